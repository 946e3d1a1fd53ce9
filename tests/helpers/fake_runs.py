"""Fake run directories without training, with numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.config import parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.report.groups import Group, group_runs
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import summarise

FEDEAS_OF_FOUR = 115
"""Images that FedEAS generates on the digits partition of four clients with β = 4, α = 0.1."""


def write_run(
    folder: Path,
    accuracies: Sequence[float],
    *,
    images: int = 0,
    extra: Sequence[dict[str, Any]] | None = None,
    finished: bool = True,
    **keys: Any,
) -> RunDirectory:
    """Write a run of four clients with these accuracies; ``extra`` adds to each round, ``keys`` are snake_case."""
    values = {"clients": 4, "rounds": len(accuracies), "policy": "none", "run-dir": str(folder)}
    values |= {key.replace("_", "-"): value for key, value in keys.items()}
    config = parse_config(values)
    run = RunDirectory.start(config, dict(_environment()))
    if not config.dataset.startswith(("own:", "hf:")):  # those may be gone
        run.record_inputs(config.dataset, dataset_info(config.dataset).classes, {})
    for number, accuracy in enumerate(accuracies, 1):
        seconds = {"clients": 2.0, "aggregate": 0.5, "end_wait": 0.25, "evaluate": 0.25}
        seconds |= {"generating": 1.0, "training": 3.0}
        seconds |= {"startup": 2.0} if number == 1 else {}
        more = extra[number - 1] if extra else {}
        record = {"round": number, "accuracy": accuracy, "clients": [0, 1, 2, 3], "failures": [], "generated": images}
        run.append_round({**record, "seconds": seconds, **more})
    if finished:
        run.save_summary(summarise(run.rounds(), config.threshold))
        run.set_status("finished")
    else:
        run.set_status("interrupted")
    return run


@cache
def _environment() -> dict[str, Any]:
    return describe_environment("cpu")


def grouped(*runs: RunDirectory) -> list[Group]:
    """Return the groups that a report makes of runs."""
    return group_runs(runs)[0]
