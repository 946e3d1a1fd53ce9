"""Row 6: invalid replies are rejected with a reason and recorded; the rest is averaged.

test_messages.py tests every kind of invalid array and number; this file tests the limits before decoding, the bounds
from a client's declared sample count, and false replies to plan queries.
"""

from __future__ import annotations

import io
import re
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from runners import finish, quick, weights
from test_federation import DIGITS, EXAMPLES, START, VALUES, federation, toy_app
from test_messages import BAD, COUNTERS, TRAINABLE, read, reply

from fedeas_flwr import client_app
from fedeas_flwr.common.errors import MessageError, RunError
from fedeas_flwr.config import parse_config
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_registry import DeclaredSampleCounts
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.messages import TrainReport
from fedeas_flwr.planning.run_plan import planned_counts
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import POLICIES, allocate
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies import records
from fedeas_flwr.strategies.records import ARRAYS, METRICS
from fedeas_flwr.strategies.registry import build_strategy


@pytest.fixture(autouse=True)
def identity() -> None:
    """Set the process identity that Flower needs to create messages."""
    InlineGrid(client_app.app, 1, {})


def app_with(corrupt: Callable[[RecordDict], None]) -> ClientApp:
    """Return clients that reply with constant arrays of test_messages.py; ``corrupt`` changes client 1's reply."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        return messages.build_query_reply(message, client, partitions=3, examples=EXAMPLES[client], classes=DIGITS)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        arrays = {key: np.full_like(like, VALUES[client]) for key, like in TRAINABLE.items()}
        report = TrainReport(client, EXAMPLES[client], 0.5, 1, 0, 0, 0.0, 0.0)
        made = messages.train_reply(message, report, arrays, COUNTERS, {})
        content = RecordDict(dict(made.content.items()))
        if client == 1:
            corrupt(content)
        made.content = content
        return made

    return app


@pytest.mark.parametrize("name", BAD)
def test_invalid_reply_is_excluded_from_the_average(tmp_path: Path, name: str) -> None:
    corrupt, reason = BAD[name]
    start = Checkpoint(0, {k: np.zeros_like(v) for k, v in TRAINABLE.items()}, dict(COUNTERS))
    state, outcome = federation(tmp_path, app_with(corrupt), **{"min-replies": 0.5}).training.train_round(start)
    for array in state.trainable.values():
        assert array == pytest.approx((30 * 1.0 + 60 * 2.0) / 90)
    (failure,) = outcome.failures
    assert failure["client"] == 1
    assert re.search(reason.replace("client 5", "client 1"), failure["reason"])
    assert state.accepted == {0: 1, 2: 1}


def encoded_as(data: bytes, stype: str = "numpy.ndarray") -> Message:
    """Return a reply whose array w declares float32 [2, 3] and holds these bytes."""
    message = reply()
    arrays = dict(message.content.array_records[ARRAYS].items())
    arrays["w"] = Array(dtype="float32", shape=(2, 3), stype=stype, data=data)
    message.content[ARRAYS] = ArrayRecord(arrays)
    return message


def npy_header(text: str) -> bytes:
    body = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(body)) + body


def test_oversized_arrays_are_rejected_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(2**20, np.float32))
    monkeypatch.setattr(records, "read_array", lambda data: pytest.fail("decoded"))
    with pytest.raises(MessageError, match=r"array w has 4194432 bytes, wanted 1048 at most"):
        read(encoded_as(buffer.getvalue()))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999,)}"), "needs 39999999999996"),
        (npy_header("{'descr': '|O', 'fortran_order': False, 'shape': (6,)}"), "Python objects"),
        (npy_header("(" * 500), "cannot be decoded"),
        (npy_header("__import__('os').abort()"), "cannot be decoded"),
        (b"\x80\x04\x95\x0b\x00\x00\x00", "cannot be decoded"),
        (b"", "cannot be decoded"),
    ],
)
def test_header_that_claims_terabytes_allocates_no_memory(data: bytes, reason: str) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(MessageError, match=reason):
        read(encoded_as(data))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert time.thread_time() - began < 1


def test_unknown_encoding_and_long_reason_are_truncated() -> None:
    with pytest.raises(MessageError, match="its encoding is 'cloudpickle"):
        read(encoded_as(b"x", stype="cloudpickle" * 1000))
    failed = Message(Error(1, "x" * 10**7), reply_to=reply())
    assert len(messages.failure_reason(failed)) == 600


# ------------------------------------------------------------------------------------- declared sample counts


@pytest.mark.parametrize(
    ("examples", "keys", "reason"),
    [
        (11, {}, "num-examples = 11, but the client first declared 10"),
        (9, {}, "num-examples = 9, but the client first declared 10"),
        (2**40, {}, "num-examples = 1099511627776, but max-examples = 10000000"),
        (10**7, {"data-change": "replan", "max-examples": 1000}, "num-examples = 10000000, but max-examples = 1000"),
    ],
)
def test_weight_must_equal_the_declared_sample_count(
    tmp_path: Path, examples: int, keys: dict[str, Any], reason: str
) -> None:
    def inflate(client: int, message: Message) -> Message | None:
        if client != 1:
            return None
        report = TrainReport(1, examples, 0.0, 1, 0, 0, 0.0, 0.0)
        return messages.train_reply(message, report, {"w": np.full(2, 9, np.float32)}, dict(START.buffers), {})

    made = federation(tmp_path, toy_app(inflate), **{"min-replies": 0.5, **keys})
    state, outcome = made.training.train_round(START)
    assert outcome.failures == [{"client": 1, "reason": reason}]
    assert state.trainable["w"] == pytest.approx((30 * 1.0 + 60 * 2.0) / 90)


def test_declared_sample_count_is_limited_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def report_less(client: int, message: Message) -> Message | None:
        report = TrainReport(client, 10, 0.0, 1, 0, 0, 0.0, 0.0)
        return messages.train_reply(message, report, {"w": np.zeros(2, np.float32)}, dict(START.buffers), {})

    monkeypatch.setattr("test_federation.EXAMPLES", (30, 2000, 60))
    keys = {"min-replies": 0.5, "data-change": "replan", "max-examples": 1000}
    _, outcome = federation(tmp_path, toy_app(report_less), **keys).training.train_round(START)
    assert outcome.failures == [{"client": 1, "reason": "num-examples = 2000, but max-examples = 1000"}]


@pytest.mark.parametrize(
    ("generated", "not_made", "told"),
    [(10**9, 0, "generated = 1000000000"), (30, 31, "generated = 30 and not-made = 31")],
)
def test_plan_beyond_any_label_counts_is_rejected(tmp_path: Path, generated: int, not_made: int, told: str) -> None:
    def overstate(client: int, message: Message) -> Message | None:
        if client != 1:
            return None
        report = TrainReport(1, 10, 0.0, 1, generated, 0, 0.0, 0.0, not_made=not_made)
        return messages.train_reply(message, report, {"w": np.zeros(2, np.float32)}, dict(START.buffers), {})

    _, outcome = federation(tmp_path, toy_app(overstate), **{"min-replies": 0.5}).training.train_round(START)
    assert outcome.failures == [{"client": 1, "reason": f"{told}, but its plan cannot exceed 60"}]


def test_client_with_more_samples_may_have_a_larger_plan(tmp_path: Path) -> None:
    """Also if its number of samples is `max-examples`, and its plan the largest possible."""

    def grown(client: int, message: Message) -> Message | None:
        report = TrainReport(client, 60, 0.0, 1, bound, 0, 0.0, 0.0)
        return messages.train_reply(message, report, {"w": np.zeros(2, np.float32)}, dict(START.buffers), {})

    made = federation(tmp_path, toy_app(grown), **{"data-change": "replan", "max-examples": 60})
    bound = made.clients.declared.max_images(2, EMPTY_SHARE)  # it declared 60 samples
    assert made.clients.declared.max_images(1, EMPTY_SHARE) < bound
    _, outcome = made.training.train_round(START)
    assert outcome.failures == []


def test_plan_reply_at_its_bound_is_accepted() -> None:
    config, policy = parse_config({"policy": "missing-only", "beta": 4.0}), POLICIES["missing-only"]
    assert isinstance(policy, MatchedPolicy)
    declared = DeclaredSampleCounts(config)
    declared.note(0, 10)
    total, absent = policy.max_reply(10, 10, config.policy_settings, "plan", 4.0)
    declared.check_reply(0, policy, "plan", 4.0, [total, absent])
    with pytest.raises(MessageError, match=f"total = {total + 1}, but it is at most {total}"):
        declared.check_reply(0, policy, "plan", 4.0, [total + 1, absent])


def app_with_false_replies(false_replies: dict[str, dict[str, int]]) -> ClientApp:
    """Return the real clients, except that client 1's query replies hold the values in ``false_replies``."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        found = client_app.query(message, context)
        question, _ = messages.read_question(message)
        if context.node_config["partition-id"] == 1 and question in false_replies:
            numbers = {**dict(found.content.metric_records[METRICS]), **false_replies[question]}
            found.content[METRICS] = MetricRecord(numbers)
        return found

    return app


FALSE_REPLIES = {
    "total": {"plan": {"total": 2**50}},
    "absent": {"plan": {"absent": 11}},
    "another's id": {"plan": {"client-id": 0}},
    "count": {"waterfill": {"count": 2**50}},
}


@pytest.mark.parametrize("false_reply", FALSE_REPLIES)
def test_false_plan_reply_costs_only_that_client_its_share(tmp_path: Path, false_reply: str) -> None:
    policy = "waterfill" if false_reply == "count" else "missing-only"
    config = parse_config({"clients": 4, "policy": policy, "beta": 4.0, "run-dir": str(tmp_path)})
    made = Federation(
        InlineGrid(app_with_false_replies(FALSE_REPLIES[false_reply]), 4, config.to_user_dict()),
        config,
        build_strategy(config),
        RunDirectory.start(config, {}),
    )
    made.clients.discover()
    made.clients.plan()
    assert list(made.clients.refused) == [1]
    counts = planned_counts(config)
    honest = [0, 2, 3]
    total = allocate(counts[honest], "fedeas", beta=4.0).sum()
    if false_reply == "count":  # its total was accepted before its count was rejected
        total += allocate(counts[[1]], "fedeas", beta=4.0).sum()
    views = [ClientView(counts[[c]], config.policy_settings, [made.clients.shares[c]]) for c in range(4)]
    given = [POLICIES[policy].plan(view).sum() for view in views]
    assert given[1] == 0
    assert sum(given) == total > 0


class OnlyOnce(dict[str, Any]):
    """Values that can be read once."""

    def __getitem__(self, key: str) -> Any:
        return self.pop(key)


def test_client_rejected_for_one_reply_gets_no_share(tmp_path: Path) -> None:
    """What it replies later does not count, so the others spend the whole total."""
    keys = {"clients": 4, "policy": "waterfill", "total": 300, "run-dir": str(tmp_path)}
    config, app = parse_config(keys), app_with_false_replies(OnlyOnce(waterfill={"count": 2**50}))
    grid = InlineGrid(app, 4, config.to_user_dict())
    made = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    made.clients.discover()
    made.clients.plan()
    counts = planned_counts(config)
    views = [ClientView(counts[[c]], config.policy_settings, [made.clients.shares[c]]) for c in range(4)]
    given = [int(POLICIES["waterfill"].plan(view).sum()) for view in views]
    assert given[1] == 0 and sum(given) == 300


def test_first_reason_for_a_rejection_is_kept(tmp_path: Path) -> None:
    config = parse_config({"clients": 4, "policy": "waterfill", "beta": 4.0, "run-dir": str(tmp_path)})
    app = app_with_false_replies({"plan": {"total": 2**50}, "waterfill": {"count": 2**50}})
    grid = InlineGrid(app, 4, config.to_user_dict())
    made = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    made.clients.discover()
    made.clients.plan()
    assert made.clients.refused[1].startswith("plan: total = ")


def test_node_with_invalid_identity_is_named_in_the_error(tmp_path: Path) -> None:
    config = parse_config({"clients": 4, "policy": "none", "run-dir": str(tmp_path)})
    app = app_with_false_replies({"identity": {"examples": -1}})
    made = Federation(
        InlineGrid(app, 4, config.to_user_dict()), config, build_strategy(config), RunDirectory.start(config, {})
    )
    with pytest.raises(RunError, match="node 2 did not identify itself: examples = -1"):
        made.clients.discover()


# --------------------------------------------------------------------------------------------- a hostile node


def test_hostile_client_changes_nothing_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1 sends another bad reply in every round: the run is bit for bit that in which it always fails."""
    monkeypatch.setattr(client_app, "app", hostile.app)
    attacked = finish(quick(tmp_path / "attacked", **hostile.RUN))
    expected = [reason for _, reason in hostile.KINDS.values()]
    monkeypatch.setattr(hostile, "KINDS", dict.fromkeys(hostile.KINDS, (hostile.fail, "")))
    without = finish(quick(tmp_path / "without", **hostile.RUN))
    assert weights(attacked) == weights(without)
    for key in ("accuracy", "loss", "train_loss", "gamma_hat", "clients", "steps"):
        assert [record[key] for record in attacked.rounds()] == [record[key] for record in without.rounds()]
    reasons = [failure["reason"] for record in attacked.rounds() for failure in record["failures"]]
    assert [part in reason for part, reason in zip(expected, reasons, strict=True)] == [True] * len(expected), reasons
