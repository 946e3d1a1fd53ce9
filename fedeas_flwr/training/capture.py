"""Capture what a function launches as a CUDA graph, one capture at a time in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

WARM_UPS = 3
_capturing = threading.Lock()
"""One capture at a time: entering one waits for the whole device."""


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
    """
    with _capturing:
        for _ in range(WARM_UPS):  # libraries choose their kernels and make their workspaces outside the capture
            before_each()
            step()
        before_each()
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        # The outer context puts the stream back even where ending a broken capture raises. thread_local: other threads
        # go on allocating and launching meanwhile.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            step()
    return graph.replay
