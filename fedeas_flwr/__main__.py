"""Entry point of the `fedeas` command: Ctrl-C prints one line even before and after a command runs.

Before a command, Python imports for a second or more; afterwards it waits for threads and shuts down. There is nothing
to clean up at these times, and KeyboardInterrupt would only print a traceback, so the process exits at once. It also
exits at once after a stopped command: a client or generator in a thread may take minutes to end.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_STOPPED = 130
"""Exit code of a command stopped by Ctrl-C: 128 plus the signal's number, as shells do."""


def main() -> None:
    """Import the command line and run it."""
    # Set before torch is imported. Its threads spin while they wait for each other; if another process occupies a core
    # that one of them needs, all wait, and training takes several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        _stop_at_once()
        from fedeas_flwr.commands import app

        if signal.getsignal(signal.SIGINT) is _stop:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            app.main()
        finally:
            _stop_at_once()
            with suppress(OSError, ValueError):  # Python reports it when it closes stdout
                sys.stdout.flush()
    except KeyboardInterrupt:  # raised between the handlers above
        _stop(signal.SIGINT, None)
    except SystemExit as end:
        if end.code == _STOPPED:
            os._exit(_STOPPED)
        raise


def _stop_at_once() -> None:
    """Let signals end the process at once, except ignored ones, as for background jobs of a shell."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"stopped\n")
    os._exit(_STOPPED)


if __name__ == "__main__":
    main()
