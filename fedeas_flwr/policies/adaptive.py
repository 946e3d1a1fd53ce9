"""Policies that spend FedEAS's total in parts: where the global model is still wrong, or by FedEAS's own plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np

from fedeas_flwr import allocation
from fedeas_flwr.allocation import BoolArray, FloatArray, IntArray
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.policies.built_in import FEDEAS
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView, Policy, PolicySettings, Query, Share
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.waterfill import waterfill_level

_ROUNDS, _FIRST = "3,5", 0.75
"""Default rounds in which later parts begin, and fraction of β of the first part: chosen on digits, for 20 rounds."""


class InParts(Policy):
    """Spend FedEAS's plan in parts: FedEAS at a fraction of β at first, at more in later rounds, at β in the last.

    This is the control of `Adaptive`: the same rounds, and about as many images in each part.
    """

    settings = frozenset({"beta", "gamma", "strict_mean"})

    def __init__(self, name: str) -> None:
        self.name = name
        self._set()

    def with_arguments(self, rounds: object = _ROUNDS, first: object = _FIRST) -> Self:
        """Return the policy with the arguments of the key ``policy-args``.

        ``rounds`` are those in which the second and later parts begin, separated by commas; without any, the policy is
        FedEAS. ``first`` is the fraction of β at which FedEAS's rule plans the first part.
        """
        made = copy(self)
        made._set(rounds, first)
        return made

    def _set(self, rounds: object = _ROUNDS, first: object = _FIRST) -> None:
        later = str(rounds).replace(",", " ").split()
        numbers = [int(word) if word.isdecimal() else 0 for word in later]
        if numbers != sorted({*numbers}) or min(numbers, default=2) < 2:
            raise ConfigError(f"policy-args: rounds = {rounds}: must be rounds from 2 on, ascending, such as 3,5")
        self.parts, start = (1, *numbers), _fraction("first", first)
        steps = np.linspace(start, 1.0, len(self.parts)) if numbers else [1.0]
        self._fraction_of_beta = dict(zip(self.parts, map(float, steps), strict=True))

    def plan(self, view: ClientView) -> IntArray:
        """Return FedEAS's plan at the part's β."""
        return FEDEAS.plan(replace(view, settings=self._at_part(view.settings, view.round)))

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return FedEAS's bound at β."""
        return FEDEAS.max_total(samples, classes, settings, share)

    def generates(self, settings: PolicySettings) -> bool:
        """Return whether budgets can be above 0."""
        return FEDEAS.generates(settings)

    def _at_part(self, settings: PolicySettings, part: int) -> PolicySettings:
        """Return the settings with the part's β, which rises in equal steps to the given one."""
        return replace(settings, beta=settings.beta * self._fraction_of_beta[part])


@dataclass(frozen=True, eq=False)
class MeasuredImages:
    """A client's images under the current global model, one element per image."""

    labels: IntArray
    loss: FloatArray
    wrong: BoolArray
    """Whether the model's prediction is not the label."""
    changed: FloatArray
    """1 if the prediction differs from that of the client's last evaluation, 0 if not, NaN without one."""
    synthetic: BoolArray
    held_out: BoolArray
    """Whether the client has not trained on the image so far."""

    def agreement(self) -> FloatArray:
        """Return the fraction of the synthetic images of each image's class that the model recognises.

        It is 1 for a class without synthetic images.
        """
        made, right = (
            np.bincount(self.labels[of], minlength=int(self.labels.max(initial=0)) + 1)
            for of in (self.synthetic, self.synthetic & ~self.wrong)
        )
        return np.asarray(np.where(made > 0, right / np.maximum(1, made), 1.0)[self.labels], dtype=np.float64)


EVALUATE = "evaluate"
"""Question of a server under an adaptive policy, with the model: the client scores its classes, and replies with its
id only."""


class Adaptive(InParts, MatchedPolicy):
    """Spend FedEAS's total in parts: the first by FedEAS's rule, the others where the global model is still wrong.

    FedEAS fills a client's classes up to b_k = β n̄_k^γ (1 − H̃_k). In the later parts, a score of the class takes the
    place of 1 − H̃_k, and a price that is the same for all clients that of 1/β: class c is filled up to
    ⌊n̄_k^γ s_k^c / price⌋, but not above the client's largest class. The server finds the price at which all clients
    together spend the part, as under waterfill: clients report how many images they would buy at a price, never of
    which classes.

    ``value`` maps a client's images to one number of at least 0 each, NaN if unknown; the score of a class is its mean.
    Clients evaluate the model in ``evaluations`` rounds in a row, up to the first of a part.
    """

    questions: Mapping[str, Sequence[str]] = {"plan": ("total",), "price": ("count",)}

    def __init__(self, name: str, value: Callable[[MeasuredImages], FloatArray], evaluations: int = 1) -> None:
        super().__init__(name)
        self._value, self._evaluations, self._held_out = value, evaluations, 0.0

    def with_arguments(self, rounds: object = _ROUNDS, first: object = _FIRST, held_out: object = 0.0) -> Self:
        """Return the policy with the arguments of the key ``policy-args``; see `InParts`.

        ``held_out`` is the fraction of its real images that a client does not train on before the last part.
        """
        made = super().with_arguments(rounds, first)
        made._held_out = _fraction("held_out", held_out)
        return made

    def plan(self, view: ClientView) -> IntArray:
        """Return the images planned so far, plus those that the client has bought since it evaluated the model."""
        planned, wants = self.progress(view)[0], _wants(self, view)
        before = [found.bought for found in view.progress] or [0] * len(planned)
        images = np.array([share.base for share in view.shares] or before) - before
        for k in np.flatnonzero(images > 0):
            planned[k] += wants.buy(int(k), int(images[k]))
        return planned

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return FedEAS's bound of the first part, plus the images that the client has bought."""
        return FEDEAS.max_total(samples, classes, self._at_part(settings, 1), EMPTY_SHARE) + share.base

    def settings_used(self, total_given: bool) -> frozenset[str]:
        """Return the names of the settings that the plan depends on."""
        return self.settings

    def reply(self, view: ClientView, question: str, argument: float) -> IntArray:
        """Return each client's integer, [K, 1]: for ``price``, the number of images that it would buy at a level."""
        if question == "plan":
            return super().reply(view, question, argument)[:, :1]
        return _wants(self, view).demand(argument)[:, None]

    def max_reply(
        self, samples: int, classes: int, settings: PolicySettings, question: str, argument: float
    ) -> Sequence[int]:
        """Return the largest integer that a client with ``samples`` real images may reply with."""
        if question == "plan":
            return super().max_reply(samples, classes, settings, question, argument)[:1]
        return ((classes - 1) * samples + int(max(0.0, -argument)),)

    def split_total(self, query: Query, classes: int, settings: PolicySettings) -> dict[int, Share]:
        """Return the number by which every client's FedEAS total exceeds its first part; nothing is bought yet."""
        whole, first = query("plan", settings.beta), query("plan", self._at_part(settings, 1).beta)
        later = {client: total - first[client][0] for client, (total,) in whole.items() if client in first}
        return {client: Share(extra=max(0, images)) for client, images in later.items()}

    def due(self, shares: Iterable[Share], round: int) -> int:
        """Return the number of images that clients with these shares have to buy before a round."""
        later, shares = len(self.parts) - 1, list(shares)
        whole = sum(share.extra for share in shares) * self.parts.index(self.part(round)) // max(1, later)
        return whole - sum(share.base for share in shares)

    def evaluates_before(self, round: int) -> bool:
        """Return whether clients evaluate the model before this round because a later one begins a part."""
        return any(first - self._evaluations < round < first for first in self.parts[1:])

    def held_out(self, round: int) -> float:
        """Return the fraction of its real images that a client does not train on in a round."""
        return self._held_out if round < self.parts[-1] else 0.0

    def score(self, measured: MeasuredImages, classes: int) -> FloatArray:
        """Return the score of each class, [C]: the mean of what is measured over the client's images of the class.

        Images that are held out count as much as all others together. A class counts as having one image more, with
        the largest mean of the client's classes, so one without images has that score.
        """
        values = self._value(measured)
        sums, numbers = np.zeros((2, 2, classes))
        for row, part in enumerate((measured.held_out, ~measured.held_out)):
            known = part & ~np.isnan(values)
            numbers[row] = np.bincount(measured.labels[known], minlength=classes)
            sums[row] = np.bincount(measured.labels[known], weights=values[known], minlength=classes)
        images = numbers.sum(axis=0)
        means = (sums / np.maximum(1, numbers)).sum(axis=0) / np.maximum(1, (numbers > 0).sum(axis=0))
        largest = means.max() if images.any() else 1.0
        return np.asarray((means * images + largest) / (images + 1), dtype=np.float64)

    def progress(self, view: ClientView) -> tuple[IntArray, FloatArray]:
        """Return the images planned when the clients last evaluated the model, and the scores, both [K, C]."""
        if not view.progress:
            first = replace(view, settings=self._at_part(view.settings, 1))
            return FEDEAS.plan(first), np.ones(view.counts.shape)
        return np.stack([p.planned for p in view.progress]), np.stack([p.scores for p in view.progress])


def _fraction(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"policy-args: {name} = {value}: must be a number from 0 to 1")
    return float(value)


class _Wants(NamedTuple):
    """What clients would buy at a level, one row per client; the price is level / (1 − level)."""

    held: IntArray
    """Real and planned images of each class."""
    reach: FloatArray
    """n̄_k^γ s_k^c: up to how many images each class is filled at a price of 1."""
    most: IntArray
    """Size of the client's largest class, up to which any class is filled, [K, 1]."""

    def missing(self, level: float) -> IntArray:
        """Return the images that fill each class up to what it is worth at a level."""
        worth = self.reach * max(0.0, 1 - level) / level if level > 0 else np.where(self.reach > 0, self.most, 0)
        missing: IntArray = np.floor(np.minimum(self.most, worth)).astype(np.int64) - self.held
        missing[missing < 0] = 0
        return missing

    def demand(self, level: float) -> IntArray:
        """Return the number of images that each client buys; a level −s means s more from every client."""
        more = np.where(self.most[:, 0] > 0, int(max(0.0, -level)), 0)
        return np.asarray(self.missing(level).sum(axis=1) + more, dtype=np.int64)

    def buy(self, k: int, number: int) -> IntArray:
        """Return ``number`` images of client k, [C]: what it buys at a price, the rest evenly over its classes."""
        alone = _Wants(self.held[[k]], self.reach[[k]], self.most[[k]])
        (bought,) = alone.missing(waterfill_level(number, alone.demand).level)
        order = np.argsort(-self.reach[k] / (self.held[k] + bought + 1), kind="stable")
        rest = divmod(number - int(bought.sum()), len(order))
        bought[order] += allocation.distribute(np.ones(len(order)), *rest)
        return np.asarray(bought)


@lru_cache(maxsize=1)
def _wants(policy: Adaptive, view: ClientView) -> _Wants:
    planned, scores = policy.progress(view)
    reach = view.counts.mean(axis=1, keepdims=True) ** view.settings.gamma * scores
    return _Wants(view.counts + planned, reach, view.counts.max(axis=1, keepdims=True))
