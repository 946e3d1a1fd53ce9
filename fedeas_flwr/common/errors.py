"""Errors that users see as one line, and detection of out-of-memory errors."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from traceback import walk_tb

from fedeas_flwr.common.text import MAX_LINE, one_line


class _OneLineError(Exception):
    """Base of errors whose text, which may quote values from outside, is one line fit for a log."""

    def __init__(self, text: object = "") -> None:
        super().__init__(one_line(text, MAX_LINE))


class ConfigError(_OneLineError, ValueError):
    """The run-config is invalid."""


class MissingPackageError(ConfigError):
    """The run-config needs a package of an extra that is not installed."""


class RunError(_OneLineError, RuntimeError):
    """A run cannot start, resume or be read."""


class RunFailedError(RunError):
    """A run, a Flower command or a Flower process started but failed."""


class ProcessesDiedError(RunFailedError):
    """Processes of a run died; the run can resume from its checkpoint in new processes."""


class MessageError(_OneLineError, ValueError):
    """A message between server and client is invalid."""


_INSTALLED = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
"""Where the names of files begin that no user of the package wrote."""


def place_in_user_code(error: BaseException) -> str:
    """Return the innermost line of a user's own code in an error's traceback, as `` (rules.py, line 12)``, if any."""
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != "fedeas_flwr" and not file.startswith(_INSTALLED):
            return f" ({Path(file).name}, line {line})"
    return ""


_WORDS = ("DefaultCPUAllocator: ", "CUDA error: out of memory")
"""Parts of the messages of out-of-memory errors for which torch has no class. The first is about CPU memory. The second
comes from CUDA itself, for example when too many processes use MPS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is an out-of-memory error."""
    torch = sys.modules.get("torch")  # slow to import; if it is not loaded, it cannot have raised the error
    classes = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, classes) or any(words in str(seen) for words in _WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
