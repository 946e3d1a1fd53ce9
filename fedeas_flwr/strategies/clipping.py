"""The client's part of client-side clipping: Flower's mods, run on trained parameters alone.

Flower's mods want messages with one record of arrays; ours also carry buffers, and within a process they carry tensors.
So the mod is shown what it knows, and the rest is put back behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod

from fedeas_flwr.array_records import ARRAYS, BUFFERS, CONFIG, METRICS, as_handed_over, encoded

Handler = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Handler], Message]
MODS: dict[str, Mod] = {"client-fixed": fixedclipping_mod, "client-adaptive": adaptiveclipping_mod}


def clips_update(train: Handler) -> Handler:
    """Clip what ``train`` replies where the run's `dp` says that clients do; the norm comes with the message."""

    @wraps(train)
    def wrapped(message: Message, context: Context) -> Message:
        mod = MODS.get(str(context.run_config.get("dp", "none")))
        return train(message, context) if mod is None else _clipped(mod, train, message, context)

    return wrapped


def _clipped(mod: Mod, train: Handler, message: Message, context: Context) -> Message:
    whole = message.content
    sent, buffers = whole.array_records[ARRAYS], []

    def train_and_show_arrays_alone(message: Message, context: Context) -> Message:
        message.content = whole
        reply = train(message, context)
        if reply.has_content():
            records = reply.content.array_records
            buffers.append(records[BUFFERS])
            arrays, metrics = encoded(records[ARRAYS]), reply.content.metric_records[METRICS]
            reply.content = RecordDict({ARRAYS: arrays, METRICS: metrics})
        return reply

    message.content = RecordDict({ARRAYS: encoded(sent), CONFIG: whole.config_records[CONFIG]})
    reply = mod(message, context, train_and_show_arrays_alone)
    if reply.has_content():
        clipped = as_handed_over(reply.content.array_records[ARRAYS], sent)
        metrics = reply.content.metric_records[METRICS]
        reply.content = RecordDict({ARRAYS: clipped, BUFFERS: buffers[0], METRICS: metrics})
    return reply
