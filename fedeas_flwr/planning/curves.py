"""Data of the paper's figures on label counts. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import FloatArray, IntArray, client_imbalance, full_balance, greedy, removed, uniform
from fedeas_flwr.planning.budget_path import BudgetPath
from fedeas_flwr.waterfill import waterfill

MAX_DRAWN_GREEDY_STEPS = 100_000
"""Largest total for which `reduction` computes greedy, which takes seconds; waterfill removes no less imbalance."""
CURVE_POINTS = 24


# Fig. 1(a)
def demand(counts: npt.ArrayLike, generated: IntArray) -> tuple[IntArray, IntArray]:
    """Return the images that each client needs for full balance, and those that it gets."""
    return full_balance(counts).sum(axis=1), generated.sum(axis=1)


# Fig. 2(a)
def concentration(counts: npt.ArrayLike, generated: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the cumulative shares of the imbalance score and of the generated images.

    Clients are in decreasing order of their part of the score, p_k ‖q_k − u‖².
    """
    held = client_imbalance(counts)
    order = np.argsort(-held, kind="stable")
    return _running_share(held[order]), _running_share(generated.sum(axis=1)[order])


def _running_share(parts: npt.NDArray[np.int64] | FloatArray) -> FloatArray:
    sums = np.concatenate([[0.0], np.cumsum(parts, dtype=np.float64)])
    return sums / sums[-1] if sums[-1] > 0 else sums


@dataclass(frozen=True)
class Reduction:
    """Points (generated images, removed share of the imbalance) of each policy, for a figure with some β marked."""

    betas: list[float]
    """The marked β."""
    curves: dict[str, list[tuple[int, float]]]
    marks: dict[str, list[tuple[int, float]]]
    """Points at the marked β, of the policy that β controls and of Uniform with the same totals."""


# Fig. 2(b): 1 − 𝓘(B) / 𝓘(0)
def reduction(path: BudgetPath, betas: Sequence[float]) -> Reduction:
    """Return the curves of a policy along β, and of Uniform, greedy and waterfill at the same totals."""
    along = [path.at(float(beta)) for beta in np.linspace(0, max(betas, default=0.0), CURVE_POINTS)]
    marked = [path.at(beta) for beta in betas]
    totals = [point.images for point in along]
    rules = {"waterfill": waterfill, "greedy": greedy, "uniform": uniform}
    if totals[-1] > MAX_DRAWN_GREEDY_STEPS:
        del rules["greedy"]

    def points(rule: Callable[[npt.ArrayLike, int], IntArray], totals: list[int]) -> list[tuple[int, float]]:
        return [(total, removed(path.counts, rule(path.counts, total))) for total in totals]

    return Reduction(
        betas=list(betas),
        curves={name: points(rule, totals) for name, rule in rules.items()}
        | {path.policy: [(point.images, point.removed) for point in along]},
        marks={
            path.policy: [(point.images, point.removed) for point in marked],
            "uniform": points(uniform, [point.images for point in marked]),
        },
    )


def marked_betas(beta: float) -> list[float]:
    """Return β/3, 2β/3, …, 5β/3; for β = 12 these are the values of the paper's sweep."""
    return [float(f"{beta * i / 3:.3g}") for i in range(1, 6)]
