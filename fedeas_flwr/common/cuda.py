"""CUDA graphs, captured one at a time in a process, and streams that nobody else in the process launches on.

torch gives streams out of a pool of 32 for each priority, in turn: the 33rd is the first one again. While one engine is
captured on such a stream, another's launches on it would fail or become part of the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from fedeas_flwr.common.text import one_line

WARM_UPS = 3
capturing = threading.RLock()
"""Held during a capture, and by whoever changes for a moment how this whole process computes (TF32, determinism).

One capture at a time: entering one waits for the whole device, and torch knows of one alone. And what a graph computes
with is settled when it is captured: with another thread's settings it would go on with them for the rest of the run.
"""

LAST = 3
"""The rank that the GPU serves last: torch has pools for four priorities."""
_POOL = 32
_lock = threading.Lock()


class CaptureError(RuntimeError):
    """What was to be captured runs, but not as a graph: it asks the GPU for a number on the way, for instance."""


def release_cached_memory() -> None:
    """Return what torch keeps for later to the GPU: not beside a capture, since it waits for all that runs there."""
    with capturing:
        torch.cuda.empty_cache()


def capture(
    step: Callable[[], None], stream: torch.cuda.Stream, before_each: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Capture ``step`` on ``stream``, which is the current one; return what replays it.

    Parameters
    ----------
    step
        What is captured. All memory it reads or writes, but for what it allocates itself, must stay where it is.
    stream
        The graph's own, which nobody else launches on meanwhile.
    before_each
        Puts back what ``step`` moves on; called before each of its runs.

    Raises
    ------
    CaptureError
        If ``step`` ran, and could not be captured.
    torch.OutOfMemoryError
        If there was no memory for it.
    """
    with capturing:
        for _ in range(WARM_UPS):  # libraries choose their kernels and make their workspaces outside the capture
            before_each()
            step()
        before_each()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        try:
            # The outer context puts the stream back even where ending a broken capture raises. thread_local: other
            # threads go on allocating and launching meanwhile.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                step()
        except RuntimeError as error:
            first = error.__context__ or error  # ending a broken capture raises an error of its own
            for known in (error, first):
                if isinstance(known, torch.OutOfMemoryError):
                    raise known from None
            raise CaptureError(one_line(first)) from error
    return graph.replay


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
