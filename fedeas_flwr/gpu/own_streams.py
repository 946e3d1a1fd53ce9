"""CUDA streams that nobody else in this process launches on.

torch gives streams out of a pool of 32 for each priority, in turn: the 33rd is the first one again. While one engine is
captured on such a stream, another's launches on it would fail or become part of the capture.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

import torch

LAST = 3
"""The rank that the GPU serves last: torch has pools for four priorities."""
_POOL = 32
_lock = threading.Lock()


class _Mark:
    """Lives as long as the stream it is put on.

    A weak reference to the stream itself dangles and crashes the process, up to torch 2.11 (pytorch/pytorch#183403).
    """


_held: WeakValueDictionary[int, _Mark] = WeakValueDictionary()
"""By CUDA's own handle. A stream that nobody holds any more may be given out again."""


def priority(rank: int) -> int:
    """Torch's number for a rank, 0 or negative; ranks after the last are as the last."""
    return min(rank - LAST, 0)


def own_stream(rank: int = LAST) -> Any:
    """Return a stream of this rank, or the next there is where 32 of it are held; nothing else may launch on it.

    Raises
    ------
    RuntimeError
        All are held.
    """
    with _lock:
        for number in (priority(rank), *map(priority, range(LAST, -1, -1))):
            for _ in range(_POOL):
                stream: Any = torch.cuda.Stream(priority=number)  # type: ignore[no-untyped-call]
                if stream.cuda_stream not in _held:
                    stream.mark = _held[stream.cuda_stream] = _Mark()
                    return stream
    raise RuntimeError(f"all {_POOL * (LAST + 1)} CUDA streams of a process are taken; let fewer clients train at once")
