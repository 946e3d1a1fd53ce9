"""Capture CUDA graphs one at a time per process, on streams that nothing else in the process uses.

torch takes streams in turn from a pool of 32 per priority, so the 33rd is the first one again. While one engine is
captured on such a stream, another engine's launches on it would fail or become part of the capture.
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
"""Held during a capture, and while code temporarily changes settings of the whole process (TF32, determinism).

Captures run one at a time: entering one synchronises the device, and torch supports only one. A graph keeps the
settings that it was captured with: those of another thread would stay in it for the remaining run.
"""

LAST = 3
"""The rank that the GPU schedules last: torch has pools for four priorities."""
_POOL = 32
_lock = threading.Lock()


class CaptureError(RuntimeError):
    """The step runs but cannot be captured as a graph, for example because it reads a number from the GPU."""


def release_cached_memory() -> None:
    """Release torch's cached memory to the GPU; not during a capture, since this synchronises the device."""
    with capturing:
        torch.cuda.empty_cache()


def capture(
    step: Callable[[], None], stream: torch.cuda.Stream, before_each: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Capture ``step`` on ``stream``, the current stream; return a function that replays it.

    The stream is the graph's own: nothing else uses it during the capture. Memory that ``step`` reads or writes, except
    what it allocates itself, must not move. ``before_each``, called before each run of ``step``, resets the state that
    it changes. `CaptureError` is raised if ``step`` runs but cannot be captured, `torch.OutOfMemoryError` if there is
    not enough memory.
    """
    with capturing:
        for _ in range(WARM_UPS):  # libraries choose kernels and allocate workspaces outside the capture
            before_each()
            step()
        before_each()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        try:
            # The outer context restores the stream even if ending a broken capture raises. thread_local: other threads
            # may allocate and launch during the capture.
            with (
                torch.cuda.stream(stream),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                step()
        except RuntimeError as error:
            _end_capture_of_random_numbers(stream.device)
            first = error.__context__ or error  # ending a broken capture raises a second error
            for known in (error, first):
                if isinstance(known, torch.OutOfMemoryError):
                    raise known from None
            raise CaptureError(one_line(first)) from error
    return graph.replay


def _end_capture_of_random_numbers(device: torch.device) -> None:
    """Let a device's generator draw again: after a failed capture torch 2.11 leaves it in its capturing state."""
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state().graphsafe_get_state())


class _Mark:
    """Marker with the lifetime of the stream that it is attached to.

    A weak reference to the stream itself dangles and crashes the process, up to torch 2.11 (pytorch/pytorch#183403).
    """


_held: WeakValueDictionary[int, _Mark] = WeakValueDictionary()
"""CUDA's stream handle → marker. A stream without references may be returned again."""


def priority(rank: int) -> int:
    """Return torch's priority of a rank, 0 or negative; ranks after `LAST` have the priority of `LAST`."""
    return min(rank - LAST, 0)


def own_stream(rank: int = LAST) -> Any:
    """Return an unused stream of this rank, or of another if its 32 are in use; raise RuntimeError if all are."""
    with _lock:
        for number in (priority(rank), *map(priority, range(LAST, -1, -1))):
            for _ in range(_POOL):
                stream: Any = torch.cuda.Stream(priority=number)  # type: ignore[no-untyped-call]
                if stream.cuda_stream not in _held:
                    stream.mark = _held[stream.cuda_stream] = _Mark()
                    return stream
    raise RuntimeError(
        f"all {_POOL * (LAST + 1)} CUDA streams of a process are in use; train fewer clients in parallel (actors)"
    )
