"""FedEAS: how many synthetic images each client generates, and for which classes.

The order is the paper's: label counts → entropy → budget → allocation → imbalance. ``counts`` is always an integer
array [K, C], n_k^c samples of class c at client k, and every policy returns the samples to generate in the same shape.
An empty client generates nothing under any policy. NumPy only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

MAX_COUNT = 2**40
"""Largest count, budget or total, in samples: sums over millions of (client, class) pairs still fit 64 bits."""
MAX_GREEDY_STEPS = 10_000_000
"""Maximum number of samples that `greedy` places."""

# ------------------------------------------------------------------- the budget and the policies that fill to it


# H̃_k = −Σ_c q_k^c log q_k^c / log C,  q_k^c = n_k^c / N_k,  0 log 0 := 0
def normalised_entropy(counts: npt.ArrayLike) -> FloatArray:
    """Return each client's label balance: 0 with a single class, 1 with equal counts of all classes.

    It is exactly 1 for equal counts, for a client without samples, and if there is only one class.
    """
    counts = checked_counts(counts)
    q = _proportions(counts)
    information = (q * np.log(q, out=np.zeros_like(q), where=q > 0)).sum(axis=1)
    entropy = (0.0 - information) / math.log(max(2, counts.shape[1]))  # 0.0 − 0.0 is not −0.0
    return np.where(np.ptp(counts, axis=1) == 0, 1.0, np.clip(entropy, 0.0, 1.0))


# Eq. (cap): b_k = ⌊ √n̄_k · (1 − H̃_k) · β ⌋,  n̄_k = N_k / C; the paper's √ is γ = ½
def budget(counts: npt.ArrayLike, beta: float, gamma: float = 0.5, use_entropy: bool = True) -> IntArray:
    """Return each client's b_k, the count up to which it fills its scarce classes.

    ``beta`` is a scale shared by all clients, ``gamma`` the exponent of the per-class mean count, both at least 0.
    Without ``use_entropy`` there is no factor (1 − H̃_k), as in the paper's first ablation.
    """
    counts = checked_counts(counts)
    check_number("beta", beta)
    check_number("gamma", gamma)
    if use_entropy:
        skew, skewed = 1.0 - normalised_entropy(counts), np.ptp(counts, axis=1) > 0
    else:
        skew, skewed = np.ones(len(counts)), counts.any(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = counts.mean(axis=1) ** gamma * beta
        product = np.where(skewed, scale * skew, 0.0)
    if not product.max() <= MAX_COUNT:
        raise ValueError(f"beta={beta!r} with gamma={gamma!r}: budgets must stay below 2**40 per class")
    budgets = np.floor(product).astype(np.int64)
    # Floating point errs by some 1e-16 of the scale, so a product this close to an integer is computed exactly.
    for k in np.flatnonzero(skewed & (np.abs(product - np.rint(product)) <= 1e-13 * scale)):
        budgets[k] = _exact_budget(counts[k].tolist(), beta, gamma, use_entropy)
    return budgets


def _exact_budget(counts: list[int], beta: float, gamma: float, use_entropy: bool) -> int:
    """Return one client's b_k by decimal arithmetic of 60 digits, with β and γ as printed: 100 · 0.29 is 29."""
    with localcontext(prec=60):
        size, skew = Decimal(sum(counts)), Decimal(1)
        if use_entropy:
            q = [n / size for n in counts if n]
            skew += sum(share * share.ln() for share in q) / Decimal(len(counts)).ln()
        product = (size / len(counts)) ** Decimal(str(float(gamma))) * skew * Decimal(str(float(beta)))
        return int(product + Decimal("1e-30"))


# Eq. (gen): n_gen = max{0, b_k − n_k^c}; the paper's totals also need n_k^c < n̄_k
def fill_to(counts: npt.ArrayLike, level: npt.ArrayLike, strict_mean: bool = True) -> IntArray:
    """Return the samples that fill classes up to their client's level.

    With ``strict_mean``, the inverse of the key ``printed-rule``, only classes strictly below the client's mean N_k / C
    are filled.
    """
    counts = checked_counts(counts)
    missing: IntArray = np.maximum(0, np.asarray(level, dtype=np.int64)[:, None] - counts)
    if strict_mean:
        missing[counts * counts.shape[1] >= counts.sum(axis=1, keepdims=True)] = 0
    return missing


def fedeas(counts: npt.ArrayLike, beta: float, gamma: float = 0.5, strict_mean: bool = True) -> IntArray:
    """Return the paper's allocation: every client fills its scarce classes up to its entropy-adaptive budget."""
    return fill_to(counts, budget(counts, beta, gamma), strict_mean)


def oversample(counts: npt.ArrayLike, beta: float, gamma: float = 0.5, strict_mean: bool = True) -> IntArray:
    """Return how many of its own images a client repeats to reach FedEAS's budget: an alternative without generator.

    These are images to repeat, not to generate. The counts are FedEAS's for classes that the client has, and 0 for
    absent classes, which have nothing to repeat.
    """
    counts = checked_counts(counts)
    return np.where(counts > 0, fedeas(counts, beta, gamma, strict_mean), 0)


def full_balance(counts: npt.ArrayLike) -> IntArray:
    """Return the samples that fill every class, absent ones included, up to the client's largest class."""
    counts = checked_counts(counts)
    missing: IntArray = counts.max(axis=1, keepdims=True) - counts
    return missing


def none(counts: npt.ArrayLike) -> IntArray:
    """Return zeros: the baseline."""
    return np.zeros_like(checked_counts(counts))


def scale_down(generated: Sequence[int], limit: int) -> list[int]:
    """Return one client's samples per class, scaled to a sum of ``limit`` if theirs is larger; see `scale_to`."""
    return list(generated) if sum(generated) <= limit else scale_to(generated, limit)


def scale_to(amounts: Sequence[int], total: int) -> list[int]:
    """Return integers in proportion to ``amounts``, of which at least one must be above 0, with a sum of ``total``.

    Every amount keeps its share, rounded down. What this leaves goes one each to the largest remainders, ties to the
    first.
    """
    whole = sum(amounts)
    scaled = [n * total // whole for n in amounts]
    by_remainder = sorted(range(len(scaled)), key=lambda i: -(amounts[i] * total % whole))
    for i in by_remainder[: total - sum(scaled)]:
        scaled[i] += 1
    return scaled


# ------------------------------------------------ matched budgets: a total distributed evenly over eligible pairs


def uniform(counts: npt.ArrayLike, total: int) -> IntArray:
    """Return the total distributed evenly over all (client, class) pairs."""
    return _distribute(total, eligible_pairs(counts))


def missing_only(counts: npt.ArrayLike, total: int) -> IntArray:
    """Return the total distributed evenly over the absent pairs, n_k^c = 0."""
    return _distribute(total, eligible_pairs(counts, absent_only=True))


def eligible_pairs(counts: npt.ArrayLike, absent_only: bool = False) -> BoolArray:
    """Return a mask [K, C] of the pairs that share a total; an empty client has none."""
    counts = checked_counts(counts)
    eligible: BoolArray = counts == 0 if absent_only else np.ones_like(counts, dtype=bool)
    eligible[~counts.any(axis=1)] = False
    return eligible


def split_total(total: int, pairs: npt.ArrayLike) -> list[tuple[int, int]]:
    """Split a total among clients by their numbers of eligible (client, class) pairs; return each (base, extra).

    Every pair gets ``base`` samples, and the remainder goes one each to the first pairs in client-major order: a
    client's first ``extra`` pairs get one more. See `distribute`.
    """
    check_total(total)
    pairs = np.asarray(pairs, dtype=np.int64)
    everyone = int(pairs.sum())
    if everyone == 0 and total > 0:
        needed = "at least one client must have images and, for missing-only, lack a class"
        raise ValueError(f"total={total}: no (client, class) pair is eligible; {needed}")
    base, remainder = divmod(int(total), max(1, everyone))
    extra = np.clip(remainder - (np.cumsum(pairs) - pairs), 0, pairs)
    return [(base, int(more)) for more in extra]


def distribute(eligible: npt.ArrayLike, base: npt.ArrayLike, extra: npt.ArrayLike) -> IntArray:
    """Return samples per class, [..., C]: ``base`` for each eligible one, one more for the first ``extra`` of them."""
    eligible, base, extra = np.asarray(eligible, dtype=bool), np.asarray(base), np.asarray(extra)
    placed = base[..., None] + (np.cumsum(eligible, axis=-1) <= extra[..., None])
    return np.where(eligible, placed, 0).astype(np.int64)


def _distribute(total: int, eligible: BoolArray) -> IntArray:
    base, extra = np.array(split_total(total, eligible.sum(axis=1))).T
    return distribute(eligible, base, extra)


# ----------------------------------------------------------- matched budgets: a total spent at the largest gain


# Repeated argmax of Eq. (gain), with the current q_k and N_k and the original p_k
def greedy(counts: npt.ArrayLike, total: int) -> IntArray:
    """Place one sample at a time at the pair of largest gain, ties to the lowest (client, class); return all samples.

    A client's best class is always its scarcest, and a sample changes the gains of its own client only: hence one heap
    of classes per client and one heap of clients. Integer arithmetic keeps equal gains equal.
    """
    counts = checked_counts(counts)
    check_total(total)
    steps = min(total, int(full_balance(counts).sum()))  # further samples have no gain
    if steps > MAX_GREEDY_STEPS:
        allowed = f"greedy places samples one at a time, {MAX_GREEDY_STEPS:,} at most; waterfill has no such limit"
        raise ValueError(f"total={total}: {allowed}")
    generated = np.zeros_like(counts)
    rows = counts.tolist()
    classes = [[(n, c) for c, n in enumerate(row)] for row in rows]
    sizes = [sum(row) for row in rows]
    squares = [sum(n * n for n in row) for row in rows]
    weights = sizes.copy()  # p_k Σ_j N_j

    def gain_of(k: int) -> float:
        return float(weights[k] * (squares[k] - classes[k][0][0] * sizes[k]) / sizes[k] ** 3)

    for heap in classes:
        heapq.heapify(heap)
    clients = [(-gain_of(k), k) for k in range(len(sizes)) if sizes[k] > 0]
    heapq.heapify(clients)
    if not clients and total > 0:
        raise ValueError(f"total={total}: every client is empty, so only 0 can be spent")
    for _ in range(steps):
        k = clients[0][1]
        n, c = classes[k][0]
        generated[k, c] += 1
        sizes[k] += 1
        squares[k] += 2 * n + 1
        heapq.heapreplace(classes[k], (n + 1, c))
        heapq.heapreplace(clients, (-gain_of(k), k))
    if total > steps:  # all are balanced: the first client gets the remainder, spread over its classes
        generated[clients[0][1]] += distribute(np.ones_like(counts[0]), *divmod(total - steps, counts.shape[1]))
    return generated


# ---------------------------------------------------------------------------------------- scores of an allocation


class Imbalance(NamedTuple):
    """The imbalance score and its two summands."""

    score: float
    heterogeneity: float
    global_part: float


# Eq. (surrogate): 𝓘 = Σ_k p_k ‖q_k − u‖²;  Eq. (r-decomp): 𝓘 = Σ_k p_k ‖q_k − q̄‖² + ‖q̄ − u‖²,  q̄ = Σ_k p_k q_k
def imbalance(counts: npt.ArrayLike, generated: npt.ArrayLike | None = None) -> Imbalance:
    """Return the label imbalance after an allocation; the weights p_k are those of the real counts."""
    counts = checked_counts(counts)
    if not counts.any():
        return Imbalance(0.0, 0.0, 0.0)
    p, q = _weights(counts), _proportions(_augmented(counts, generated))
    mean = p @ q
    return Imbalance(
        score=float(client_imbalance(counts, generated).sum()),
        heterogeneity=float(p @ np.square(q - mean).sum(axis=1)),
        global_part=float(np.square(mean - 1 / q.shape[1]).sum()),
    )


# The summands of Eq. (surrogate)
def client_imbalance(counts: npt.ArrayLike, generated: npt.ArrayLike | None = None) -> FloatArray:
    """Return each client's summand of the score, p_k ‖q_k − u‖²."""
    counts = checked_counts(counts)
    q = _proportions(_augmented(counts, generated))
    parts: FloatArray = _weights(counts) * np.square(q - 1 / q.shape[1]).sum(axis=1)
    return parts


# Eq. (gain): Δ_k^c = (2 p_k / N_k) (‖q_k‖² − q_k^c)
def gain(counts: npt.ArrayLike) -> FloatArray:
    """Return, to first order, how much one more sample at each pair lowers the score; 0 for an empty client."""
    counts = checked_counts(counts)
    size = counts.sum(axis=1, keepdims=True).astype(np.float64)
    # Over the common denominator N_k², where integers make a gain of zero exactly 0.
    excess = np.square(counts, dtype=np.float64).sum(axis=1, keepdims=True) - counts * size
    gains: FloatArray = 2 / max(1.0, float(size.sum())) * excess / np.maximum(1.0, size) ** 2
    return gains


def negative_gain_samples(counts: npt.ArrayLike, generated: npt.ArrayLike) -> int:
    """Return the number of samples placed at pairs whose gain on the real counts is negative."""
    return int(checked_counts(generated, "generated")[gain(counts) < 0].sum())


def removed(counts: npt.ArrayLike, generated: npt.ArrayLike) -> float:
    """Return the fraction of the imbalance that an allocation removes, 1 − 𝓘(B) / 𝓘(0); 0 if there was none."""
    before = imbalance(counts).score
    return 1 - imbalance(counts, generated).score / before if before > 0 else 0.0


def _proportions(counts: IntArray) -> FloatArray:
    """Return q_k; for an empty client the uniform distribution, whose imbalance is 0."""
    size = counts.sum(axis=1, keepdims=True)
    q: FloatArray = np.where(size > 0, counts / np.maximum(1, size), 1 / counts.shape[1])
    return q


def _weights(counts: IntArray) -> FloatArray:
    return np.asarray(counts.sum(axis=1) / max(1, counts.sum()), dtype=np.float64)


def _augmented(counts: IntArray, generated: npt.ArrayLike | None) -> IntArray:
    if generated is None:
        return counts
    generated = checked_counts(generated, "generated")
    if generated.shape != counts.shape:
        raise ValueError(f"generated has shape {generated.shape}: must be that of counts, {counts.shape}")
    return counts + generated


# ---------------------------------------------------------------------------------------------------- validation


def checked_counts(counts: npt.ArrayLike, name: str = "counts") -> IntArray:
    """Return counts as int64 [K, C]; raise ValueError for anything but integers, also stored as floats."""
    try:
        array = np.asarray(counts)
    except ValueError:
        raise ValueError(f"{name}: rows differ in length, must be a table of clients by classes") from None
    if array.ndim != 2 or array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}: must be a table of clients by classes, at least 1 by 1")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} has type {array.dtype}: must be integers")
    wrong = (array < 0) | (array > MAX_COUNT)
    if array.dtype.kind == "f":
        wrong |= array != np.floor(array)  # NaN included
    if wrong.any():
        k, c = np.argwhere(wrong)[0]
        raise ValueError(f"{name}[{k}, {c}]={array[k, c].item()!r}: must be an integer from 0 to 2**40")
    return array.astype(np.int64, copy=False)


def check_number(name: str, value: float) -> None:
    """Raise ValueError unless the value is a finite number of at least 0."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: must be a finite number of at least 0")


def check_total(total: int) -> None:
    """Raise ValueError unless the total is an integer from 0 to `MAX_COUNT`."""
    if not isinstance(total, int | np.integer) or isinstance(total, bool) or not 0 <= total <= MAX_COUNT:
        raise ValueError(f"total={total!r}: must be an integer from 0 to 2**40")


def first_failing(low: IntArray, high: IntArray, holds: Callable[[IntArray], BoolArray]) -> IntArray:
    """Return, elementwise by bisection, the first integer from low up to high at which a condition no longer holds."""
    while (low < high).any():
        middle = (low + high) // 2
        more = holds(middle) & (low < high)
        low, high = np.where(more, middle + 1, low), np.where(more, high, middle)
    return low
