"""Policies: per-client plans, the server's bounds and shares; no other module branches on a policy's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from label_counts import betas, tables, totals

from fedeas_flwr.allocation import IntArray, eligible_pairs, fedeas, missing_only, uniform
from fedeas_flwr.config import parse_config
from fedeas_flwr.policies.adaptive import Adaptive
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView, PolicySettings, Share
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import POLICIES, REFERENCES, allocate, images_to_generate
from fedeas_flwr.waterfill import waterfill

PACKAGE = Path(__file__).parents[1] / "fedeas_flwr"
MATCHED = [p for p in POLICIES.values() if isinstance(p, MatchedPolicy) and not isinstance(p, Adaptive)]

policy_settings = st.builds(
    PolicySettings, beta=betas, gamma=st.floats(0, 2), strict_mean=st.booleans(), total=st.none() | totals
)


def shares_of(policy: MatchedPolicy, counts: IntArray, settings: PolicySettings) -> dict[int, Share]:
    """Split a total as the server does, when each client knows only its own row; return the shares."""
    views = {client: ClientView(row[None], settings) for client, row in enumerate(counts)}

    def ask(question: str, at: float) -> dict[int, list[int]]:
        found = {client: policy.reply(view, question, at)[0].tolist() for client, view in views.items()}
        assert all(len(numbers) == len(policy.questions[question]) for numbers in found.values())
        return found

    return policy.split_total(ask, counts.shape[1], settings)


@given(tables(), policy_settings)
def test_per_client_plans_equal_the_federations_plan(counts: IntArray, settings: PolicySettings) -> None:
    assume(eligible_pairs(counts, absent_only=True).any())
    for name, policy in POLICIES.items():
        shares = shares_of(policy, counts, settings) if isinstance(policy, MatchedPolicy) else {}
        views = [ClientView(row[None], settings, [shares.get(k, EMPTY_SHARE)]) for k, row in enumerate(counts)]
        planned = np.concatenate([images_to_generate(policy, view) for view in views])
        keys = {"beta": settings.beta, "gamma": settings.gamma, "strict_mean": settings.strict_mean}
        total = settings.total if "total" in policy.settings else None
        assert np.array_equal(planned, allocate(counts, name, **keys, total=total, round=1))


def test_client_with_all_classes_may_plan_its_whole_share_and_no_more() -> None:
    policy, settings, share = POLICIES["uniform"], PolicySettings(6.0), Share(base=3, extra=1)
    assert policy.plan(ClientView(np.array([[9, 1, 1, 1]]), settings, [share])).sum() == 13
    assert policy.max_total(12, 4, settings, share) == 13


@pytest.mark.parametrize("policy", MATCHED)
def test_matched_policy_with_a_total_generates_without_beta(policy: MatchedPolicy) -> None:
    assert policy.generates(PolicySettings(0.0, total=50))
    assert not policy.generates(PolicySettings(0.0)) and not policy.generates(PolicySettings(0.0, total=0))


def test_plan_of_round_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^round=0: must be an integer of at least 1$"):
        allocate([[3, 0]], "fedeas-in-parts", beta=6.0, round=0)


@given(tables(), policy_settings)
def test_max_total_and_max_reply_are_never_exceeded(counts: IntArray, settings: PolicySettings) -> None:
    assume(eligible_pairs(counts, absent_only=True).any())
    classes, asked = counts.shape[1], [("plan", settings.beta), ("waterfill", 0.1), ("waterfill", -2.5)]
    for policy in POLICIES.values():
        shares = shares_of(policy, counts, settings) if isinstance(policy, MatchedPolicy) else {}
        for k, row in enumerate(counts):
            share, samples = shares.get(k, EMPTY_SHARE), int(row.sum())
            view = ClientView(row[None], settings, [share])
            most = policy.max_total(samples, classes, settings, share)
            images = int(images_to_generate(policy, view).sum())
            assert images <= most and (policy.generates(settings) or images == 0)
            if isinstance(policy, MatchedPolicy):
                for question, at in asked:
                    if question in policy.questions:
                        bound = policy.max_reply(samples, classes, settings, question, at)
                        assert (policy.reply(view, question, at)[0] <= bound).all()


@given(tables(), policy_settings)
def test_replies_and_shares_spend_the_matched_total(counts: IntArray, settings: PolicySettings) -> None:
    assume(eligible_pairs(counts, absent_only=True).any())
    rules = {"uniform": uniform, "missing-only": missing_only, "waterfill": waterfill}
    total = settings.total
    if total is None:
        total = int(fedeas(counts, settings.beta, settings.gamma, settings.strict_mean).sum())
    assert [policy.name for policy in MATCHED] == list(rules)
    for policy in MATCHED:
        shares = shares_of(policy, counts, settings)
        planned = policy.plan(ClientView(counts, settings, list(shares.values())))
        assert planned.sum() == total
        assert np.array_equal(planned, rules[policy.name](counts, total))


@pytest.mark.parametrize("policy", MATCHED, ids=lambda policy: policy.name)
def test_client_without_replies_gets_no_share(policy: MatchedPolicy) -> None:
    counts, settings = np.array([[9, 0, 0], [5, 1, 0], [0, 0, 7]]), PolicySettings(0.0, total=30)

    def ask(question: str, at: float) -> dict[int, list[int]]:
        rows = policy.reply(ClientView(counts, settings), question, at).tolist()
        left_out = 1 if question == "plan" else 0  # a client rejected once stays rejected
        return {client: row for client, row in enumerate(rows) if client not in (1, left_out)}

    shares = policy.split_total(ask, 3, settings)
    assert list(shares) == [0, 2]
    if list(policy.questions) == ["plan"]:
        spent = [policy.plan(ClientView(counts[[k]], settings, [shares[k]])).sum() for k in shares]
        assert sum(spent) == 30
    assert policy.plan(ClientView(counts[[1]], settings, [EMPTY_SHARE])).sum() == 0


def test_waterfill_adds_the_extra_samples_of_a_share() -> None:
    """Two equal clients stop at one level, so the odd sample of a total is an extra one."""
    counts, settings, policy = np.array([[4, 0], [4, 0]]), PolicySettings(0.0, total=3), POLICIES["waterfill"]
    assert isinstance(policy, MatchedPolicy)
    shares = list(shares_of(policy, counts, settings).values())
    assert [share.extra for share in shares] == [1, 0]
    assert policy.plan(ClientView(counts, settings, shares)).tolist() == [[0, 2], [0, 1]]
    assert [policy.max_total(4, 2, settings, share) for share in shares] == [4 + 1, 4]


def test_one_policy_is_the_baseline_and_one_repeats_images() -> None:
    assert [name for name, policy in POLICIES.items() if policy.is_baseline] == ["none"]
    assert [name for name, policy in POLICIES.items() if policy.repeats] == ["oversample"]
    assert parse_config({"total": 7, "policy": "uniform", "printed-rule": True}).policy_settings == PolicySettings(
        6.0, 0.5, False, 7
    )


# ------------------------------------------------------------------------------------- who may name a policy

AMBIGUOUS = {"none", "fedeas", "linear", "adaptive"}
"""Also a value of other keys, the command, a schedule of noise, a kind of clipping."""
MAY_NAME = {"config.py", "commands/quickstart.py", "planning/curves.py", "report/style.py", "report/plan_figures.py"}
"""Defaults, the quickstart, curves by name and their labels and colours; all of reproduce/: the paper's tables."""


def names_in(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the literals that are a policy's name, except names of random streams."""
    for parent in ast.walk(tree):
        if not (isinstance(parent, ast.Call) and ast.unparse(parent.func) == "stream"):
            children = ast.iter_child_nodes(parent)
            yield from (c for c in children if isinstance(c, ast.Constant) and c.value in {*POLICIES, *REFERENCES})


def decides(node: ast.AST) -> bool:
    """Return whether a node compares with a policy's name or is a table with one as key."""
    if isinstance(node, ast.Compare) and "policy" in ast.unparse(node):
        return any(True for _ in names_in(node))
    return isinstance(node, ast.Dict) and any(key in names_in(node) for key in node.keys)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_policies_module_branches_on_policy_names(path: Path) -> None:
    place, tree = path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())
    if place.startswith(("policies/", "reproduce/")):
        return
    named = {literal.lineno for literal in names_in(tree) if literal.value not in AMBIGUOUS}
    decided = [node for node in ast.walk(tree) if decides(node)]
    if place in MAY_NAME:
        decided = [node for node in decided if isinstance(node, ast.Compare)]
    assert place in MAY_NAME or not named, f"{place} names policies in lines {sorted(named)}"
    assert not decided, f"{place}:{decided[0].lineno} decides by a policy's name"  # type: ignore[attr-defined]
