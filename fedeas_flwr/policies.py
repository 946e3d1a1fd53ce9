"""Allocation policies (``policy=``). Only this module makes decisions by a policy's name.

A policy is one object. `fedeas plan`, a simulation, a SuperNode, the cost estimate and the server's checks all call it:

    any policy     ``plan``         client: how many images of each class it adds, computed from its own counts
                   ``max_total``    server: the largest total that a client may report
    matched ones   ``reply``        client: the integers that it sends to the server, never its counts
                   ``split_total``  server: each client's share of one total, computed from these integers
    adaptive ones  ``score``        client: how much an image of each class would help, by the global model's errors
                   ``due``          server: the number of images that the clients buy before a round

Each row of a view is one client. On a node, a view has one row: the client's own. The plan of a whole federation makes
the same calls with one row per client. A policy treats rows independently, so plan and run cannot disagree.

To add a policy, write a class here and add it to `POLICIES`. A policy of a user's own package has an import path in
place of a name; own_policies.py loads it. This module needs NumPy only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedeas_flwr import allocation
from fedeas_flwr.allocation import MAX_COUNT, BoolArray, FloatArray, IntArray, checked_counts
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import is_import_path
from fedeas_flwr.waterfill import waterfill_count, waterfill_counter, waterfill_fill, waterfill_level


@dataclass(frozen=True)
class PolicySettings:
    """Settings of a plan besides counts; ``strict_mean`` is the inverse of the key ``printed-rule``."""

    beta: float
    gamma: float = 0.5
    strict_mean: bool = True
    total: int | None = None
    """Number of images that a matched policy spends; None means FedEAS's total at β."""


@dataclass(frozen=True)
class Share:
    """A client's share of a matched total: (base, extra) of an even split, or (level, extra) of waterfill.

    Under an adaptive policy, base is the number of images that the client has bought so far, and extra the number by
    which FedEAS's plan exceeds the first part.
    """

    base: int = 0
    extra: int = 0
    level: float = 0.0


EMPTY_SHARE = Share(level=2.0)
"""A share without images under any policy: waterfill's level is a marginal gain, which never exceeds 1."""


@dataclass(frozen=True, eq=False)
class Progress:
    """A client's plan under an adaptive policy when it last evaluated the global model, and what it found."""

    bought: int
    """Number of images that it had bought by then."""
    planned: IntArray
    """Number of images of each class that its plan had by then, [C]."""
    scores: FloatArray
    """How much one more image of each class would help, at least 0, [C]."""


@dataclass(frozen=True, eq=False)
class ClientView:
    """Input of a policy: clients' label counts, the settings and, under a matched policy, the clients' shares."""

    counts: IntArray
    """Label counts, [K, C]; one row on a node."""
    settings: PolicySettings
    shares: Sequence[Share] = ()
    """One share per row, for the plan of a matched policy."""
    round: int = 1
    """First round of the current part of the plan, one of `Policy.parts`."""
    progress: Sequence[Progress] = ()
    """One per row, for an adaptive policy after the clients have evaluated the global model."""


Query = Callable[[str, float], Mapping[int, Sequence[int]]]
"""Sends a question and its argument, a β or a level, to all clients; returns each client's integers, by client id."""


@runtime_checkable
class Policy(Protocol):
    """Decides how many images of each class a client adds to its own. Pure and deterministic."""

    name: str
    settings: frozenset[str] = frozenset()
    """Fields of `PolicySettings` that the plan depends on."""
    repeats: bool = False
    """Whether the plan counts copies of the client's own images; nothing is generated then."""
    is_baseline: bool = False
    """Whether clients train on their own images only; reports compare other policies with this one."""
    parts: Sequence[int] = (1,)
    """Rounds, in ascending order from 1, in which a part of the plan begins. A client plans in its first round of each
    part; the plan has all images that it then uses, those of earlier parts included."""

    def plan(self, view: ClientView) -> IntArray:
        """Return the images of each class that each client adds, in the shape of the counts."""
        ...

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return the largest number of generated images that a client with ``samples`` real images may report.

        By default, as many as make the counts of a client equal that has a single class.
        """
        return (classes - 1) * samples

    def generates(self, settings: PolicySettings) -> bool:
        """Return whether any client can be asked to generate images."""
        return True

    def budget(self, view: ClientView) -> IntArray | None:
        """Return each client's budget b_k, the count up to which it fills its classes; None if the policy has none."""
        return None

    def settings_used(self, total_given: bool) -> frozenset[str]:
        """Return the names of the settings that the plan depends on, given whether there is a ``total``."""
        return self.settings

    def part(self, round: int) -> int:
        """Return the first round of the part of the plan that a round belongs to."""
        return max(first for first in self.parts if first <= round)


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


# ------------------------------------------------------------------------- policies that need a client's counts only


class NoImages(Policy):
    """Add nothing."""

    name = "none"
    is_baseline = True

    def plan(self, view: ClientView) -> IntArray:
        """Return zeros."""
        return allocation.none(view.counts)

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return 0."""
        return 0

    def generates(self, settings: PolicySettings) -> bool:
        """Return False."""
        return False


class FillToBudget(Policy):
    """Fill every client's scarce classes up to its b_k: FedEAS, and the paper's ablations of b_k."""

    def __init__(self, name: str, gamma: float | None = None, use_entropy: bool = True) -> None:
        self.name, self._own_gamma, self._use_entropy = name, gamma, use_entropy
        self.settings = frozenset({"beta", "strict_mean"} | ({"gamma"} if gamma is None else set()))

    def plan(self, view: ClientView) -> IntArray:
        """Return the samples that fill the scarce classes."""
        return allocation.fill_to(view.counts, self.budget(view), view.settings.strict_mean)

    def budget(self, view: ClientView) -> IntArray:
        """Return b_k."""
        return allocation.budget(view.counts, view.settings.beta, self._gamma(view.settings), self._use_entropy)

    # Eq. (cap): b_k = ⌊β n̄_k^γ (1 − H̃_k)⌋ is largest where all samples are of one class, H̃_k = 0
    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return C times the largest b_k that any label counts with a sum of ``samples`` can have."""
        budget = settings.beta * (samples / classes) ** self._gamma(settings)
        return classes * int(min(MAX_COUNT, budget * (1 + 1e-9)))

    def generates(self, settings: PolicySettings) -> bool:
        """Return whether budgets can be above 0."""
        return settings.beta > 0

    def _gamma(self, settings: PolicySettings) -> float:
        return settings.gamma if self._own_gamma is None else self._own_gamma


class Oversample(Policy):
    """Repeat a client's own images up to FedEAS's budget: the alternative without a generator."""

    name = "oversample"
    settings = frozenset({"beta", "gamma", "strict_mean"})
    repeats = True

    def plan(self, view: ClientView) -> IntArray:
        """Return the number of copies per class; 0 for absent classes."""
        settings = view.settings
        return allocation.oversample(view.counts, settings.beta, settings.gamma, settings.strict_mean)

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return 0: copies are not generated."""
        return 0

    def generates(self, settings: PolicySettings) -> bool:
        """Return False."""
        return False

    def budget(self, view: ClientView) -> IntArray:
        """Return FedEAS's b_k."""
        return FEDEAS.budget(view)


class FullBalance(Policy):
    """Fill every class up to the client's largest class."""

    name = "full-balance"

    def plan(self, view: ClientView) -> IntArray:
        """Return the samples that make the counts equal."""
        return allocation.full_balance(view.counts)


# ------------------------------------------------------------------------------------------------- matched policies


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


# ------------------------------------------------------------------------------------------ plans in several parts


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
class Measured:
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
    together spend the part, as that of waterfill: it hears how many images a client would buy at a price, never of
    which classes.

    Parameters
    ----------
    name
        Name of the policy.
    value
        What is measured: maps a client's images to one number of at least 0 each, NaN if unknown. The score of a class
        is its mean.
    evaluations
        Number of rounds in a row, up to the first of a part, in which clients evaluate the model.
    """

    questions: Mapping[str, Sequence[str]] = {"plan": ("total",), "price": ("count",)}

    def __init__(self, name: str, value: Callable[[Measured], FloatArray], evaluations: int = 1) -> None:
        super().__init__(name)
        self._value, self._evaluations, self._held_out = value, evaluations, 0.0

    def with_arguments(self, rounds: object = _ROUNDS, first: object = _FIRST, held_out: object = 0.0) -> Self:
        """Return the policy with the arguments of the key ``policy-args``; see `InParts`.

        ``held_out`` is the fraction of its real images that a client does not train on before the last part.
        """
        made = super().with_arguments(rounds, first)
        made._held_out = _fraction("held_out", held_out) if made.parts[1:] else 0.0
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

    def generates(self, settings: PolicySettings) -> bool:
        """Return whether budgets can be above 0."""
        return FEDEAS.generates(settings)

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

    def score(self, measured: Measured, classes: int) -> FloatArray:
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


# ---------------------------------------------------------------------------------------------------------- by name

FEDEAS = FillToBudget("fedeas")
POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        NoImages(),
        FEDEAS,
        EvenSplit("uniform"),
        EvenSplit("missing-only", absent_only=True),
        FullBalance(),
        Waterfill(),
        FillToBudget("without-entropy", gamma=0.5, use_entropy=False),
        FillToBudget("linear", gamma=1.0),
        Oversample(),
        InParts("fedeas-in-parts"),
        Adaptive("adaptive", lambda images: images.loss),
        Adaptive("adaptive-accuracy", lambda images: images.wrong.astype(np.float64)),
        Adaptive("adaptive-disagreement", lambda images: images.changed, evaluations=2),
        Adaptive("adaptive-agreement", lambda images: images.loss * images.agreement()),
    )
}
AT_ONCE = [name for name, policy in POLICIES.items() if not isinstance(policy, InParts)]
"""Names of the policies that plan once, as those of another Flower app must (`with_fedeas`)."""
REFERENCES: dict[str, Callable[[IntArray, int], IntArray]] = {"greedy": allocation.greedy}
"""Rules that need the counts of all clients and a total: for `fedeas plan` and the figures, not for runs."""


_ALLOWED = f"{', '.join(POLICIES)}, or package.module:name"


def check_runnable(name: str) -> None:
    """Raise ValueError, with the allowed values, for a name of a policy that a federation cannot run."""
    if name in REFERENCES:
        raise ValueError(
            f"must be a policy that needs only a client's own label counts; {name} needs those of all clients, so "
            "only `fedeas plan` supports it. Use waterfill, which spends a total at least as well"
        )
    if name not in POLICIES and not is_import_path(name):
        raise ValueError(f"must be one of {_ALLOWED}")


def settings_of(policy: str | Policy, total_given: bool) -> frozenset[str]:
    """Return the names of the settings that a policy uses; it ignores all others.

    A matched policy uses β, γ and the rule only to compute FedEAS's total. The two ablations have a fixed γ. A policy
    given by its import path counts as using all, so that a record can be read where its package is not installed.
    """
    if not isinstance(policy, str):
        return policy.settings_used(total_given)
    if policy in POLICIES:
        return POLICIES[policy].settings_used(total_given)
    if policy in REFERENCES:
        return frozenset({"total"}) if total_given else MatchedPolicy.settings
    if is_import_path(policy):
        return MatchedPolicy.settings
    near = difflib.get_close_matches(policy.lower(), [*POLICIES, *REFERENCES], n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"policy={policy!r}: must be one of {', '.join([*POLICIES, *REFERENCES])}{hint}")


def allocate(
    counts: npt.ArrayLike,
    policy: str | Policy,
    *,
    beta: float | None = None,
    gamma: float = 0.5,
    strict_mean: bool = True,
    total: int | None = None,
    round: int | None = None,
) -> IntArray:
    """Return the images to generate under a policy; a matched one spends ``total`` or, if None, FedEAS's total.

    ``policy`` is a name or a `Policy`, such as one of your own (own_policies.py). ``oversample`` gives zeros, since it
    repeats a client's own images. A matched policy distributes one total over all clients, so it needs the counts of
    all of them; under the other policies, a client's row does not depend on others. ``strict_mean`` is the inverse of
    the run-config key ``printed-rule``. ``beta`` may be omitted if it is not used: with a total, and with ``none`` and
    ``full-balance``. Under a policy that plans in parts, the plan is that of ``round``, by default of the last part;
    under an adaptive one it is what clients would buy if all classes had the same score.
    """
    counts = checked_counts(counts)
    if isinstance(policy, str) and policy not in REFERENCES and policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: must be one of {', '.join([*POLICIES, *REFERENCES])}, or a policy")
    rule = POLICIES.get(policy, policy) if isinstance(policy, str) else policy
    names = settings_of(rule, total is not None)
    shown = policy if isinstance(policy, str) else policy.name
    if total is not None and "total" not in names:
        raise ValueError(f"total={total!r}: policy {shown!r} sets its own total; remove the argument")
    if "beta" not in names:
        beta = 0.0
    elif beta is None:
        raise ValueError(f"beta=None: policy {shown!r} needs a number{', or a total' if 'total' in names else ''}")
    view = ClientView(counts, PolicySettings(beta, gamma, strict_mean, total))
    if isinstance(rule, str):
        return REFERENCES[rule](counts, int(FEDEAS.plan(view).sum()) if total is None else total)
    view = replace(view, round=max(rule.parts) if round is None else rule.part(round))
    return images_to_generate(rule, replace(view, shares=split_over_rows(rule, view)))


def images_to_generate(policy: Policy, view: ClientView) -> IntArray:
    """Return the part of a plan that is generated: all of it, or nothing under a policy that repeats images."""
    planned = checked_plan(policy, view)
    return np.zeros_like(planned) if policy.repeats else planned


def checked_plan(policy: Policy, view: ClientView) -> IntArray:
    """Return a policy's plan, zeros for a client without images.

    Raises
    ------
    ConfigError
        If the plan is not one integer of at least 0 for each count.
    """
    planned = policy.plan(view)
    try:
        checked = checked_counts(planned, "plan")
    except ValueError as error:
        raise ConfigError(f"policy: {policy.name!r}: {error}") from None
    if checked.shape != view.counts.shape:
        raise ConfigError(f"policy: {policy.name!r}: plan has shape {checked.shape}: must be {view.counts.shape}")
    return np.where(view.counts.any(axis=1, keepdims=True), checked, 0)


def answer_question(policy: MatchedPolicy, view: ClientView, question: str, argument: float) -> dict[str, int]:
    """Return a client's integers by name, in reply to one of the policy's questions; the view has the client's row."""
    (values,) = policy.reply(view, question, argument).tolist()
    return dict(zip(policy.questions[question], values, strict=True))


def split_over_rows(policy: Policy, view: ClientView) -> list[Share]:
    """Split a matched total over all rows, as the server splits it over clients by the round of the view."""
    if not isinstance(policy, MatchedPolicy):
        return []

    def query(question: str, argument: float) -> dict[int, list[int]]:
        return dict(enumerate(policy.reply(view, question, argument).tolist()))

    shares = list(policy.split_total(query, view.counts.shape[1], view.settings).values())
    if isinstance(policy, Adaptive) and (due := policy.due(shares, view.round)):
        bought = waterfill_level(due, lambda level: policy.reply(view, "price", level)[:, 0]).samples
        shares = [replace(share, base=int(images)) for share, images in zip(shares, bought, strict=True)]
    return shares
