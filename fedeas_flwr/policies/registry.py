"""All policies by name, and what a plan of any of them goes through."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from inspect import isroutine

import numpy as np
import numpy.typing as npt

from fedeas_flwr import allocation
from fedeas_flwr.allocation import IntArray, checked_counts
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import is_import_path
from fedeas_flwr.policies.adaptive import Adaptive, InParts
from fedeas_flwr.policies.built_in import FEDEAS, FillToBudget, FullBalance, NoImages, Oversample
from fedeas_flwr.policies.interface import ClientView, Policy, PolicySettings, Share
from fedeas_flwr.policies.matched import EvenSplit, MatchedPolicy, Waterfill
from fedeas_flwr.waterfill import waterfill_level

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


def check_runnable(name: str) -> None:
    """Raise ValueError, with the allowed values, for a name of a policy that a federation cannot run."""
    if name in REFERENCES:
        raise ValueError(
            f"must be a policy that needs only a client's own label counts; {name} needs those of all clients, so "
            "only `fedeas plan` supports it. Use waterfill, which spends a total at least as well"
        )
    if name not in POLICIES and not is_import_path(name):
        raise ValueError(f"must be one of {', '.join(POLICIES)}, or package.module:name")


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
    policy: str | Policy | Callable[..., npt.ArrayLike],
    *,
    beta: float | None = None,
    gamma: float = 0.5,
    strict_mean: bool = True,
    total: int | None = None,
    round: int | None = None,
) -> IntArray:
    """Return the images to generate under a policy; a matched one spends ``total`` or, if None, FedEAS's total.

    ``policy`` is a name, a `Policy`, or a function of one client's label counts (own.py). ``oversample`` gives zeros,
    since it repeats a client's own images. A matched policy distributes one total over all clients, so it needs the
    counts of all of them; under the other policies, a client's row does not depend on others. ``strict_mean`` is the
    inverse of the run-config key ``printed-rule``. ``beta`` may be omitted if it is not used: with a total, and with
    ``none`` and ``full-balance``. Under a policy that plans in parts, the plan is that of ``round``, by default of the
    last part; under an adaptive one it is what clients would buy if all classes had the same score.
    """
    counts = checked_counts(counts)
    if round is not None and (not isinstance(round, int | np.integer) or round < 1):
        raise ValueError(f"round={round!r}: must be an integer of at least 1")
    if isroutine(policy):
        from fedeas_flwr.policies.own import FunctionPolicy

        policy = FunctionPolicy(policy)
    if not isinstance(policy, str | Policy):
        raise ValueError(f"policy={policy!r}: must be a name, a Policy or a function")
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
    return federation_plan(rule, counts, view.settings, max(rule.parts) if round is None else int(round))


def federation_plan(policy: Policy, counts: IntArray, settings: PolicySettings, round: int) -> IntArray:
    """Return the images that each of a federation's clients generates in a round, a matched total shared among them."""
    view = ClientView(counts, settings, round=policy.part(round))
    return images_to_generate(policy, replace(view, shares=split_over_rows(policy, view)))


def images_to_generate(policy: Policy, view: ClientView) -> IntArray:
    """Return the part of a plan that is generated: all of it, or nothing under a policy that repeats images."""
    planned = checked_plan(policy, view)
    return np.zeros_like(planned) if policy.repeats else planned


def checked_plan(policy: Policy, view: ClientView) -> IntArray:
    """Return a policy's plan, zeros for a client without images.

    Raise `ConfigError` if the plan is not one integer of at least 0 for each count.
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
