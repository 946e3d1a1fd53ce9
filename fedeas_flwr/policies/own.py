"""Policies of a user's own package: ``policy = "package.module:name"``, with the arguments of ``policy-args``.

The name may be that of

    a function      of one client's label counts, an array of C integers: it returns the number of images to generate
                    of each class. With a parameter ``beta`` or ``gamma`` it gets the run's β or γ
    ``@matched``    before such a function: its plans are scaled so that all clients together spend FedEAS's total
    a `Policy`      an object, or a class, which is called with the arguments

docs/own-policy.md has an example. This module needs NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from inspect import isclass, isfunction, signature
from typing import Any

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import IntArray, scale_to
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import accepted_arguments, call_with, describe_error, import_object, parse_arguments
from fedeas_flwr.policies.adaptive import InParts
from fedeas_flwr.policies.built_in import FEDEAS
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView, Policy, PolicySettings, Query, Share
from fedeas_flwr.policies.matched import MatchedPolicy, matched_total
from fedeas_flwr.policies.registry import POLICIES, checked_plan, split_over_rows

Rule = Callable[..., npt.ArrayLike]
"""Label counts of one client, [C] → the number of images of each class to generate."""
_SETTINGS = frozenset({"beta", "gamma"})


class FunctionPolicy(Policy):
    """Generate the images that a function returns for a client's label counts."""

    def __init__(self, rule: Rule, name: str = "", arguments: Mapping[str, Any] | None = None) -> None:
        self.rule, self.name, self.arguments = rule, name or getattr(rule, "__name__", repr(rule)), arguments or {}
        self.settings = _SETTINGS & (accepted_arguments(rule) or frozenset())

    def plan(self, view: ClientView) -> IntArray:
        """Return the function's result for every row; zeros for a client without images."""
        given = {key: getattr(view.settings, key) for key in self.settings} | {**self.arguments}
        rows = [np.asarray(self._call(row.copy(), given) if row.any() else row) for row in view.counts]
        for row in rows:
            if row.shape != view.counts.shape[1:]:
                found = f"shape {row.shape}" if row.shape else repr(row.item())
                raise ConfigError(f"policy: {self.name!r} returned {found}: must be {view.counts.shape[1:]}")
        return np.stack(rows)  # `checked_plan` checks the values

    def _call(self, counts: IntArray, given: Mapping[str, Any]) -> npt.ArrayLike:
        try:
            return self.rule(counts, **given)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"policy: {self.name!r} raised {describe_error(error)}") from error


class ScaledPolicy(MatchedPolicy):
    """Scale another policy's plans so that all clients together spend a matched total.

    A client sends the server its FedEAS total and the sum of its unscaled plan, never the plan itself.
    """

    questions: Mapping[str, Sequence[str]] = {"plan": ("total", "unscaled")}

    def __init__(self, unscaled: Policy) -> None:
        self.unscaled, self.name = unscaled, unscaled.name
        self.__wrapped__ = getattr(unscaled, "rule", unscaled)  # as `functools.wraps` has it, for `source_hash`

    def settings_used(self, total_given: bool) -> frozenset[str]:
        """Return the names of the settings that the plan depends on."""
        return super().settings_used(total_given) | self.unscaled.settings

    def plan(self, view: ClientView) -> IntArray:
        """Return every client's plan, scaled to its share."""
        rows = checked_plan(self.unscaled, view).tolist()
        parts = [share.base for share in view.shares]
        scaled = [scale_to(row, part) if part else [0] * len(row) for row, part in zip(rows, parts, strict=True)]
        return np.array(scaled, dtype=np.int64)

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return the client's share."""
        return share.base

    def reply(self, view: ClientView, question: str, argument: float) -> IntArray:
        """Return each client's integers, [K, 2]: its FedEAS total at a β, and the sum of its unscaled plan."""
        view = replace(view, settings=replace(view.settings, beta=argument))
        return np.stack([checked_plan(policy, view).sum(axis=1) for policy in (FEDEAS, self.unscaled)], axis=1)

    def max_reply(
        self, samples: int, classes: int, settings: PolicySettings, question: str, argument: float
    ) -> Sequence[int]:
        """Return the largest integers that a client with ``samples`` real images may reply with."""
        settings = replace(settings, beta=argument)
        return [policy.max_total(samples, classes, settings, EMPTY_SHARE) for policy in (FEDEAS, self.unscaled)]

    def split_total(self, query: Query, classes: int, settings: PolicySettings) -> dict[int, Share]:
        """Return every client's share, in proportion to the sum of its unscaled plan."""
        replies = query("plan", settings.beta)
        total, unscaled = matched_total(replies, settings), [number for _, number in replies.values()]
        if not total:
            return dict.fromkeys(replies, Share())
        if not any(unscaled):
            raise ConfigError(f"policy: {self.name!r} plans no image for any client, so {total} cannot be spent")
        return {client: Share(base=part) for client, part in zip(replies, scale_to(unscaled, total), strict=True)}


def matched(rule: Rule) -> ScaledPolicy:
    """Return a policy that spends FedEAS's total, or the key ``total``, in the proportions that a function returns."""
    return ScaledPolicy(FunctionPolicy(rule))


# ------------------------------------------------------------------------------------------------ by import path


@lru_cache
def find_policy(name: str, arguments: str = "") -> Policy:
    """Return the policy of a name or an import path; ``arguments`` are those of the key ``policy-args``.

    Named policies that take no arguments ignore them, so that a sweep can have both kinds.
    """
    found = POLICIES.get(name)
    if isinstance(found, InParts):
        made: Policy = call_with(found.with_arguments, name, "policy", parse_arguments(arguments, "policy-args"))
        return made
    return load_policy(name, arguments) if found is None else found


def load_policy(path: str, arguments: str = "") -> Policy:
    """Return the policy at an import path; raise `ConfigError` if there is none, or it does not take the arguments."""
    found, given = import_object(path, "policy"), parse_arguments(arguments, "policy-args")
    if isfunction(found):
        return _from_function(found, path, given)
    if isinstance(found, ScaledPolicy) and isinstance(found.unscaled, FunctionPolicy):
        return ScaledPolicy(_from_function(found.unscaled.rule, path, given))
    if isclass(found):
        found = call_with(found, path, "policy", given)
    elif given:
        raise ConfigError(f"policy-args = {arguments!r}: {path!r} is an object and takes no arguments")
    if not isinstance(found, Policy):
        kind = f"is of type {type(found).__name__}"
        raise ConfigError(f"policy: {path!r} {kind}: must be a function of a client's counts, or a Policy")
    if not found.name:
        found.name = path
    return found


def _from_function(rule: Rule, path: str, given: Mapping[str, Any]) -> FunctionPolicy:
    """Return a function's policy after checking that it takes the arguments."""
    parameters = list(signature(rule).parameters)
    policy, names = FunctionPolicy(rule, path, given), accepted_arguments(rule)
    if not parameters:
        raise ConfigError(f"policy: {path!r} takes no argument: must take a client's label counts")
    allowed = None if names is None else sorted(names - _SETTINGS - {parameters[0]})
    for name in given:
        if allowed is not None and name not in allowed:
            raise ConfigError(f"policy-args: {path!r} has no argument {name!r}; it has {', '.join(allowed) or 'none'}")
    return policy


def check_policy(policy: Policy, counts: IntArray, settings: PolicySettings) -> None:
    """Check a policy of a user's own on label counts, before a run.

    Raise `ConfigError` if its plan is not made of integers of at least 0, differs between two calls or depends on other
    clients' counts, exceeds its own ``max_total`` or misses its total, or if a ``total`` is given that it does not
    take.
    """
    try:
        _check_plans(policy, counts, settings)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"policy: {policy.name!r} raised {describe_error(error)}") from error


def _check_plans(policy: Policy, counts: IntArray, settings: PolicySettings) -> None:
    """Check every part of a policy's plan; see `check_policy`."""
    name, matches = policy.name, isinstance(policy, MatchedPolicy)
    if settings.total is not None and not matches:
        raise ConfigError(f"total = {settings.total}: policy {name!r} sets its own; write @matched before the function")
    if not policy.parts or policy.parts[0] != 1 or list(policy.parts) != sorted({*policy.parts}):
        raise ConfigError(f"policy: {name!r} has parts = {policy.parts!r}: must be ascending rounds from 1")
    for first in policy.parts:
        view = ClientView(counts, settings, round=first)
        view = replace(view, shares=split_over_rows(policy, view))
        planned, again = (checked_plan(policy, view) for _ in range(2))
        rows = [
            checked_plan(policy, replace(view, counts=counts[k : k + 1], shares=view.shares[k : k + 1]))[0]
            for k in range(len(counts))
        ]
        if not np.array_equal(planned, again):
            raise ConfigError(f"policy: {name!r} returned another plan when called again: must be deterministic")
        if not np.array_equal(planned, rows):
            raise ConfigError(
                f"policy: {name!r} plans a client's images by other clients' counts: must use its own only"
            )
        for k, (row, samples) in enumerate(zip(planned.sum(axis=1), counts.sum(axis=1), strict=True)):
            share = view.shares[k] if matches else EMPTY_SHARE
            limit = policy.max_total(int(samples), counts.shape[1], settings, share)
            if row > limit and not policy.repeats:
                raise ConfigError(
                    f"policy: {name!r} plans {row} images for a client with {samples} samples, "
                    f"but its max_total is {limit}"
                )
    total = FEDEAS.plan(view).sum() if settings.total is None else settings.total
    if matches and planned.sum() != total:
        raise ConfigError(f"policy: {name!r} plans {planned.sum()} images in total: must be {total}")


def probe_counts(classes: int) -> IntArray:
    """Return label counts of a few different clients, to check a policy where the real ones are not known."""
    ramp = np.arange(classes)
    rows = [np.where(ramp == 0, 40, 0), np.where(ramp < 2, 250, 0), ramp, 3 * ramp[::-1] ** 2, np.full(classes, 30)]
    return np.array(rows, dtype=np.int64)
