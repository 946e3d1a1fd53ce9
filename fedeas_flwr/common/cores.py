"""Run NumPy work on several cores with threads, since NumPy releases the GIL inside its loops.

The threads exist for one call: none is left that could keep a process alive, and creating them takes less than a
millisecond.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

CGROUP = Path("/sys/fs/cgroup")
"""Folder with the limits of a container."""
MAX_THREADS = 8
"""Maximum number of threads: between two loops a thread needs the GIL, which does not scale to more."""
ELEMENTS_PER_THREAD = 2**22
"""Elements to read per additional thread. On two slow cores a second thread did not help to average three million
elements (1.8 ms with one, 2.1 ms with two), and saved a quarter of the time with ten million (6.3 ms, 4.8 ms)."""
MIN_ARRAY = 2**15
"""Minimum elements of an array that counts for this: with 2,000 arrays of 1,000 elements the threads only waited for
the GIL, and two took twice as long as one."""
_AHEAD = 2
"""Pieces per thread that are submitted before the oldest result is awaited."""

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = (CGROUP / "cpu.max").read_text().split()
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def threads_for(model: Mapping[str, Any], models: int, while_clients_train: bool = False) -> int:
    """Return the number of threads worth using to read `models` models like this one; 1 means the caller's thread.

    Only NumPy arrays count: torch handles tensors. While clients train, half of the cores stay free: nothing waits for
    such work, and on two cores a second thread cost the clients more time than it saved.
    """
    sizes = [array.size for array in model.values() if isinstance(array, np.ndarray)]
    elements = models * sum(size for size in sizes if size >= MIN_ARRAY)
    useful = min(MAX_THREADS, elements // ELEMENTS_PER_THREAD)
    if useful <= 1:
        return 1
    return min(useful, max(1, usable_cores() // 2) if while_clients_train else usable_cores())


def chunks(arrays: Mapping[str, Any], block: int, elements: int, blocks: int) -> Iterator[list[tuple[str, int]]]:
    """Yield the blocks of arrays as (name, first element), in order, in pieces large enough for a thread.

    A block has at most ``block`` elements, all of one array. A piece is full with ``elements`` elements, or with
    ``blocks`` blocks if they are small.
    """
    piece: list[tuple[str, int]] = []
    held = 0
    for name, array in arrays.items():
        for first in range(0, array.size, block):
            piece.append((name, first))
            held += min(block, array.size - first)
            if held >= elements or len(piece) == blocks:
                yield piece
                piece, held = [], 0
    if piece:
        yield piece


def map_ordered(work: Callable[[Piece], Result], pieces: Iterable[Piece], threads: int) -> Iterator[Result]:
    """Apply ``work`` to every piece in parallel, and yield the results in the order of the pieces.

    What the caller computes from them therefore does not depend on the number of threads. Only a few results are
    buffered. An error or Ctrl-C cancels the pieces that have not started, and waits for the others.
    """
    if threads == 1:
        yield from map(work, pieces)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="cores")
    begun: deque[Future[Result]] = deque()
    try:
        for piece in pieces:
            begun.append(pool.submit(work, piece))
            if len(begun) > _AHEAD * threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
