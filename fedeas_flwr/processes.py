"""The processes that a launch starts, and how all of them are ended."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

MARK = "FEDEAS_LAUNCH"
"""Environment variable that every process of a launch inherits, wherever it is re-parented to."""


class ProcessTree:
    """Every process a launch started, so that all of them can be ended.

    Parents die before their children here, and Ray's helpers go on for a minute, in groups and sessions of their own.
    So descendants are noted while their parents live; those that were born and orphaned in between still carry the mark
    in their environment, unless they overwrote it with a title, as Ray's helpers do: each way finds what the other
    cannot.
    """

    def __init__(self, root: subprocess.Popen[bytes], mark: str) -> None:
        self._root, self._mark = psutil.Process(root.pid), mark
        self._known: set[psutil.Process] = {self._root}

    def note(self) -> None:
        """Remember the descendants there are now."""
        for process in list(self._known):
            with suppress(psutil.Error):
                self._known.update(process.children(recursive=True))

    def end(self) -> None:
        """End them all. Killed, not asked: the run is over or given up, and Ray takes seconds to say goodbye."""
        with _undisturbed():
            for _ in range(3):  # a process may start another while it is being found
                self.note()
                self._known.update(self._marked())
                alive = [process for process in self._known if _is_alive(process)]
                if not alive:
                    return
                for process in alive:
                    with suppress(psutil.Error):
                        process.kill()
                psutil.wait_procs(alive, timeout=5)

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark:
                    yield process


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore a second Ctrl-C for a moment: it would stop the cleaning up half way."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
