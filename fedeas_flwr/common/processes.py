"""The processes that a launch starts, how all of them are ended, and how a later process knows whether one lives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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

    def __init__(self, root: subprocess.Popen[bytes] | psutil.Process, mark: str) -> None:
        self._root, self._mark = psutil.Process(root.pid), mark
        self._known: set[psutil.Process] = {self._root}

    def note(self) -> None:
        """Remember the descendants there are now.

        Each look reads all processes of the machine, so that only those are looked at whose ancestors have died: the
        others are among the root's descendants.
        """
        known = {process for process in self._known if process.is_running()}
        found: set[psutil.Process] = set()
        for process in sorted(known, key=lambda process: process.pid):  # ancestors first, as a rule
            if process not in found:
                with suppress(psutil.Error):
                    found.update(process.children(recursive=True))
        self._known = known | found

    def end(self) -> None:
        """End them all. Killed, not asked: the run is over or given up, and Ray takes seconds to say goodbye."""
        with ignore_sigint():
            for _ in range(3):  # a process may start another while it is being found
                self.note()
                self._known.update(with_variable(MARK, self._mark))
                alive = [process for process in self._known if _is_alive(process)]
                if not alive:
                    return
                for process in alive:
                    with suppress(psutil.Error):
                        process.kill()
                psutil.wait_procs(alive, timeout=5)


def with_variable(name: str, value: str) -> Iterator[psutil.Process]:
    """The processes of this machine that were started with this value of an environment variable."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                yield process


@contextmanager
def ignore_sigint() -> Iterator[None]:
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


def listens(pid: int, port: int) -> bool:
    """Whether a process or one of its descendants listens on a port of this machine."""
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                sockets = process.net_connections("tcp")
                if any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets):
                    return True
    return False


def identify(pid: int | None = None) -> dict[str, Any]:
    """Describe a living process of this machine, by default this one: a number alone may be used again."""
    process = psutil.Process(os.getpid() if pid is None else pid)
    return {"pid": process.pid, "started": _started(process), "host": socket.gethostname()}


def is_elsewhere(identity: Mapping[str, Any]) -> bool:
    """Whether the described process ran on another machine, where it cannot be looked for."""
    return identity.get("host") != socket.gethostname()


def is_alive(identity: Mapping[str, Any]) -> bool:
    """Whether that very process lives on this machine; one that has ended and was not waited for does not."""
    if is_elsewhere(identity):
        return False
    try:
        process = psutil.Process(identity["pid"])
        return _started(process) == identity["started"] and _is_alive(process)
    except psutil.Error:
        return False


def _started(process: psutil.Process) -> str:
    """When a process started, so that setting the machine's clock changes nothing.

    Linux counts it in ticks from the boot, which has a name of its own; elsewhere it is the time of day in seconds.
    """
    try:
        # The name comes second, in brackets, and may hold anything; the 22nd field is the start.
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {fields.split()[19]}"
    except OSError:
        return f"{process.create_time():.0f}"
