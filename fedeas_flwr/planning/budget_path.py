"""What β decides on given label counts, and for which β it decides enough.

Budgets are whole numbers, so everything moves in steps. Images and the synthetic share never fall as β grows: the
greatest β under such a ceiling is found by plain bisection (`bisect_last_true`). The removed share does fall at some
steps, where a client is filled past its best level, and in the end for good: see `where_removed`. NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import (
    BoolArray,
    FloatArray,
    IntArray,
    check_number,
    checked_counts,
    client_imbalance,
    fill_to,
    first_failing,
)
from fedeas_flwr.policies import POLICIES, ClientView, FillToBudget, PolicySettings

Window = tuple[float, float]  # of β, both ends included


@dataclass(frozen=True)
class Point:
    """What one β means."""

    beta: float
    images: int
    synthetic: float  # share of the training data then
    removed: float  # share of the imbalance score


class BudgetPath:
    """All that β decides on given counts, under a policy that fills to a budget.

    Attributes
    ----------
    end : float
        As far as β is looked at: a power of two, beyond which budgets would soon exceed what counts may be.
    """

    def __init__(
        self, counts: npt.ArrayLike, policy: str = "fedeas", gamma: float = 0.5, strict_mean: bool = True
    ) -> None:
        able = {name: rule for name, rule in POLICIES.items() if isinstance(rule, FillToBudget)}
        if policy not in able:
            raise ValueError(
                f"policy={policy!r}: limits and figures are for those whose total β decides: {', '.join(able)}"
            )
        check_number("gamma", gamma)
        self.counts, self.policy, self.gamma, self.strict_mean = checked_counts(counts), policy, gamma, strict_mean
        self._rule = able[policy]
        self.before = float(client_imbalance(self.counts).sum())
        self.end = self._end()

    def levels(self, beta: float) -> IntArray:
        """Give every client's budget b_k."""
        return self._rule.budget(ClientView(self.counts, PolicySettings(beta, self.gamma, self.strict_mean)))

    def parts(self, levels: IntArray) -> FloatArray:
        """Give every client's part of the imbalance score when it fills to a level."""
        return client_imbalance(self.counts, fill_to(self.counts, levels, self.strict_mean))

    def removed(self, parts: FloatArray) -> float:
        """Give the share of the score that is gone when these parts are left; as `allocation.removed`."""
        return 1 - float(parts.sum()) / self.before if self.before > 0 else 0.0

    def at(self, beta: float) -> Point:
        """Say what one β means."""
        levels = self.levels(beta)
        real, images = int(self.counts.sum()), int(fill_to(self.counts, levels, self.strict_mean).sum())
        synthetic = images / (real + images) if images else 0.0
        return Point(float(beta), images, synthetic, self.removed(self.parts(levels)))

    def _end(self) -> float:
        self.levels(0.0)  # where γ alone is too much, no β is small enough
        end = 2.0**40
        while True:
            try:
                self.levels(end)
            except ValueError:
                end /= 2
            else:
                return end / 2  # at the very limit, the rounding of budgets would step over it


# ------------------------------------------------------------------------------------------- which β satisfy


def bisect_last_true(holds: Callable[[float], bool], end: float) -> float:
    """Find by bisection the last float from 0 to ``end`` at which a condition holds that, once lost, stays lost."""
    if holds(end):
        return end
    low, high = 0.0, end
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def where_removed(path: BudgetPath, least: float, end: float) -> list[Window]:
    """Find every β from 0 to ``end`` that removes at least a share of the imbalance, exactly.

    The removed share is no monotone function of β, so bisecting it alone could miss a piece. But each client's part of
    the score, filled to b, first falls and then rises: with S = Σ n², its slope has the sign of b·N − S, which grows
    with b. Over an interval of β a part is hence at most what it is at the interval's ends, and at least the lesser of
    these or, if the turning point lies inside, its minimum. Intervals that these bounds do not decide are halved, down
    to single steps. Pieces that touch are one; a step that falls below the limit inside leaves two.
    """
    turning = _best_levels(path)
    best = np.minimum(path.parts(turning), path.parts(turning - 1))
    pieces: list[Window] = []

    def accept(low: float, high: float) -> None:
        if pieces and low <= math.nextafter(pieces[-1][1], math.inf):
            low = pieces.pop()[0]
        pieces.append((low, high))

    waiting = [(0.0, end)]
    while waiting:
        low, high = waiting.pop()
        at_low, at_high = path.levels(low), path.levels(high)
        left, right = path.parts(at_low), path.parts(at_high)
        inside = (at_low < turning) & (turning - 1 < at_high)
        if path.removed(np.maximum(left, right)) >= least:
            accept(low, high)
        elif path.removed(np.where(inside, best, np.minimum(left, right))) >= least:
            middle = (low + high) / 2
            if low < middle < high:
                waiting += [(middle, high), (low, middle)]  # the left one is next
                continue
            for beta, parts in ((low, left), (high, right)):
                if path.removed(parts) >= least:
                    accept(beta, beta)
    return pieces


def _best_levels(path: BudgetPath) -> IntArray:
    """Find every client's first level from 1 on where b·N − S is not negative; its best is this or one less."""

    def falls(level: IntArray) -> BoolArray:
        filled = (path.counts + fill_to(path.counts, level, path.strict_mean)).astype(np.float64)
        return np.asarray(level * filled.sum(axis=1) < np.square(filled).sum(axis=1), dtype=np.bool_)

    return first_failing(np.ones(len(path.counts), dtype=np.int64), np.maximum(1, path.counts.max(axis=1)), falls)
