"""Whether an error means that memory ran out, on a GPU or here."""

from __future__ import annotations

import sys

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
