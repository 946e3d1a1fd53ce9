"""One thread that launches the CUDA graphs of all engines of a process, in turns.

Ten threads that launch graphs block each other, in the driver and at Python's interpreter lock. One thread launches for
all of them several times faster than the GPU executes. It takes turns, so that no stream becomes idle, and stays only a
few launches ahead of each stream: the driver blocks a launch on a stream with a long queue, and with it all others.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

MAX_QUEUED_PER_STREAM = 4
"""Maximum number of launches queued on a stream: a few milliseconds of work, longer than delays of this thread."""
MAX_DIRECT = 32
"""Maximum number of launches that a client's thread makes itself, without waiting for the launching thread."""
PAUSE = 1e-4
"""Seconds to sleep when all queues are full."""

SWITCH = 5e-4
"""Switch interval while jobs run, in seconds: after it Python passes the interpreter lock on. The default is 5e-3."""


class _Job:
    def __init__(self, stream: Any, launches: Sequence[Callable[[], object]]) -> None:
        self.stream, self.launches, self.next = stream, launches, 0
        self.waiting: deque[Any] = deque()
        self.done, self.error = threading.Event(), None

    error: BaseException | None

    def launch_next(self) -> bool:
        """Launch the next item, unless the stream's queue is full; return whether anything was done.

        An error is stored for the caller of `Launcher.run`, also a GPU error, which querying the stream raises. Raised
        here it would end the thread, and all callers would wait forever.
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
            # The thread references the job until the next one arrives; unused graphs must free their memory now.
            self.launches, self.next = (), 0
            self.waiting.clear()
            self.done.set()
        return True


class Launcher:
    """The launching thread and its jobs."""

    def __init__(self) -> None:
        self._new: list[_Job] = []
        self._arrived = threading.Condition()
        self._callers, self._usual_interval = 0, sys.getswitchinterval()
        threading.Thread(target=self._run, name="launcher", daemon=True).start()

    def run(self, stream: Any, launches: Sequence[Callable[[], object]]) -> None:
        """Launch ``launches`` on ``stream`` in order; return after the last launch, before the GPU has finished.

        An error in a launch is raised here.
        """
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
    """Return this process's launcher."""
    return Launcher()


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Run the block on a stream, after the default stream's work, and wait for it at the end; None: do nothing."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        try:
            yield
        finally:  # also after an error: the caller may free tensors that the stream still reads
            stream.synchronize()


def launch(stream: Any, steps: Sequence[Callable[[], object]]) -> None:
    """Call ``steps`` in order: in the launching thread; in this one if they are few, or without a stream.

    The stream must be the current one.
    """
    if stream is None or len(steps) <= MAX_DIRECT:
        for step in steps:
            step()
    else:
        launcher().run(stream, steps)
