"""Watchdog process that briefly outlives the launcher.

If the launcher is killed (SIGKILL), the watchdog kills the processes that the launcher started. The launcher holds one
end of a pipe, which the OS closes however the launcher exits. A launcher that has ended its processes itself reports
this through the pipe first, and the watchdog does nothing.

If launcher and watchdog are killed at the same moment, the next command of the same user does the watchdog's work. It
finds the launch by its temporary folder, in which a living launcher holds a lock.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedeas_flwr.common.processes import MARK, ProcessTree, with_variable

_EXITED_CLEANLY = "ended\n"
_LOCK = "launcher.lock"


@contextmanager
def launch_folder() -> Iterator[Path]:
    """Yield a new temporary folder of a launch, locked until the launcher exits; remove it at the end of the block."""
    # A short path: Ray creates Unix sockets below it, whose paths may have at most 107 characters.
    import fcntl  # which Windows does not have, nor Ray runs

    folder = Path(tempfile.mkdtemp(prefix="fe-"))
    with (folder / _LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(b"locked")
        lock.flush()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def dead_launches() -> dict[str, list[int]]:
    """Find this user's launches whose launcher was killed and whose processes no watchdog has ended.

    Return the temporary folder of each launch, which is also its mark, and the PIDs of the processes with this mark.
    """
    if os.name != "posix":
        return {}
    import fcntl

    found = {}
    for folder in Path(tempfile.gettempdir()).glob("fe-*"):
        with suppress(OSError):  # another user's folder, or a living launcher's lock
            place = folder.lstat()
            if stat.S_ISDIR(place.st_mode) and place.st_uid == os.geteuid():
                with (folder / _LOCK).open("rb") as lock:
                    if lock.read():  # an empty file is about to be locked
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        found[str(folder)] = [process.pid for process in with_variable(MARK, str(folder))]
    return found


def end_launch(processes: ProcessTree, folder: Path) -> None:
    """Kill the processes of a launch and its MPS daemon, and remove its temporary folder."""
    processes.end()
    for process in psutil.process_iter():  # MPS has no mark, but its sockets are in the folder
        with suppress(psutil.Error, OSError):
            if str(folder / "mps") in process.environ().values():
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def watchdog(root: int, folder: Path) -> Iterator[None]:
    """Run a watchdog process for the duration of the `with` block.

    ``root`` is the root process of the launcher's `ProcessTree`, whose mark is the launcher's temporary folder.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(root), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # survives a signal to the launcher's process group
        text=True,
    )
    try:
        yield
    finally:
        process.communicate(_EXITED_CLEANLY)  # raises nothing if the watchdog was killed


def is_watchdog(process: psutil.Process) -> bool:
    """Return whether a process is a watchdog, which must not be killed."""
    return bool(process.cmdline()[1:3] == ["-m", __name__])


def main() -> None:
    """Wait for the launcher to exit, and kill its processes if it did not do so itself."""
    root, folder = sys.argv[1:]
    tree = ProcessTree(psutil.Process(int(root)), folder)
    if sys.stdin.read() != _EXITED_CLEANLY:
        end_launch(tree, Path(folder))


if __name__ == "__main__":
    main()
