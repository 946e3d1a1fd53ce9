"""What crosses the wire: who writes what into a message, and how it is checked when it is read.

    query     server: which question, at what   client: its id and the whole numbers asked for, nothing else;
                      β or level                        or its id and arrays that a `disclose-…` key lets out
    train     server: model, β, this round,     client: model, its real sample count, a few numbers,
                      last accepted round,              and an algorithm's extra arrays (SCAFFOLD …)
                      share, extra arrays
    evaluate  server: model                     client: how many of its own test images it got right

No per-class vector crosses but in such a disclosure: a client's label counts stay with it. β is the server's to say: a
client takes it from the message, never from its run-config.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict

from fedeas_flwr.common.errors import MessageError
from fedeas_flwr.common.text import one_line
from fedeas_flwr.policies import Share
from fedeas_flwr.runs.checkpoints import Arrays
from fedeas_flwr.strategies.records import (
    ARRAYS,
    BUFFERS,
    CONFIG,
    EXTRA,
    LOSS,
    METRICS,
    WEIGHT,
    ArrayMismatchError,
    InProcessRecord,
    read_validated,
    to_arrays,
    to_record,
)

log = logging.getLogger("flwr").log

_LOGGED_CHARACTERS = 20_000
CLIENT_FAILED = 1
"""Error code of a reply in which the client itself says what went wrong."""


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


def classes_digest(classes: Sequence[str]) -> int:
    """One number for the names of all classes in their order: by it a server sees whether a node means the same."""
    return int(hashlib.sha256(repr(tuple(classes)).encode()).hexdigest()[:12], 16)


def is_in_process(message: Message) -> bool:
    """Whether a message hands its model over within the process."""
    return isinstance(message.content.array_records[ARRAYS], InProcessRecord)


# ------------------------------------------------------------------------------------------------ query


def build_query(node: int, question: str, at: float = 0.0) -> Message:
    """Ask a node who it is (``identity``), what a matched policy asks at a β or a level, or for a disclosure."""
    config = ConfigRecord({"question": question, "at": at})
    return Message(RecordDict({CONFIG: config}), dst_node_id=node, message_type=MessageType.QUERY)


def read_question(message: Message) -> tuple[str, float]:
    """Read what the server asks, and the β or the level it is about."""
    config = message.content[CONFIG]
    return str(config["question"]), float(config["at"])  # type: ignore[arg-type]


def build_query_reply(message: Message, client: int, **numbers: int) -> Message:
    """Answer a query with the client's id and whole numbers."""
    record = MetricRecord({"client-id": client, **numbers})
    return Message(RecordDict({METRICS: record}), reply_to=message)


def read_answer(message: Message, *keys: str) -> tuple[int, ...]:
    """Read the client's id and the numbers asked for."""
    record = _metrics(message)
    return tuple(_whole(record, key, 0, 2**53) for key in ("client-id", *keys))


def disclose(message: Message, client: int, arrays: Arrays) -> Message:
    """Answer a query with the client's id and arrays; only for what `strategies/interface.py` names."""
    records = {METRICS: MetricRecord({"client-id": client}), ARRAYS: to_record(arrays)}
    return Message(RecordDict(records), reply_to=message)  # type: ignore[arg-type]


def read_disclosed(message: Message, client: int, expected: Arrays) -> Arrays:
    """Read what a client disclosed; names, kinds and shapes must be those of ``expected``, as in a train reply."""
    _check_sender(_metrics(message), client)
    records = message.content.array_records
    if set(records) != {ARRAYS}:
        raise MessageError(f"array records {sorted(records)}, wanted {ARRAYS} alone")
    # Copies: a strategy keeps them for the whole run, and they may be views of memory that Ray wants back.
    return {key: array.copy() for key, array in _like(records[ARRAYS], expected).items()}


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
    _check_sender(record, client)
    report = TrainReport(
        client=client,
        examples=_whole(record, WEIGHT, 1, 2**40),
        loss=_number(record, LOSS),
        steps=_whole(record, "steps", 0, 2**53),
        generated=_whole(record, "generated", 0, 2**53),
        made=_whole(record, "made", 0, 2**53),
        seconds_generating=_number(record, "seconds-generating"),
        seconds_training=_number(record, "seconds-training"),
        rejected=_whole(record, "rejected", 0, 2**53),
    )
    records = message.content.array_records
    wanted = [ARRAYS, BUFFERS, *([EXTRA] if extra else [])]
    if set(records) != set(wanted):
        raise MessageError(f"array records {sorted(records)}, wanted {' and '.join(wanted)}")
    _like(records[ARRAYS], trainable)
    received = _like(records[BUFFERS], buffers)
    message.content = RecordDict({ARRAYS: records[ARRAYS], METRICS: record})
    if extra:
        _like(records[EXTRA], extra)
        message.content[EXTRA] = records[EXTRA]
    return report, received


# --------------------------------------------------------------------------------------------- evaluate


def evaluate_message(node: int, model: ArrayRecord, buffers: ArrayRecord) -> Message:
    """Ask a node to test the global model on its own test data."""
    content = RecordDict({ARRAYS: model, BUFFERS: buffers})
    return Message(content, dst_node_id=node, message_type=MessageType.EVALUATE)


def evaluate_reply(message: Message, report: EvaluateReport) -> Message:
    """Build a client's answer to an evaluate message."""
    record = {WEIGHT: report.examples, "client-id": report.client, "correct": report.correct, LOSS: report.loss}
    return Message(RecordDict({METRICS: MetricRecord(record)}), reply_to=message)  # type: ignore[arg-type]


def read_evaluate_reply(message: Message, client: int) -> EvaluateReport:
    """Check and read an evaluate reply."""
    record = _metrics(message)
    _check_sender(record, client)
    examples = _whole(record, WEIGHT, 0, 2**40)
    return EvaluateReport(
        client=client,
        examples=examples,
        correct=_whole(record, "correct", 0, examples),
        loss=_number(record, LOSS),
    )


# ----------------------------------------------------------------------------------------------- errors


def error_reply(message: Message, error: Exception | SystemExit) -> Message:
    """Tell the server what went wrong on a client: one line, and the traceback below it."""
    text = one_line(error, 500) or "no message"
    trace = "".join(traceback.format_exception(error))[-8000:]
    return Message(Error(CLIENT_FAILED, f"{type(error).__name__}: {text}\n{trace}"), reply_to=message)


def failure_reason(message: Message) -> str:
    """The reason of a failed reply in one line; all that came with it goes to the log."""
    reason = (message.error.reason or f"error {message.error.code}")[:_LOGGED_CHARACTERS]
    log(ERROR, "node %d failed: %s", message.metadata.src_node_id, reason)
    return (reason.strip().splitlines() or ["no reason given"])[0][:600]


def _like(record: ArrayRecord, expected: Arrays) -> Arrays:
    try:
        return read_validated(record, expected)
    except ArrayMismatchError as error:
        raise MessageError(str(error)) from None


def _metrics(message: Message) -> MetricRecord:
    records = message.content.metric_records
    if set(records) != {METRICS}:
        raise MessageError(f"metric records {sorted(records)}, wanted {METRICS} alone")
    return records[METRICS]


def _check_sender(record: MetricRecord, client: int) -> None:
    if (found := _whole(record, "client-id", 0, 2**53)) != client:
        raise MessageError(f"client-id = {found}, but the message was for client {client}")


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
