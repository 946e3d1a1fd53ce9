"""Track and end the processes that a launch starts, and identify processes across restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

MARK = "FEDEAS_LAUNCH"
"""Environment variable that every process of a launch inherits, wherever it is re-parented to."""

_MAX_END = 30.0
"""Seconds after which `ProcessTree.end` gives up on processes that do not die."""


class ProcessTree:
    """All processes that a launch started, so that it can end them.

    Parents exit before their children here, and Ray's helpers run for another minute in their own groups and sessions.
    So descendants are recorded while their parents are alive. Processes that started and were orphaned in between still
    have the mark in their environment, unless they overwrote it with a title, as Ray's helpers do: each method finds
    what the other misses.
    """

    def __init__(self, root: subprocess.Popen[bytes] | psutil.Process | None, mark: str) -> None:
        self._mark = mark
        self._known: set[psutil.Process] = {psutil.Process(root.pid)} if root else set()

    def note(self) -> None:
        """Record the current descendants.

        Listing children reads all processes of the machine, so only processes whose ancestors have exited are queried:
        the others are among the root's descendants.
        """
        known = {process for process in self._known if process.is_running()}
        found: set[psutil.Process] = set()
        for process in sorted(known, key=lambda process: process.pid):  # usually ancestors first
            if process not in found:
                with suppress(psutil.Error):
                    found.update(process.children(recursive=True))
        self._known = known | found

    def runs(self, command: str) -> bool:
        """Return whether a process that `note` found, and that is alive, runs this Python command."""
        for process in self._known:
            with suppress(psutil.Error):
                if _is_alive(process) and any(Path(word).name == command for word in process.cmdline()[:2]):
                    return True
        return False

    def end(self) -> None:
        """Kill all of them and wait until they have ended; Ray would take seconds to shut down.

        Ancestors are killed first, which usually have lower pids: Ray's raylet replaces workers that die before it.
        """
        with ignore_sigint():
            deadline = time.monotonic() + _MAX_END
            while time.monotonic() < deadline:  # a process may start another one meanwhile
                self._known.update(with_variable(MARK, self._mark))
                self.note()
                alive = [process for process in self._known if _is_alive(process)]
                if not alive:
                    return
                for process in sorted(alive, key=lambda process: process.pid):
                    with suppress(psutil.Error):
                        process.kill()
                psutil.wait_procs(alive, timeout=5)


def with_variable(name: str, value: str) -> Iterator[psutil.Process]:
    """Yield the processes of this machine that started with this value of an environment variable."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                yield process


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Ignore signals such as a second Ctrl-C inside the block, so that cleaning up completes."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def exit_after_block() -> Iterator[None]:
    """On SIGINT, SIGTERM or SIGQUIT leave the block by SystemExit, and only then call the signal's handler.

    Flower's handler reports to the SuperLink first and ends the process after five seconds, whether the block has saved
    its work by then or not. A second signal calls it at once. Outside the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def leave_block(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        restore()
        raise SystemExit

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
    before = {number: signal.signal(number, leave_block) for number in numbers}
    try:
        yield
    finally:
        restore()
        for number in received:
            os.kill(os.getpid(), number)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def listens(pid: int, port: int) -> bool:
    """Return whether a process or one of its descendants listens on a port of this machine."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                sockets = process.net_connections("tcp")
                if any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
                    return True
    return False


def identify(pid: int | None = None) -> dict[str, Any]:
    """Return the identity of a running process, by default this one; a PID alone may be reused."""
    process = psutil.Process(os.getpid() if pid is None else pid)
    return {"pid": process.pid, "started": _started(process), "host": socket.gethostname()}


def is_elsewhere(identity: Mapping[str, Any]) -> bool:
    """Return whether the process ran on another machine, where it cannot be checked."""
    return identity.get("host") != socket.gethostname()


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Return whether this exact process is alive on this machine; a zombie is not."""
    if is_elsewhere(identity):
        return False
    try:
        process = psutil.Process(identity["pid"])
        return _started(process) == identity["started"] and _is_alive(process)
    except psutil.Error:
        return False


def _started(process: psutil.Process) -> str:
    """Return the start of a process, independent of changes to the machine's clock where possible.

    On Linux this is the boot id and the ticks since boot; elsewhere it is the time of day in seconds.
    """
    try:
        # The second field, the name in brackets, may contain anything; the 22nd field is the start.
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {fields.split()[19]}"
    except OSError:
        return f"{process.create_time():.0f}"
