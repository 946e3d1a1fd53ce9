"""FedEAS: how much synthetic data each client generates, and where it goes.

The paper from top to bottom: label counts → entropy → budget → allocation → imbalance. ``counts`` is everywhere an
integer array [K, C], n_k^c samples of class c at client k, and every policy returns the samples to generate in the same
shape. An empty client generates nothing under any policy. NumPy only.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedeas_flwr.counts import LARGEST, BoolArray, FloatArray, IntArray, check_number, check_total, checked_counts
from fedeas_flwr.waterfill import waterfill

# Name → kind. "budget": each client fills to its own b_k; "matched": a given total is spent; "fixed": neither;
# "repeat": nothing is generated, a client fills to b_k with copies of what it has (`oversample`).
POLICIES: dict[str, str] = {
    "none": "fixed",
    "fedeas": "budget",
    "uniform": "matched",
    "missing-only": "matched",
    "full-balance": "fixed",
    "greedy": "matched",
    "waterfill": "matched",
    "without-entropy": "budget",
    "linear": "budget",
    "oversample": "repeat",
}
OWN_GAMMA = {"without-entropy": 0.5, "linear": 1.0}
"""The two ablations', whatever γ is given."""
MOST_STEPS = 10_000_000
"""Maximum number of samples that `greedy` places."""

# ------------------------------------------------------------------- the budget and the policies that fill to it


# H̃_k = −Σ_c q_k^c log q_k^c / log C,  q_k^c = n_k^c / N_k,  0 log 0 := 0
def normalised_entropy(counts: npt.ArrayLike) -> FloatArray:
    """Measure each client's label balance: 0 with a single class, 1 with all classes alike.

    Exactly 1 where nothing is left to balance: all classes alike, no sample at all, or only one class to have.
    """
    counts = checked_counts(counts)
    q = _proportions(counts)
    information = (q * np.log(q, out=np.zeros_like(q), where=q > 0)).sum(axis=1)
    entropy = (0.0 - information) / math.log(max(2, counts.shape[1]))  # 0.0 − 0.0 is not −0.0
    return np.where(np.ptp(counts, axis=1) == 0, 1.0, np.clip(entropy, 0.0, 1.0))


# Eq. (cap): b_k = ⌊ √n̄_k · (1 − H̃_k) · β ⌋,  n̄_k = N_k / C; the paper's √ is γ = ½
def budget(counts: npt.ArrayLike, beta: float, gamma: float = 0.5, use_entropy: bool = True) -> IntArray:
    """Give each client the count b_k up to which it fills its scarce classes.

    Parameters
    ----------
    counts : array_like of int, shape [K, C]
        Label counts.
    beta : float
        Scale shared by all clients, at least 0.
    gamma : float
        Exponent of the per-class mean count, at least 0.
    use_entropy : bool
        Whether the factor (1 − H̃_k) is there; the paper's first ablation leaves it out.
    """
    counts = checked_counts(counts)
    check_number("beta", beta)
    check_number("gamma", gamma)
    skew = 1.0 - normalised_entropy(counts) if use_entropy else counts.any(axis=1).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.where(skew > 0, counts.mean(axis=1) ** gamma * skew * beta, 0.0)
    if not exact.max() <= LARGEST:
        raise ValueError(f"beta={beta!r} with gamma={gamma!r}: budgets must stay below 2**40 a class")
    # A product that is whole on paper may come out a few ulps short of it: 100 · 0.29 is 28.999999999999996.
    return np.floor(exact * (1 + 1e-12)).astype(np.int64)


# Eq. (gen): n_gen = max{0, b_k − n_k^c}; the paper's own totals need n_k^c < n̄_k besides
def fill_to(counts: npt.ArrayLike, level: npt.ArrayLike, strict_mean: bool = True) -> IntArray:
    """Fill classes up to their client's level; with ``strict_mean`` only those strictly below its mean N_k / C."""
    counts = checked_counts(counts)
    missing: IntArray = np.maximum(0, np.asarray(level, dtype=np.int64)[:, None] - counts)
    if strict_mean:
        missing[counts * counts.shape[1] >= counts.sum(axis=1, keepdims=True)] = 0
    return missing


def fedeas(counts: npt.ArrayLike, beta: float, gamma: float = 0.5, strict_mean: bool = True) -> IntArray:
    """Fill every client's scarce classes up to its entropy-adaptive budget: the paper's method."""
    return fill_to(counts, budget(counts, beta, gamma), strict_mean)


def oversample(counts: npt.ArrayLike, beta: float, gamma: float = 0.5, strict_mean: bool = True) -> IntArray:
    """Repeat a client's own images up to FedEAS's budget: the free alternative to it.

    Returns the images to repeat, not to generate. Where FedEAS fills a class that the client has some of, so does this,
    with copies; a class it has none of stays empty, for there is nothing to repeat.
    """
    counts = checked_counts(counts)
    return np.where(counts > 0, fedeas(counts, beta, gamma, strict_mean), 0)


def full_balance(counts: npt.ArrayLike) -> IntArray:
    """Fill every class, absent ones included, up to the client's largest."""
    counts = checked_counts(counts)
    missing: IntArray = counts.max(axis=1, keepdims=True) - counts
    return missing


def none(counts: npt.ArrayLike) -> IntArray:
    """Generate nothing: the strategy alone."""
    return np.zeros_like(checked_counts(counts))


# --------------------------------------------------- matched budgets: a total dealt out evenly over eligible pairs


def uniform(counts: npt.ArrayLike, total: int) -> IntArray:
    """Spend the total evenly over all pairs of client and class."""
    return _deal_out(total, eligible_pairs(counts))


def missing_only(counts: npt.ArrayLike, total: int) -> IntArray:
    """Spend the total evenly over the absent pairs, n_k^c = 0."""
    return _deal_out(total, eligible_pairs(counts, absent_only=True))


def eligible_pairs(counts: npt.ArrayLike, absent_only: bool = False) -> BoolArray:
    """Mark the pairs [K, C] that a total is dealt out over; an empty client has none."""
    counts = checked_counts(counts)
    eligible: BoolArray = counts == 0 if absent_only else np.ones_like(counts, dtype=bool)
    eligible[~counts.any(axis=1)] = False
    return eligible


def shares(total: int, pairs: npt.ArrayLike) -> list[tuple[int, int]]:
    """Tell each client its part of a total, from nothing but how many eligible pairs everyone has.

    Returns
    -------
    list of (base, extra)
        One a client, in the order given. Every pair gets ``base`` samples, and the remainder goes one each to the
        first pairs in client-major order: a client's first ``extra`` pairs get one more. See `spread`.
    """
    check_total(total)
    pairs = np.asarray(pairs, dtype=np.int64)
    everyone = int(pairs.sum())
    if everyone == 0 and total > 0:
        wanted = "a client with images, for missing-only a class that a client has none of"
        raise ValueError(f"total={total}: no pair to generate for is eligible, that needs {wanted}")
    base, remainder = divmod(int(total), max(1, everyone))
    extra = np.clip(remainder - (np.cumsum(pairs) - pairs), 0, pairs)
    return [(base, int(more)) for more in extra]


def spread(eligible: npt.ArrayLike, base: int, extra: int) -> IntArray:
    """Turn one client's share into samples per class: base each, one more for the first ``extra`` eligible ones."""
    eligible = np.asarray(eligible, dtype=bool)
    return np.where(eligible, base + (np.cumsum(eligible) <= extra), 0).astype(np.int64)


def _deal_out(total: int, eligible: BoolArray) -> IntArray:
    parts = shares(total, eligible.sum(axis=1))
    return np.stack([spread(mine, *part) for mine, part in zip(eligible, parts, strict=True)])


# ----------------------------------------------------------- matched budgets: a total spent where it helps most


# Repeated argmax of Eq. (gain), with the current q_k and N_k and the original p_k
def greedy(counts: npt.ArrayLike, total: int) -> IntArray:
    """Place one sample at a time at the pair of largest gain, ties to the lowest (client, class).

    A client's best class is always its scarcest, and a sample changes the gains of its own client only: hence one heap
    of classes a client and one heap of clients. Integer arithmetic keeps equal gains equal.
    """
    counts = checked_counts(counts)
    check_total(total)
    steps = min(total, int(full_balance(counts).sum()))  # beyond them no sample gains anything
    if steps > MOST_STEPS:
        allowed = f"greedy places samples one at a time, {MOST_STEPS:,} at most; waterfill has no such limit"
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
    if total > steps:  # all are balanced: the lowest client has the rest, round by round
        generated[clients[0][1]] += spread(np.ones_like(counts[0]), *divmod(total - steps, counts.shape[1]))
    return generated


# --------------------------------------------------------------------------------------------- policies by name


def allocate(
    counts: npt.ArrayLike,
    policy: str,
    *,
    beta: float | None = None,
    gamma: float = 0.5,
    strict_mean: bool = True,
    total: int | None = None,
) -> IntArray:
    """Allocate by a policy's name; a matched one spends ``total`` or, where it is None, what FedEAS would spend.

    These are images to generate: none for ``oversample``, whose copies `oversample` counts. A matched policy deals one
    total out to all clients, so its counts must be everybody's; under the others a client's row depends on no other.
    ``beta`` may be left out where nothing depends on it: beside a total, and with ``none`` and ``full-balance``.
    """
    counts, kind = checked_counts(counts), kind_of(policy)
    if total is not None and kind != "matched":
        raise ValueError(f"total={total!r}: policy {policy!r} sets its own total; leave it out")
    if kind == "fixed":
        return full_balance(counts) if policy == "full-balance" else none(counts)
    if kind == "matched" and total is not None:
        return _spend(counts, policy, total)
    if beta is None:
        raise ValueError(f"beta=None: policy {policy!r} needs a number{', or a total' if kind == 'matched' else ''}")
    if kind == "matched":
        return _spend(counts, policy, int(fedeas(counts, beta, gamma, strict_mean).sum()))
    level = policy_budget(counts, policy, beta, gamma)
    return none(counts) if kind == "repeat" or level is None else fill_to(counts, level, strict_mean)


def _spend(counts: IntArray, policy: str, total: int) -> IntArray:
    matched = {"uniform": uniform, "missing-only": missing_only, "greedy": greedy, "waterfill": waterfill}
    return matched[policy](counts, total)


def kind_of(policy: str) -> str:
    """Give a policy's kind, of those in `POLICIES`."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: must be one of {', '.join(POLICIES)}")
    return POLICIES[policy]


def policy_budget(counts: npt.ArrayLike, policy: str, beta: float, gamma: float = 0.5) -> IntArray | None:
    """Give the b_k that a policy fills to, None for a policy without one; the two ablations have their own γ."""
    if kind_of(policy) not in ("budget", "repeat"):
        return None
    return budget(counts, beta, OWN_GAMMA.get(policy, gamma), use_entropy=policy != "without-entropy")


# ------------------------------------------------------------------------------------- what an allocation is worth


class Imbalance(NamedTuple):
    """The imbalance score and the two parts it splits into."""

    score: float
    heterogeneity: float
    global_part: float


# Eq. (surrogate): 𝓘 = Σ_k p_k ‖q_k − u‖²;  Eq. (r-decomp): 𝓘 = Σ_k p_k ‖q_k − q̄‖² + ‖q̄ − u‖²,  q̄ = Σ_k p_k q_k
def imbalance(counts: npt.ArrayLike, generated: npt.ArrayLike | None = None) -> Imbalance:
    """Score the label imbalance that is left after an allocation; the weights p_k stay those of the real counts."""
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
    """Give each client's part of the score, p_k ‖q_k − u‖²."""
    counts = checked_counts(counts)
    q = _proportions(_augmented(counts, generated))
    parts: FloatArray = _weights(counts) * np.square(q - 1 / q.shape[1]).sum(axis=1)
    return parts


# Eq. (gain): Δ_k^c = (2 p_k / N_k) (‖q_k‖² − q_k^c)
def gain(counts: npt.ArrayLike) -> FloatArray:
    """Tell to first order how much one more sample at each pair lowers the score; 0 for an empty client."""
    counts = checked_counts(counts)
    size = counts.sum(axis=1, keepdims=True).astype(np.float64)
    # Over the common denominator N_k², where whole numbers let a gain of nothing be exactly 0.
    excess = np.square(counts, dtype=np.float64).sum(axis=1, keepdims=True) - counts * size
    gains: FloatArray = 2 / max(1.0, float(size.sum())) * excess / np.maximum(1.0, size) ** 2
    return gains


def negative_gain_samples(counts: npt.ArrayLike, generated: npt.ArrayLike) -> int:
    """Count the samples placed where, on the real counts, the gain is negative."""
    return int(checked_counts(generated, "generated")[gain(counts) < 0].sum())


def removed(counts: npt.ArrayLike, generated: npt.ArrayLike) -> float:
    """Give the part of the imbalance that an allocation removes, 1 − 𝓘(B) / 𝓘(0); 0 where there was none."""
    before = imbalance(counts).score
    return 1 - imbalance(counts, generated).score / before if before > 0 else 0.0


def _proportions(counts: IntArray) -> FloatArray:
    """q_k; for an empty client the uniform distribution, from which nothing is missing."""
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
