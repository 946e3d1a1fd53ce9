"""The quickstart: one digits partition under four policies, a table, a picture and a page, in minutes on 2 cores."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedeas_flwr.commands.output import can_be_folder, console
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.launch.sweep import SweepRun, check_cell
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import is_run

RUNS = (("none", "ray"), ("fedeas", "ray"), ("uniform", "inline"), ("missing-only", "inline"))
"""Policy and backend. Two runs go through Flower's Ray simulation; its start costs half a minute, so two do not: the
result is the same bit for bit."""
_FOLDER = Path("runs/quickstart")


def quickstart_command(
    out: Annotated[Path, typer.Option(help="folder of the runs and the picture", callback=can_be_folder)] = _FOLDER,
) -> None:
    """Four runs on the built-in digits: no synthetic data, FedEAS, and two policies at FedEAS's budget.

    Started again, it does what is left of them.
    """
    try:
        quickstart(out.absolute(), console)
    except KeyboardInterrupt:
        again = shlex.join(["fedeas", "quickstart", *(() if out == _FOLDER else ("--out", str(out)))])
        raise KeyboardInterrupt(f"stopped; go on with: {again}") from None


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
    """Run the four policies into ``folder``, or what is left of them, print a table, write a picture and a page."""
    from fedeas_flwr.report.groups import group_runs
    from fedeas_flwr.report.page import as_png
    from fedeas_flwr.report.writing import comparison_figure, print_comparison, write_report

    _refuse_others(folder)
    cells = [_cell(quickstart_config(policy, backend, folder)) for policy, backend in RUNS]
    groups, left_out = group_runs([_do(cell, console) for cell in cells])
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


def _refuse_others(folder: Path) -> None:
    """Write into no folder with somebody's own things; what was put beside an earlier quickstart's runs may stay."""
    own = [policy for policy, _ in RUNS]
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in there if name not in own and not name.startswith(".")]
    if others and not any(is_run(folder / policy) for policy in own):
        raise ConfigError(f"--out '{folder}': holds {others[0]} and no quickstart; name a new folder")


def _cell(config: RunConfig) -> SweepRun:
    """One of the runs as it is to be done: from its start, or from its checkpoint; refused if it cannot be."""
    run = RunDirectory(Path(config.run_dir))
    cell = SweepRun(config.policy, {}, config.with_changes(resume=run.is_record()), run)
    check_cell(cell)
    run.checked_rounds()
    if not cell.finished:
        run.check_ready(cell.config)
    return cell


def _do(cell: SweepRun, console: Console) -> RunDirectory:
    """Do one of the runs, or what is left of it."""
    if cell.finished:
        again = shlex.join(["fedeas", "runs", "rm", str(cell.run.path)])
        console.print(f"{cell.name}: done before, and kept; to do it anew, first: {again}", soft_wrap=True)
        return cell.run
    from fedeas_flwr.launch.prepare import prepare
    from fedeas_flwr.launch.run import launch

    config = prepare(cell.config, console)
    console.print(f"\n{cell.name}: {config.rounds} rounds, {config.clients} clients, backend {config.backend}")
    return launch(config, console)
