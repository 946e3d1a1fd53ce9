"""Policies that distribute one total over all clients, which do not send their label counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np

from fedeas_flwr import allocation
from fedeas_flwr.allocation import IntArray
from fedeas_flwr.policies.built_in import FEDEAS
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView, Policy, PolicySettings, Query, Share
from fedeas_flwr.waterfill import waterfill_count, waterfill_counter, waterfill_fill, waterfill_level


@runtime_checkable
class MatchedPolicy(Policy, Protocol):
    """A policy that distributes one total over all clients: FedEAS's total, unless the settings give another."""

    settings: frozenset[str] = frozenset({"beta", "gamma", "strict_mean", "total"})
    questions: Mapping[str, Sequence[str]] = {"plan": ("total", "absent")}
    """Names of the integers in a reply to each of the server's questions, in the order sent."""

    def reply(self, view: ClientView, question: str, argument: float) -> IntArray:
        """Return each client's integers, [K, n]: for ``plan`` at a β, its FedEAS total and number of absent classes."""
        total = FEDEAS.plan(replace(view, settings=replace(view.settings, beta=argument))).sum(axis=1)
        return np.stack([total, (view.counts == 0).sum(axis=1)], axis=1)

    def max_reply(
        self, samples: int, classes: int, settings: PolicySettings, question: str, argument: float
    ) -> Sequence[int]:
        """Return the largest integers that a client with ``samples`` real images may reply with."""
        return FEDEAS.max_total(samples, classes, replace(settings, beta=argument), EMPTY_SHARE), classes

    def split_total(self, query: Query, classes: int, settings: PolicySettings) -> dict[int, Share]:
        """Return the share of every client that replied, computed from the replies only."""
        ...

    def generates(self, settings: PolicySettings) -> bool:
        """Return whether there is a total to spend."""
        return settings.beta > 0 or bool(settings.total)

    def settings_used(self, total_given: bool) -> frozenset[str]:
        """Return the names of the settings that the plan depends on: only ``total`` if it is given."""
        return frozenset({"total"}) if total_given else self.settings


class EvenSplit(MatchedPolicy):
    """Spend a total evenly over all (client, class) pairs, or over the absent ones."""

    def __init__(self, name: str, absent_only: bool = False) -> None:
        self.name, self._absent_only = name, absent_only

    def plan(self, view: ClientView) -> IntArray:
        """Return base samples for each eligible class, and one more for the first ``extra``."""
        eligible = allocation.eligible_pairs(view.counts, self._absent_only)
        base, extra = np.array([(share.base, share.extra) for share in view.shares]).T
        return allocation.distribute(eligible, base, extra)

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return the total of a client if all its classes are eligible."""
        return classes * share.base + share.extra

    def split_total(self, query: Query, classes: int, settings: PolicySettings) -> dict[int, Share]:
        """Return (base, extra) of every client; a client without samples has no eligible pair."""
        replies = query("plan", settings.beta)
        pairs = [
            (absent if self._absent_only else classes) if absent < classes else 0 for _, absent in replies.values()
        ]
        parts = allocation.split_total(matched_total(replies, settings), pairs)
        return {client: Share(*part) for client, part in zip(replies, parts, strict=True)}


class Waterfill(MatchedPolicy):
    """Spend a total so that the imbalance score is minimal."""

    name = "waterfill"
    questions: Mapping[str, Sequence[str]] = {**MatchedPolicy.questions, "waterfill": ("count",)}

    def plan(self, view: ClientView) -> IntArray:
        """Return the samples for the smallest classes: as many as the share's level gives, plus its extra samples."""
        samples = np.array([share.extra for share in view.shares])
        levels = np.array([share.level for share in view.shares])
        for level in np.unique(levels):
            samples[levels == level] += waterfill_count(view.counts[levels == level], float(level))
        return waterfill_fill(view.counts, samples)

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return the most samples that the share's level can give, plus its extra samples."""
        return self._max_count(samples, classes, share.level) + share.extra

    def reply(self, view: ClientView, question: str, argument: float) -> IntArray:
        """Return each client's integers, [K, n]: for ``waterfill`` at a level, the number of samples that it adds."""
        return super().reply(view, question, argument) if question == "plan" else _counter(view)(argument)[:, None]

    def max_reply(
        self, samples: int, classes: int, settings: PolicySettings, question: str, argument: float
    ) -> Sequence[int]:
        """Return the largest integers that a client with ``samples`` real images may reply with."""
        if question == "plan":
            return super().max_reply(samples, classes, settings, question, argument)
        return (self._max_count(samples, classes, argument),)

    def split_total(self, query: Query, classes: int, settings: PolicySettings) -> dict[int, Share]:
        """Return the level and each client's extra; a client that does not answer a later question counts as 0."""
        replies = query("plan", settings.beta)

        def count_at(level: float) -> IntArray:
            counts = query("waterfill", level)
            return np.array([counts[client][0] if client in counts else 0 for client in replies], dtype=np.int64)

        water = waterfill_level(matched_total(replies, settings), count_at)
        return {c: Share(extra=int(extra), level=water.level) for c, extra in zip(replies, water.extra, strict=True)}

    def _max_count(self, samples: int, classes: int, level: float) -> int:
        return (classes - 1) * samples + int(max(0.0, -level))


def matched_total(replies: Mapping[int, Sequence[int]], settings: PolicySettings) -> int:
    """Return the total to spend: the given one, or the sum of the FedEAS totals, which the replies begin with."""
    return sum(total for total, *_ in replies.values()) if settings.total is None else settings.total


@lru_cache(maxsize=1)
def _counter(view: ClientView) -> Callable[[float], IntArray]:
    return waterfill_counter(view.counts)
