"""The built-in job: the same digits partition under four policies, a table and a picture, in minutes on two cores."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.launch import launch
from fedeas_flwr.prepare import prepare
from fedeas_flwr.report.comparison import comparison_figure, comparison_table
from fedeas_flwr.runs import RunDirectory

RUNS = (("none", "ray"), ("fedeas", "ray"), ("uniform", "inline"), ("missing-only", "inline"))
"""Policy and backend. Two runs go through Flower's Ray simulation; its start costs half a minute, so two do not: the
result is the same bit for bit."""


def quickstart_config(policy: str, backend: str, folder: Path) -> RunConfig:
    """One of the four runs: the run-config's defaults, for ten clients."""
    return parse_config(
        {
            "clients": 10,
            "policy": policy,
            "backend": backend,
            "threshold": 0.9,
            "run-dir": str(folder / policy),
        }
    )


def quickstart(folder: Path, console: Console) -> None:
    """Run the four policies into ``folder`` (what was there before is replaced), print a table, write a picture."""
    runs: list[RunDirectory] = []
    for policy, backend in RUNS:
        config = prepare(quickstart_config(policy, backend, folder), console)
        shutil.rmtree(config.run_dir, ignore_errors=True)
        console.print(f"\n{policy}: {config.rounds} rounds, {config.clients} clients, backend {backend}")
        runs.append(launch(config, console))
    picture = folder / "quickstart.png"
    comparison_figure(runs, picture)
    console.print()
    console.print(comparison_table(runs))
    console.print(
        "One seed, 8×8 digits: generating is far above not generating; policies that spend the same number of images "
        "lie too close together here to be told apart."
    )
    console.print(f"Picture: {picture}", soft_wrap=True, highlight=False)
