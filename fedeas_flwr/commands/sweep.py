"""The command `fedeas sweep`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedeas_flwr.commands.output import check_folder, check_format, print_line
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.tables import folding_table, print_table
from fedeas_flwr.common.text import counted, show_seconds
from fedeas_flwr.config_files import parse_overrides, read_values, refuse_ignored
from fedeas_flwr.launch.sweep import MEASURES, Sweep, SweepRun, make_sweep, parse_grid, points
from fedeas_flwr.launch.sweep_jobs import SweepStatus, Watcher, run_sweep
from fedeas_flwr.runs.listing import find_runs
from fedeas_flwr.runs.metrics import score_name

_LINE_EVERY = 30.0
"""Seconds without output after which `Lines` prints the progress of the running runs."""
_MIN_LIVE_WIDTH = 72
"""Minimum terminal width, in characters, for the live table of a sweep."""
_STATES = ("running", "failed", "waiting", "finished")
"""States of a run, in the order of the live table."""


def sweep(
    conf: Annotated[Path, typer.Argument(help="a TOML file of run-config keys, such as conf/quickstart.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …, for all runs")] = None,
    grid: Annotated[list[str] | None, typer.Option(help="key=value,value…; repeat for each key")] = None,
    jobs: Annotated[int, typer.Option(help="number of parallel runs", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option(help="folder for the runs; default: runs/sweep-CONF", callback=check_folder)
    ] = None,
    retries: Annotated[int, typer.Option(help="how many times to restart a failed run", min=0)] = 1,
    output: Annotated[
        str, typer.Option("--format", help="table, or json to print sweep.json at the end", callback=check_format)
    ] = "table",
) -> None:
    """Run every combination of the grid's values; run the same command again to finish the remaining runs."""
    swept, given = parse_grid(grid or []), parse_overrides(overrides or [])
    for key, value in given.items():
        if key in swept:
            raise ConfigError(f"{key} = {value!r}: remove the key, since --grid sets the values of {key}")
    folder = (out or Path("runs") / f"sweep-{conf.stem}").absolute()
    sweep = make_sweep(read_values(conf, overrides or []), grid or [], folder)
    for cell in sweep.cells:
        refuse_ignored(cell.config, {*given, *sweep.grid})
    sweep.check()
    console = Console(stderr=output == "json", markup=False)
    validate_runs(sweep, console)
    failed = run_watched(sweep, jobs, retries, console)
    if output == "json":
        print((folder / "sweep.json").read_text(encoding="utf-8"), end="")
    else:
        print_results(sweep, console)
    print_line(console, f"{folder / 'sweep.json'}, sweep.csv")
    if others := {run.path for run in find_runs([folder], 1, [])} - {cell.run.path for cell in sweep.cells}:
        console.print(f"left out {counted(len(others), 'run')} in {folder}: not in this grid", soft_wrap=True)
    for cell in failed:
        print_line(Console(stderr=True), f"failed: {cell.name}: {cell.error}")
    if failed:
        raise typer.Exit(1)


def validate_runs(sweep: Sweep, console: Console) -> None:
    """Check all unfinished runs before the first one starts, so that an error does not appear only hours later."""
    from fedeas_flwr.launch.prepare import check_runs  # imports Flower

    check_runs([cell.config for cell in sweep.cells if not cell.finished], console)


def run_watched(
    sweep: Sweep, jobs: int, retries: int, console: Console, wrap: Callable[[Watcher], Watcher] = lambda inner: inner
) -> list[SweepRun]:
    """Run a sweep with its display, which ``wrap`` may extend; return the runs that failed after all retries.

    The built-in generator is trained before the first run, where its progress is shown.
    """

    def prepare() -> None:
        generating = (cell.config for cell in sweep.cells if not cell.finished and cell.config.generates)
        if any(config.generator_spec.kind == "builtin" for config in generating):
            from fedeas_flwr.launch.prepare import ensure_digits_generator

            ensure_digits_generator(console)

    try:
        with watching(console) as watcher:
            return run_sweep(sweep, jobs, retries, wrap(watcher), prepare)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; resume with: {shlex.join(['fedeas', *sys.argv[1:]])}") from None


@contextmanager
def watching(console: Console) -> Iterator[Watcher]:
    """Yield the sweep's display: a live table on a wide terminal, otherwise printed lines."""
    if not console.is_terminal or console.width < _MIN_LIVE_WIDTH:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveTable(live)


class Lines:
    """Prints a line when a run starts or ends, and a line for each running run after 30 s without output."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed_at = console, time.monotonic()

    def on_start(self, status: SweepStatus) -> None:
        """Print the headline."""
        self._print(_headline(status))

    def on_event(self, cell: SweepRun, event: str, status: SweepStatus) -> None:
        """Print what happened to a run."""
        self._print(f"{_event_line(cell, event, status)}  ({_progress_line(status)})")

    def on_tick(self, status: SweepStatus) -> None:
        """Print the progress of running runs if nothing was printed for `_LINE_EVERY` seconds."""
        if time.monotonic() - self._printed_at < _LINE_EVERY:
            return
        for name, job in status.running.items():
            self._print(f"{name}  " + "  ".join(_columns(status, job.cell)))

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        print_line(self._console, line)


class LiveTable:
    """Shows a live table of all runs, running ones first."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def on_start(self, status: SweepStatus) -> None:
        """Print the headline above the table."""
        print_line(self._live.console, _headline(status))

    def on_event(self, cell: SweepRun, event: str, status: SweepStatus) -> None:
        """Print failures above the table."""
        if event in ("failed", "again"):
            self._live.console.print(_event_line(cell, event, status), highlight=False, markup=False)

    def on_tick(self, status: SweepStatus) -> None:
        """Redraw the table."""
        self._live.update(status_table(status, self._live.console.width), refresh=True)


def status_table(status: SweepStatus, width: int) -> Table:
    """Return a table of every run's state, round, score and time left; the caption shows the sweep's progress."""
    columns = ("round", "loss" if status.sweep.base.task == "generator" else "accuracy %", "left")
    cells = sorted(status.sweep.cells, key=lambda cell: _STATES.index(status.progress[cell.name].state))
    rows = [(cell.name, status.progress[cell.name].state, *_columns(status, cell)) for cell in cells]
    table = folding_table(width, ("run", "state", *columns), rows, fold=["run"], right=columns)
    table.caption = Text(_progress_line(status))
    return table


def _headline(status: SweepStatus) -> str:
    return f"{counted(len(status.sweep.cells), 'run')}, {status.slots} at once → {status.sweep.folder}"


def _columns(status: SweepStatus, cell: SweepRun) -> tuple[str, str, str]:
    progress = status.progress[cell.name]
    left = status.seconds_left(cell) if progress.state in ("waiting", "running") else None
    score = "-" if progress.score is None else _shown(progress.score, cell.config.task)
    rounds = f"{progress.rounds}/{cell.config.rounds}"
    return rounds, score, f"about {show_seconds(left)}" if left else ""


def _event_line(cell: SweepRun, event: str, status: SweepStatus) -> str:
    progress = status.progress[cell.name]
    text = {"again": "will be restarted", "joined": "is already running"}.get(event, event)
    if event in ("failed", "again"):
        return f"{cell.name}  {text}: {cell.error}"
    if event == "started" and progress.rounds:
        return f"{cell.name}  resumed after round {progress.rounds}"
    return f"{cell.name}  {text}"


def _progress_line(status: SweepStatus) -> str:
    states = ", ".join(f"{number} {state}" for state in reversed(_STATES) if (number := status.count(state)))
    left = status.all_seconds_left()
    return f"{states}; about {show_seconds(left)} left" if left else states


def print_results(sweep: Sweep, console: Console) -> None:
    """Print mean ± standard deviation over the finished seeds of every grid point."""
    keys = [key for key in sweep.grid if key != "seed"]
    task, score = sweep.base.task, score_name(cell.config.rounds for cell in sweep.cells)
    titles = {"last_20": f"{score} %", "peak": "peak %", "final_loss": "loss", "images": "images"}
    results, rows = ("runs", *(titles[measure] for measure in MEASURES[task])), []
    for point in points([cell.result() for cell in sweep.cells], sweep.grid):
        count = f"{point['finished']}" + ("" if point["finished"] == point["runs"] else f" of {point['runs']}")
        scores = [_mean_and_sd(point[measure], task) for measure in MEASURES[task] if measure != "images"]
        images = [_images(point["images"])] if "images" in point else []
        rows.append((*(str(point[key]) for key in keys), count, *scores, *images))
    print_table(console, (*keys, *results), rows, fold=keys, right=results)


def _mean_and_sd(measure: Mapping[str, Any], task: str) -> str:
    if measure["mean"] is None:
        return "-"
    return _shown(measure["mean"], task) + ("" if measure["sd"] is None else f" ± {_shown(measure['sd'], task)}")


def _images(measure: Mapping[str, Any]) -> str:
    """Return a number of images, with the standard deviation if seeds differ."""
    if measure["mean"] is None:
        return "-"
    return f"{measure['mean']:,.0f}" + (f" ± {measure['sd']:,.0f}" if measure["sd"] else "")


def _shown(score: float, task: str) -> str:
    """Return an accuracy in percent, or a generator's loss."""
    return f"{score:.5f}" if task == "generator" else f"{100 * score:.1f}"
