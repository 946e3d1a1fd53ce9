"""Messages between the server and the clients: each one's writer, and the reader that checks it.

    query     server: a question, at a β or     client: its id and the whole numbers asked for, nothing else;
                      a level; perhaps its              or its id and arrays that a `disclose-…` key allows
                      task and the model
    train     server: model, β, this round,     client: model, its real sample count, a few numbers,
                      last accepted round,              and an algorithm's extra arrays (SCAFFOLD …)
                      share, extra arrays,
                      perhaps a generator
    evaluate  server: model                     client: how many of its own test images it classified correctly

A train and an evaluate message say what is trained: the classifier, or its generator before it.

A client sends a vector per class only in such a disclosure; otherwise its label counts stay on the client. The server
decides β: a client reads it from the message, never from its run-config.
"""

from __future__ import annotations

import hashlib
import logging
import re
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass, field, fields, is_dataclass
from logging import ERROR
from typing import Any, TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict

from fedeas_flwr.common.errors import MessageError, place_in_user_code
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.text import MAX_LINE, indented_lines, one_line
from fedeas_flwr.policies.interface import EMPTY_SHARE, PolicySettings, Share
from fedeas_flwr.policies.registry import AT_ONCE
from fedeas_flwr.strategies.records import (
    ARRAYS,
    BUFFERS,
    CONFIG,
    EXTRA,
    LOSS,
    METRICS,
    WEIGHT,
    InProcessRecord,
    read_validated,
    to_arrays,
    to_record,
)

log = logging.getLogger("flwr").log

AUGMENT_QUERY = f"{MessageType.QUERY}.fedeas"
"""Message type of a matched policy's questions to another app: its ClientApp answers in ``@app.query("fedeas")``."""
CLIENT_FAILED = 1
"""Error code of a reply whose reason the client wrote itself."""

# --------------------------------------------------------------------------- values of a record, by field


@dataclass(frozen=True)
class _Key:
    """One value of a record: its name on the wire, and the check that a reader makes."""

    name: str
    check: Callable[[Any], bool]
    expected: str

    def read(self, record: Mapping[str, Any]) -> Any:
        """Return the value, or raise `MessageError` with its key, the value and what is allowed."""
        value = record.get(self.name)
        if not self.check(value):
            raise MessageError(f"{self.name} = {value!r}, expected {self.expected}")
        return value


def _whole(name: str, low: int = 0, high: int = 2**53) -> _Key:
    return _Key(name, lambda v: type(v) is int and low <= v <= high, f"a whole number from {low} to {high}")


def _number(name: str) -> _Key:
    """Return a key with a limit far below the largest float, so that no weighted sum of such numbers overflows."""
    return _Key(name, lambda v: type(v) in (int, float) and abs(v) <= 1e39, "a number from -1e+39 to 1e+39")


def _text(name: str, pattern: str = ".*", expected: str = "a text") -> _Key:
    return _Key(name, lambda v: type(v) is str and re.fullmatch(pattern, v) is not None, expected)


def _on_wire(*keys: _Key, build: Callable[..., Any] = lambda value: value) -> dict[str, Any]:
    """Return a field's metadata: its keys, and the function that builds the field from their values."""
    return {"keys": keys, "build": build}


_Values = TypeVar("_Values", bound="TrainTask | TrainReport | EvaluateReport | AugmentTask")
_Record = TypeVar("_Record", bound=MutableMapping[str, Any])


def _write(record: _Record, values: TrainTask | TrainReport | EvaluateReport | AugmentTask) -> _Record:
    """Add every field to a record and return it."""
    for item in fields(values):
        value = getattr(values, item.name)
        parts = astuple(value) if is_dataclass(value) else (value,)  # type: ignore[arg-type]
        for key, part in zip(item.metadata["keys"], parts, strict=True):
            record[key.name] = part
    return record


def _read(cls: type[_Values], record: Mapping[str, Any]) -> _Values:
    """Read and check every field; raise `MessageError` for the first value that is not allowed."""
    found = {
        item.name: item.metadata["build"](*(key.read(record) for key in item.metadata["keys"])) for item in fields(cls)
    }
    return cls(**found)


_CLIENT = _whole("client-id")
_TASK = _text("task", "classifier|generator", "classifier or generator")
_GENERATOR = "generator"
"""Name of the record of a generator's weights."""


@dataclass(frozen=True)
class TrainTask:
    """A client's task in a round: what the server sends in addition to the model."""

    round: int = field(metadata=_on_wire(_whole("server-round")))
    beta: float = field(metadata=_on_wire(_number("beta"), build=float))
    accepted_round: int = field(metadata=_on_wire(_whole("accepted-round")))
    """Last round whose reply from this client the server used; the client starts from its state after that round."""
    checkpointed_round: int = field(metadata=_on_wire(_whole("checkpointed-round")))
    """`accepted_round` in the server's last checkpoint, from which a server that crashed resumes."""
    previous_checkpointed_round: int = field(metadata=_on_wire(_whole("previous-checkpointed-round")))
    """The same in the checkpoint before it, from which the server resumes if the last one is damaged."""
    run: str = field(metadata=_on_wire(_text("run", "[0-9a-f]{32}", "32 hexadecimal digits")))
    """Identity of the run. A node keeps the client's state in a folder of this name."""
    share: Share = field(
        metadata=_on_wire(_whole("share-base"), _whole("share-extra"), _number("share-level"), build=Share)
    )
    service: str = field(default="", metadata=_on_wire(_text("generator-service")))
    """Address of the generator that all clients share; empty if every client opens its own."""
    task: str = field(default="classifier", metadata=_on_wire(_TASK))
    """What is trained: see the key `task`. A run with ``generator = "federated"`` first trains the generator."""


@dataclass(frozen=True)
class TrainReport:
    """A client's numbers for a round, which it sends in addition to the model."""

    client: int = field(metadata=_on_wire(_CLIENT))
    examples: int = field(metadata=_on_wire(_whole(WEIGHT, 1, 2**40)))
    """Number of real samples N_k, the aggregation weight. Synthetic images do not count."""
    loss: float = field(metadata=_on_wire(_number(LOSS), build=float))
    steps: int = field(metadata=_on_wire(_whole("steps")))
    generated: int = field(metadata=_on_wire(_whole("generated")))
    """Total number of images in this client's cache."""
    made: int = field(metadata=_on_wire(_whole("made")))
    """Number of images newly generated in this round."""
    seconds_generating: float = field(metadata=_on_wire(_number("seconds-generating"), build=float))
    seconds_training: float = field(metadata=_on_wire(_number("seconds-training"), build=float))
    rejected: int = field(default=0, metadata=_on_wire(_whole("rejected")))
    """Number of cached images that `min-class-agreement` excludes from training."""
    not_made: int = field(default=0, metadata=_on_wire(_whole("not-made")))
    """Number of planned images that the node's own limit excludes."""


@dataclass(frozen=True)
class EvaluateReport:
    """A client's result on its own test images."""

    client: int = field(metadata=_on_wire(_CLIENT))
    examples: int = field(metadata=_on_wire(_whole(WEIGHT, 0, 2**40)))
    correct: int = field(metadata=_on_wire(_whole("correct")))
    loss: float = field(metadata=_on_wire(_number(LOSS), build=float))


@dataclass(frozen=True)
class AugmentTask:
    """What `with_fedeas` adds to another app's messages: how an `Augmenter` plans its client's images."""

    policy: str = field(metadata=_on_wire(_text("fedeas-policy", "|".join(AT_ONCE), f"one of {', '.join(AT_ONCE)}")))
    beta: float = field(metadata=_on_wire(_number("fedeas-beta"), build=float))
    gamma: float = field(metadata=_on_wire(_number("fedeas-gamma"), build=float))
    strict_mean: bool = field(metadata=_on_wire(_Key("fedeas-strict-mean", lambda v: type(v) is bool, "true or false")))
    share: Share = field(
        default=EMPTY_SHARE,
        metadata=_on_wire(
            _whole("fedeas-share-base"), _whole("fedeas-share-extra"), _number("fedeas-share-level"), build=Share
        ),
    )

    @property
    def settings(self) -> PolicySettings:
        """Settings of the plan."""
        return PolicySettings(self.beta, self.gamma, self.strict_mean)


def classes_digest(classes: Sequence[str]) -> int:
    """Return a 48-bit hash of the class names in order; the server compares it with its own."""
    return int(hashlib.sha256(repr(tuple(classes)).encode()).hexdigest()[:12], 16)


def is_in_process(message: Message) -> bool:
    """Return whether a message passes its model by reference within this process, not as bytes."""
    return isinstance(message.content[ARRAYS], InProcessRecord)


# Not by Flower's properties such as `array_records`: each call builds a view of the records, in a reference cycle.


def _config(message: Message) -> ConfigRecord:
    return cast(ConfigRecord, message.content[CONFIG])


def _arrays(message: Message, name: str) -> Arrays:
    return to_arrays(cast(ArrayRecord, message.content[name]))


# ------------------------------------------------------------------------------------------------ query


def build_query(
    node: int,
    question: str,
    at: float = 0.0,
    message_type: str = MessageType.QUERY,
    task: TrainTask | None = None,
    model: Mapping[str, ArrayRecord] | None = None,
) -> Message:
    """Build a query to a node: its ``identity``, a matched policy's question at a β or a level, or a disclosure.

    The questions of an adaptive policy during a run have the client's task, and ``evaluate`` also has the model.
    """
    config = ConfigRecord({"question": question, "at": at})
    if task is not None:
        _write(config, task)
    return Message(RecordDict({CONFIG: config, **(model or {})}), dst_node_id=node, message_type=message_type)


def read_question(message: Message) -> tuple[str, float]:
    """Return the server's question, and the β or level that it is asked at."""
    config = message.content[CONFIG]
    return str(config["question"]), float(config["at"])  # type: ignore[arg-type]


def build_query_reply(message: Message, client: int, **numbers: int) -> Message:
    """Build a reply with the client's id and whole numbers."""
    record = MetricRecord({"client-id": client, **numbers})
    return Message(RecordDict({METRICS: record}), reply_to=message)


def read_answer(message: Message, *keys: str) -> tuple[int, ...]:
    """Return the client's id and the numbers under ``keys``; raise `MessageError` if one is missing or negative."""
    record = _metrics(message)
    return tuple(_whole(key).read(record) for key in ("client-id", *keys))


def disclose(message: Message, client: int, arrays: Arrays) -> Message:
    """Build a reply with the client's id and arrays; only a `Disclosure` (strategies/interface.py) uses it."""
    records = {METRICS: MetricRecord({"client-id": client}), ARRAYS: to_record(arrays)}
    return Message(RecordDict(records), reply_to=message)  # type: ignore[arg-type]


def read_disclosed(message: Message, client: int, expected: Arrays) -> Arrays:
    """Return the arrays that a client disclosed; raise `MessageError` unless they match ``expected``."""
    _check_sender(_CLIENT.read(_metrics(message)), client)
    records = message.content.array_records
    if set(records) != {ARRAYS}:
        raise MessageError(f"array records {sorted(records)}, expected {ARRAYS} alone")
    # Copy: a strategy keeps the arrays for the whole run, and they may be views of memory that Ray reuses.
    return {key: array.copy() for key, array in read_validated(records[ARRAYS], expected).items()}


# ------------------------------------------------------------------------------------------------ train


def add_task(
    message: Message, task: TrainTask, buffers: ArrayRecord, extra: ArrayRecord, generator: ArrayRecord | None = None
) -> None:
    """Add one client's task, the buffers and the extra arrays to a message that the strategy built.

    ``generator`` has the weights of the run's generator, for a client that does not have it yet.
    """
    content = RecordDict(dict(message.content.items()))
    content[CONFIG] = _write(ConfigRecord(dict(_config(message).items())), task)
    content[BUFFERS], content[EXTRA] = buffers, extra
    if generator is not None:
        content[_GENERATOR] = generator
    message.content = content


def read_task(message: Message) -> TrainTask:
    """Return the client's task; raise `MessageError` for a value that is not allowed."""
    return _read(TrainTask, _config(message))


def has_task(message: Message) -> bool:
    """Return whether a query has the client's task."""
    return "server-round" in _config(message)


def read_model(message: Message) -> tuple[Arrays, Arrays]:
    """Return the trainable arrays and the buffers of a message."""
    return _arrays(message, ARRAYS), _arrays(message, BUFFERS)


def read_extra(message: Message) -> Arrays:
    """Return the extra arrays that the strategy sent with the model."""
    return _arrays(message, EXTRA)


def has_generator(message: Message) -> bool:
    """Return whether a train message holds the weights of a generator."""
    return _GENERATOR in message.content


def read_generator(message: Message, expected: Arrays) -> Arrays:
    """Return the weights of the generator; raise `MessageError` unless they match ``expected``."""
    return read_validated(cast(ArrayRecord, message.content[_GENERATOR]), expected)


def train_reply(
    message: Message, report: TrainReport, trainable: Arrays, buffers: Arrays, extra: Mapping[str, Any]
) -> Message:
    """Build a client's reply to a train message, with a record of extra arrays if there are any."""
    metrics = _write(MetricRecord(), report)
    records = {ARRAYS: to_record(trainable), BUFFERS: to_record(buffers), METRICS: metrics}
    if extra:
        records[EXTRA] = to_record(extra)
    return Message(RecordDict(records), reply_to=message)  # type: ignore[arg-type]


def read_train_reply(
    message: Message, client: int, trainable: Arrays, buffers: Arrays, extra: Arrays
) -> tuple[TrainReport, Arrays]:
    """Check a train reply against the model that was sent; return its report and its buffers.

    Afterwards the message holds exactly one ArrayRecord and one MetricRecord, as Flower's strategies require, and the
    record of extra arrays if the strategy expects ``extra`` (arrays with the expected names, dtypes and shapes). Raise
    `MessageError`, which names the value, for any that must not reach the global model.
    """
    record = _metrics(message)
    report = _read(TrainReport, record)
    _check_sender(report.client, client)
    records = message.content.array_records
    expected = [ARRAYS, BUFFERS, *([EXTRA] if extra else [])]
    if set(records) != set(expected):
        raise MessageError(f"array records {sorted(records)}, expected {' and '.join(expected)}")
    arrays, received = to_record(read_validated(records[ARRAYS], trainable)), read_validated(records[BUFFERS], buffers)
    message.content = RecordDict({ARRAYS: arrays, METRICS: record})
    if extra:
        message.content[EXTRA] = to_record(read_validated(records[EXTRA], extra))
    return report, received


# --------------------------------------------------------------------------------------------- evaluate


def evaluate_message(node: int, model: ArrayRecord, buffers: ArrayRecord, task: str) -> Message:
    """Build a request to evaluate the global model, of a ``task`` as in `TrainTask`, on the node's own images."""
    content = RecordDict({ARRAYS: model, BUFFERS: buffers, CONFIG: ConfigRecord({_TASK.name: task})})
    return Message(content, dst_node_id=node, message_type=MessageType.EVALUATE)


def read_trained(message: Message) -> str:
    """Return what the model of a train or evaluate message is: a classifier or a generator."""
    return str(_TASK.read(_config(message)))


def evaluate_reply(message: Message, report: EvaluateReport) -> Message:
    """Build a client's reply to an evaluate message."""
    return Message(RecordDict({METRICS: _write(MetricRecord(), report)}), reply_to=message)


def read_evaluate_reply(message: Message, client: int) -> EvaluateReport:
    """Check an evaluate reply and return its report."""
    report = _read(EvaluateReport, _metrics(message))
    _check_sender(report.client, client)
    if report.correct > report.examples:
        raise MessageError(f"correct = {report.correct}, expected at most {WEIGHT} = {report.examples}")
    return report


# ------------------------------------------------------------------------------------ messages of other apps


def add_augment_task(message: Message, task: AugmentTask) -> None:
    """Add a task to the config record of a message that another app's strategy built.

    It has no record of its own, since Flower's client-side differential privacy allows one config record only.
    """
    records = message.content.config_records
    name = next(iter(records), CONFIG)
    config = ConfigRecord(dict(records[name].items()) if records else {})  # a copy: nodes may share the strategy's
    message.content = RecordDict({**message.content, name: _write(config, task)})


def read_augment_task(message: Message) -> AugmentTask:
    """Return the task; raise `MessageError` if there is none, or for a value that is not allowed."""
    for record in message.content.config_records.values():
        if "fedeas-beta" in record:
            return _read(AugmentTask, record)
    raise MessageError("no β in the message: the ServerApp needs strategy = with_fedeas(strategy, beta=...)")


# ----------------------------------------------------------------------------------------------- errors


def error_reply(message: Message, error: Exception | SystemExit) -> Message:
    """Build the reply of a client that failed: the error in one line, then its traceback."""
    text = (one_line(error, 500) or "no message") + place_in_user_code(error)
    trace = "".join(traceback.format_exception(error))[-8000:]
    return Message(Error(CLIENT_FAILED, f"{type(error).__name__}: {text}\n{trace}"), reply_to=message)


def failure_reason(message: Message) -> str:
    """Return the reason of a failed reply in one line, and log all of it."""
    reason = (message.error.reason or "").strip() or f"error {message.error.code}"
    log(ERROR, "node %d failed: %s", message.metadata.src_node_id, indented_lines(reason))
    lines = reason.splitlines()
    cause = lines[-1].removesuffix("'>") if "RayTaskError" in lines[0] else lines[0]  # Ray's traceback ends with it
    return one_line(cause, MAX_LINE) or "no reason given"


def _metrics(message: Message) -> MetricRecord:
    """Return a reply's numbers; raise `MessageError` if the client failed, with its reason, or if there are others."""
    if message.has_error():
        raise MessageError(failure_reason(message))
    records = message.content.metric_records
    if set(records) != {METRICS}:
        raise MessageError(f"metric records {sorted(records)}, expected {METRICS} alone")
    return records[METRICS]


def _check_sender(found: int, client: int) -> None:
    if found != client:
        raise MessageError(f"client-id = {found}, but the message was for client {client}")
