"""Waterfill: the least imbalance score a total can buy (ours; the paper has only its greedy reference).

Each client fills its lowest classes as water would, all clients down to one common marginal gain. On the wire that is
one scalar, found by asking the clients, and a remainder: a client still needs nothing but its own counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import BoolArray, FloatArray, IntArray, check_total, checked_counts, first_failing


# argmin of Eq. (surrogate) at a given total
def waterfill(counts: npt.ArrayLike, total: int) -> IntArray:
    """Spend the total so that the imbalance score becomes least, up to the rounding to whole samples.

    A total beyond full balance, where the score can only grow, is dealt out evenly.
    """
    return waterfill_fill(counts, waterfill_level(total, waterfill_counter(counts)).samples)


class WaterLevel(NamedTuple):
    """A total as clients are told it: one level for all, and for some clients a few samples more."""

    level: float
    extra: IntArray
    samples: IntArray  # what each client generates: its count at the level plus its extra


def waterfill_level(total: int, count_at: Callable[[float], IntArray]) -> WaterLevel:
    """Find by bisection the marginal gain down to which clients must fill to spend the total exactly.

    Parameters
    ----------
    total : int
        Samples to spend.
    count_at : callable
        Maps a level to the samples each client would add, see `waterfill_count`; a server asks its clients.

    Returns
    -------
    WaterLevel
        What the level leaves over goes to the clients whose next samples have that very gain, lowest client first.
    """
    check_total(total)
    below, most = 0.0, count_at(0.0)  # everyone balanced
    above, least = 1.0, np.zeros_like(most)  # no gain exceeds 1
    while most.sum() < total:
        above, least, below = below, most, 2 * below - 1
        most = count_at(below)
        if most.sum() == least.sum():
            raise ValueError(f"total={total}: every client is empty, so only 0 can be spent")
    if most.sum() == total:
        above, least = below, most
    while least.sum() < total and above - below > 2.0**-50 * max(1.0, -below):  # finer than gains can be told apart
        middle = (above + below) / 2
        at_middle = count_at(middle)
        if at_middle.sum() <= total:
            above, least = middle, at_middle
        else:
            below, most = middle, at_middle
    room = most - least
    extra = np.clip(total - least.sum() - (np.cumsum(room) - room), 0, room)
    return WaterLevel(above, extra, least + extra)


def waterfill_count(counts: npt.ArrayLike, level: float) -> IntArray:
    """Count the samples each client adds while its marginal gain stays above the level.

    Gains are counted in units of 2 / Σ_j N_j, so that a client needs nothing but its own row: at first about
    ‖q_k‖² − min_c q_k^c, never above 1, and 0 when it is balanced. Beyond that, level −s stands for s samples more from
    everyone.
    """
    return waterfill_counter(counts)(level)


def waterfill_counter(counts: npt.ArrayLike) -> Callable[[float], IntArray]:
    """Return `waterfill_count` of these counts as a function of the level; what no level changes is computed once."""
    return partial(_count, _water(checked_counts(counts)))


class _Water(NamedTuple):
    """What does not depend on the level, of each client (row) as the water reaches each of its heights (column)."""

    heights: IntArray
    sums: IntArray  # running, of the heights
    poured: IntArray  # samples until then
    other_squares: FloatArray  # of the classes above
    gains: FloatArray  # marginal, at that moment


def _water(counts: IntArray) -> _Water:
    heights, sums, poured = _pour(counts)
    own = np.square(heights, dtype=np.float64)
    other_squares = own.sum(axis=1, keepdims=True) - np.cumsum(own, axis=1)
    filling = np.arange(1, counts.shape[1] + 1)
    gains = _gain(sums[:, -1:], poured, other_squares + filling * own, heights, filling)
    return _Water(heights, sums, poured, other_squares, gains)


def _count(water: _Water, level: float) -> IntArray:
    heights, sums, poured, other_squares, gains = water
    size = sums[:, -1]
    if level <= 0:
        return np.asarray(np.where(size > 0, poured[:, -1] + math.floor(-level), 0), dtype=np.int64)
    # The client stops as its j + 1 lowest classes fill up together, somewhere below the height of the next.
    client, j = np.arange(len(heights)), np.maximum(0, (gains[:, :-1] > level).sum(axis=1) - 1)
    lowest, below, rest = heights[client, j], sums[client, j], other_squares[client, j]

    def worth(height: IntArray, over: IntArray) -> BoolArray:
        """Tell whether to go on when the j + 1 lowest classes stand at a height, ``over`` of them one higher."""
        squares = rest + (j + 1.0) * height**2 + over * (2.0 * height + 1)
        added, to_level = (j + 1) * height + over - below, np.maximum(1, j + 1 - over)
        return _gain(size, added, squares, height, to_level) > level

    next_height = heights[client, np.minimum(j + 1, heights.shape[1] - 1)]
    rounds_end = first_failing(lowest, next_height, lambda h: worth(h, np.zeros_like(h)))
    height = np.maximum(lowest, rounds_end - 1)  # where the last round begins
    over = first_failing(np.zeros_like(j), np.where(rounds_end > lowest, j + 1, 0), lambda o: worth(height, o))
    count: IntArray = (j + 1) * height + over - below
    return count


# A sample in a client's lowest class, at height h, takes S = Σ_c (n_k^c)² to S + 2h + 1 and N_k to N_k + 1, so b of
# them gain p_k (S / N_k² − (S + b (2h + 1)) / (N_k + b)²): to first order b times Eq. (gain).
def _gain(size: IntArray, added: IntArray, squares: FloatArray, height: IntArray, to_level: IntArray) -> FloatArray:
    """Give the marginal gain of clients of N_k = ``size`` real samples and so many ``added``.

    It is the next sample's or, if that is more, the mean over the ``to_level`` that make the lowest classes level
    again: near balance the first samples of such a round do harm that the last ones repair.
    """
    grown, step = np.maximum(1.0, size + added), 2.0 * height + 1
    next_one = squares / grown**2 - (squares + step) / (grown + 1) ** 2
    next_all = squares / grown**2 - (squares + to_level * step) / (grown + to_level) ** 2
    return np.asarray(size / 2 * np.maximum(next_one, next_all / to_level), dtype=np.float64)


def waterfill_fill(counts: npt.ArrayLike, samples: npt.ArrayLike) -> IntArray:
    """Place each client's number of samples into its lowest classes, one at a time as it were, ties to the lowest."""
    counts, samples = checked_counts(counts), np.asarray(samples, dtype=np.int64)
    _, sums, poured = _pour(counts)
    filling = (poured <= samples[:, None]).sum(axis=1)
    height, over = np.divmod(sums[np.arange(len(counts)), filling - 1] + samples, filling)
    low = counts <= height[:, None]
    placed: IntArray = np.where(low, height[:, None] + (np.cumsum(low, axis=1) <= over[:, None]) - counts, 0)
    return placed


def _pour(counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Sort each row; give heights, their running sums, and the samples it takes for the water to reach each height."""
    heights = np.sort(counts, axis=1)
    sums = np.cumsum(heights, axis=1)
    return heights, sums, np.arange(1, counts.shape[1] + 1) * heights - sums
