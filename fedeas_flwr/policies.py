"""Allocation policies (``policy=``). Only this module makes decisions by a policy's name.

A policy is one object. `fedeas plan`, a simulation, a SuperNode, the cost estimate and the server's checks all call it:

    any policy     ``plan``         client: how many images of each class it adds, computed from its own counts
                   ``max_total``    server: the largest total that a client may report
    matched ones   ``reply``        client: the integers that it sends to the server, never its counts
                   ``split_total``  server: each client's share of one total, computed from these integers

Each row of a view is one client. On a node, a view has one row: the client's own. The plan of a whole federation makes
the same calls with one row per client. A policy treats rows independently, so plan and run cannot disagree.

To add a policy, write a class here and add it to `POLICIES`. A policy of a user's own package has an import path in
place of a name; own_policies.py loads it. This module needs NumPy only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedeas_flwr import allocation
from fedeas_flwr.allocation import MAX_COUNT, IntArray, checked_counts
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
    """A client's share of a matched total: (base, extra) of an even split, or (level, extra) of waterfill."""

    base: int = 0
    extra: int = 0
    level: float = 0.0


EMPTY_SHARE = Share(level=2.0)
"""A share without images under any policy: waterfill's level is a marginal gain, which never exceeds 1."""


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
    )
}
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
    ``full-balance``. Under a policy that plans in parts, the plan is that of ``round``, by default of the last part.
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
    first = max(rule.parts) if round is None else rule.part(round)
    return images_to_generate(rule, replace(view, shares=split_over_rows(rule, view), round=first))


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
    """Split a matched total over all rows, as the server splits it over clients."""
    if not isinstance(policy, MatchedPolicy):
        return []

    def query(question: str, argument: float) -> dict[int, list[int]]:
        return dict(enumerate(policy.reply(view, question, argument).tolist()))

    return list(policy.split_total(query, view.counts.shape[1], view.settings).values())
