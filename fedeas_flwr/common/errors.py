"""Errors that users see as one line, and whether an error means that memory ran out."""

from __future__ import annotations

import sys


class ConfigError(ValueError):
    """A run-config that cannot be run; the message is one line for the user."""


class RunError(RuntimeError):
    """A run that cannot start, go on, or be read; the message is one line for the user."""


class RunFailedError(RunError):
    """A run, or what is done around it, that was begun and did not come to its end."""


class ProcessesDiedError(RunFailedError):
    """A run that processes died under, by no fault of its own: it can go on from its checkpoint in fresh ones."""


class MessageError(ValueError):
    """A message that is not what it should be; the text is one line."""


_WORDS = ("DefaultCPUAllocator: ", "CUDA error: out of memory")
"""What torch says where it has no class of its own: of the processor's memory, and where it is CUDA that refuses, as
under MPS to one process too many."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that memory ran out."""
    torch = sys.modules.get("torch")  # slow to import; where it is not loaded, no error is of its classes
    classes = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, classes) or any(words in str(seen) for words in _WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
