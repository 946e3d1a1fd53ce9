"""Send messages to clients and collect the replies, also if client processes die.

If a client process dies, Flower replies with an error in its place. The client itself has not failed, so we send the
message again; the client starts from the state the server last accepted, so the second attempt computes the same.

Under Ray, one retry is not enough. Flower keeps its client processes on a stack and puts a dead process's handle back
on top, so a single message reaches the same dead process every time; and because a dead process fails fast, it takes
most of a round's messages. So we retry in several passes and send a few short probes at once between passes: the dead
process fails immediately, a live one answers later and is then on top. On a busy machine the order can be reversed and
the pass is wasted. If only dead processes answer the probes, we stop retrying.

In a deployment every message starts its own process, so one retry is enough. Only a node's report that this process
crashed leads to one: there, a client can reply with any error code itself.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedeas_flwr.federation import messages
from fedeas_flwr.federation.flower_internals import SimulationGrid, announce_messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.strategies.records import encoded, to_arrays

log = logging.getLogger("flwr").log

_CRASHED = 8
"""Flower's error code of a client process that crashed."""
PROCESS_DIED = (0, _CRASHED)
"""Flower's error codes of a dead client process in a simulation; 0 is an unknown error (Ray's ActorDiedError)."""
_NODE_UNAVAILABLE = 5
"""Flower's error code of a node that is not online."""
_PASSES_PER_MESSAGE = 4
"""Maximum number of retry passes per message of a call; a pass usually delivers at least one message."""
_PROBES, _PROBE_ATTEMPTS, _PROBE_PAUSE_SECONDS = 4, 5, 0.1
"""Number of probes sent at once, of attempts to reach a live process, and the seconds between two attempts."""
_PULL_SECONDS, _PULL_SECONDS_PER_MESSAGE = 0.005, 0.0002
"""Seconds between two polls of a simulation's replies: the larger of the first and the second times the open messages.
On a slow core a poll takes 0.2 ms, and 15 µs per open message: less than a tenth of the time."""
_HTTP_PULL_SECONDS = 3.0
"""Seconds between two requests to a SuperLink, as in Flower."""
_MIN_SHARED_BYTES = 100 * 1024
"""Minimum bytes of arrays to share between messages; Ray sends smaller ones faster within the message."""

OnReply = Callable[[int, Message], Any]


def deliver(
    grid: Grid, out: Sequence[Message], timeout: float, on_reply: OnReply = lambda node, reply: None
) -> dict[int, Message]:
    """Send messages, at most one per node; return the replies by node. A node that did not reply in time has none.

    ``timeout`` is in seconds, for all messages, retries included; 0 means no limit. ``on_reply`` is called with the
    node and its reply as soon as a reply arrives, but not with an error.
    """
    deadline, simulated = time.monotonic() + timeout if timeout else math.inf, is_simulated(grid)
    codes = PROCESS_DIED if simulated else (_CRASHED,)
    replies = _exchange(grid, out, deadline, on_reply)
    for _ in range(_PASSES_PER_MESSAGE * len(out) if simulated else 1):
        lost = [message for message in out if _has_code(replies.get(message.metadata.dst_node_id), codes)]
        if not lost or time.monotonic() >= deadline:
            break
        log(WARNING, "%d of %d messages reached a client process that died; sending them again", len(lost), len(out))
        if simulated and not _has_live_process(grid, deadline):
            break
        replies |= _exchange(grid, [_copy_unsent(message) for message in lost], deadline, on_reply)
    return replies


def collect(grid: Grid, sent: Sequence[Message]) -> dict[int, Message]:
    """Return the replies to messages that `deliver` sent without getting one, as far as they are here now, by node."""
    if not sent:
        return {}
    return _by_node(sent, grid.pull_messages(_by_id(sent)))


def has_died(grid: Grid, reply: Message | None) -> bool:
    """Return whether a reply is the error of a simulation for a client process that died.

    In a deployment none is: a node that fails must not stop the run.
    """
    return is_simulated(grid) and _has_code(reply, PROCESS_DIED)


def _has_code(reply: Message | None, codes: Collection[int]) -> bool:
    return reply is not None and reply.has_error() and reply.error.code in codes


def is_simulated(grid: Grid) -> bool:
    """Return whether the grid's clients are processes of this machine that the run has started itself."""
    return isinstance(grid, InlineGrid | SimulationGrid)


def _copy_unsent(message: Message) -> Message:
    meta = message.metadata
    return Message(
        message.content, dst_node_id=meta.dst_node_id, message_type=meta.message_type, group_id=meta.group_id
    )


def _has_live_process(grid: Grid, deadline: float) -> bool:
    """Probe several times: one dead process may take all probes before a thread passes one to a live process."""
    nodes = sorted(grid.get_node_ids())[:_PROBES]
    for _ in range(_PROBE_ATTEMPTS):
        answers = _exchange(grid, [messages.build_query(node, "identity") for node in nodes], deadline)
        if not all(has_died(grid, answers.get(node)) for node in nodes):
            return True
        time.sleep(_PROBE_PAUSE_SECONDS)
    return False


class _SharedRecord(ArrayRecord):
    """Arrays in Ray's object store. Ray sends a reference to them, and the receiver maps their memory.

    To Flower it is an empty record.
    """

    def __init__(self, record: ArrayRecord) -> None:
        import ray  # running already

        super().__init__()
        self.__dict__["reference"] = ray.put(record)

    def __reduce__(self) -> tuple[Any, ...]:
        import ray

        return ray.get, (self.__dict__["reference"],)


def _share_arrays(out: Sequence[Message]) -> None:
    """Copy the arrays that messages to Ray's client processes have in common to shared memory once, not per message."""
    shared: dict[int, ArrayRecord] = {}
    for message in out:
        for record in message.content.array_records.values():
            if id(record) not in shared and not isinstance(record, _SharedRecord):
                plain = encoded(record)
                large = sum(array.nbytes for array in to_arrays(plain).values()) >= _MIN_SHARED_BYTES
                shared[id(record)] = _SharedRecord(plain) if large else plain
        content = message.content.items()
        message.content = RecordDict({name: shared.get(id(record), record) for name, record in content})


def _exchange(
    grid: Grid, out: Sequence[Message], deadline: float, on_reply: OnReply = lambda node, reply: None
) -> dict[int, Message]:
    """Send messages and wait for the replies until the deadline.

    Flower's own `send_and_receive` measures time by the wall clock, which can jump, and polls the replies of a
    simulation only ten times per second. In a deployment it would also wait for the reply of a node that
    restarted, although Flower delivers no message twice.
    """
    if isinstance(grid, InlineGrid):
        return _by_node(out, grid.send_and_receive(out), on_reply)
    since = _online_since(grid)
    if simulation := isinstance(grid, SimulationGrid):
        _share_arrays(out)
    taken = set(grid.push_messages(out))
    if simulation:
        announce_messages(message.metadata.dst_node_id for message in out)
    sent = _by_id(out)
    replies = {
        message.metadata.dst_node_id: _error_reply(message, "the SuperLink did not take the message")
        for key, message in sent.items()
        if key not in taken
    }
    waiting = sent.keys() & taken
    while waiting:
        answered = _by_node(out, grid.pull_messages(waiting), on_reply)
        waiting -= {reply.metadata.reply_to_message_id for reply in answered.values()}
        replies |= answered
        now = _online_since(grid)
        for key in list(waiting) if now else ():
            node = sent[key].metadata.dst_node_id
            if node in since and now.get(node, since[node]) != since[node]:
                replies[node] = _error_reply(sent[key], "its node went offline after the message was sent")
                waiting.remove(key)
        if not waiting or time.monotonic() >= deadline:
            break
        pause = max(_PULL_SECONDS, _PULL_SECONDS_PER_MESSAGE * len(waiting)) if simulation else _HTTP_PULL_SECONDS
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
    return replies


def _online_since(grid: Grid) -> dict[int, str]:
    """Return since when the nodes have been online, by node; nothing for a simulation."""
    return {} if is_simulated(grid) else {node.node_id: node.last_activated_at for node in grid.get_nodes()}


def _error_reply(message: Message, reason: str) -> Message:
    """Build the error reply for a message that does not reach its node."""
    return Message(Error(_NODE_UNAVAILABLE, reason), reply_to=message)


def _by_id(out: Sequence[Message]) -> dict[str, Message]:
    """Return sent messages by the ids that they got when they were sent."""
    return {message.metadata.message_id: message for message in out}


def _by_node(
    out: Sequence[Message], replies: Iterable[Message], on_reply: OnReply = lambda node, reply: None
) -> dict[int, Message]:
    """Return replies by the node of the message; ignore those to other messages, such as an earlier round's."""
    found: dict[int, Message] = {}
    sent: dict[str, Message] = {}
    for reply in replies:
        if reply.metadata.reply_to_message_id not in sent:  # after the first reply, all messages have ids
            sent = _by_id(out)
        # Not the sender's id: if a node's reply is broken, Flower replies in its own name.
        message = sent.get(reply.metadata.reply_to_message_id)
        if message is None or message.metadata.dst_node_id in found:
            log(WARNING, "ignoring a reply of node %d to no open message", reply.metadata.src_node_id)
            continue
        found[message.metadata.dst_node_id] = reply
        if not reply.has_error():
            on_reply(message.metadata.dst_node_id, reply)
    return found
