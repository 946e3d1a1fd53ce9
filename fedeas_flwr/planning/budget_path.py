"""Compute images, synthetic share and removed imbalance as functions of β, and find the values of β within a limit.

Budgets are whole numbers, so these functions are step functions. The number of images and the synthetic share never
decrease with β, so bisection finds the largest β within a limit (`bisect_last_true`). The removed share decreases
at steps that fill a client past the level at which its imbalance is lowest, and at all steps if β is large.
For this share, `where_removed` finds the values of β. This module needs no package but NumPy.
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
from fedeas_flwr.policies.built_in import FillToBudget
from fedeas_flwr.policies.interface import ClientView, PolicySettings
from fedeas_flwr.policies.registry import POLICIES

Window = tuple[float, float]  # interval of β; both ends are included


@dataclass(frozen=True)
class Point:
    """Images and shares for one β."""

    beta: float
    images: int
    synthetic: float  # share of the training data
    removed: float  # share of the imbalance score that is removed


class BudgetPath:
    """Budgets, images and imbalance as functions of β, for given counts and a policy that fills to a budget.

    The largest β that is considered, ``end``, is a power of two; the budgets there are within the maximum count.
    """

    def __init__(
        self, counts: npt.ArrayLike, policy: str = "fedeas", gamma: float = 0.5, strict_mean: bool = True
    ) -> None:
        able = {name: rule for name, rule in POLICIES.items() if isinstance(rule, FillToBudget)}
        if policy not in able:
            needed = f"limits and figures need a policy whose total depends on β: {', '.join(able)}"
            raise ValueError(f"policy={policy!r}: {needed}")
        check_number("gamma", gamma)
        self.counts, self.policy, self.gamma, self.strict_mean = checked_counts(counts), policy, gamma, strict_mean
        self._rule = able[policy]
        self.before = float(client_imbalance(self.counts).sum())
        self.end = self._end()

    def levels(self, beta: float) -> IntArray:
        """Return every client's budget b_k."""
        return self._rule.budget(ClientView(self.counts, PolicySettings(beta, self.gamma, self.strict_mean)))

    def parts(self, levels: IntArray) -> FloatArray:
        """Return every client's part of the imbalance score after its scarce classes are filled to its level."""
        return client_imbalance(self.counts, fill_to(self.counts, levels, self.strict_mean))

    def removed(self, parts: FloatArray) -> float:
        """Return the share of the score that is removed if these parts remain; see `allocation.removed`."""
        return 1 - float(parts.sum()) / self.before if self.before > 0 else 0.0

    def at(self, beta: float) -> Point:
        """Return images and shares for one β."""
        levels = self.levels(beta)
        real, images = int(self.counts.sum()), int(fill_to(self.counts, levels, self.strict_mean).sum())
        synthetic = images / (real + images) if images else 0.0
        return Point(float(beta), images, synthetic, self.removed(self.parts(levels)))

    def _end(self) -> float:
        self.levels(0.0)  # raises if the power with γ overflows, whatever β is
        end = 2.0**40
        while True:
            try:
                self.levels(end)
            except ValueError:
                end /= 2
            else:
                return end / 2  # half, because rounding may lift a budget at the limit over it


def bisect_last_true(holds: Callable[[float], bool], end: float) -> float:
    """Return the last float from 0 to ``end`` at which a condition holds.

    The search is a bisection, so a condition that fails at one float must fail at all larger ones.
    """
    if holds(end):
        return end
    low, high = 0.0, end
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def where_removed(path: BudgetPath, least: float, end: float) -> list[Window]:
    """Return the exact windows of β from 0 to ``end`` that remove at least the share ``least`` of the imbalance.

    The removed share is not monotone in β, so bisection could miss a window. But as a client's budget b grows, its part
    of the score first decreases and then increases. The slope has the sign of b·N − S, which grows with b; N is the sum
    of the client's filled counts n, and S = Σ n². This bounds each part over an interval of β. The part is at most the
    larger of its values at the two ends. It is at least the smaller of these values, or its minimum if the turning
    point is inside the interval. An interval that these bounds do not decide is halved, until no float lies between its
    ends. Adjacent windows are merged. Two windows stay separate if a step between them removes less than ``least``.
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
                waiting += [(middle, high), (low, middle)]  # pop() takes the left half next
                continue
            for beta, parts in ((low, left), (high, right)):
                if path.removed(parts) >= least:
                    accept(beta, beta)
    return pieces


def _best_levels(path: BudgetPath) -> IntArray:
    """Return every client's first level b ≥ 1 with b·N − S ≥ 0 (see `where_removed`); the best level is b or b − 1."""

    def falls(level: IntArray) -> BoolArray:
        filled = (path.counts + fill_to(path.counts, level, path.strict_mean)).astype(np.float64)
        return np.asarray(level * filled.sum(axis=1) < np.square(filled).sum(axis=1), dtype=np.bool_)

    return first_failing(np.ones(len(path.counts), dtype=np.int64), np.maximum(1, path.counts.max(axis=1)), falls)
