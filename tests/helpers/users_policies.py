"""Policies as a user writes them, right and wrong, for tests."""

from __future__ import annotations

import itertools

import numpy as np

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.policies.interface import ClientView, Policy, PolicySettings, Query, Share
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.own import matched

not_a_policy = 3.0
_calls = itertools.count()


def up_to(counts: IntArray, most: int = 5) -> IntArray:
    """Fill every class up to ``most``."""
    return np.maximum(most - counts, 0)


def by_beta(counts: IntArray, beta: float) -> IntArray:
    """Generate β images of every class that the client lacks."""
    return np.where(counts == 0, int(beta), 0)


same_budget = matched(up_to)


class TwoParts(Policy):
    """Fill every class up to ``first`` at the start, and up to ``second`` from a later round on."""

    name = "two-parts"

    def __init__(self, first: int = 2, second: int = 4, later: int = 3) -> None:
        self.parts, self._levels = (1, later), {1: first, later: second}

    def plan(self, view: ClientView) -> IntArray:
        return np.maximum(self._levels[view.round] - view.counts, 0)

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        return classes * max(self._levels.values())


class Nameless(Policy):
    """Add nothing, without a name of its own."""

    def plan(self, view: ClientView) -> IntArray:
        return np.zeros_like(view.counts)


class ByBeta(Policy):
    """Generate β images of each class that a client lacks; it does not declare that it uses β."""

    def plan(self, view: ClientView) -> IntArray:
        return np.where(view.counts == 0, int(view.settings.beta), 0)


# ------------------------------------------------------------------------------------------------------- wrong


def negative(counts: IntArray) -> IntArray:
    return counts.mean().astype(int) - counts


def fractional(counts: IntArray) -> object:
    return counts / 3


def returns_none(counts: IntArray) -> None:
    counts.sum()


def too_short(counts: IntArray) -> IntArray:
    return counts[1:]


def no_numbers(counts: IntArray) -> object:
    return ["many"] * len(counts)


def raises(counts: IntArray) -> IntArray:
    raise ZeroDivisionError("no budget")


def random(counts: IntArray) -> IntArray:
    return counts * 0 + next(_calls) % 7


def too_many(counts: IntArray) -> IntArray:
    return counts * 0 + 10**6


def without_counts() -> None: ...


class UsesOthers(Policy):
    """Fill to the mean of all clients, which no client knows."""

    name = "uses-others"

    def plan(self, view: ClientView) -> IntArray:
        return np.maximum(int(view.counts.mean()) - view.counts, 0)


class LatePart(TwoParts):
    """Has a part after the last round."""

    name = "late-part"

    def __init__(self) -> None:
        super().__init__(later=30)


class WrongFirstPart(TwoParts):
    name = "wrong-first-part"

    def plan(self, view: ClientView) -> IntArray:
        return super().plan(view) - (view.round == 1)


class MissesTotal(MatchedPolicy):
    """Give every client one image."""

    name = "misses-total"

    def plan(self, view: ClientView) -> IntArray:
        return np.eye(1, view.counts.shape[1], dtype=int).repeat(len(view.counts), axis=0)

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        return 1

    def split_total(self, query: Query, classes: int, settings: PolicySettings) -> dict[int, Share]:
        return dict.fromkeys(query("plan", settings.beta), Share(base=1))


class MaxTotalRaises(Nameless):
    name = "max-total-raises"

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        raise KeyError("most")


class NoParts(Nameless):
    name = "no-parts"
    parts = 5  # type: ignore[assignment]


class WithoutPlan:
    name = "without-plan"


class RaisesWhenBuilt(Policy):
    def __init__(self) -> None:
        raise RuntimeError("not today")
