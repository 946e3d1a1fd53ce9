"""NumPy's work on several of the machine's cores: threads, since NumPy lets go of the interpreter inside its loops.

The threads live as long as one call: none is left behind that could keep a process alive, and to make them takes less
than a millisecond.
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
"""Where a container reads its own limits."""
MAX_THREADS = 8
"""Between two loops a thread needs the interpreter, of which there is one: it serves no more of them in time."""
ELEMENTS_PER_THREAD = 2**22
"""Numbers to be read for which a thread more is made. On two slow cores a second one gained nothing in an average of
three million numbers (1.8 ms with one, 2.1 with two), and a quarter of the time with ten million (6.3 ms, 4.8)."""
MIN_ARRAY = 2**15
"""Elements below which an array does not count for that: with 2,000 arrays of 1,000 elements the threads only waited
for each other at the interpreter, and two took twice as long as one."""
_AHEAD = 2
"""Pieces a thread that are begun before the oldest is asked for."""

Piece = TypeVar("Piece")
Result = TypeVar("Result")


def usable_cores() -> int:
    """Cores this process may use: its affinity, and the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or the word max
        quota, period = (CGROUP / "cpu.max").read_text().split()
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def threads_for(model: Mapping[str, Any], models: int, while_clients_train: bool = False) -> int:
    """How many threads pay for work that reads so many models like this one; 1: none but the caller's.

    NumPy's arrays alone count: tensors are left to torch. Beside clients that train half of the cores stay free: nobody
    waits for such work, and on two cores a second thread took more time from the clients than it saved.
    """
    sizes = [array.size for array in model.values() if isinstance(array, np.ndarray)]
    elements = models * sum(size for size in sizes if size >= MIN_ARRAY)
    wanted = min(MAX_THREADS, elements // ELEMENTS_PER_THREAD)
    if wanted <= 1:
        return 1
    return min(wanted, max(1, usable_cores() // 2) if while_clients_train else usable_cores())


def chunks(arrays: Mapping[str, Any], block: int, elements: int, blocks: int) -> Iterator[list[tuple[str, int]]]:
    """The blocks of arrays as (name, first element), in order: so many a piece that a thread is worth being woken.

    Parameters
    ----------
    arrays
        A model. No block holds parts of two arrays.
    block
        Most elements of a block.
    elements, blocks
        A piece is full with so many elements, or so many blocks of fewer.
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
    """Do work on every piece, several at once, and give the results in the order of the pieces.

    What is done with them then does not depend on the number of threads. Only a few results wait to be taken, however
    many pieces there are. An error or Ctrl-C leaves the pieces that are not begun undone, and waits for the others.
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
