"""The inline grid, and the view of a grid that strategies get."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import cast

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedeas_flwr.client_app import app
from fedeas_flwr.config import parse_config
from fedeas_flwr.federation.delivery import deliver
from fedeas_flwr.federation.grids import GridView, InlineGrid
from fedeas_flwr.federation.messages import build_query, failure_reason, read_answer


def test_inline_grid_reaches_all_clients_and_replies_in_order() -> None:
    for workers in (1, 3):
        grid = InlineGrid(app, 4, parse_config({"clients": 4}).to_user_dict(), workers)
        nodes = list(grid.get_node_ids())
        replies = grid.send_and_receive([build_query(node, "identity") for node in reversed(nodes)])
        assert [read_answer(reply, "partitions") for reply in replies] == [(3, 4), (2, 4), (1, 4), (0, 4)]
        grid.close()


def test_reply_is_reported_before_the_next_client_starts() -> None:
    events: list[tuple[str, int]] = []

    def handle(message: Message, context: Context) -> Message:
        events.append(("started", message.metadata.dst_node_id))
        return Message(RecordDict(), reply_to=message)

    grid = InlineGrid(cast(ClientApp, handle), 2, parse_config({"clients": 2}).to_user_dict())
    out = [build_query(node, "identity") for node in grid.get_node_ids()]
    assert list(deliver(grid, out, 0, lambda node, reply: events.append(("replied", node)))) == [1, 2]
    assert events == [("started", 1), ("replied", 1), ("started", 2), ("replied", 2)]


def test_closed_inline_grid_does_not_wait_for_busy_clients() -> None:
    """A client may need minutes more; clients still in the queue never start."""
    begun, go_on, handed_over = threading.Semaphore(0), threading.Event(), threading.Event()

    def work(*_: object) -> None:
        begun.release()
        go_on.wait(60)

    grid = InlineGrid(cast(ClientApp, work), 4, parse_config({"clients": 4}).to_user_dict(), workers=2)

    def messages() -> Iterator[Message]:
        yield from [build_query(node, "identity") for node in grid.get_node_ids()]
        handed_over.set()

    def send() -> None:
        with suppress(CancelledError):
            grid.send_and_receive(messages())

    others = threading.Thread(target=send)
    others.start()
    assert begun.acquire(timeout=60)
    assert begun.acquire(timeout=60)
    assert handed_over.wait(60)
    before = time.monotonic()
    grid.close()
    assert time.monotonic() - before < 30
    go_on.set()
    others.join(60)
    assert not begun.acquire(blocking=False)


def test_unhandled_message_type_gets_an_error_reply() -> None:
    grid = InlineGrid(app, 2, parse_config({"clients": 2}).to_user_dict())
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1, message_type="query.unknown")])
    assert reply.has_error()
    assert "unknown" in failure_reason(reply)


def test_grid_view_lists_only_the_chosen_nodes() -> None:
    grid = InlineGrid(app, 4, parse_config({"clients": 4}).to_user_dict())
    view = GridView(grid, [2, 4])
    assert list(view.get_node_ids()) == [2, 4]
    (reply,) = view.send_and_receive([build_query(4, "identity")])
    assert read_answer(reply, "partitions") == (3, 4)
