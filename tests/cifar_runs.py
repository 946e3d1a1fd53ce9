"""The committed runs on CIFAR, the sweeps on digits beside them, and the pages that tell of them."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.metrics import falls
from fedeas_flwr.run_plan import planned_allocation, planned_counts
from fedeas_flwr.runs import RunDirectory

RESULTS = Path(__file__).parents[1] / "results"
PAGE, README = (" ".join((RESULTS.parent / name).read_text().split()) for name in ("docs/reproduction.md", "README.md"))
POLICIES = ("fedeas", "missing-only", "uniform")
Counts = NDArray[np.int64]


def record(name: str) -> RunDirectory:
    return RunDirectory(RESULTS / name)


def sweep_curves(folder: str) -> dict[str, list[float]]:
    """By the name of a sweep's run: its accuracy after each round."""
    with (RESULTS / folder / "curves.csv").open() as file:
        return {row.pop("name"): [float(value) for value in row.values()] for row in csv.DictReader(file)}


def accuracies(run: RunDirectory) -> list[float]:
    return list(_accuracies(run.path))


@cache
def _accuracies(path: Path) -> tuple[float, ...]:
    return tuple(float(one["accuracy"]) for one in RunDirectory(path).rounds())


def falls_of(run: RunDirectory) -> dict[int, float]:
    """By round that falls: how far."""
    return dict(_falls_of(run.path))


@cache
def _falls_of(path: Path) -> dict[int, float]:
    return falls(_accuracies(path))


def last_batches(run: RunDirectory) -> tuple[Counts, Counts]:
    """By client: its real samples, and how many images an epoch leaves for its last batch, 0 if none."""
    return _last_batches(run.path)


@cache
def _last_batches(path: Path) -> tuple[Counts, Counts]:
    config = RunDirectory(path).config()
    counts = planned_counts(config, config.clients)
    return counts.sum(axis=1), (counts + planned_allocation(config, counts)).sum(axis=1) % config.batch_size


def runs_with_own_images() -> list[RunDirectory]:
    """The policies at α = 0.1, each client with images of its own."""
    large = [f"{policy}-s{seed}" for policy in POLICIES for seed in (1, 2, 3)]
    return [record(f"cifar10-k100-a0.1/{name}") for name in (*large, "full-balance-s1")] + [
        record(f"cifar10-k20-a0.1/{policy}-s1") for policy in (*POLICIES, "full-balance")
    ]


def runs_at_other_alphas() -> list[RunDirectory]:
    """Likewise at α = 0.05 and 0.3, 100 clients."""
    names = [f"a{alpha}/{policy}-s1" for alpha in ("0.05", "0.3") for policy in POLICIES]
    return [record(f"cifar10-k100-{name}") for name in (*names, "a0.05/missing-only-s2")]


def runs_at_other_budgets() -> dict[str, RunDirectory]:
    """The β sweep and the ablation, 20 clients."""
    names = [f"{policy}-b{beta}" for policy in ("fedeas", "uniform") for beta in (4, 8, 16, 20)]
    return {name: record(f"cifar10-k20-a0.1/{name}-s1") for name in (*names, "without-entropy", "linear")}


def runs_without_images(clients: int) -> list[RunDirectory]:
    """FedAvg, FedProx and MOON, with 100 clients at every α."""
    if clients == 20:
        return [record(f"cifar10-k20-a0.1/{name}") for name in ("fedavg-s1", "fedprox-s1", "moon-s1", "moon-s2")]
    names = ["a0.1/fedprox-s1", *(f"a0.1/{name}-s{seed}" for name in ("none", "moon") for seed in (1, 2, 3))]
    names += [f"a0.05/{name}-s1" for name in ("fedavg", "fedprox", "moon")]
    names += [*(f"a0.3/{name}-s1" for name in ("none", "fedprox", "moon")), "a0.3/moon-s2"]
    return [record(f"cifar10-k100-{name}") for name in names]


def runs_that_generate_since() -> list[RunDirectory]:
    """Made after falls had been put down to last batches of two: protocol clean, other rules, CIFAR-100."""
    names = [*(f"{policy}-clean" for policy in POLICIES), "waterfill", "fedeas-g0.25", "fedeas-g1"]
    folders = [*(f"cifar10-k100-a0.1/{name}-s1" for name in names), *(f"cifar100-k100-a0.1/{p}-s1" for p in POLICIES)]
    return [record(name) for name in folders]
