"""What crosses the wire: the only place that knows the names of records and keys.

    query     server: which question            client: its id and the whole numbers asked for, nothing else;
                                                        or its id and arrays that a `disclose-…` key lets out
    train     server: model, β, this round,     client: model, its real sample count, a few numbers,
                      last accepted round,              and an algorithm's extra arrays (SCAFFOLD …)
                      share, extra arrays
    evaluate  server: model                     client: how many of its own test images it got right

No per-class vector crosses but in such a disclosure: a client's label counts stay with it.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore import log

from fedeas_flwr.npy import array_bytes, read_array
from fedeas_flwr.runs import Arrays, plain

ARRAYS, BUFFERS, EXTRA, CONFIG, METRICS = "arrays", "buffers", "extra", "config", "metrics"
WEIGHT, LOSS = "num-examples", "loss"
_ENCODING = "numpy.ndarray"  # Flower's name for NumPy's file format
_HEADER_BYTES = 1024  # of NumPy's format before the data; 128 are usual
_LOGGED_CHARACTERS = 20_000
CLIENT_FAILED = 1
"""Error code of a reply in which the client itself says what went wrong."""


class MessageError(ValueError):
    """A message that is not what it should be; the text is one line."""


@dataclass(frozen=True)
class Share:
    """A client's part of a matched budget (allocation.py says how it becomes images of a class)."""

    base: int = 0
    extra: int = 0
    level: float = 0.0


@dataclass(frozen=True)
class TrainTask:
    """What the server asks of a client in a round, beside the model."""

    round: int
    beta: float
    accepted_round: int
    """The last round whose reply from this client the server used: the client's state starts from it."""
    checkpointed_round: int
    """The same, as the server's last checkpoint knows it: what it would ask for after a crash."""
    run: str
    """The run's name for itself, under which a node keeps its state."""
    share: Share
    service: str = ""
    """Address of the generator that all clients share; empty: a client has its own."""


@dataclass(frozen=True)
class TrainReport:
    """What a client says of its round, beside the model."""

    client: int
    examples: int
    """Real samples N_k: the aggregation weight. Synthetic images do not count."""
    loss: float
    steps: int
    generated: int
    """Images in this client's cache."""
    made: int
    """Images sampled in this very round; the rest were there."""
    seconds_generating: float
    seconds_training: float
    rejected: int = 0  # images in the cache that `min-class-agreement` left out


@dataclass(frozen=True)
class EvaluateReport:
    """How a client's own test images fared."""

    client: int
    examples: int
    correct: int
    loss: float


class LiveRecord(ArrayRecord):
    """Arrays handed over within one process, without bytes: the one exception to messages, for the inline grid.

    To Flower it is an empty record. What it holds must not be changed by either side.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__["live"] = dict(arrays)


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Build a new record: one that was sent must never be changed in place. Tensors are handed over as they are."""
    if any(hasattr(value, "cpu") for value in arrays.values()):
        return LiveRecord(arrays)
    return ArrayRecord({key: _encoded(np.asarray(value)) for key, value in arrays.items()})


def _encoded(array: Any) -> Array:
    return Array(dtype=str(array.dtype), shape=array.shape, stype=_ENCODING, data=array_bytes(array))


def to_arrays(record: ArrayRecord) -> Arrays:
    """Read a record: NumPy arrays, not to be written to, or the tensors of a live one."""
    if isinstance(record, LiveRecord):
        return dict(record.__dict__["live"])
    return {key: read_array(value.data) for key, value in record.items()}


def encoded(record: ArrayRecord) -> ArrayRecord:
    """The record as Flower knows it, which may be copied, kept and sent on.

    Tensors that were handed over become NumPy arrays, and data that came out of band (npy.py) become bytes: Flower
    makes an Array of nothing else, and neither pickle nor protobuf takes a view.
    """
    if isinstance(record, LiveRecord):
        return to_record(plain(to_arrays(record)))
    if all(isinstance(array.data, bytes) for array in record.values()):
        return record
    return ArrayRecord({key: _with_bytes(array) for key, array in record.items()})


def _with_bytes(array: Array) -> Array:
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=bytes(array.data))


def as_handed_over(record: ArrayRecord, like: ArrayRecord) -> ArrayRecord:
    """The way back: tensors beside those of ``like``, if it is live."""
    if not isinstance(like, LiveRecord):
        return record
    tensors = to_arrays(like)
    return LiveRecord({key: tensors[key].new_tensor(array) for key, array in to_arrays(record).items()})


def is_live(message: Message) -> bool:
    """Whether a message hands its model over within the process."""
    return isinstance(message.content.array_records[ARRAYS], LiveRecord)


# ------------------------------------------------------------------------------------------------ query


def ask(node: int, question: str, level: float = 0.0) -> Message:
    """Ask a node who it is (``identity``), for its part of a plan (``plan``, ``waterfill``), or for a disclosure."""
    config = ConfigRecord({"question": question, "level": level})
    return Message(RecordDict({CONFIG: config}), dst_node_id=node, message_type=MessageType.QUERY)


def read_question(message: Message) -> tuple[str, float]:
    """Read what the server asks, and the level the question is about."""
    config = message.content[CONFIG]
    return str(config["question"]), float(config["level"])  # type: ignore[arg-type]


def answer(message: Message, client: int, **numbers: int) -> Message:
    """Answer a query with the client's id and whole numbers."""
    record = MetricRecord({"client-id": client, **{k.replace("_", "-"): v for k, v in numbers.items()}})
    return Message(RecordDict({METRICS: record}), reply_to=message)


def read_answer(message: Message, *keys: str) -> tuple[int, ...]:
    """Read the client's id and the numbers asked for."""
    record = _metrics(message)
    return tuple(_whole(record, key, 0, 2**53) for key in ("client-id", *keys))


def disclose(message: Message, client: int, arrays: Arrays) -> Message:
    """Answer a query with the client's id and arrays; only for what `strategies/disclosure.py` names."""
    records = {METRICS: MetricRecord({"client-id": client}), ARRAYS: to_record(arrays)}
    return Message(RecordDict(records), reply_to=message)  # type: ignore[arg-type]


def read_disclosed(message: Message, client: int, wanted: Arrays) -> Arrays:
    """Read what a client disclosed; names, kinds and shapes must be those of ``wanted``, as in a train reply."""
    found = _whole(_metrics(message), "client-id", 0, 2**53)
    if found != client:
        raise MessageError(f"client-id = {found}, but the question was for client {client}")
    records = message.content.array_records
    if set(records) != {ARRAYS}:
        raise MessageError(f"array records {sorted(records)}, wanted {ARRAYS} alone")
    # Copies: a strategy keeps them for the whole run, and they may be views of memory that Ray wants back.
    return {key: array.copy() for key, array in _check_like(records[ARRAYS], wanted).items()}


# ------------------------------------------------------------------------------------------------ train


def add_task(message: Message, task: TrainTask, buffers: ArrayRecord, extra: ArrayRecord) -> None:
    """Give a strategy's message the task of one client; the arrays in it stay as they are."""
    content = RecordDict(dict(message.content.items()))
    config = ConfigRecord(dict(message.content.config_records[CONFIG].items()))
    config["server-round"], config["beta"] = task.round, task.beta
    config["accepted-round"], config["checkpointed-round"] = task.accepted_round, task.checkpointed_round
    config["share-base"], config["share-extra"] = task.share.base, task.share.extra
    config["share-level"] = task.share.level
    config["run"], config["generator-service"] = task.run, task.service
    content[CONFIG] = config
    content[BUFFERS], content[EXTRA] = buffers, extra
    message.content = content


def read_task(message: Message) -> TrainTask:
    """Read the server's task."""
    config: Any = message.content.config_records[CONFIG]
    if not re.fullmatch("[0-9a-f]{32}", str(config["run"])):  # it becomes part of a path
        raise MessageError(f"run = {config['run']!r}, wanted 32 hexadecimal digits")
    return TrainTask(
        round=int(config["server-round"]),
        beta=float(config["beta"]),
        accepted_round=int(config["accepted-round"]),
        checkpointed_round=int(config["checkpointed-round"]),
        run=str(config["run"]),
        share=Share(int(config["share-base"]), int(config["share-extra"]), float(config["share-level"])),
        service=str(config["generator-service"]),
    )


def read_model(message: Message) -> tuple[Arrays, Arrays]:
    """Read the trainable arrays and the buffers of a message."""
    records = message.content.array_records
    return to_arrays(records[ARRAYS]), to_arrays(records[BUFFERS])


def read_extra(message: Message) -> Arrays:
    """Read what the server's part of an algorithm sent beside the model."""
    return to_arrays(message.content.array_records[EXTRA])


def train_reply(
    message: Message, report: TrainReport, trainable: Arrays, buffers: Arrays, extra: Mapping[str, Any]
) -> Message:
    """Build a client's answer to a train message; a record of extra arrays only where there are any."""
    metrics = MetricRecord(
        {
            WEIGHT: report.examples,
            "client-id": report.client,
            LOSS: report.loss,
            "steps": report.steps,
            "generated": report.generated,
            "made": report.made,
            "seconds-generating": report.seconds_generating,
            "seconds-training": report.seconds_training,
            "rejected": report.rejected,
        }
    )
    records = {ARRAYS: to_record(trainable), BUFFERS: to_record(buffers), METRICS: metrics}
    if extra:
        records[EXTRA] = to_record(extra)
    return Message(RecordDict(records), reply_to=message)  # type: ignore[arg-type]


def read_train_reply(
    message: Message, client: int, trainable: Arrays, buffers: Arrays, extra: Arrays
) -> tuple[TrainReport, Arrays]:
    """Check a train reply against what was sent, and take its buffers out of it.

    Afterwards the message holds exactly one ArrayRecord and one MetricRecord, which is what Flower's strategies take,
    and the record of extra arrays if ``extra`` (arrays like those wanted) says that the strategy waits for one.

    Raises
    ------
    MessageError
        For anything that must not reach the global model, by name.
    """
    record = _metrics(message)
    report = TrainReport(
        client=_whole(record, "client-id", 0, 2**53),
        examples=_whole(record, WEIGHT, 1, 2**40),
        loss=_number(record, LOSS),
        steps=_whole(record, "steps", 0, 2**53),
        generated=_whole(record, "generated", 0, 2**53),
        made=_whole(record, "made", 0, 2**53),
        seconds_generating=_number(record, "seconds-generating"),
        seconds_training=_number(record, "seconds-training"),
        rejected=_whole(record, "rejected", 0, 2**53),
    )
    if report.client != client:
        raise MessageError(f"client-id = {report.client}, but the message was for client {client}")
    records = message.content.array_records
    wanted = [ARRAYS, BUFFERS, *([EXTRA] if extra else [])]
    if set(records) != set(wanted):
        raise MessageError(f"array records {sorted(records)}, wanted {' and '.join(wanted)}")
    _check_like(records[ARRAYS], trainable)
    received = _check_like(records[BUFFERS], buffers)
    message.content = RecordDict({ARRAYS: records[ARRAYS], METRICS: record})
    if extra:
        _check_like(records[EXTRA], extra)
        message.content[EXTRA] = records[EXTRA]
    return report, received


def _check_like(record: ArrayRecord, wanted: Arrays) -> Arrays:
    if isinstance(record, LiveRecord):
        return _check_live(to_arrays(record), wanted)
    if list(record) != list(wanted):
        odd = sorted(set(record) ^ set(wanted)) or ["the order"]
        raise MessageError(f"arrays differ from those wanted: {odd[0]}")
    arrays: Arrays = {}
    for key, like in wanted.items():
        # The declared dtype and shape are compared before the bytes are decoded.
        if record[key].dtype != str(like.dtype) or tuple(record[key].shape) != like.shape:
            got = f"{record[key].dtype}{list(record[key].shape)}"
            raise MessageError(f"array {key} is {got}, wanted {like.dtype}{list(like.shape)}")
        array = _decoded(key, record[key], like)
        if not np.isfinite(array).all():
            raise MessageError(f"array {key} holds NaN or infinity")
        arrays[key] = array
    return arrays


def _decoded(key: str, sent: Array, like: Any) -> Any:
    """Read an array's bytes, after a look at how many they are and at what they say of themselves.

    A few bytes may claim to be an array of terabytes, and NumPy makes room for it before it counts them.
    """
    most = like.nbytes + _HEADER_BYTES
    if not _is_of_bytes(sent.data):
        raise MessageError(f"array {key} has data of type {type(sent.data).__name__}, wanted bytes")
    if len(sent.data) > most:
        raise MessageError(f"array {key} has {len(sent.data)} bytes, wanted {most} at most")
    try:
        if sent.stype != _ENCODING:
            raise ValueError(f"its encoding is '{sent.stype[:50]}', wanted {_ENCODING}")
        array = read_array(sent.data)
    except ValueError as error:
        raise MessageError(f"array {key} cannot be decoded: {error}") from None
    if array.dtype != like.dtype or array.shape != like.shape:
        raise MessageError(f"array {key} decodes to {array.dtype}{list(array.shape)}")
    return array


def _is_of_bytes(data: Any) -> bool:
    """Whether they are bytes, or the view of bytes that comes out of band; its length must be what it is read as."""
    if isinstance(data, memoryview):
        return data.format == "B" and data.ndim == 1 and data.c_contiguous and data.readonly
    return isinstance(data, bytes)


def _check_live(arrays: Arrays, wanted: Arrays) -> Arrays:
    """The same checks on tensors, with one look at the GPU for all of them."""
    import torch  # where tensors are handed over it is there already

    if list(arrays) != list(wanted):
        raise MessageError("arrays differ from those wanted")
    for key, like in wanted.items():
        if arrays[key].dtype != like.dtype or arrays[key].shape != like.shape:
            raise MessageError(f"array {key} is {arrays[key].dtype}{list(arrays[key].shape)}")
    floats = [array for array in arrays.values() if array.is_floating_point() and array.numel()]
    # A maximum norm is NaN or infinite where an element is, and all of them are a launch or two.
    if floats and not bool(torch.stack(torch._foreach_norm(floats, float("inf"))).isfinite().all()):
        raise MessageError("the arrays hold NaN or infinity")
    return arrays


# --------------------------------------------------------------------------------------------- evaluate


def evaluate_message(node: int, model: ArrayRecord, buffers: ArrayRecord) -> Message:
    """Ask a node to test the global model on its own test data."""
    content = RecordDict({ARRAYS: model, BUFFERS: buffers})
    return Message(content, dst_node_id=node, message_type=MessageType.EVALUATE)


def evaluate_reply(message: Message, report: EvaluateReport) -> Message:
    """Build a client's answer to an evaluate message."""
    record = {WEIGHT: report.examples, "client-id": report.client, "correct": report.correct, "loss": report.loss}
    return Message(RecordDict({METRICS: MetricRecord(record)}), reply_to=message)  # type: ignore[arg-type]


def read_evaluate_reply(message: Message, client: int) -> EvaluateReport:
    """Check and read an evaluate reply."""
    record = _metrics(message)
    examples = _whole(record, WEIGHT, 0, 2**40)
    report = EvaluateReport(
        client=_whole(record, "client-id", 0, 2**53),
        examples=examples,
        correct=_whole(record, "correct", 0, examples),
        loss=_number(record, "loss"),
    )
    if report.client != client:
        raise MessageError(f"client-id = {report.client}, but the message was for client {client}")
    return report


# ----------------------------------------------------------------------------------------------- errors


def error_reply(message: Message, error: Exception | SystemExit) -> Message:
    """Tell the server what went wrong on a client: one line, and the traceback below it."""
    text = " ".join(str(error).split()) or "no message"
    trace = "".join(traceback.format_exception(error))[-8000:]
    return Message(Error(CLIENT_FAILED, f"{type(error).__name__}: {text[:500]}\n{trace}"), reply_to=message)


def failure_reason(message: Message) -> str:
    """The reason of a failed reply in one line; all that came with it goes to the log."""
    reason = (message.error.reason or f"error {message.error.code}")[:_LOGGED_CHARACTERS]
    log(ERROR, "node %d failed: %s", message.metadata.src_node_id, reason)
    return (reason.strip().splitlines() or ["no reason given"])[0][:600]


def _metrics(message: Message) -> MetricRecord:
    records = message.content.metric_records
    if set(records) != {METRICS}:
        raise MessageError(f"metric records {sorted(records)}, wanted {METRICS} alone")
    return records[METRICS]


def _whole(record: MetricRecord, key: str, low: int, high: int) -> int:
    value = record.get(key)
    if type(value) is not int or not low <= value <= high:
        raise MessageError(f"{key} = {value!r}, wanted a whole number from {low} to {high}")
    return value


def _number(record: MetricRecord, key: str) -> float:
    value = record.get(key)
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise MessageError(f"{key} = {value!r}, wanted a finite number")
    return float(value)  # type: ignore[arg-type]
