"""Bring messages to clients and replies back, past processes that die on the way.

Flower answers for a client process that died with an error of its own. The work is not the client's failure then, so it
is sent again: a client starts from the state the server last accepted, so that a second try computes the same.

Once is not enough under Ray. Flower keeps its client processes on a stack and puts the handle of a dead one back on
top, so that a lone message meets the same dead process for ever; and a dead one fails fast, so that it takes most of a
round's messages. Hence several passes, and between two of them a few short questions at once: the dead process refuses
at once, a live one answers later and then lies on top. On a busy machine it may be the other way round, and a pass in
vain. When none but dead processes answer the questions, no other pass follows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from logging import WARNING

from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid

log = logging.getLogger("flwr").log

PROCESS_DIED = (0, 8)
"""Flower's error codes for it: an error it has no name for (Ray's ActorDiedError), and a crashed client process."""
_NODE_UNAVAILABLE = 5
"""Flower's error code for it."""
_PASSES = 4
"""For each message; a pass usually brings one through at least."""
_PROBES, _PROBE_ATTEMPTS, _PROBE_PAUSE_SECONDS = 4, 5, 0.1
_PULL_SECONDS, _PULL_SECONDS_PER_MESSAGE = 0.005, 0.0002
"""Between two looks for replies that lie in this process, or for each that is waited for, whichever is more. On a slow
core a look takes 0.2 ms and 15 µs for each: less than a tenth of the time."""
_HTTP_PULL_SECONDS = 3.0
"""Between two requests to a SuperLink, as Flower has it."""


def deliver(grid: Grid, out: Sequence[Message], timeout: float) -> dict[int, Message]:
    """Send messages, at most one a node, and return the replies by node; a node without one did not reply in time.

    Parameters
    ----------
    grid
        Any grid.
    out
        What to send.
    timeout
        Seconds for all of it, second tries included; 0: for ever.
    """
    deadline = time.monotonic() + timeout if timeout else None
    replies = _exchange(grid, out, deadline)
    for _ in range(_PASSES * len(out)):
        lost = [message for message in out if has_died(replies.get(message.metadata.dst_node_id))]
        if not lost or (deadline is not None and time.monotonic() >= deadline):
            break
        log(WARNING, "%d of %d messages met a client process that died; they are sent again", len(lost), len(out))
        if not _has_live_process(grid, deadline):
            break
        replies |= _exchange(grid, [_copy_unsent(message) for message in lost], deadline)
    return replies


def has_died(reply: Message | None) -> bool:
    """Whether a reply only says that the process which should have made it is dead."""
    return reply is not None and reply.has_error() and reply.error.code in PROCESS_DIED


def _copy_unsent(message: Message) -> Message:
    meta = message.metadata
    return Message(
        message.content, dst_node_id=meta.dst_node_id, message_type=meta.message_type, group_id=meta.group_id
    )


def _has_live_process(grid: Grid, deadline: float | None) -> bool:
    """Ask, and ask again: one dead process may take all questions before a thread has handed one to a live process."""
    nodes = sorted(grid.get_node_ids())[:_PROBES]
    for _ in range(_PROBE_ATTEMPTS):
        answers = _exchange(grid, [messages.build_query(node, "identity") for node in nodes], deadline)
        if not all(has_died(answers.get(node)) for node in nodes):
            return True
        time.sleep(_PROBE_PAUSE_SECONDS)
    return False


def _exchange(grid: Grid, out: Sequence[Message], deadline: float | None) -> dict[int, Message]:
    """Send and wait.

    Flower's own `send_and_receive` goes by a clock that jumps, and looks for replies that lie in this very process no
    more than ten times a second.
    """
    until = math.inf if deadline is None else deadline
    if isinstance(grid, InlineGrid):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        found = list(grid.send_and_receive(out, timeout=left))
        return _by_node(_by_id(out), found)
    in_this_process = hasattr(grid, "pull_interval")  # which Flower's grid of a simulation has, and no other
    taken = set(grid.push_messages(out))
    asked = _by_id(out)
    replies = {
        message.metadata.dst_node_id: _node_unavailable_reply(message)
        for key, message in asked.items()
        if key not in taken
    }
    waiting = asked.keys() & taken
    while waiting:
        answered = _by_node(asked, list(grid.pull_messages(waiting)))
        waiting -= {reply.metadata.reply_to_message_id for reply in answered.values()}
        replies |= answered
        if not waiting or time.monotonic() >= until:
            break
        here = max(_PULL_SECONDS, _PULL_SECONDS_PER_MESSAGE * len(waiting))
        step = here if in_this_process else _HTTP_PULL_SECONDS
        time.sleep(min(step, max(0.0, until - time.monotonic())))
    return replies


def _node_unavailable_reply(message: Message) -> Message:
    """Answer for a SuperLink that has no such node any more: nobody will, and to wait for it would be in vain."""
    return Message(Error(_NODE_UNAVAILABLE, "the SuperLink did not take the message"), reply_to=message)


def _by_id(out: Sequence[Message]) -> dict[str, Message]:
    """Messages by the ids that they have since they were sent."""
    return {message.metadata.message_id: message for message in out}


def _by_node(asked: Mapping[str, Message], replies: Sequence[Message]) -> dict[int, Message]:
    """Sort replies by the node that was asked; one to something else, such as an earlier round, counts for nothing."""
    found: dict[int, Message] = {}
    for reply in replies:
        # Not the sender's id: Flower answers in its own name for a node whose reply is broken.
        message = asked.get(reply.metadata.reply_to_message_id)
        if message is None or message.metadata.dst_node_id in found:
            log(WARNING, "a reply of node %d to no open message is ignored", reply.metadata.src_node_id)
            continue
        found[message.metadata.dst_node_id] = reply
    return found
