"""The command `fedeas quickstart`: four policies on one digits partition, in minutes on two cores."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedeas_flwr.commands.output import check_folder, console, print_line
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.launch.sweep import SweepRun, check_cell
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import is_run

RUNS = (("none", "ray"), ("fedeas", "ray"), ("uniform", "inline"), ("missing-only", "inline"))
"""Policy and backend of each run. Two use Flower's Ray simulation, which takes half a minute to start; the other two
run inline, with bit-identical results."""
QUICKSTART: dict[str, Any] = {"clients": 10, "policy": "fedeas", "threshold": 0.9}
"""The keys of conf/quickstart.toml, which an installed package does not have."""
_FOLDER = Path("runs/quickstart")


def quickstart_command(
    out: Annotated[
        Path, typer.Option(help="folder of the runs, the figure and the report", callback=check_folder)
    ] = _FOLDER,
) -> None:
    """Run four policies on the built-in digits: none, FedEAS, and two others with FedEAS's number of images.

    Run the same command again to finish what is left.
    """
    try:
        quickstart(out.absolute())
    except KeyboardInterrupt:
        again = shlex.join(["fedeas", "quickstart", *(() if out == _FOLDER else ("--out", str(out)))])
        raise KeyboardInterrupt(f"stopped; resume with: {again}") from None


def quickstart_config(policy: str, backend: str, folder: Path) -> RunConfig:
    """Return the config of one of the four runs: the defaults, with ten clients."""
    return parse_config({**QUICKSTART, "policy": policy, "backend": backend, "run-dir": str(folder / policy)})


def quickstart(folder: Path) -> None:
    """Finish the four runs in ``folder``, print a table, and write a figure and an HTML report."""
    from fedeas_flwr.report.groups import group_runs
    from fedeas_flwr.report.notes import notes_on
    from fedeas_flwr.report.page import as_png
    from fedeas_flwr.report.writing import comparison_figure, print_comparison, write_report

    _reject_other_folder(folder)
    cells = [_cell(quickstart_config(policy, backend, folder)) for policy, backend in RUNS]
    groups, left_out = group_runs([_finish(cell) for cell in cells])
    figure, page = folder / "quickstart.png", folder / "report.html"
    atomic_write(figure, as_png(comparison_figure(groups)))
    write_report(groups, left_out, page)
    console.print()
    print_comparison(groups, console)
    for note in notes_on(groups):
        print_line(console, note)
    console.print(
        "8×8 digits: generating images raises accuracy, most of all in early rounds; policies with the same number of "
        "images are too close to separate here."
    )
    print_line(console, f"Figure: {figure}\nReport: {page}")


def _reject_other_folder(folder: Path) -> None:
    """Raise `ConfigError` if the folder holds other files and no run of an earlier quickstart."""
    own = [policy for policy, _ in RUNS]
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in there if name not in own and not name.startswith(".")]
    if others and not any(is_run(folder / policy) for policy in own):
        raise ConfigError(f"--out '{folder}': holds {others[0]} and no quickstart; give a new folder")


def _cell(config: RunConfig) -> SweepRun:
    """Return one of the runs, to be started or resumed; raise if its folder does not allow that."""
    run = RunDirectory(Path(config.run_dir))
    cell = SweepRun(config.policy, {}, config.with_changes(resume=run.has_rounds()), run)
    check_cell(cell)
    run.checked_rounds()
    if not cell.finished:
        run.check_ready(cell.config)
    return cell


def _finish(cell: SweepRun) -> RunDirectory:
    """Start or resume one of the runs and return its directory; a finished run is kept."""
    if cell.finished:
        again = shlex.join(["fedeas", "runs", "rm", str(cell.run.path)])
        console.print(f"{cell.name}: already finished and kept; to repeat it, first: {again}", soft_wrap=True)
        return cell.run
    from fedeas_flwr.launch.prepare import prepare
    from fedeas_flwr.launch.run import launch

    config = prepare(cell.config, console)
    console.print(f"\n{cell.name}: {config.rounds} rounds, {config.clients} clients, backend {config.backend}")
    return launch(config, console)
