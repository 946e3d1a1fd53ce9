"""Gather the threads that handle a round's clients at one point, so that one of them works for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class _Ticket:
    """A client that waits, and the group that its thread is to work for; empty if another thread does."""

    def __init__(self, item: Any) -> None:
        self.item, self.ready = item, threading.Event()
        self.group: Sequence[_Ticket] = ()


class Gathering:
    """Gathers clients that are handled in threads; the last one to arrive works for all that wait.

    A group is complete when ``at_once`` clients wait, or all clients of a round that are not finished yet.
    """

    _of_thread = threading.local()

    def __init__(self, at_once: int) -> None:
        self._at_once, self._unfinished, self._lock = at_once, 0, threading.Lock()
        self._waiting: list[_Ticket] = []

    @contextmanager
    def expect(self, clients: int) -> Iterator[None]:
        """Handle this number of clients in the block, each within `client`."""
        self._unfinished = clients
        try:
            yield
        finally:
            self._leave(self._unfinished)  # after an interruption: those that wait continue without the others

    @contextmanager
    def client(self) -> Iterator[None]:
        """Handle one client in this thread; a client that ends without `work_together` is not waited for."""
        self._of_thread.gathering = self
        try:
            yield
        finally:
            self._of_thread.gathering = None
            self._leave(1)

    def _leave(self, clients: int) -> None:
        with self._lock:
            self._unfinished -= clients
            group = self._complete_group()
        if group:
            group[0].group = group
            group[0].ready.set()

    def _complete_group(self) -> list[_Ticket]:
        if len(self._waiting) < min(self._at_once, self._unfinished):
            return []
        group, self._waiting = self._waiting, []
        return group

    @classmethod
    def work_together(cls, item: Any, work: Callable[[Sequence[Any]], None]) -> None:
        """Wait until ``work`` was called with a group's items, this one included, by one of its threads.

        In a thread without a gathering the group is this item alone. An error is raised in the thread that worked only.
        """
        gathering: Gathering | None = getattr(cls._of_thread, "gathering", None)
        own = _Ticket(item)
        group: Sequence[_Ticket] = [own]
        if gathering is not None:
            with gathering._lock:
                gathering._waiting.append(own)
                group = gathering._complete_group()
            if not group:
                own.ready.wait()
                group = own.group
        try:
            if group:
                work([ticket.item for ticket in group])
        finally:
            for ticket in group:
                ticket.ready.set()
