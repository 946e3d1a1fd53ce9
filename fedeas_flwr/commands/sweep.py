"""The command `fedeas sweep`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedeas_flwr.commands.output import check_folder, check_format
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.tables import folding_table, print_table
from fedeas_flwr.common.text import counted, show_seconds
from fedeas_flwr.config_files import parse_overrides, read_values, refuse_ignored
from fedeas_flwr.launch.sweep import Sweep, SweepRun, make_sweep, parse_grid, points
from fedeas_flwr.launch.sweep_jobs import SweepStatus, Watcher, run_sweep
from fedeas_flwr.runs.listing import find_runs

_LINE_EVERY = 30.0
_LIVE = 72
"""Minimum terminal width, in characters, for the live table of a sweep."""
_ORDER = ("running", "failed", "waiting", "finished")


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
    _reject_keys_given_twice(overrides or [], grid or [])
    folder = (out or Path("runs") / f"sweep-{conf.stem}").absolute()
    found = make_sweep(read_values(conf, overrides or []), grid or [], folder)
    for cell in found.cells:
        refuse_ignored(cell.config, {*parse_overrides(overrides or []), *found.grid})
    found.check()
    console, warnings = Console(stderr=output == "json", markup=False), Console(stderr=True, markup=False)
    validate_runs(found, console)
    try:
        with watching(console) as watcher:
            failed = run_sweep(found, jobs, retries, watcher)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; resume with: {shlex.join(['fedeas', *sys.argv[1:]])}") from None
    if output == "json":
        print((folder / "sweep.json").read_text(encoding="utf-8"), end="")
    else:
        print_results(found, console)
    console.print(f"{folder / 'sweep.json'}, sweep.csv", highlight=False, soft_wrap=True)
    if others := {run.path for run in find_runs([folder], 1, [])} - {cell.run.path for cell in found.cells}:
        console.print(f"left out {counted(len(others), 'run')} in {folder}: not in this grid", soft_wrap=True)
    for cell in failed:
        warnings.print(f"failed: {cell.name}: {cell.error}", highlight=False, soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(1)


def _reject_keys_given_twice(overrides: list[str], grid: list[str]) -> None:
    """Raise `ConfigError` for a key that is both an override and in the grid."""
    swept = parse_grid(grid)
    for key, value in parse_overrides(overrides).items():
        if key in swept:
            raise ConfigError(f"{key} = {value!r}: remove the key, since --grid sets the values of {key}")


def validate_runs(sweep: Sweep, console: Console) -> None:
    """Check all unfinished runs before the first one starts, so that an error does not appear only hours later."""
    from fedeas_flwr.launch.prepare import check_runs  # imports Flower

    check_runs([cell.config for cell in sweep.cells if not cell.finished], console)


# ------------------------------------------------------------------------------------------ while it runs


@contextmanager
def watching(console: Console) -> Iterator[Watcher]:
    """Yield the sweep's display: a live table on a wide terminal, otherwise printed lines."""
    if not console.is_terminal or console.width < _LIVE:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveTable(live)


class Lines:
    """Prints a line when a run starts or ends, and a line for each running run after 30 s without output."""

    def __init__(self, console: Console) -> None:
        self._console, self._printed_at = console, time.monotonic()

    def on_start(self, board: SweepStatus) -> None:
        """Print the headline."""
        self._print(_headline(board))

    def on_event(self, cell: SweepRun, word: str, board: SweepStatus) -> None:
        """Print what happened to a run."""
        self._print(f"{_event(cell, word, board)}  ({_progress(board)})")

    def on_tick(self, board: SweepStatus) -> None:
        """Print the progress of running runs if nothing was printed for `_LINE_EVERY` seconds."""
        if time.monotonic() - self._printed_at < _LINE_EVERY:
            return
        for name, job in board.running.items():
            self._print(f"{name}  " + "  ".join(_facts(board, job.cell)))

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


class LiveTable:
    """Shows a live table of all runs, running ones first."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def on_start(self, board: SweepStatus) -> None:
        """Print the headline above the table."""
        self._live.console.print(_headline(board), highlight=False, soft_wrap=True, markup=False)

    def on_event(self, cell: SweepRun, word: str, board: SweepStatus) -> None:
        """Print failures above the table."""
        if word in ("failed", "again"):
            self._live.console.print(_event(cell, word, board), highlight=False, markup=False)

    def on_tick(self, board: SweepStatus) -> None:
        """Redraw the table."""
        self._live.update(board_table(board, self._live.console.width), refresh=True)


def board_table(board: SweepStatus, width: int) -> Table:
    """Return a table of every run's state, round, accuracy and time left; the caption shows the sweep's progress."""
    facts = ("round", "accuracy %", "left")
    cells = sorted(board.sweep.cells, key=lambda cell: _ORDER.index(board.progress[cell.name].state))
    rows = [(cell.name, board.progress[cell.name].state, *_facts(board, cell)) for cell in cells]
    table = folding_table(width, ("run", "state", *facts), rows, fold=["run"], right=facts)
    table.caption = Text(_progress(board))
    return table


def _headline(board: SweepStatus) -> str:
    return f"{counted(len(board.sweep.cells), 'run')}, {board.slots} at once → {board.sweep.folder}"


def _facts(board: SweepStatus, cell: SweepRun) -> tuple[str, str, str]:
    standing = board.progress[cell.name]
    left = board.seconds_left(cell) if standing.state in ("waiting", "running") else None
    accuracy = "-" if standing.accuracy is None else f"{100 * standing.accuracy:.1f}"
    rounds = f"{standing.rounds}/{cell.config.rounds}"
    return rounds, accuracy, f"about {show_seconds(left)}" if left else ""


def _event(cell: SweepRun, word: str, board: SweepStatus) -> str:
    standing = board.progress[cell.name]
    text = {"again": "will be restarted", "joined": "is already running"}.get(word, word)
    if word in ("failed", "again"):
        return f"{cell.name}  {text}: {cell.error}"
    if word == "started" and standing.rounds:
        return f"{cell.name}  resumed after round {standing.rounds}"
    return f"{cell.name}  {text}"


def _progress(board: SweepStatus) -> str:
    counted = ", ".join(f"{number} {state}" for state in reversed(_ORDER) if (number := board.count(state)))
    left = board.all_seconds_left()
    return f"{counted}; about {show_seconds(left)} left" if left else counted


# --------------------------------------------------------------------------------------------- at the end


def print_results(found: Sweep, console: Console) -> None:
    """Print mean ± standard deviation over the finished seeds of every grid point."""
    keys = [key for key in found.grid if key != "seed"]
    rounds = min(20, max(cell.config.rounds for cell in found.cells))
    reached, rows = ("runs", f"last-{rounds} %", "peak %", "images"), []
    for point in points([cell.result() for cell in found.cells], found.grid):
        accuracies = [_mean_and_sd(point[measure]) for measure in ("last_20", "peak")]
        images = point["images"]["mean"]
        count = (
            f"{point['finished']}" if point["finished"] == point["runs"] else f"{point['finished']} of {point['runs']}"
        )
        shown = "-" if images is None else f"{images:,.0f}"
        rows.append((*(str(point[key]) for key in keys), count, *accuracies, shown))
    print_table(console, (*keys, *reached), rows, fold=keys, right=reached)


def _mean_and_sd(found: Mapping[str, Any]) -> str:
    if found["mean"] is None:
        return "-"
    return f"{100 * found['mean']:.1f}" + ("" if found["sd"] is None else f" ± {100 * found['sd']:.1f}")
