"""The built-in job: one digits partition under four policies, a table, a picture and a page, in minutes on 2 cores."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.launch import launch
from fedeas_flwr.paths import atomic_write
from fedeas_flwr.prepare import prepare
from fedeas_flwr.report.comparison import comparison_figure, print_comparison
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.page import as_png
from fedeas_flwr.report.writing import write_report
from fedeas_flwr.run_files import files_of_run, is_run, remove_files
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
    """Run the four policies into ``folder`` (runs that were there are replaced), print a table, write a picture and a
    page."""
    runs: list[RunDirectory] = []
    for policy, backend in RUNS:
        _clear(RunDirectory(folder / policy))
        config = prepare(quickstart_config(policy, backend, folder), console)
        console.print(f"\n{policy}: {config.rounds} rounds, {config.clients} clients, backend {backend}")
        runs.append(launch(config, console))
    groups, left_out = group_runs(runs)
    picture, page = folder / "quickstart.png", folder / "report.html"
    atomic_write(picture, as_png(comparison_figure(groups)))
    write_report(groups, left_out, page)
    console.print()
    print_comparison(groups, console)
    console.print(
        "One seed, 8×8 digits: generating is far above not generating; policies that spend the same number of images "
        "lie too close together here to be told apart."
    )
    console.print(f"Picture: {picture}\nReport: {page}", soft_wrap=True, highlight=False)


def _clear(run: RunDirectory) -> None:
    """Make room where an earlier quickstart ran; what is not a run's stays, and a run refuses to begin there."""
    run.refuse_if_it_runs()
    if is_run(run.path):
        remove_files(run.path, files_of_run(run.path))
