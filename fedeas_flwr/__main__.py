"""The command `fedeas` from its first moment to its last: Ctrl-C is one line also while no command is at work.

Before, Python loads what commands need for a second or more; afterwards it waits for threads and closes down. There is
nothing to clean up then, and nothing of ours that could: an exception would only be a traceback. Nor is there anything
to wait for once a command was stopped: a client at work in a thread, or the generator, may have minutes to go.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

_STOPPED = 130
"""The exit code of a command that Ctrl-C ended: as shells have it, 128 and the signal's number."""


def main() -> None:
    """Load the command line, and run it."""
    # Set before torch is loaded. Its threads spin while they wait for each other, and where something else has the core
    # that one of them needs, all of them stand: training then takes several times as long.
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
            with suppress(OSError, ValueError):  # what cannot be written is told when Python closes it
                sys.stdout.flush()
    except KeyboardInterrupt:  # between two of the lines above
        _stop(signal.SIGINT, None)
    except SystemExit as end:
        if end.code == _STOPPED:
            os._exit(_STOPPED)
        raise


def _stop_at_once() -> None:
    """Let a signal end the process, unless it is ignored, as in a shell's background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"stopped\n")
    os._exit(_STOPPED)


if __name__ == "__main__":
    main()
