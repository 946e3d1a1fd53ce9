"""Waterfill: spend a total so that the imbalance score is minimal (ours; the paper has only its greedy reference).

Each client fills its lowest classes to a common height, and all clients stop at one common marginal gain. The server
sends this scalar, which it finds by asking the clients, and a remainder: a client needs only its own counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import BoolArray, FloatArray, IntArray, check_total, checked_counts, first_failing


# argmin of Eq. (surrogate) at a given total
def waterfill(counts: npt.ArrayLike, total: int) -> IntArray:
    """Return the allocation of a total with the minimal imbalance score, up to rounding to whole samples.

    What exceeds full balance, where the score can only grow, is distributed evenly.
    """
    return waterfill_fill(counts, waterfill_level(total, waterfill_counter(counts)).samples)


class WaterLevel(NamedTuple):
    """A total as the server sends it: one level for all clients, and a few extra samples for some."""

    level: float
    extra: IntArray
    samples: IntArray  # total per client: its count at the level plus its extra


def waterfill_level(total: int, count_at: Callable[[float], IntArray]) -> WaterLevel:
    """Find by bisection the marginal gain at which clients stop to spend the total exactly.

    ``count_at`` maps a level to the samples each client would add, see `waterfill_count`; a server asks its clients.
    The remainder goes to the clients whose next samples have exactly this gain, lowest client first.
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
    while least.sum() < total and above - below > 2.0**-50 * max(1.0, -below):  # below the resolution of gains
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
    """Return the samples that each client adds while its marginal gain is above the level.

    Gains are in units of 2 / Σ_j N_j, so a client needs only its own row: about ‖q_k‖² − min_c q_k^c at first, never
    above 1, and 0 when it is balanced. A negative level −s means s more samples from every client.
    """
    return waterfill_counter(counts)(level)


def waterfill_counter(counts: npt.ArrayLike) -> Callable[[float], IntArray]:
    """Return `waterfill_count` of these counts as a function of the level; the rest is computed once."""
    # Per client (row) and height that the filling reaches (column): the samples poured to reach it, the excess
    # Σ_c n_c (n_c − height) over the higher classes, and the marginal gain.
    heights, sums, poured = _pour(checked_counts(counts))
    size = sums[:, -1]
    steps = np.diff(heights, axis=1) * (size[:, None] - sums[:, :-1]).astype(np.float64)
    excess = np.cumsum(np.pad(steps, ((0, 0), (0, 1)))[:, ::-1], axis=1)[:, ::-1]
    gains = _gain(size[:, None], poured, excess, heights, np.arange(1, heights.shape[1] + 1))

    def count(level: float) -> IntArray:
        if level <= 0:
            return np.asarray(np.where(size > 0, poured[:, -1] + math.floor(-level), 0), dtype=np.int64)
        # The client stops while its j + 1 lowest classes fill up together, below the height of the next class.
        client, j = np.arange(len(heights)), np.maximum(0, (gains[:, :-1] > level).sum(axis=1) - 1)
        following = np.minimum(j + 1, heights.shape[1] - 1)
        lowest, below, next_height = heights[client, j], sums[client, j], heights[client, following]
        rest, higher = excess[client, following], (size - below).astype(np.float64)

        def worth(height: IntArray, over: IntArray) -> BoolArray:
            """Return whether to continue when the j + 1 lowest classes are at a height, ``over`` of them one higher."""
            at_height = rest + (next_height - height) * higher + over * (height + 1.0)
            added, to_level = (j + 1) * height + over - below, np.maximum(1, j + 1 - over)
            return _gain(size, added, at_height, height, to_level) > level

        rounds_end = first_failing(lowest, next_height, lambda h: worth(h, np.zeros_like(h)))
        height = np.maximum(lowest, rounds_end - 1)  # where the last round begins
        over = first_failing(np.zeros_like(j), np.where(rounds_end > lowest, j + 1, 0), lambda o: worth(height, o))
        counted: IntArray = (j + 1) * height + over - below
        return counted

    return count


# b samples in lowest classes, at height h, take S = Σ_c n_c² to S + b (2h + 1) and n = Σ_c n_c to n + b, so they gain
# p_k (S / n² − (S + b (2h + 1)) / (n + b)²): to first order b times Eq. (gain). With the excess A = S − hn, the mean
# gain of one of them is p_k ((2n + b) A − n (n − bh)) / (n² (n + b)²), where no large numbers cancel.
def _gain(size: IntArray, added: IntArray, excess: FloatArray, height: IntArray, to_level: IntArray) -> FloatArray:
    """Return the marginal gain of clients with N_k = ``size`` real samples and ``added`` samples.

    It is the next sample's gain or, if larger, the mean gain of the ``to_level`` samples that make the lowest classes
    equal again: near balance the first samples of such a round raise the score, and the last ones lower it.
    """
    grown = np.maximum(1.0, size + added)

    def mean_gain(samples: IntArray | int) -> FloatArray:
        gained = (2 * grown + samples) * excess - grown * (grown - samples * height)
        return np.asarray(gained / (grown * (grown + samples)) ** 2, dtype=np.float64)

    return np.asarray(size / 2 * np.maximum(mean_gain(1), mean_gain(to_level)), dtype=np.float64)


def waterfill_fill(counts: npt.ArrayLike, samples: npt.ArrayLike) -> IntArray:
    """Return each client's samples placed in its lowest classes, as if one at a time, ties to the lowest class."""
    counts, samples = checked_counts(counts), np.asarray(samples, dtype=np.int64)
    _, sums, poured = _pour(counts)
    filling = (poured <= samples[:, None]).sum(axis=1)
    height, over = np.divmod(sums[np.arange(len(counts)), filling - 1] + samples, filling)
    low = counts <= height[:, None]
    placed: IntArray = np.where(low, height[:, None] + (np.cumsum(low, axis=1) <= over[:, None]) - counts, 0)
    return placed


def _pour(counts: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Sort each row; return heights, their cumulative sums, and the samples needed to reach each height."""
    heights = np.sort(counts, axis=1)
    sums = np.cumsum(heights, axis=1)
    return heights, sums, np.arange(1, counts.shape[1] + 1) * heights - sums
