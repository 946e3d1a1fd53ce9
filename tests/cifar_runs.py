"""The committed runs on CIFAR, and the pages that tell of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.local_data import planned_allocation, planned_counts
from fedeas_flwr.runs import RunDirectory

RESULTS = Path(__file__).parents[1] / "results"
PAGE, README = (" ".join((RESULTS.parent / name).read_text().split()) for name in ("docs/reproduction.md", "README.md"))
POLICIES = ("fedeas", "missing-only", "uniform")
Counts = NDArray[np.int64]


def record(name: str) -> RunDirectory:
    return RunDirectory(RESULTS / name)


def accuracies(run: RunDirectory) -> list[float]:
    return [float(one["accuracy"]) for one in run.rounds()]


def last_batches(run: RunDirectory) -> tuple[Counts, Counts]:
    """By client: its real samples, and how many images an epoch leaves for its last batch, 0 if none."""
    config = run.config()
    counts = planned_counts(config, config.clients)
    return counts.sum(axis=1), (counts + planned_allocation(config, counts)).sum(axis=1) % config.batch_size
