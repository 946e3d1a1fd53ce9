"""Allocation: the paper's figures, and results by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
from label_counts import paper_counts

from fedeas_flwr.allocation import (
    IntArray,
    budget,
    client_imbalance,
    distribute,
    fedeas,
    fill_to,
    full_balance,
    gain,
    greedy,
    imbalance,
    missing_only,
    negative_gain_samples,
    none,
    normalised_entropy,
    removed,
    scale_down,
    split_total,
    uniform,
)
from fedeas_flwr.policies.registry import POLICIES, REFERENCES, allocate, settings_of
from fedeas_flwr.waterfill import waterfill


@pytest.fixture
def cifar() -> IntArray:
    """Return the counts of the paper's main setting: CIFAR-10, K = 20, α = 0.1."""
    return paper_counts("cifar10", 20, 0.1)


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
def test_totals_of_all_paper_settings(
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
def test_beta_sweep_totals(cifar: IntArray, beta: float, total: int) -> None:
    assert fedeas(cifar, beta).sum() == total


def test_ablation_totals(cifar: IntArray) -> None:
    assert allocate(cifar, "without-entropy", beta=6).sum() == 10_337
    assert allocate(cifar, "linear", beta=0.6).sum() == 10_198


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


# ----------------------------------------------------------------------------------------------- answers by hand


def test_entropy_by_hand() -> None:
    counts = [[8, 0, 0, 0], [4, 4, 0, 0], [3, 3, 3, 3], [0, 0, 0, 0]]
    np.testing.assert_allclose(normalised_entropy(counts), [0, 0.5, 1, 1], atol=1e-15)
    assert str(normalised_entropy(counts)[0]) == "0.0"  # not -0.0
    assert normalised_entropy([[5], [0]]).tolist() == [1, 1]
    for n in range(1, 200):  # a balanced client has entropy exactly 1 despite rounding of log(1/C)
        assert normalised_entropy(np.full((1, n), 7))[0] == 1.0


def test_budget_by_hand() -> None:
    counts = [[64, 0, 0, 0], [32, 32, 0, 0], [16, 16, 16, 16], [0, 0, 0, 0]]  # a mean of 16
    assert budget(counts, 3).tolist() == [12, 6, 0, 0]
    assert budget(counts, 3, use_entropy=False).tolist() == [12, 12, 12, 0]
    assert budget(counts, 0.5, gamma=1).tolist() == [8, 4, 0, 0]
    assert budget(counts, 0.24).tolist() == [0, 0, 0, 0]  # below one before the floor


def test_budget_that_is_exactly_an_integer_is_not_rounded_down() -> None:
    assert 100 * 0.29 < 29
    assert budget([[400, 0, 0, 0]], 0.29, gamma=1).tolist() == [29]
    tenth = np.zeros((1, 100), dtype=int)
    tenth[0, :10] = 160  # ten of a hundred classes: an entropy of one half; a mean of 16
    assert budget(tenth, 7).tolist() == [14]


@pytest.mark.parametrize("exponent", [5, 8, 10, 11, 12])
def test_large_budgets_are_exact(exponent: int) -> None:
    size = 10**exponent
    rows = np.zeros((10, 10), dtype=np.int64)
    rows[:, 0] = size - np.arange(10)  # a single class: b = ⌊N β / C⌋ under `linear`
    expected = [n * 79 // 100 for n in rows[:, 0].tolist()]
    assert budget(rows, 7.9, gamma=1).tolist() == expected
    rows[:, 1] = rows[:, 0]  # two equal classes of a hundred
    wide = np.pad(rows, ((0, 0), (0, 90)))
    with localcontext(prec=50):
        skew = 1 - Decimal(2).ln() / Decimal(100).ln()
        assert budget(wide, 30, gamma=1).tolist() == [
            int(Decimal(2 * n) / 100 * skew * 30) for n in wide[:, 0].tolist()
        ]
        nearly = np.array([[size, size + 1]])
        halves = [Decimal(n) / (2 * size + 1) for n in nearly[0].tolist()]
        skew = 1 + sum(q * q.ln() for q in halves) / Decimal(2).ln()
        assert budget(nearly, 1e6, gamma=1.5).tolist() == [
            int((Decimal(2 * size + 1) / 2) ** Decimal("1.5") * skew * 10**6)
        ]


def test_balanced_client_has_no_budget_at_any_beta() -> None:
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
    assert split_total(8, [2, 0, 1]) == [(2, 2), (2, 0), (2, 0)]
    assert distribute([False, True, True], 2, 1).tolist() == [0, 3, 2]


def test_total_without_eligible_pairs_raises() -> None:
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
    # Once all clients are balanced no gain is left, and the lowest client gets the rest at once.
    assert greedy([[0, 0], [2, 0], [1, 1]], 10**9 + 1).tolist() == [[0, 0], [5 * 10**8, 5 * 10**8 + 1], [0, 0]]


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
def test_invalid_counts_are_named(counts: object, message: str) -> None:
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
        (lambda: budget([[1, 2]], "6"), "beta='6': must be a finite number of at least 0"),  # type: ignore[arg-type]
        (lambda: budget([[1, 2]], True), "beta=True"),
        (lambda: allocate([[1, 2]], "uniform", beta=[6]), r"beta=\[6\]: must be"),  # type: ignore[arg-type]
        (lambda: allocate([[1, 2]], "fedeas", beta=1, gamma="1"), "gamma='1'"),  # type: ignore[arg-type]
        (lambda: allocate([[1, 2]], "fedeas", beta=1, round="1"), "round='1': must be"),  # type: ignore[arg-type]
        (lambda: budget([[1, 2]], 1e300), r"beta=1e\+300 .*below 2\*\*40"),
        (lambda: uniform([[1, 2]], -1), "total=-1: must be an integer from 0"),
        (lambda: waterfill([[1, 2]], 2**40 + 1), r"total=1099511627777: must be an integer from 0 to 2\*\*40"),
        (lambda: waterfill([[1, 2]], 1.5), "total=1.5"),  # type: ignore[arg-type]
        (lambda: greedy([[1, 2]], True), "total=True"),
        (lambda: greedy([[10**9, 0]], 10**8), "total=100000000: greedy .* one at a time, 10,000,000 .* waterfill"),
        (lambda: allocate([[1, 2]], "best", beta=1), "policy='best': must be one of none, fedeas"),
        (lambda: allocate([[1, 2]], "fedeas", beta=1, total=5), "total=5: policy 'fedeas'"),
        (lambda: imbalance([[1, 2]], [[1, 2, 3]]), r"generated has shape \(1, 3\)"),
    ],
)
def test_invalid_parameters_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", [*POLICIES, *REFERENCES])
def test_beta_is_required_only_by_policies_that_use_it(policy: str) -> None:
    counts, needed = [[4, 0, 2], [0, 5, 1]], settings_of(policy, total_given=False)
    if "total" in needed:
        spent = allocate(counts, policy, total=6)
        assert spent.sum() == 6 and np.array_equal(spent, allocate(counts, policy, beta=3.0, total=6))
    if not needed:
        assert np.array_equal(allocate(counts, policy), allocate(counts, policy, beta=3.0))
        return
    with pytest.raises(ValueError, match=f"^beta=None: policy '{policy}' needs a number"):
        allocate(counts, policy)


def test_integral_floats_are_accepted_as_counts() -> None:
    assert fedeas(np.array([[40.0, 0.0]]), 3).tolist() == fedeas([[40, 0]], 3).tolist()


def test_allocate_does_not_modify_its_input(cifar: IntArray) -> None:
    before = cifar.copy()
    for policy in (*POLICIES, *REFERENCES):
        allocate(cifar, policy, beta=2)
    assert np.array_equal(cifar, before)


def test_thousand_clients_and_classes_take_at_most_3_seconds() -> None:
    rng = np.random.RandomState(0)
    counts = rng.poisson(rng.gamma(0.1, 50, (1000, 1000)))
    for policy in POLICIES:
        start = time.thread_time()  # CPU time, which other processes do not affect
        allocate(counts, policy, beta=12)
        assert time.thread_time() - start < 3, policy  # measured: 0.4 s for waterfill, below 0.1 s for the others


@pytest.mark.parametrize("module", ["allocation", "partition", "planning.plan", "policies"])
def test_core_modules_need_only_numpy(module: str) -> None:
    code = (
        f"import sys, fedeas_flwr.{module}\n"
        "heavy = {'torch', 'torchvision', 'flwr', 'ray', 'sklearn', 'diffusers', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_allocate_knows_every_policy_name() -> None:
    direct = {
        "fedeas": fedeas([[9, 0], [3, 1]], 5),
        "without-entropy": fill_to([[9, 0], [3, 1]], budget([[9, 0], [3, 1]], 5, use_entropy=False)),
        "linear": fedeas([[9, 0], [3, 1]], 5, gamma=1.0),
        "full-balance": full_balance([[9, 0], [3, 1]]),
        "oversample": none([[9, 0], [3, 1]]),  # what it repeats is not generated
        "greedy": greedy([[9, 0], [3, 1]], int(fedeas([[9, 0], [3, 1]], 5).sum())),
    }
    for policy, expected in direct.items():
        assert np.array_equal(allocate([[9, 0], [3, 1]], policy, beta=5), expected)


def test_missing_only_without_absent_class_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"total=19: .*missing-only, lack a class"):
        allocate([[1, 2, 30]], "missing-only", beta=5.0)


@pytest.mark.parametrize(
    ("plan", "limit", "kept"),
    [
        ([5, 3, 2], 10, [5, 3, 2]),
        ([5, 3, 2], 5, [3, 1, 1]),  # 2.5, 1.5 and 1: the one left goes to the lower of two equal remainders
        ([10, 0, 1, 1], 3, [3, 0, 0, 0]),  # 2.5, 0, 0.25, 0.25
        ([1, 1, 1], 2, [1, 1, 0]),
        ([7, 0], 0, [0, 0]),
        ([2**40, 2**40], 2**39 + 1, [2**38 + 1, 2**38]),
    ],
)
def test_scale_down_by_hand(plan: list[int], limit: int, kept: list[int]) -> None:
    assert scale_down(plan, limit) == kept


def test_scale_down_meets_the_limit_and_the_proportions() -> None:
    random = np.random.default_rng(0)
    for _ in range(500):
        plan = random.integers(0, random.integers(1, 200), random.integers(1, 12)).tolist()
        limit = int(random.integers(0, sum(plan) + 2))
        kept = scale_down(plan, limit)
        assert sum(kept) == min(limit, sum(plan))
        share = min(1.0, limit / max(1, sum(plan)))
        assert all(0 <= new <= old and abs(new - share * old) < 1 for new, old in zip(kept, plan, strict=True))
