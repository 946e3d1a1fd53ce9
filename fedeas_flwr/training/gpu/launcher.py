"""One thread that launches the work of all of a process's engines in turn.

Ten threads that launch graphs get in each other's way: in the driver, and at Python's interpreter lock. One thread can
launch for all of them several times faster than the GPU works it off. It takes turns, so that no stream runs dry, and
stays only a few steps ahead of each: the driver would make it wait at a stream that has many, and the others with it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

MAX_QUEUED_PER_STREAM = 4
"""Pieces of work that wait on a stream: some milliseconds, which covers whatever keeps this thread from coming."""
PAUSE = 1e-4
"""Seconds between two looks at streams that all have enough."""

SWITCH = 5e-4
"""Seconds after which Python takes the interpreter from a thread that others wait for; 10 times that is the default."""


class _Job:
    def __init__(self, stream: Any, launches: Sequence[Callable[[], object]]) -> None:
        self.stream, self.launches, self.next = stream, launches, 0
        self.waiting: deque[Any] = deque()
        self.done, self.error = threading.Event(), None

    error: BaseException | None

    def launch_next(self) -> bool:
        """Launch the next piece, unless the stream has work for a while; say whether something was done.

        An error belongs to whoever waits for the job: also one of the GPU's, of which a look at the stream tells.
        Raised here, it would end the thread, and everybody would wait for ever.
        """
        try:
            while self.waiting and self.waiting[0].query():
                self.waiting.popleft()
            if len(self.waiting) >= MAX_QUEUED_PER_STREAM:
                return False
            if self.next < len(self.launches):
                torch.cuda.set_stream(self.stream)
                self.launches[self.next]()
                self.next += 1
                self.waiting.append(self.stream.record_event())
        except BaseException as error:
            self.error, self.next = error, len(self.launches)
        if self.next == len(self.launches):
            # This thread knows the job until the next one comes, and graphs that nobody needs must free their memory.
            self.launches, self.next = (), 0
            self.waiting.clear()
            self.done.set()
        return True


class Launcher:
    """The thread, and the jobs it takes turns with."""

    def __init__(self) -> None:
        self._new: list[_Job] = []
        self._arrived = threading.Condition()
        self._callers, self._usual_interval = 0, sys.getswitchinterval()
        threading.Thread(target=self._run, name="launcher", daemon=True).start()

    def run(self, stream: Any, launches: Sequence[Callable[[], object]]) -> None:
        """Launch all of ``launches`` on ``stream`` in order; return when the last one is launched, not done."""
        job = _Job(stream, launches)
        with self._arrived:
            if self._callers == 0:
                self._usual_interval = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH)
            self._callers += 1
            self._new.append(job)
            self._arrived.notify()
        try:
            job.done.wait()
        finally:
            with self._arrived:
                self._callers -= 1
                if self._callers == 0:
                    sys.setswitchinterval(self._usual_interval)
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
            worked = [job.launch_next() for job in active]
            active = [job for job in active if not job.done.is_set()]
            if not any(worked):
                time.sleep(PAUSE)


@lru_cache(maxsize=1)
def launcher() -> Launcher:
    """This process's launcher."""
    return Launcher()
