"""Label counts: what the paper starts from, and what may pass as them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

LARGEST = 2**40  # of any count, budget or total: sums over millions of pairs still fit 64 bits


def checked_counts(counts: npt.ArrayLike, name: str = "counts") -> IntArray:
    """Give counts as int64 [K, C]; whole floats pass, anything else is a ValueError."""
    try:
        array = np.asarray(counts)
    except ValueError:
        raise ValueError(f"{name}: rows differ in length, must be a table of clients by classes") from None
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: must be a table of clients by classes, at least 1 by 1")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} has type {array.dtype}: must be integers")
    wrong = (array < 0) | (array > LARGEST)
    if array.dtype.kind == "f":
        wrong |= array != np.floor(array)  # NaN included
    if wrong.any():
        k, c = np.argwhere(wrong)[0]
        raise ValueError(f"{name}[{k}, {c}]={array[k, c].item()!r}: must be an integer from 0 to 2**40")
    return array.astype(np.int64, copy=False)


def check_number(name: str, value: float) -> None:
    """Refuse what is no finite number of at least 0."""
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")


def check_total(total: int) -> None:
    """Refuse what cannot be a number of images."""
    if not isinstance(total, int | np.integer) or isinstance(total, bool) or not 0 <= total <= LARGEST:
        raise ValueError(f"total={total!r}: must be an integer from 0 to 2**40")


def first_failing(low: IntArray, high: IntArray, holds: Callable[[IntArray], BoolArray]) -> IntArray:
    """Find by bisection, elementwise, the first integer from low up to high at which a condition no longer holds."""
    while (low < high).any():
        middle = (low + high) // 2
        more = holds(middle) & (low < high)
        low, high = np.where(more, middle + 1, low), np.where(more, high, middle)
    return low
