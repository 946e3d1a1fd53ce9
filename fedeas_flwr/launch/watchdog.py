"""A process that outlives its launcher by a moment: if that is killed (SIGKILL), it ends what the launcher had started.

The launcher holds one end of a pipe, and the system closes it however the launcher ends. A launcher that has ended its
processes itself says so before.
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
    """Have a keeper for the block.

    Parameters
    ----------
    root, mark
        Of the launch's `ProcessTree`.
    folder
        The launch's temporary one.
    """
    keeper = subprocess.Popen(
        [sys.executable, "-m", __name__, str(root), mark, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what kills the launcher's group does not kill it
        text=True,
    )
    try:
        yield
    finally:
        keeper.communicate(_EXITED_CLEANLY)  # no error where somebody killed it


def is_watchdog(process: psutil.Process) -> bool:
    """Whether a process is one: it is to be left to its work."""
    return bool(process.cmdline()[1:3] == ["-m", __name__])


def main() -> None:
    """Wait for the launcher's end."""
    root, mark, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    tree = ProcessTree(psutil.Process(root), mark)
    if sys.stdin.read() == _EXITED_CLEANLY:
        return
    tree.end()
    for process in psutil.process_iter():  # MPS does without the mark, but has its sockets in the folder
        with suppress(psutil.Error, OSError):
            if any(value.startswith(str(folder)) for value in process.environ().values()):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
