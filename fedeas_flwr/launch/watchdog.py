"""Watchdog process that briefly outlives the launcher.

If the launcher is killed (SIGKILL), the watchdog kills the processes that the launcher started. The launcher holds one
end of a pipe, which the OS closes however the launcher exits. A launcher that has ended its processes itself reports
this through the pipe first, and the watchdog does nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedeas_flwr.common.processes import ProcessTree

_EXITED_CLEANLY = "ended\n"


@contextmanager
def watchdog(root: int, mark: str, folder: Path) -> Iterator[None]:
    """Run a watchdog process for the duration of the `with` block.

    Parameters
    ----------
    root, mark
        Root process and mark of the launcher's `ProcessTree`.
    folder
        Temporary folder of the launcher.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(root), mark, str(folder)],
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
    root, mark, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    tree = ProcessTree(psutil.Process(root), mark)
    if sys.stdin.read() == _EXITED_CLEANLY:
        return
    tree.end()
    for process in psutil.process_iter():  # MPS has no mark, but its sockets are in the folder
        with suppress(psutil.Error, OSError):
            if any(value.startswith(str(folder)) for value in process.environ().values()):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
