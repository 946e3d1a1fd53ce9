"""Estimates with intervals: a fraction, the AUC of an attack, and its true-positive rate at 1 % false positives.

An attack gives an error per image. Members, the images that a model was trained on, should have lower errors than
non-members.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
_RESAMPLES = 1000


class Estimate(NamedTuple):
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


def joint_confidence(intervals: int) -> float:
    """Return the confidence of each interval so that all hold together with `CONFIDENCE` (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / intervals


def wilson(value: float, number: float, confidence: float = CONFIDENCE) -> Estimate:
    """Return a fraction of ``number`` independent trials with Wilson's score interval."""
    z2 = _quantile(confidence) ** 2
    middle = (value + z2 / (2 * number)) / (1 + z2 / number)
    half = sqrt(z2 * (value * (1 - value) / number + z2 / (4 * number**2))) / (1 + z2 / number)
    return Estimate(value, max(0.0, middle - half), min(1.0, middle + half))


def auc(members: Floats, non_members: Floats, confidence: float = CONFIDENCE) -> Estimate:
    """Return the probability that a member has a lower error than a non-member, counting ties half.

    The interval holds every AUC θ that is within z standard errors, with Hanley and McNeil's variance at θ (Newcombe,
    2006, method 5). At θ = 0.5 this is the Mann–Whitney test, also for few images, where DeLong's interval is too
    narrow: it has no width if all members are below all non-members.
    """
    ordered, pairs = np.sort(non_members), len(members) * len(non_members)
    left, right = (np.searchsorted(ordered, members, side=side) for side in ("left", "right"))
    value = 1 - float((left + right).sum()) / (2 * pairs)
    others, z = (len(members) + len(non_members)) / 2 - 1, _quantile(confidence)

    def within(theta: float) -> bool:
        variance = theta * (1 - theta) * (1 + others * ((1 - theta) / (2 - theta) + theta / (1 + theta))) / pairs
        return abs(value - theta) <= z * sqrt(variance)

    return Estimate(value, _boundary(within, value, 0.0), _boundary(within, value, 1.0))


def true_positives(
    members: Floats, non_members: Floats, random: np.random.Generator, confidence: float = CONFIDENCE
) -> dict[str, float]:
    """Return the fraction of members found at a false-positive rate of at most 1 %, with interval and p-value.

    The interval is a percentile bootstrap over members and non-members, and at least Wilson's for a fixed threshold:
    at 0 and 1 the bootstrap has no width. The p-value is exact: the probability that at least as many members are found
    if members and non-members have the same distribution. ``expected`` is the mean fraction in that case.
    """
    found, allowed, number = int(_found(members, non_members).sum()), len(non_members) // 100, len(non_members)
    drawn = (
        _found(random.choice(members, len(members)), random.choice(non_members, number)) for _ in range(_RESAMPLES)
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile([part.mean() for part in drawn], [tail, 1 - tail])
    # As many are found if and only if at most `allowed` of the lowest `found + allowed` errors are of non-members.
    lowest, total = found + allowed, len(members) + number
    ways = sum(comb(lowest, few) * comb(total - lowest, number - few) for few in range(allowed + 1))
    fixed = wilson(found / len(members), len(members), confidence)
    estimate = Estimate(fixed.value, min(fixed.low, float(low)), max(fixed.high, float(high)))
    return {**estimate._asdict(), "expected": (allowed + 1) / (number + 1), "p": ways / comb(total, number)}


def _found(members: Floats, non_members: Floats) -> NDArray[np.bool_]:
    allowed = len(non_members) // 100
    return np.asarray(members < np.partition(non_members, allowed)[allowed])


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _boundary(within: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return by bisection where ``within`` ends between a value inside and the end of the scale."""
    for _ in range(50):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if within(middle) else (inside, middle)
    return inside
