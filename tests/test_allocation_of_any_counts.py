"""Properties of all policies for arbitrary counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from label_counts import betas, tables, totals

from fedeas_flwr.allocation import (
    IntArray,
    budget,
    distribute,
    eligible_pairs,
    fedeas,
    gain,
    greedy,
    imbalance,
    missing_only,
    split_total,
    uniform,
)
from fedeas_flwr.policies.registry import POLICIES, REFERENCES, allocate, settings_of
from fedeas_flwr.waterfill import waterfill_count


@given(tables(), betas, st.floats(0, 2), st.booleans())
def test_policies_give_integers_and_spend_their_total(
    counts: IntArray, beta: float, gamma: float, strict_mean: bool
) -> None:
    assume(eligible_pairs(counts, absent_only=True).any())
    spent = fedeas(counts, beta, gamma, strict_mean).sum()
    for policy in (*POLICIES, *REFERENCES):
        assume(policy != "greedy" or spent < 2000)
        generated = allocate(counts, policy, beta=beta, gamma=gamma, strict_mean=strict_mean)
        assert generated.dtype == np.int64
        assert generated.shape == counts.shape
        assert generated.min() >= 0
        assert generated[counts.sum(axis=1) == 0].sum() == 0
        if "total" in settings_of(policy, total_given=False):
            assert generated.sum() == spent


@given(tables(), totals)
def test_matched_policies_spend_a_given_total(counts: IntArray, total: int) -> None:
    assume(eligible_pairs(counts, absent_only=True).any())
    for policy in (name for name in (*POLICIES, *REFERENCES) if "total" in settings_of(name, total_given=True)):
        assert allocate(counts, policy, beta=1.0, total=total).sum() == total


@given(tables(clients=4), betas, st.randoms(use_true_random=False))
def test_allocation_does_not_depend_on_client_order(counts: IntArray, beta: float, random: object) -> None:
    order = list(range(len(counts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for policy in ("none", "fedeas", "full-balance", "without-entropy", "linear"):
        one_way, other_way = (allocate(c, policy, beta=beta) for c in (counts, counts[order]))
        assert np.array_equal(one_way[order], other_way)
    np.testing.assert_allclose(imbalance(counts), imbalance(counts[order]), atol=1e-12)
    # A remainder depends on the order of clients; a level does not.
    assert np.array_equal(waterfill_count(counts, 0.1)[order], waterfill_count(counts[order], 0.1))


@given(tables(), betas, betas)
def test_larger_beta_never_reduces_an_allocation(counts: IntArray, one: float, other: float) -> None:
    small, large = sorted((one, other))
    for policy in ("fedeas", "without-entropy", "linear"):
        assert (allocate(counts, policy, beta=small) <= allocate(counts, policy, beta=large)).all()


@given(tables(), st.booleans())
def test_beta_zero_generates_nothing(counts: IntArray, strict_mean: bool) -> None:
    for policy in ("fedeas", "without-entropy", "linear", "uniform", "missing-only", "greedy", "waterfill"):
        assert allocate(counts, policy, beta=0, strict_mean=strict_mean).sum() == 0


@given(st.integers(1, 12), st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.floats(0, 1e6))
def test_balanced_clients_generate_nothing(classes: int, levels: list[int], beta: float) -> None:
    counts = np.repeat(np.array(levels)[:, None], classes, axis=1)
    for policy in (*POLICIES, *REFERENCES):
        assert allocate(counts, policy, beta=beta).sum() == 0
    assert imbalance(counts).heterogeneity == pytest.approx(0, abs=1e-12)


@given(tables(), betas)
def test_fedeas_fills_only_scarce_classes_and_only_to_the_budget(counts: IntArray, beta: float) -> None:
    generated, level = fedeas(counts, beta), budget(counts, beta)
    at_work = generated > 0
    assert (counts < counts.mean(axis=1, keepdims=True))[at_work].all()
    assert ((counts + generated) == level[:, None])[at_work].all()
    assert (fedeas(counts, beta, strict_mean=False) >= generated).all()


@given(tables(least_classes=2), st.booleans(), totals)
def test_client_computes_its_share_from_its_own_row(counts: IntArray, absent_only: bool, total: int) -> None:
    eligible = eligible_pairs(counts, absent_only)
    assume(eligible.any())
    distributed_by_hand = np.zeros_like(counts)
    for k, c in itertools.islice(itertools.cycle(np.argwhere(eligible)), total):
        distributed_by_hand[k, c] += 1
    parts = split_total(total, [int(eligible_pairs(row[None], absent_only).sum()) for row in counts])
    on_the_wire = [
        distribute(eligible_pairs(row[None], absent_only)[0], *part) for row, part in zip(counts, parts, strict=True)
    ]
    assert np.array_equal(on_the_wire, distributed_by_hand)
    assert np.array_equal((missing_only if absent_only else uniform)(counts, total), distributed_by_hand)


@settings(max_examples=50)
@given(tables(most=30) | tables(most=3), st.integers(0, 40))
def test_greedy_equals_its_definition(counts: IntArray, total: int) -> None:
    """Compute with integers, so that equal gains compare equal."""
    assume(counts.any())
    weights, current = counts.sum(axis=1), counts.copy()
    for _ in range(total):
        sizes = current.sum(axis=1).astype(object)
        gains = {
            (k, c): weights[k] * (sum(int(n) ** 2 for n in current[k]) - int(current[k, c]) * sizes[k]) / sizes[k] ** 3
            for k, c in np.ndindex(*counts.shape)
            if weights[k] > 0
        }
        current[max(gains, key=lambda pair: (gains[pair], -pair[0], -pair[1]))] += 1
    assert np.array_equal(greedy(counts, total), current - counts)


@given(tables(), st.data())
def test_imbalance_is_heterogeneity_plus_global_part(counts: IntArray, data: st.DataObject) -> None:
    generated = data.draw(arrays(np.int64, counts.shape, elements=st.integers(0, 50)))
    score, heterogeneity, global_part = imbalance(counts, generated)
    assert score == pytest.approx(heterogeneity + global_part, abs=1e-12)
    assert min(score, heterogeneity, global_part) >= 0


@given(tables(most=500, least_classes=2), st.data())
def test_gain_is_the_first_order_change_of_the_imbalance(counts: IntArray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(counts) - 1))
    c = data.draw(st.integers(0, counts.shape[1] - 1))
    assume(counts[k].sum() > 0)
    one_more = np.zeros_like(counts)
    one_more[k, c] = 1
    change = imbalance(counts).score - imbalance(counts, one_more).score
    share = counts[k].sum() / counts.sum()
    assert abs(change - gain(counts)[k, c]) <= 6 * share / counts[k].sum() ** 2 + 1e-12
