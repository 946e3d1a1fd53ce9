"""Waterfill: results by hand, and no other allocation of the same total is better."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from label_counts import paper_counts, tables, totals

from fedeas_flwr.allocation import (
    MAX_COUNT,
    IntArray,
    eligible_pairs,
    fedeas,
    full_balance,
    greedy,
    imbalance,
    removed,
    uniform,
)
from fedeas_flwr.waterfill import waterfill, waterfill_count, waterfill_fill, waterfill_level


@pytest.mark.parametrize("total", [100, 13_437, 200_000])
@pytest.mark.parametrize("setting", [("cifar10", 20, 0.1), ("cifar100", 20, 0.1)])
def test_waterfill_is_no_worse_than_greedy(setting: tuple[str, int, float], total: int) -> None:
    counts = paper_counts(*setting)
    by_waterfill = waterfill(counts, total)
    assert by_waterfill.sum() == total
    assert removed(counts, by_waterfill) >= removed(counts, greedy(counts, total)) - 1e-7


def test_waterfill_fill_by_hand() -> None:
    assert waterfill_fill([[5, 0, 2, 9]], [0]).tolist() == [[0, 0, 0, 0]]
    assert waterfill_fill([[5, 0, 2, 9]], [4]).tolist() == [[0, 3, 1, 0]]
    assert waterfill_fill([[5, 0, 2, 9]], [9]).tolist() == [[1, 5, 3, 0]]
    assert waterfill_fill([[1, 1], [0, 7]], [5, 3]).tolist() == [[3, 2], [3, 0]]


def test_waterfill_beyond_balance_stays_even() -> None:
    counts = [[4, 0], [3, 3], [0, 0]]
    assert waterfill(counts, 4).tolist() == full_balance(counts).tolist()
    assert waterfill(counts, 9).tolist() == [[2, 5], [1, 1], [0, 0]]


@settings(max_examples=40)
@given(tables(), totals)
def test_waterfill_level_can_be_found_by_querying_clients(counts: IntArray, total: int) -> None:
    assume(counts.any())

    def ask(level: float) -> IntArray:
        return np.array([waterfill_count(row[None], level)[0] for row in counts])

    told = waterfill_level(total, ask)
    rows = [
        waterfill_fill(row[None], waterfill_count(row[None], told.level) + extra)[0]
        for row, extra in zip(counts, told.extra, strict=True)
    ]
    assert np.array_equal(rows, waterfill(counts, total))


@given(tables(), st.floats(-50, 1), st.floats(-50, 1))
def test_lower_level_never_needs_fewer_samples(counts: IntArray, one: float, other: float) -> None:
    high, low = max(one, other), min(one, other)
    assert (waterfill_count(counts, high) <= waterfill_count(counts, low)).all()
    assert waterfill_count(counts, 1.0).sum() == 0
    assert np.array_equal(waterfill_count(counts, 0.0), full_balance(counts).sum(axis=1))


@given(tables(clients=1), totals)
def test_waterfill_of_one_client_equals_greedy(counts: IntArray, total: int) -> None:
    assume(counts.any())
    assert np.array_equal(waterfill_fill(counts, [total]), greedy(counts, total))


def rounding(counts: IntArray) -> float:
    """Return the cost of rounding to integers: less than one sample per class off the ideal level per client."""
    sizes = counts.sum(axis=1)
    held = sizes > 0
    return float((sizes[held] / sizes.sum() * counts.shape[1] / (4 * sizes[held] ** 2)).sum())


@given(tables(most=400), st.floats(0.1, 12))
def test_waterfill_is_no_worse_than_any_policy_at_its_total(counts: IntArray, beta: float) -> None:
    assume(counts.any())
    by_fedeas = fedeas(counts, beta)
    total = int(by_fedeas.sum())
    least = imbalance(counts, waterfill(counts, total)).score - rounding(counts)
    assert least <= imbalance(counts, by_fedeas).score
    assert least <= imbalance(counts, uniform(counts, total)).score
    assert least <= imbalance(counts, greedy(counts, total)).score


@settings(max_examples=40)
@given(tables(most=9, clients=2, classes=3, least_classes=2), st.integers(0, 7))
def test_waterfill_is_no_worse_than_any_allocation(counts: IntArray, total: int) -> None:
    assume(counts.any())
    pairs = np.argwhere(eligible_pairs(counts))
    best = min(
        imbalance(counts, placed(counts.shape, pairs, chosen)).score
        for chosen in itertools.combinations_with_replacement(range(len(pairs)), total)
    )
    score = imbalance(counts, waterfill(counts, total)).score
    assert best - 1e-12 <= score <= best + rounding(counts) + 1e-12


@pytest.mark.parametrize("largest", [2**20, 2**30, 2**36, 2**40])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.99, 0.999999])
def test_waterfill_of_large_counts_is_minimal(largest: int, part: float) -> None:
    counts = (np.random.default_rng(7).random((3, 4)) ** 3 * largest).astype(np.int64)
    total = min(MAX_COUNT, int(full_balance(counts).sum() * part))
    samples = waterfill(counts, total).sum(axis=1)
    least = exact_score(counts, samples)
    for giver, taker in itertools.permutations(range(3), 2):
        for moved in (8, 1000, 10**6):  # fewer than a round of each client is the rounding
            if moved <= samples[giver]:
                other = samples.copy()
                other[giver] -= moved
                other[taker] += moved
                assert exact_score(counts, other) >= least, (giver, taker, moved)


def exact_score(counts: IntArray, samples: IntArray) -> Fraction:
    """Return Σ_k N_k ‖q_k‖², which differs from the imbalance score by constants only."""
    filled = (counts + waterfill_fill(counts, samples)).tolist()
    sizes = counts.sum(axis=1).tolist()
    squares = (Fraction(sum(n * n for n in row), sum(row) ** 2) for row in filled)
    return sum((size * square for size, square in zip(sizes, squares, strict=True)), Fraction())


def placed(shape: tuple[int, ...], pairs: npt.NDArray[np.int64], chosen: tuple[int, ...]) -> IntArray:
    generated = np.zeros(shape, dtype=np.int64)
    for i in chosen:
        generated[tuple(pairs[i])] += 1
    return generated
