"""The committed runs on CIFAR, and the pages that tell of them."""

from __future__ import annotations

from pathlib import Path

from fedeas_flwr.runs import RunDirectory

RESULTS = Path(__file__).parents[1] / "results"
PAGE, README = (" ".join((RESULTS.parent / name).read_text().split()) for name in ("docs/reproduction.md", "README.md"))
POLICIES = ("fedeas", "missing-only", "uniform")


def record(name: str) -> RunDirectory:
    return RunDirectory(RESULTS / name)


def accuracies(run: RunDirectory) -> list[float]:
    return [float(one["accuracy"]) for one in run.rounds()]
