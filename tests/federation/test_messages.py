"""Invalid replies are rejected with a reason, and no message holds a per-class vector."""

import copy
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedeas_flwr.client_app import app as client_app
from fedeas_flwr.common.errors import MessageError
from fedeas_flwr.common.npy import to_numpy
from fedeas_flwr.config import parse_config
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.messages import EvaluateReport, TrainReport, TrainTask
from fedeas_flwr.policies.interface import Share
from fedeas_flwr.strategies.records import (
    ARRAYS,
    BUFFERS,
    CONFIG,
    METRICS,
    WEIGHT,
    read_validated,
    to_arrays,
    to_record,
)

TRAINABLE = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}
COUNTERS = {"n": np.array(4, np.int64)}
REPORT = TrainReport(5, 120, 0.5, 7, 30, 30, 1.5, 2.5)


@pytest.fixture(autouse=True)
def identity() -> None:
    """Set the process identity that Flower needs to create messages."""
    InlineGrid(client_app, 1, parse_config({}).to_user_dict())


def request() -> Message:
    content = RecordDict({ARRAYS: to_record(TRAINABLE), CONFIG: ConfigRecord({"server-round": 3})})
    message = Message(content, dst_node_id=6, message_type="train")
    task = TrainTask(3, 12.0, 2, 1, 1, "0123456789abcdef" * 2, Share(4, 1, 0.25))
    messages.add_task(message, task, to_record(COUNTERS), to_record({}))
    return message


def reply() -> Message:
    return messages.train_reply(request(), REPORT, TRAINABLE, COUNTERS, {})


def read(message: Message) -> Any:
    return messages.read_train_reply(message, 5, TRAINABLE, COUNTERS, {})


def test_task_and_reply_survive_a_round_trip() -> None:
    assert messages.read_task(request()) == TrainTask(3, 12.0, 2, 1, 1, "0123456789abcdef" * 2, Share(4, 1, 0.25))
    message = reply()
    report, buffers = read(message)
    assert report == REPORT
    assert buffers["n"] == 4
    assert buffers["n"].dtype == np.int64
    # What remains is what Flower's strategies expect.
    assert list(message.content.array_records) == [ARRAYS]
    assert list(message.content.metric_records) == [METRICS]


@pytest.mark.parametrize("run", ["", "../../etc", "0" * 31, "0" * 33, "0" * 32 + "\n", "G" * 32, 7])
def test_run_identity_other_than_32_hex_digits_is_rejected(run: Any) -> None:
    """A node names a folder by it."""
    message = request()
    message.content.config_records[CONFIG]["run"] = run
    with pytest.raises(MessageError, match=f"^{re.escape(f'run = {run!r}, expected 32 hexadecimal digits')}$"):
        messages.read_task(message)


def replace_array(key: str, value: Any, record: str = ARRAYS) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        arrays = dict(content.array_records[record].items())
        if value is None:
            del arrays[key]
        else:
            arrays[key] = Array(value)
        content[record] = ArrayRecord(arrays)

    return change


def replace_metric(key: str, value: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        metrics = dict(content.metric_records[METRICS].items())
        metrics.pop(key)
        if value is not None:
            metrics[key] = value
        content[METRICS] = MetricRecord(metrics)

    return change


def wrong_declared_shape(content: RecordDict) -> None:
    """Declare the expected shape for bytes of another shape."""
    arrays = dict(content.array_records[ARRAYS].items())
    big = Array(np.ones((50, 3), np.float32))
    arrays["w"] = Array(dtype="float32", shape=(2, 3), stype=big.stype, data=big.data)
    content[ARRAYS] = ArrayRecord(arrays)


def undecodable_bytes(content: RecordDict) -> None:
    arrays = dict(content.array_records[ARRAYS].items())
    arrays["w"] = Array(dtype="float32", shape=(2, 3), stype=arrays["w"].stype, data=b"not an array")
    content[ARRAYS] = ArrayRecord(arrays)


def second_metric_record(content: RecordDict) -> None:
    content["more"] = MetricRecord({"a": 1})


def with_data(data: Any) -> Callable[[RecordDict], None]:
    """Set an array's data to a value that Flower's constructor rejects but unpickling accepts."""

    def change(content: RecordDict) -> None:
        array = Array(TRAINABLE["w"])
        array.data = data
        content.array_records[ARRAYS]["w"] = array

    return change


W = to_record(TRAINABLE)["w"].data
BAD = {
    "bytes cut short": (with_data(W[:-1]), "w cannot be decoded: .* needs 24 bytes, .* 23"),
    "bytes of another array": (with_data(W[:60] + b"9" + W[61:]), "w cannot be decoded"),
    "more bytes than it may": (with_data(bytes(2**20)), "w has 1048576 bytes, wanted 1048 at most"),
    "a view of bytes": (with_data(memoryview(W)), "w has data of type memoryview, wanted bytes"),
    "data that are no bytes": (with_data([1, 2, 3]), "w has data of type list, wanted bytes"),
    "NaN": (replace_array("w", np.full((2, 3), np.nan, np.float32)), "w holds NaN"),
    "infinity": (replace_array("b", np.array([0, np.inf, 0], np.float32)), "b holds NaN or infinity"),
    "finite, but too large": (
        replace_array("w", np.full((2, 3), 3.3e38, np.float32)),
        r"8\.08e\+38, wanted (2\.45|1)e\+06 ",
    ),
    "a large element": (
        replace_array("b", np.array([0, 3e6, 0], np.float32)),
        r"norm is 3e\+06, wanted .* model's is ",
    ),
    "a counter beyond any count": (replace_array("n", np.array(2**63 - 1), BUFFERS), "n holds 9223372036854775807"),
    "a counter below any count": (replace_array("n", np.array(-(2**63)), BUFFERS), "n holds -9223372036854775808"),
    "wrong shape": (replace_array("w", np.ones((3, 2), np.float32)), r"w is float32\[3, 2\]"),
    "broadcastable shape": (replace_array("b", np.ones(1, np.float32)), r"b is float32\[1\]"),
    "wrong dtype": (replace_array("w", np.ones((2, 3))), "w is float64"),
    "missing key": (replace_array("b", None), "differ from those wanted: b"),
    "extra key": (replace_array("z", np.ones(1, np.float32)), "differ from those wanted: z"),
    "float counter": (replace_array("n", np.array(4.0), BUFFERS), "n is float64"),
    "shape that lies": (wrong_declared_shape, "w decodes to"),
    "bytes that are no array": (undecodable_bytes, "w cannot be decoded"),
    "no weight": (replace_metric(WEIGHT, None), "num-examples = None"),
    "zero weight": (replace_metric(WEIGHT, 0), "num-examples = 0"),
    "negative weight": (replace_metric(WEIGHT, -3), "num-examples = -3"),
    "fractional weight": (replace_metric(WEIGHT, 1.5), r"num-examples = 1\.5"),
    "huge weight": (replace_metric(WEIGHT, 2**60), "num-examples = "),
    "a loss beyond any sum": (replace_metric("loss", 1e308), r"loss = 1e\+308, expected a number from -1e\+39 to"),
    "NaN loss": (replace_metric("loss", float("nan")), "loss = nan"),
    "another client": (replace_metric("client-id", 6), "client-id = 6, but the message was for client 5"),
    "second metric record": (second_metric_record, "metric records"),
}


def through_ray(message: Message) -> Message:
    """Return the message as Ray delivers it: unpickled, with large buffers out of band."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 5_000 and len(buffers) == 3, "the arrays were copied"
    received: Message = pickle.loads(stream, buffers=buffers)
    return received


def test_reply_through_ray_holds_read_only_views_of_its_buffers() -> None:
    sent = reply()
    message = through_ray(sent)
    report, buffers = read(message)
    assert report == REPORT and buffers["n"] == 4 and buffers["n"].dtype == np.int64
    record = message.content.array_records[ARRAYS]
    before = to_arrays(sent.content.array_records[ARRAYS])
    for key, array in to_arrays(record).items():
        assert np.array_equal(array, TRAINABLE[key]) and np.shares_memory(array, before[key])
        assert not array.flags.writeable and record[key].numpy().flags.writeable  # as Flower reads it
    assert record.count_bytes() == to_record(TRAINABLE).count_bytes()
    copied, stored = copy.deepcopy(record), pickle.loads(pickle.dumps(record, protocol=4))
    assert to_arrays(copied).keys() == TRAINABLE.keys() and stored["w"].data == record["w"].data == W


def test_record_does_not_copy_its_arrays() -> None:
    arrays = {"w": np.ones((2, 3), np.float32), "n": np.array(4)}
    read = to_arrays(to_record(arrays))
    assert all(np.shares_memory(read[key], array) and not read[key].flags.writeable for key, array in arrays.items())
    assert arrays["w"].flags.writeable


def test_records_serialise_exactly_as_flowers_own() -> None:
    ours, flowers = to_record(TRAINABLE), ArrayRecord({key: Array(array) for key, array in TRAINABLE.items()})
    assert ours.object_id == flowers.object_id
    assert recorddict_to_proto(RecordDict({ARRAYS: ours})) == recorddict_to_proto(RecordDict({ARRAYS: flowers}))
    nested, expected = get_all_nested_objects(ours), get_all_nested_objects(flowers)
    assert list(nested) == list(expected) and len(nested) == 5  # the record, two arrays and a chunk of each
    assert [part.deflate() for part in nested.values()] == [part.deflate() for part in expected.values()]
    assert all(type(part.deflate()) is bytes for part in nested.values())


@pytest.mark.parametrize("name", BAD)
def test_invalid_reply_is_rejected_with_its_reason(name: str) -> None:
    change, reason = BAD[name]
    message = reply()
    content = RecordDict(dict(message.content.items()))
    change(content)
    message.content = content
    with pytest.raises(MessageError, match=reason):
        read(message)


def test_disclosure_with_another_array_record_is_rejected() -> None:
    disclosed = messages.disclose(request(), 5, TRAINABLE)
    assert list(messages.read_disclosed(disclosed, 5, TRAINABLE)) == list(TRAINABLE)
    disclosed.content["more"] = to_record(TRAINABLE)
    with pytest.raises(MessageError, match=r"^array records \['arrays', 'more'\], expected arrays alone$"):
        messages.read_disclosed(disclosed, 5, TRAINABLE)


def test_disclosure_of_another_client_is_rejected_and_arrays_are_copied() -> None:
    disclosed = messages.disclose(request(), 5, TRAINABLE)
    found = messages.read_disclosed(disclosed, 5, TRAINABLE)
    assert not any(np.shares_memory(found[key], TRAINABLE[key]) for key in TRAINABLE)
    with pytest.raises(MessageError, match=r"^client-id = 5, but the message was for client 4$"):
        messages.read_disclosed(disclosed, 4, TRAINABLE)


def test_evaluation_of_another_client_or_above_all_images_is_rejected() -> None:
    def evaluated(correct: int) -> Message:
        return messages.evaluate_reply(request(), EvaluateReport(5, 30, correct, 0.5))

    assert messages.read_evaluate_reply(evaluated(30), 5).correct == 30
    with pytest.raises(MessageError, match=r"^correct = 31, expected at most num-examples = 30$"):
        messages.read_evaluate_reply(evaluated(31), 5)
    with pytest.raises(MessageError, match=r"^client-id = 5, but the message was for client 4$"):
        messages.read_evaluate_reply(evaluated(30), 4)


def test_error_reply_has_one_line_and_the_traceback() -> None:
    try:
        raise ArithmeticError("first\nsecond")
    except ArithmeticError as error:
        failed = messages.error_reply(request(), error)
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
    assert messages.failure_reason(failed) == f"ArithmeticError: first second (test_messages.py, line {line})"
    assert "Traceback" in (failed.error.reason or "")
    traceback = "<class 'ray.exceptions.RayTaskError(E)'>:<'ray::run()\n  File x\nValueError: no query function'>"
    under_ray = Message(Error(code=3, reason=traceback), reply_to=request())
    assert messages.failure_reason(under_ray) == "ValueError: no query function"
    blank = Message(Error(code=3, reason=" \n"), reply_to=request())
    assert messages.failure_reason(blank) == "error 3"


def test_error_reply_is_short() -> None:
    failed = messages.error_reply(request(), ValueError(10**6 * "x"))
    assert len(failed.error.reason or "") < 9000


HOSTILE = "evil\n2026-01-01 00:00:00 INFO client 1 won\x1b[2J" + 5000 * "x"


def rename(content: RecordDict, name: str, new: str) -> None:
    content[new] = content.pop(name)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: rename(content, BUFFERS, HOSTILE),
        lambda content: rename(content, METRICS, HOSTILE),
        lambda content: content.update({METRICS: MetricRecord({WEIGHT: 5, HOSTILE: 2, "client-id": 2**60})}),
        lambda content: content.update({BUFFERS: to_record({HOSTILE: np.zeros(3)})}),
        lambda content: content.update({BUFFERS: ArrayRecord({"n": Array(HOSTILE, (), HOSTILE, b"")})}),
        lambda content: content.update({BUFFERS: ArrayRecord({"n": Array("int64", (), HOSTILE, b"")})}),
        lambda content: content.update({METRICS: MetricRecord({"client-id": 5, WEIGHT: [2.5] * 5000})}),
    ],
)
def test_hostile_names_and_values_are_refused_in_one_short_line(change: Callable[[RecordDict], Any]) -> None:
    message = reply()
    content = RecordDict(dict(message.content.items()))
    change(content)
    message.content = content
    with pytest.raises(MessageError) as found:
        read(message)
    assert str(found.value).isprintable() and len(str(found.value)) <= 600


def test_a_clients_reason_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        reason = messages.failure_reason(Message(Error(1, HOSTILE + 30_000 * "\ny"), reply_to=request()))
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    (record,) = {record.getMessage() for record in caplog.records}
    assert reason == "evil"
    assert "\n  | 2026-01-01" in record and "\x1b" not in record
    assert all(line.startswith("  | ") for line in record.splitlines()[1:])
    assert len(record.replace("\n  | ", "\n")) < 20_100


def numbers_on_the_wire(message: Message) -> list[Any]:
    records = [*message.content.metric_records.values(), *message.content.config_records.values()]
    return [value for record in records for value in record.values()]


def test_query_replies_hold_single_integers_only() -> None:
    grid = InlineGrid(client_app, 4, parse_config({"policy": "waterfill", "clients": 4}).to_user_dict())
    for question, keys in (
        ("identity", {"partitions", "examples", "classes"}),
        ("plan", {"total", "absent"}),
        ("waterfill", {"count"}),
    ):
        for found in grid.send_and_receive([messages.build_query(node, question, 0.1) for node in grid.get_node_ids()]):
            assert set(found.content.metric_records[METRICS]) == {"client-id", *keys}
            assert all(type(v) is int for v in found.content.metric_records[METRICS].values())
            assert not found.content.array_records
    (unknown,) = grid.send_and_receive([messages.build_query(1, "counts")])
    assert "question = 'counts'" in messages.failure_reason(unknown)


@pytest.mark.parametrize(("policy", "question"), [("missing-only", "waterfill"), ("fedeas", "plan")])
def test_client_rejects_questions_of_other_policies(policy: str, question: str) -> None:
    grid = InlineGrid(client_app, 4, parse_config({"policy": policy, "clients": 4}).to_user_dict())
    (refused,) = grid.send_and_receive([messages.build_query(1, question, 0.1)])
    assert f"question = '{question}'" in messages.failure_reason(refused)


def test_train_messages_and_replies_hold_no_lists() -> None:
    for message in (request(), reply()):
        assert not any(isinstance(value, (list, tuple, bytes)) for value in numbers_on_the_wire(message))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_in_process_reply_with_non_finite_value_is_rejected(value: float) -> None:
    model = {"w": torch.ones(3, 4), "b": torch.ones(4)}
    counters = {"n": torch.tensor(3)}
    good = messages.train_reply(request(), REPORT, model, counters, {})
    messages.read_train_reply(good, 5, model, counters, {})
    invalid = {"w": torch.ones(3, 4), "b": torch.tensor([1, 2, value, 4])}
    bad = messages.train_reply(request(), REPORT, invalid, counters, {})
    with pytest.raises(MessageError, match="NaN or infinity"):
        messages.read_train_reply(bad, 5, model, counters, {})
    smaller = messages.train_reply(request(), REPORT, {**model, "b": torch.ones(1)}, counters, {})
    with pytest.raises(MessageError, match="array b is"):
        messages.read_train_reply(smaller, 5, model, counters, {})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"a": torch.zeros(2, 3)}, "differ from those wanted: b"),
        ({"b": torch.zeros(2), "a": torch.zeros(2, 3)}, "differ from those wanted: the order"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(2)}, r"a is torch.float32\[3, 2\], wanted torch.float32\[2, 3\]"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2).double()}, r"b is torch.float64\[2\], wanted torch.float32\[2\]"),
        ({"a": torch.full((2, 3), torch.inf), "b": torch.zeros(2)}, "NaN or infinity"),
        ({"a": np.full((2, 3), np.nan, np.float32), "b": np.zeros(2, np.float32)}, "NaN or infinity"),
        (
            {"a": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)},
            r"a is float32\[3, 2\], wanted torch.float32",
        ),
    ],
)
def test_arrays_are_validated_like_tensors(found: dict[str, Any], reason: str) -> None:
    wanted = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    assert read_validated(to_record(wanted), wanted) == wanted
    arrived = read_validated(to_record(to_numpy(wanted)), wanted)
    assert all(torch.equal(arrived[key], tensor) for key, tensor in wanted.items())
    with pytest.raises(MessageError, match=reason):
        read_validated(to_record(found), wanted)


BIG = 1e4 * np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("model", "value", "accepted"),
    [
        (np.zeros(2, np.float32), 7e5, True),  # a norm below 1 counts as 1
        (np.zeros(2, np.float32), 8e5, False),
        (BIG, 9e9, True),
        (BIG, 1.1e10, False),
        (1e33 * BIG, 1e38, True),
        (1e33 * BIG, 2e38, False),  # 20 times the model's norm, but an average may overflow
        (np.array([3, 4], np.int64), 2**53, True),
        (np.array([3, 4], np.int64), 2**53 + 1, False),
        (np.array([3, 4], np.uint8), 255, True),
        (np.array([True, False]), True, True),
        (np.zeros((0, 2), np.float32), 1, True),
    ],
)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_replies_are_bounded_by_the_models_norm(model: Any, value: float, accepted: bool, as_tensors: bool) -> None:
    expected = {"a": model, "n": np.array(0)}
    found = {"a": np.full_like(model, value), "n": np.array(1)}
    if as_tensors:
        expected, found = ({k: torch.from_numpy(v) for k, v in each.items()} for each in (expected, found))
    if accepted:
        read_validated(to_record(found), expected)
    else:
        with pytest.raises(MessageError, match=r"norm|holds? 9007199254740993"):
            read_validated(to_record(found), expected)
