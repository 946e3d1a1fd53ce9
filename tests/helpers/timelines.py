"""Simulated clocks, so that timings in tests do not depend on the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from fedeas_flwr.federation import federation as federation_module
from fedeas_flwr.federation import training_round


class Timelines:
    """A clock per thread, in place of `time` and of `BackgroundTask`'s pool in the modules of a round.

    What is begun beside a thread begins at that thread's time. Who waits for it has the later of the two times then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_thread = threading.local()
        for module in (federation_module, training_round):
            monkeypatch.setattr(module, "time", self)
        monkeypatch.setattr(
            federation_module, "ThreadPoolExecutor", lambda *given, **named: _Pool(self, *given, **named)
        )

    def perf_counter(self) -> float:
        """Return the calling thread's time."""
        return getattr(self._of_thread, "now", 0.0)

    def spend(self, seconds: float) -> None:
        """Advance the calling thread's time."""
        self.move_to(self.perf_counter() + seconds)

    def move_to(self, moment: float) -> None:
        """Advance the calling thread's time to ``moment`` if it is earlier."""
        self._of_thread.now = max(self.perf_counter(), moment)


class _Pool(ThreadPoolExecutor):
    def __init__(self, times: Timelines, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._times = times

    def submit(self, work: Callable[[], None]) -> _Piece:  # type: ignore[override]
        began, ended = self._times.perf_counter(), list[float]()

        def timed() -> None:
            self._times.move_to(began)
            try:
                work()
            finally:
                ended.append(self._times.perf_counter())

        return _Piece(self._times, super().submit(timed), ended)


class _Piece:
    def __init__(self, times: Timelines, future: Future[None], ended: list[float]) -> None:
        self._times, self._future, self._ended = times, future, ended

    def result(self) -> None:
        try:
            self._future.result()
        finally:
            self._times.move_to(max(self._ended, default=0.0))


class Clock:
    """One clock for all threads, in place of `time` in a module that waits: sleeping only advances this clock."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
