"""Disclosures: only with the strategy's key, collected once, validated like any reply, and kept on resume."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from rich.console import Console
from runners import finish, pass_models_by_reference, quick, weights

import fedeas_flwr.federation.delivery  # noqa: F401 - it must know the true InlineGrid, whichever test comes first
from fedeas_flwr.client_app import app as client_app
from fedeas_flwr.common.errors import ConfigError, MessageError, RunError
from fedeas_flwr.config import STRATEGIES
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.interface import NeedsDisclosure
from fedeas_flwr.strategies.records import ARRAYS, CONFIG
from fedeas_flwr.strategies.registry import build_strategy, find_algorithm

DISCLOSING: dict[str, dict[str, Any]] = {
    name: {"strategy": name, algorithm.disclosure.key.replace("-", "_"): True}
    for name, algorithm in ((name, find_algorithm(name)) for name in STRATEGIES)
    if algorithm.disclosure
}


class RecordingGrid(InlineGrid):
    """Records every message and reply in `log`."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        log.extend(sent)
        replies = list(super().send_and_receive(sent))
        log.extend(replies)
        return replies


log: list[Message] = []


@pytest.fixture(autouse=True)
def record_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    log.clear()
    monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", RecordingGrid)


def questions() -> list[str]:
    return [str(m.content.config_records[CONFIG]["question"]) for m in log if "question" in m.content.get(CONFIG, {})]


@pytest.mark.parametrize("name", DISCLOSING)
def test_disclosure_without_its_key_is_rejected(tmp_path: Path, name: str) -> None:
    disclosure = find_algorithm(name).disclosure
    assert disclosure is not None
    config = quick(tmp_path / "r", strategy=name, policy="none")
    with pytest.raises(ConfigError) as refused:
        prepare(config, Console(file=io.StringIO()))
    with pytest.raises(RunError, match=f"{disclosure.key} = false"):  # a ServerApp that `fedeas run` did not prepare
        finish(config)
    assert log == []
    assert "\n" not in str(refused.value)
    assert f"{disclosure.key} = false" in str(refused.value)
    assert disclosure.what in str(refused.value)


@pytest.mark.parametrize("name", DISCLOSING)
def test_client_rejects_question_its_config_does_not_allow(tmp_path: Path, name: str) -> None:
    disclosure = find_algorithm(name).disclosure
    assert disclosure is not None
    allowed = quick(tmp_path / "r", policy="none", **DISCLOSING[name]).to_user_dict()
    for keys, words in (
        ({disclosure.key: False}, f"{disclosure.key} = false"),
        ({"strategy": "fedavg"}, "question = "),  # the key alone discloses nothing
        ({}, None),
    ):
        (reply,) = InlineGrid(client_app, 4, {**allowed, **keys}).send_and_receive(
            [messages.build_query(2, disclosure.question)]
        )
        assert reply.has_error() == (words is not None)
        if words is not None:
            assert words in messages.failure_reason(reply)
            assert not reply.has_content()


@pytest.mark.parametrize("name", DISCLOSING)
def test_disclosures_are_collected_once_and_kept_on_resume(tmp_path: Path, name: str) -> None:
    disclosure = find_algorithm(name).disclosure
    assert disclosure is not None
    keys = {"policy": "none", **DISCLOSING[name]}
    whole = finish(quick(tmp_path / "whole", rounds=4, **keys))
    assert questions() == ["identity"] * 4 + [disclosure.question] * 4
    said = (whole.path / "flower.log").read_text()
    assert said.count(disclosure.what) == 1
    assert f"{disclosure.key} = true" in said
    finish(quick(tmp_path / "parts", rounds=2, **keys))
    log.clear()
    resumed = finish(quick(tmp_path / "parts", rounds=4, resume=True, **keys))
    assert questions() == ["identity"] * 4
    assert weights(whole) == weights(resumed)


@pytest.mark.parametrize("name", DISCLOSING)
def test_disclosures_are_stored_in_ascending_client_id(tmp_path: Path, name: str) -> None:
    class ReversedGrid(InlineGrid):
        def get_node_ids(self) -> list[int]:
            return sorted(super().get_node_ids(), reverse=True)

    config = quick(tmp_path / "r", policy="none", **DISCLOSING[name])
    strategy, grid = build_strategy(config), ReversedGrid(client_app, 4, config.to_user_dict())
    made = Federation(grid, config, strategy, RunDirectory.start(config, {}))
    assert isinstance(strategy, NeedsDisclosure) and made.clients.discover() == 4
    made.clients.collect_disclosures(strategy)
    assert list(strategy.disclosing_clients()) == [0, 1, 2, 3]


class OfflineNodesGrid(RecordingGrid):
    """A grid with offline nodes; they connect after the first round unless `permanently` is true."""

    offline: ClassVar[set[int]] = set()
    permanently = False

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node not in self.offline]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = list(super().send_and_receive(messages))
        if not self.permanently and any(reply.metadata.message_type == "train" for reply in replies):
            self.offline.clear()
        return replies


@pytest.fixture
def take_offline(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def switch(*offline: int, permanently: bool = False) -> None:
        patch = {"offline": set(offline), "permanently": permanently}
        monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", type("Grid", (OfflineNodesGrid,), patch))

    return switch


FOUR_CLIENTS = {"policy": "none", "participation": 1.0, "min_replies": 0.75, "node_wait": 0.0}


def trained_clients(run: RunDirectory) -> list[list[int]]:
    return [record["clients"] for record in run.rounds()]


@pytest.mark.parametrize("name", DISCLOSING)
@pytest.mark.parametrize("joins", ["in the run", "with the resume"])
def test_client_that_joins_after_disclosure_is_excluded(
    tmp_path: Path, name: str, joins: str, take_offline: Callable[..., None]
) -> None:
    keys = {**FOUR_CLIENTS, **DISCLOSING[name]}
    take_offline(4, permanently=True)
    alone = finish(quick(tmp_path / "alone", rounds=4, **keys))
    take_offline(4, permanently=joins == "with the resume")
    finish(quick(tmp_path / "r", rounds=2, **keys))
    take_offline()
    log.clear()
    resumed = finish(quick(tmp_path / "r", rounds=4, resume=True, **keys))
    assert questions() == ["identity"] * 4
    assert trained_clients(resumed) == [[0, 1, 2]] * 4
    said = "Client 3 joined too late and is excluded from this run: its strategy collected disclosures before"
    assert said in (resumed.path / "flower.log").read_text()
    assert weights(resumed) == weights(alone)


@pytest.mark.parametrize("name", DISCLOSING)
def test_client_that_disclosed_may_reconnect_later(
    tmp_path: Path, name: str, take_offline: Callable[..., None]
) -> None:
    keys = {**FOUR_CLIENTS, **DISCLOSING[name]}
    finish(quick(tmp_path / "r", rounds=1, **keys))
    take_offline(4)
    resumed = finish(quick(tmp_path / "r", rounds=3, resume=True, **keys))
    assert trained_clients(resumed) == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("name", DISCLOSING)
def test_undisclosed_clients_do_not_count_towards_quorum(
    tmp_path: Path, name: str, take_offline: Callable[..., None]
) -> None:
    keys = {**FOUR_CLIENTS, **DISCLOSING[name]}
    take_offline(4, permanently=True)
    finish(quick(tmp_path / "r", rounds=1, **keys))
    take_offline(3, permanently=True)
    with pytest.raises(RunError, match="clients = 4, but the federation has 3 nodes"):
        finish(quick(tmp_path / "r", rounds=2, resume=True, **keys))


@pytest.mark.parametrize("name", DISCLOSING)
def test_models_passed_as_tensors_give_same_weights(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"policy": "none", "rounds": 3, **DISCLOSING[name]}
    sent = finish(quick(tmp_path / "bytes", **keys))
    pass_models_by_reference(monkeypatch)
    assert weights(finish(quick(tmp_path / "live", **keys))) == weights(sent)
    finish(quick(tmp_path / "parts", **{**keys, "rounds": 1}))
    assert weights(finish(quick(tmp_path / "parts", resume=True, **keys))) == weights(sent)


@pytest.mark.parametrize("name", DISCLOSING)
def test_disclosing_strategy_works_with_generated_images(tmp_path: Path, digits_generator: Path, name: str) -> None:
    run = finish(quick(tmp_path / "r", rounds=2, beta=1.0, **DISCLOSING[name]))
    assert run.summary()["total_generated"] > 0
    assert len(run.rounds()) == 2


@pytest.mark.parametrize(
    ("name", "disclosed", "words"),
    [
        (
            "fedmix",
            {"labels": [0.5, -0.25, 0.75] + [0.0] * 7},
            "client 3: proportion of class 1 = -0.25, wanted 0 to 1",
        ),
        ("fedmix", {"labels": [0.0] * 9 + [1.5]}, "client 3: proportion of class 9 = 1.5, wanted 0 to 1"),
        ("fedmix", {"labels": [0.5, 0.25] + [0.0] * 8}, "client 3: sum of its label proportions = 0.75, wanted 1"),
        ("fedgen", {"counts": [1, 2, -3] + [0] * 7}, "client 3: images of class 2 = -3, wanted 0 to 1099511627776"),
        ("fedgen", {"counts": [2**40 + 1] + [0] * 9}, "images of class 0 = 1099511627777, wanted 0 to 1099511627776"),
        ("fedgen", {"counts": [0] * 10}, "images of all 1 clients = 0, wanted 1 or more"),
    ],
)
def test_invalid_disclosure_error_names_value_and_range(
    tmp_path: Path, name: str, disclosed: dict[str, Any], words: str
) -> None:
    strategy = build_strategy(quick(tmp_path, **DISCLOSING[name]))
    assert isinstance(strategy, NeedsDisclosure)
    arrays = {key: np.array(value, np.float32 if name == "fedmix" else np.int64) for key, value in disclosed.items()}
    with pytest.raises(MessageError, match=re.escape(words)):
        strategy.receive_disclosures({3: {"image": np.zeros((1, 8, 8), np.float32), **arrays}})
    assert not strategy.disclosing_clients()


def test_dp_is_rejected_for_strategies_that_send_more_than_models(tmp_path: Path) -> None:
    refused = set()
    for name in STRATEGIES:
        try:
            build_strategy(
                quick(tmp_path, **{"clients": 20, **DISCLOSING.get(name, {"strategy": name}), "dp": "client-fixed"})
            )
        except ConfigError as error:
            refused.add(name)
            assert f"dp = 'client-fixed' does not cover all that strategy = '{name}' sends" in str(error)
            assert "set dp = none, or choose a strategy that sends nothing but models" in str(error)
    assert refused == {"scaffold", "fedmix", "fedgen"}


@pytest.mark.parametrize("name", DISCLOSING)
def test_client_without_images_raises_on_disclosure(tmp_path: Path, name: str) -> None:
    disclosure = find_algorithm(name).disclosure
    assert disclosure is not None
    with pytest.raises(ValueError, match=f"{disclosure.key} = true: this client holds 0 images, wanted 1 or more"):
        disclosure.answer(quick(tmp_path, **DISCLOSING[name]), np.zeros((0, 8, 8, 1), np.uint8), np.zeros(0, np.int64))


def corrupted_grid(first: Any) -> type[InlineGrid]:
    """Return a grid class on which the first array of client 1's replies is changed."""

    class CorruptedGrid(InlineGrid):
        def _deliver(self, message: Message) -> Message:
            reply = super()._deliver(message)
            if message.metadata.dst_node_id == 2 and ARRAYS in reply.content and CONFIG in message.content:
                arrays = dict(reply.content.array_records[ARRAYS].items())
                key = next(iter(arrays))
                arrays[key] = Array(first(arrays[key].numpy()))
                reply.content = RecordDict({**reply.content, ARRAYS: ArrayRecord(arrays)})
            return reply

    return CorruptedGrid


@pytest.mark.parametrize("name", DISCLOSING)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a.astype(np.float64), "is float64"),
        (lambda a: a[..., :-1], "wanted"),
        (lambda a: (a * np.nan).astype(np.float32), "NaN|is float32"),
    ],
)
def test_disclosure_reply_is_validated(
    tmp_path: Path, name: str, change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", corrupted_grid(change))
    with pytest.raises(RunError, match=f"invalid reply to the question .*({reason})"):
        finish(quick(tmp_path / "r", policy="none", **DISCLOSING[name]))
