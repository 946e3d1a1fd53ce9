"""The paper's rule: answers worked out by hand, the paper's own figures, and what must hold for any counts."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedeas_flwr import allocation
from fedeas_flwr.allocation import (
    POLICIES,
    allocate,
    budget,
    client_imbalance,
    eligible_pairs,
    fedeas,
    fill_to,
    full_balance,
    gain,
    greedy,
    imbalance,
    linear,
    missing_only,
    negative_gain_samples,
    none,
    normalised_entropy,
    removed,
    shares,
    spread,
    uniform,
    without_entropy,
)
from fedeas_flwr.counts import IntArray
from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.waterfill import waterfill, waterfill_count, waterfill_counter, waterfill_fill, waterfill_level


@cache
def paper_counts(dataset: str, clients: int, alpha: float) -> IntArray:
    classes = {"cifar10": 10, "cifar100": 100}[dataset]
    return make_partition(dataset, "paper", clients, alpha, 42).counts(plan_labels(dataset, "paper"), classes)


@pytest.fixture
def cifar() -> IntArray:
    """The paper's main setting: CIFAR-10, K = 20, α = 0.1."""
    return paper_counts("cifar10", 20, 0.1)


def tables(most: int = 60, clients: int = 5, classes: int = 6, least_classes: int = 1) -> st.SearchStrategy[IntArray]:
    """Count tables with plenty of absent and equal classes, empty clients among them."""
    shape = st.tuples(st.integers(1, clients), st.integers(least_classes, classes))
    return shape.flatmap(lambda s: arrays(np.int64, s, elements=st.just(0) | st.integers(0, most)))


betas = st.floats(0, 40, allow_nan=False)
totals = st.integers(0, 200)

# ---------------------------------------------------------------------------------------------- the paper's figures


@pytest.mark.parametrize(
    ("dataset", "clients", "alpha", "samples", "by_fedeas", "as_printed", "by_full_balance"),
    [
        ("cifar10", 20, 0.05, 45_007, 18_080, 18_125, 284_853),
        ("cifar10", 20, 0.1, 45_007, 13_437, 13_437, 226_783),
        ("cifar10", 20, 0.3, 45_006, 5_675, 5_675, 141_944),
        pytest.param("cifar10", 100, 0.05, 45_038, 36_697, 36_935, 268_402, marks=pytest.mark.slow),
        ("cifar10", 100, 0.1, 45_046, 33_650, 33_837, 246_394),
        ("cifar10", 100, 0.3, 45_038, 15_666, 15_686, 162_082),
        ("cifar100", 20, 0.1, 45_008, 29_639, 29_647, 612_492),
        ("cifar100", 100, 0.1, 45_038, 74_005, 75_559, 826_762),
    ],
)
def test_totals_of_all_settings(
    dataset: str, clients: int, alpha: float, samples: int, by_fedeas: int, as_printed: int, by_full_balance: int
) -> None:
    counts = paper_counts(dataset, clients, alpha)
    assert counts.sum() == samples
    assert fedeas(counts, 12).sum() == by_fedeas
    assert fedeas(counts, 12, strict_mean=False).sum() == as_printed
    assert full_balance(counts).sum() == by_full_balance


def test_sizes_and_budgets_of_the_main_setting(cifar: IntArray) -> None:
    sizes = "2829 2211 130 6133 3171 1758 3369 431 621 2253 1635 1614 2499 4026 5582 1172 810 595 3350 818"
    budgets = "130 93 27 133 175 83 196 27 60 156 79 73 156 117 90 90 96 52 132 36"
    assert cifar.sum(axis=1).tolist() == [int(n) for n in sizes.split()]
    assert budget(cifar, 12).tolist() == [int(b) for b in budgets.split()]
    assert (cifar == 0).sum() == 95


@pytest.mark.parametrize(("beta", "total"), [(4, 4_113), (8, 8_673), (12, 13_437), (16, 18_435), (20, 23_514)])
def test_budget_sweep(cifar: IntArray, beta: float, total: int) -> None:
    assert fedeas(cifar, beta).sum() == total


def test_ablation_rows(cifar: IntArray) -> None:
    assert without_entropy(cifar, 6).sum() == 10_337
    assert linear(cifar, 0.6).sum() == 10_198


def test_imbalance_figures(cifar: IntArray) -> None:
    by_fedeas, by_uniform = fedeas(cifar, 12), uniform(cifar, 13_437)
    held = client_imbalance(cifar)
    top = np.argsort(-held)[:5]
    assert round(100 * removed(cifar, by_fedeas), 1) == 51.8
    assert round(100 * held[top].sum() / held.sum(), 1) == 53.6
    assert round(100 * by_fedeas[top].sum() / by_fedeas.sum(), 1) == 45.1
    assert round(100 * (removed(cifar, by_fedeas) - removed(cifar, by_uniform)), 1) == 14.6
    assert round(100 * removed(cifar, greedy(cifar, 13_437)), 1) == 53.3
    assert np.median(by_fedeas.sum(axis=1)) == 595


def test_matched_policies_of_the_main_setting(cifar: IntArray) -> None:
    by_uniform, by_missing = uniform(cifar, 13_437), missing_only(cifar, 13_437)
    assert by_uniform.sum() == by_missing.sum() == 13_437
    assert by_uniform.min() == 67
    assert by_uniform.max() == 68
    assert negative_gain_samples(cifar, by_uniform) == 1_679
    given_to_absent = by_missing[cifar == 0]  # in client-major order
    assert given_to_absent.tolist() == [142] * 42 + [141] * 53
    assert by_missing[cifar > 0].sum() == 0


@pytest.mark.parametrize("total", [100, 13_437, 200_000])
@pytest.mark.parametrize("setting", [("cifar10", 20, 0.1), ("cifar100", 20, 0.1)])
def test_waterfill_is_no_worse_than_greedy(setting: tuple[str, int, float], total: int) -> None:
    counts = paper_counts(*setting)
    by_waterfill = waterfill(counts, total)
    assert by_waterfill.sum() == total
    assert removed(counts, by_waterfill) >= removed(counts, greedy(counts, total)) - 1e-7


# ----------------------------------------------------------------------------------------------- answers by hand


def test_entropy_by_hand() -> None:
    counts = [[8, 0, 0, 0], [4, 4, 0, 0], [3, 3, 3, 3], [0, 0, 0, 0]]
    np.testing.assert_allclose(normalised_entropy(counts), [0, 0.5, 1, 1], atol=1e-15)
    assert str(normalised_entropy(counts)[0]) == "0.0"  # not -0.0
    assert normalised_entropy([[5], [0]]).tolist() == [1, 1]
    for n in range(1, 200):  # balanced is exactly balanced, whatever rounding makes of log(1/C)
        assert normalised_entropy(np.full((1, n), 7))[0] == 1.0


def test_budget_by_hand() -> None:
    counts = [[64, 0, 0, 0], [32, 32, 0, 0], [16, 16, 16, 16], [0, 0, 0, 0]]  # a mean of 16
    assert budget(counts, 3).tolist() == [12, 6, 0, 0]
    assert budget(counts, 3, use_entropy=False).tolist() == [12, 12, 12, 0]
    assert budget(counts, 0.5, gamma=1).tolist() == [8, 4, 0, 0]
    assert budget(counts, 0.24).tolist() == [0, 0, 0, 0]  # below one before the floor


def test_budget_that_is_whole_on_paper_is_not_rounded_down() -> None:
    assert 100 * 0.29 < 29
    assert budget([[400, 0, 0, 0]], 0.29, gamma=1).tolist() == [29]
    tenth = np.zeros((1, 100), dtype=int)
    tenth[0, :10] = 160  # ten of a hundred classes: an entropy of one half; a mean of 16
    assert budget(tenth, 7).tolist() == [14]


def test_a_balanced_client_has_no_budget_at_any_beta() -> None:
    assert budget(np.full((1, 7), 12345), 1e15).tolist() == [0]


def test_fill_to_by_hand() -> None:
    counts = [[0, 2, 4, 6]]  # a mean of 3
    assert fill_to(counts, [5]).tolist() == [[5, 3, 0, 0]]
    assert fill_to(counts, [5], strict_mean=False).tolist() == [[5, 3, 1, 0]]
    assert fill_to([[3, 3, 0]], [5]).tolist() == [[0, 0, 5]]
    assert fill_to([[2, 2, 2]], [5]).tolist() == [[0, 0, 0]]  # at the mean is not below it


def test_full_balance_and_none_by_hand() -> None:
    assert full_balance([[0, 2, 4], [0, 0, 0]]).tolist() == [[4, 2, 0], [0, 0, 0]]
    assert none([[0, 2, 4]]).tolist() == [[0, 0, 0]]


def test_uniform_and_missing_only_by_hand() -> None:
    counts = [[5, 0, 0], [0, 0, 0], [0, 3, 3]]
    assert uniform(counts, 8).tolist() == [[2, 2, 1], [0, 0, 0], [1, 1, 1]]
    assert missing_only(counts, 8).tolist() == [[0, 3, 3], [0, 0, 0], [2, 0, 0]]
    assert shares(8, [2, 0, 1]) == [(2, 2), (2, 0), (2, 0)]
    assert spread([False, True, True], 2, 1).tolist() == [0, 3, 2]


def test_a_total_that_nobody_can_spend_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"total=3: .*eligible"):
        missing_only([[1, 2], [3, 4]], 3)
    assert missing_only([[1, 2], [3, 4]], 0).sum() == 0
    for spend in (uniform, missing_only, greedy, waterfill):
        with pytest.raises(ValueError, match="total=3: "):
            spend([[0, 0], [0, 0]], 3)
        assert spend([[0, 0], [0, 0]], 0).sum() == 0


def test_gain_and_imbalance_by_hand() -> None:
    counts = [[3, 1], [2, 2]]  # q = (¾, ¼) and (½, ½), p = ½ each
    np.testing.assert_allclose(gain(counts), [[2 / 8 * (10 / 16 - 3 / 4), 2 / 8 * (10 / 16 - 1 / 4)], [0, 0]])
    score = imbalance(counts)
    np.testing.assert_allclose(score, [1 / 16, 1 / 32, 1 / 32])
    np.testing.assert_allclose(client_imbalance(counts), [1 / 16, 0])
    assert removed(counts, [[0, 2], [0, 0]]) == 1.0
    assert removed([[2, 2]], [[0, 1]]) == 0.0
    assert negative_gain_samples(counts, [[5, 7], [1, 1]]) == 5


def test_imbalance_keeps_the_weights_of_the_real_counts() -> None:
    counts, generated = [[4, 0], [12, 12]], [[0, 0], [0, 1000]]
    np.testing.assert_allclose(client_imbalance(counts, generated)[0], 4 / 28 * 0.5)


def test_greedy_by_hand() -> None:
    # Client 0 is the more skewed and starts; equal gains go to the lowest client and class.
    assert greedy([[4, 0, 0], [4, 2, 0]], 1).tolist() == [[0, 1, 0], [0, 0, 0]]
    assert greedy([[4, 0, 0], [4, 0, 0]], 3).tolist() == [[0, 1, 1], [0, 1, 0]]


def test_waterfill_fill_by_hand() -> None:
    assert waterfill_fill([[5, 0, 2, 9]], [0]).tolist() == [[0, 0, 0, 0]]
    assert waterfill_fill([[5, 0, 2, 9]], [4]).tolist() == [[0, 3, 1, 0]]
    assert waterfill_fill([[5, 0, 2, 9]], [9]).tolist() == [[1, 5, 3, 0]]
    assert waterfill_fill([[1, 1], [0, 7]], [5, 3]).tolist() == [[3, 2], [3, 0]]


def test_waterfill_beyond_balance_goes_on_evenly() -> None:
    counts = [[4, 0], [3, 3], [0, 0]]
    assert waterfill(counts, 4).tolist() == full_balance(counts).tolist()
    assert waterfill(counts, 9).tolist() == [[2, 5], [1, 1], [0, 0]]


# ------------------------------------------------------------------------------------------- what holds for any counts


@settings(deadline=None)
@given(tables(), betas, st.floats(0, 2), st.booleans())
def test_every_policy_gives_whole_samples_and_spends_its_total(
    counts: IntArray, beta: float, gamma: float, strict_mean: bool
) -> None:
    assume(eligible_pairs(counts, absent_only=True).any())
    spent = fedeas(counts, beta, gamma, strict_mean).sum()
    for policy, kind in POLICIES.items():
        assume(policy != "greedy" or spent < 2000)
        generated = allocate(counts, policy, beta=beta, gamma=gamma, strict_mean=strict_mean)
        assert generated.dtype == np.int64
        assert generated.shape == counts.shape
        assert generated.min() >= 0
        assert generated[counts.sum(axis=1) == 0].sum() == 0
        if kind == "matched":
            assert generated.sum() == spent


@settings(deadline=None)
@given(tables(), totals)
def test_matched_policies_spend_a_given_total(counts: IntArray, total: int) -> None:
    assume(eligible_pairs(counts, absent_only=True).any())
    for policy in (name for name, kind in POLICIES.items() if kind == "matched"):
        assert allocate(counts, policy, beta=1.0, total=total).sum() == total


@settings(deadline=None)
@given(tables(clients=4), betas, st.randoms(use_true_random=False))
def test_clients_may_come_in_any_order(counts: IntArray, beta: float, random: object) -> None:
    order = list(range(len(counts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for policy in ("none", "fedeas", "full-balance", "without-entropy", "linear"):
        one_way, other_way = (allocate(c, policy, beta=beta) for c in (counts, counts[order]))
        assert np.array_equal(one_way[order], other_way)
    np.testing.assert_allclose(imbalance(counts), imbalance(counts[order]), atol=1e-12)
    # A remainder depends on the order of clients; a level does not.
    assert np.array_equal(waterfill_count(counts, 0.1)[order], waterfill_count(counts[order], 0.1))


@settings(deadline=None)
@given(tables(), betas, betas)
def test_a_larger_beta_never_takes_anything_away(counts: IntArray, one: float, other: float) -> None:
    small, large = sorted((one, other))
    for policy in ("fedeas", "without-entropy", "linear"):
        assert (allocate(counts, policy, beta=small) <= allocate(counts, policy, beta=large)).all()


@settings(deadline=None)
@given(tables(), st.booleans())
def test_beta_zero_generates_nothing(counts: IntArray, strict_mean: bool) -> None:
    for policy in ("fedeas", "without-entropy", "linear", "uniform", "missing-only", "greedy", "waterfill"):
        assert allocate(counts, policy, beta=0, strict_mean=strict_mean).sum() == 0


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.floats(0, 1e6))
def test_balanced_clients_generate_nothing(classes: int, levels: list[int], beta: float) -> None:
    counts = np.repeat(np.array(levels)[:, None], classes, axis=1)
    for policy in POLICIES:
        assert allocate(counts, policy, beta=beta).sum() == 0
    assert imbalance(counts).heterogeneity == pytest.approx(0, abs=1e-12)


@settings(deadline=None)
@given(tables(), betas)
def test_fedeas_fills_only_scarce_classes_and_only_to_the_budget(counts: IntArray, beta: float) -> None:
    generated, level = fedeas(counts, beta), budget(counts, beta)
    at_work = generated > 0
    assert (counts < counts.mean(axis=1, keepdims=True))[at_work].all()
    assert ((counts + generated) == level[:, None])[at_work].all()
    assert (fedeas(counts, beta, strict_mean=False) >= generated).all()


@settings(deadline=None)
@given(tables(least_classes=2), st.booleans(), totals)
def test_a_client_finds_its_part_from_its_own_row(counts: IntArray, absent_only: bool, total: int) -> None:
    eligible = eligible_pairs(counts, absent_only)
    assume(eligible.any())
    dealt_by_hand = np.zeros_like(counts)
    for k, c in itertools.islice(itertools.cycle(np.argwhere(eligible)), total):
        dealt_by_hand[k, c] += 1
    parts = shares(total, [int(eligible_pairs(row[None], absent_only).sum()) for row in counts])
    on_the_wire = [
        spread(eligible_pairs(row[None], absent_only)[0], *part) for row, part in zip(counts, parts, strict=True)
    ]
    assert np.array_equal(on_the_wire, dealt_by_hand)
    assert np.array_equal((missing_only if absent_only else uniform)(counts, total), dealt_by_hand)


@settings(max_examples=40, deadline=None)
@given(tables(), totals)
def test_waterfill_can_be_found_by_asking_clients_one_by_one(counts: IntArray, total: int) -> None:
    assume(counts.any())

    def ask(level: float) -> IntArray:
        return np.array([waterfill_count(row[None], level)[0] for row in counts])

    told = waterfill_level(total, ask)
    rows = [
        waterfill_fill(row[None], waterfill_count(row[None], told.level) + extra)[0]
        for row, extra in zip(counts, told.extra, strict=True)
    ]
    assert np.array_equal(rows, waterfill(counts, total))


@settings(deadline=None)
@given(tables(), st.floats(-50, 1), st.floats(-50, 1))
def test_a_lower_level_never_asks_for_fewer_samples(counts: IntArray, one: float, other: float) -> None:
    high, low = max(one, other), min(one, other)
    count_at = waterfill_counter(counts)
    assert (count_at(high) <= count_at(low)).all()
    assert count_at(1.0).sum() == 0
    assert np.array_equal(count_at(0.0), full_balance(counts).sum(axis=1))


@settings(deadline=None)
@given(tables(clients=1), totals)
def test_waterfill_of_one_client_is_greedy(counts: IntArray, total: int) -> None:
    assume(counts.any())
    assert np.array_equal(waterfill_fill(counts, [total]), greedy(counts, total))


def rounding(counts: IntArray) -> float:
    """What placing whole samples can cost: each client is off the ideal level by less than one sample a class."""
    sizes = counts.sum(axis=1)
    held = sizes > 0
    return float((sizes[held] / sizes.sum() * counts.shape[1] / (4 * sizes[held] ** 2)).sum())


@settings(deadline=None)
@given(tables(most=400), st.floats(0.1, 12))
def test_waterfill_is_no_worse_than_any_policy_at_its_total(counts: IntArray, beta: float) -> None:
    assume(counts.any())
    by_fedeas = fedeas(counts, beta)
    total = int(by_fedeas.sum())
    least = imbalance(counts, waterfill(counts, total)).score - rounding(counts)
    assert least <= imbalance(counts, by_fedeas).score
    assert least <= imbalance(counts, uniform(counts, total)).score
    assert least <= imbalance(counts, greedy(counts, total)).score


@settings(max_examples=40, deadline=None)
@given(tables(most=9, clients=2, classes=3, least_classes=2), st.integers(0, 7))
def test_waterfill_against_every_possible_allocation(counts: IntArray, total: int) -> None:
    assume(counts.any())
    pairs = np.argwhere(eligible_pairs(counts))
    best = min(
        imbalance(counts, placed(counts.shape, pairs, chosen)).score
        for chosen in itertools.combinations_with_replacement(range(len(pairs)), total)
    )
    score = imbalance(counts, waterfill(counts, total)).score
    assert best - 1e-12 <= score <= best + rounding(counts) + 1e-12


def placed(shape: tuple[int, ...], pairs: npt.NDArray[np.int64], chosen: tuple[int, ...]) -> IntArray:
    generated = np.zeros(shape, dtype=np.int64)
    for i in chosen:
        generated[tuple(pairs[i])] += 1
    return generated


@settings(max_examples=50, deadline=None)
@given(tables(most=30), st.integers(0, 40))
def test_greedy_is_the_repeated_best_gain(counts: IntArray, total: int) -> None:
    """The definition spelled out, on integers so that equal gains are equal."""
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


@settings(deadline=None)
@given(tables(), st.data())
def test_imbalance_splits_into_its_two_parts(counts: IntArray, data: st.DataObject) -> None:
    generated = data.draw(arrays(np.int64, counts.shape, elements=st.integers(0, 50)))
    score, heterogeneity, global_part = imbalance(counts, generated)
    assert score == pytest.approx(heterogeneity + global_part, abs=1e-12)
    assert min(score, heterogeneity, global_part) >= 0


@settings(deadline=None)
@given(tables(most=500, least_classes=2), st.data())
def test_gain_is_the_first_order_change_of_the_score(counts: IntArray, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(counts) - 1))
    c = data.draw(st.integers(0, counts.shape[1] - 1))
    assume(counts[k].sum() > 0)
    one_more = np.zeros_like(counts)
    one_more[k, c] = 1
    change = imbalance(counts).score - imbalance(counts, one_more).score
    share = counts[k].sum() / counts.sum()
    assert abs(change - gain(counts)[k, c]) <= 6 * share / counts[k].sum() ** 2 + 1e-12


# ------------------------------------------------------------------------------------------- inputs, speed, imports


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 2, 3], r"counts has shape \(3,\)"),
        ([], r"counts has shape \(0,\)"),
        ([[1, 2], [3]], "counts: rows differ in length"),
        ([[1, -2]], r"counts\[0, 1\]=-2: must be an integer from 0"),
        ([[1, 2.5]], r"counts\[0, 1\]=2.5"),
        ([[1, float("nan")]], r"counts\[0, 1\]=nan"),
        ([[float("inf"), 1]], r"counts\[0, 0\]=inf"),
        ([[2**41, 1]], r"counts\[0, 0\]=2199023255552"),
        ([["a", "b"]], "counts has type"),
    ],
)
def test_wrong_counts_are_named(counts: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fedeas(counts, 1)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: budget([[1, 2]], -1), "beta=-1: must be a finite number of at least 0"),
        (lambda: budget([[1, 2]], float("nan")), "beta=nan"),
        (lambda: budget([[1, 2]], float("inf")), "beta=inf"),
        (lambda: budget([[1, 2]], 1, gamma=-0.5), "gamma=-0.5"),
        (lambda: budget([[1, 2]], 1e300), r"beta=1e\+300 .*below 2\*\*40"),
        (lambda: uniform([[1, 2]], -1), "total=-1: must be an integer from 0"),
        (lambda: waterfill([[1, 2]], 1.5), "total=1.5"),  # type: ignore[arg-type]
        (lambda: greedy([[1, 2]], True), "total=True"),
        (lambda: allocate([[1, 2]], "best", beta=1), "policy='best': must be one of none, fedeas"),
        (lambda: allocate([[1, 2]], "fedeas", beta=1, total=5), "total=5: policy 'fedeas'"),
        (lambda: imbalance([[1, 2]], [[1, 2, 3]]), r"generated has shape \(1, 3\)"),
    ],
)
def test_wrong_parameters_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_whole_floats_are_counts() -> None:
    assert fedeas(np.array([[40.0, 0.0]]), 3).tolist() == fedeas([[40, 0]], 3).tolist()


def test_inputs_are_left_alone(cifar: IntArray) -> None:
    before = cifar.copy()
    for policy in POLICIES:
        allocate(cifar, policy, beta=2)
    assert np.array_equal(cifar, before)


def test_a_thousand_clients_of_a_thousand_classes_take_seconds_at_most() -> None:
    rng = np.random.RandomState(0)
    counts = rng.poisson(rng.gamma(0.1, 50, (1000, 1000)))
    for policy in POLICIES:
        if policy != "greedy":
            start = time.perf_counter()
            allocate(counts, policy, beta=12)
            assert time.perf_counter() - start < 3, policy  # measured: 0.4 s for waterfill, below 0.1 s for the others


@pytest.mark.parametrize("module", ["allocation", "partition", "planning"])
def test_the_core_needs_numpy_only(module: str) -> None:
    code = (
        f"import sys, fedeas_flwr.{module}\n"
        "heavy = {'torch', 'torchvision', 'flwr', 'ray', 'sklearn', 'diffusers', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_names_of_policies_are_those_that_allocate_knows() -> None:
    assert set(POLICIES.values()) == {"fixed", "budget", "matched", "repeat"}
    direct = {
        "fedeas": fedeas([[9, 0], [3, 1]], 5),
        "without-entropy": without_entropy([[9, 0], [3, 1]], 5),
        "linear": linear([[9, 0], [3, 1]], 5),
        "full-balance": full_balance([[9, 0], [3, 1]]),
        "oversample": none([[9, 0], [3, 1]]),  # what it repeats is not generated
        "greedy": greedy([[9, 0], [3, 1]], int(fedeas([[9, 0], [3, 1]], 5).sum())),
    }
    for policy, expected in direct.items():
        assert np.array_equal(allocation.allocate([[9, 0], [3, 1]], policy, beta=5), expected)
