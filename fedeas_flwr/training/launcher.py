"""One thread that launches the work of all of a process's engines in turn.

Ten threads that launch graphs get in each other's way: in the driver, and at Python's interpreter lock. One thread can
launch for all of them several times faster than the GPU works it off, and takes turns, so that no stream runs dry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch


class _Job:
    def __init__(self, stream: Any, launches: Sequence[Callable[[], object]]) -> None:
        self.stream, self.launches, self.next = stream, launches, 0
        self.done, self.error = threading.Event(), None

    error: BaseException | None

    def launch_one(self) -> bool:
        """Launch the next piece; say whether there is another."""
        try:
            if self.next < len(self.launches):
                torch.cuda.set_stream(self.stream)
                self.launches[self.next]()
                self.next += 1
        except BaseException as error:  # it belongs to whoever waits for the job
            self.error, self.next = error, len(self.launches)
        if self.next < len(self.launches):
            return True
        self.done.set()
        return False


class Launcher:
    """The thread, and the jobs it takes turns with."""

    def __init__(self) -> None:
        self._new: list[_Job] = []
        self._arrived = threading.Condition()
        threading.Thread(target=self._run, name="launcher", daemon=True).start()

    def run(self, stream: Any, launches: Sequence[Callable[[], object]]) -> None:
        """Launch all of ``launches`` on ``stream`` in order; return when the last one is launched, not done."""
        job = _Job(stream, launches)
        with self._arrived:
            self._new.append(job)
            self._arrived.notify()
        job.done.wait()
        if job.error is not None:
            raise job.error

    def _run(self) -> None:
        active: list[_Job] = []
        while True:
            with self._arrived:
                while not active and not self._new:
                    self._arrived.wait()
                active += self._new
                self._new.clear()
            active = [job for job in active if job.launch_one()]


@lru_cache(maxsize=1)
def launcher() -> Launcher:
    """This process's launcher."""
    return Launcher()
