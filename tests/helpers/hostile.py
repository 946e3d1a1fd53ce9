"""A ClientApp whose client 1 is hostile: in each round it sends another reply that must not reach the model.

The other clients are the real ones. It works inline and on SuperNodes, where every message has a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedeas_flwr import client_app
from fedeas_flwr.data.node import SIMULATED, read_node
from fedeas_flwr.federation import messages
from fedeas_flwr.strategies.records import ARRAYS, METRICS, WEIGHT, to_arrays, to_record

HOSTILE = 1
"""Client that is hostile."""
app = ClientApp()
app.query()(client_app.query)


@app.train()
def train(message: Message, context: Context) -> Message:
    reply = client_app.train_client(message, context)
    if read_node(context.node_config).client != HOSTILE:
        return reply
    kind = list(KINDS)[messages.read_task(message).round - 1]
    if kind == "silence" and SIMULATED not in context.node_config:
        time.sleep(3600)
    KINDS[kind][0](reply)
    return reply


def fail(reply: Message) -> None:
    raise ArithmeticError("no reply today")


def arrays(change: Callable[[Any], Any]) -> Callable[[Message], None]:
    """Return what applies a function to every array of the model."""

    def spoil(reply: Message) -> None:
        found = to_arrays(reply.content.array_records[ARRAYS])
        reply.content[ARRAYS] = to_record({key: change(array) for key, array in found.items()})

    return spoil


def claim(key: str, value: float) -> Callable[[Message], None]:
    """Return what replaces one of the reply's numbers."""

    def spoil(reply: Message) -> None:
        reply.content[METRICS] = MetricRecord({**dict(reply.content.metric_records[METRICS]), key: value})

    return spoil


def oversize(reply: Message) -> None:
    """Send 16 MB as an array that says it has the right shape."""
    found = dict(reply.content.array_records[ARRAYS].items())
    name, right = next(iter(found.items()))
    big = Array(np.zeros(2**22, np.float32))
    found[name] = Array(dtype=right.dtype, shape=tuple(right.shape), stype=big.stype, data=big.data)
    reply.content[ARRAYS] = ArrayRecord(found)


def replay(reply: Message) -> None:
    """Reply to a message that is not open: what an earlier round's reply is, sent again."""
    reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64


def more_records(reply: Message) -> None:
    reply.content = RecordDict({**dict(reply.content.items()), "more": MetricRecord({"a": 1})})


KINDS: dict[str, tuple[Callable[[Message], None], str]] = {
    "NaN": (arrays(lambda array: np.full_like(array, np.nan)), "holds NaN or infinity"),
    "shapes": (arrays(lambda array: array[..., None]), "wanted float32"),
    "values": (arrays(lambda array: np.full_like(array, 3.3e38)), "the norm is "),
    "weight": (claim(WEIGHT, 2**39), "num-examples = 549755813888, but max-examples"),
    "images": (claim("generated", 2**50), "generated = 1125899906842624, but its plan cannot exceed 0"),
    "loss": (claim("loss", 1e308), "loss = 1e+308"),
    "another client": (claim("client-id", 0), "client-id = 0, but the message was for client 1"),
    "records": (more_records, "metric records"),
    "size": (oversize, "wanted"),
    "replay": (replay, "no reply"),
    "silence": (replay, "no reply"),
}
"""What it does in rounds 1, 2, …, and a part of the reason that the server records."""

RUN: dict[str, Any] = {
    "clients": 3,
    "rounds": len(KINDS),
    "policy": "none",
    "participation": 1.0,
    "min_replies": 0.5,
    "local_epochs": 1,
    "batch_size": 512,
    "alpha": 0.1,
}
"""Keys of a run with this app."""
