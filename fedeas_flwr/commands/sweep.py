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

from fedeas_flwr.commands.output import can_be_folder, check_format
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.tables import folding_table, print_table
from fedeas_flwr.common.text import counted, show_seconds
from fedeas_flwr.config_files import parse_overrides, read_values, refuse_ignored
from fedeas_flwr.launch.sweep import Sweep, SweepRun, make_sweep, parse_grid, points
from fedeas_flwr.launch.sweep_jobs import SweepStatus, Watcher, run_sweep
from fedeas_flwr.runs.listing import find_runs

_LINE_EVERY = 30.0
_LIVE = 72
"""Characters that the table of a sweep at work needs."""
_ORDER = ("running", "failed", "waiting", "finished")


def sweep(
    conf: Annotated[Path, typer.Argument(help="a TOML file of run-config keys, such as conf/quickstart.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …, of all runs")] = None,
    grid: Annotated[list[str] | None, typer.Option(help="key=value,value…; once for each key")] = None,
    jobs: Annotated[int, typer.Option(help="runs at once", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option(help="folder of the runs; else runs/sweep-CONF", callback=can_be_folder)
    ] = None,
    retries: Annotated[int, typer.Option(help="how often a run that failed is started again", min=0)] = 1,
    output: Annotated[
        str, typer.Option("--format", help="table, or json: what sweep.json holds, at the end", callback=check_format)
    ] = "table",
) -> None:
    """Run every combination of some keys' values; started again, it does what is left."""
    _refuse_two_words(overrides or [], grid or [])
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
        raise KeyboardInterrupt(f"stopped; go on with: {shlex.join(['fedeas', *sys.argv[1:]])}") from None
    if output == "json":
        print((folder / "sweep.json").read_text(encoding="utf-8"), end="")
    else:
        print_results(found, console)
    console.print(f"{folder / 'sweep.json'}, sweep.csv", highlight=False, soft_wrap=True)
    if others := {run.path for run in find_runs([folder], 1, [])} - {cell.run.path for cell in found.cells}:
        console.print(f"left out, being of another grid: {counted(len(others), 'run')} in {folder}", soft_wrap=True)
    for cell in failed:
        warnings.print(f"failed: {cell.name}: {cell.error}", highlight=False, soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(1)


def _refuse_two_words(overrides: list[str], grid: list[str]) -> None:
    """Refuse a key that is given one value for all runs, and others by the grid."""
    swept = parse_grid(grid)
    for key, value in parse_overrides(overrides).items():
        if key in swept:
            raise ConfigError(f"{key} = {value!r}: leave it out, --grid has the values of {key}")


def validate_runs(sweep: Sweep, console: Console) -> None:
    """Refuse now what a run that is still to be done would, hours later."""
    from fedeas_flwr.launch.prepare import check_runs  # with all of Flower, which other commands need not load

    check_runs([cell.config for cell in sweep.cells if not cell.finished], console)


# --------------------------------------------------------------------------------------- while it goes on


@contextmanager
def watching(console: Console) -> Iterator[Watcher]:
    """Give what shows a sweep: a table that changes on a terminal, lines elsewhere and where it has no room."""
    if not console.is_terminal or console.width < _LIVE:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveTable(live)


class Lines:
    """A line when a run starts or ends, and now and then one about those that run."""

    def __init__(self, console: Console) -> None:
        self._console, self._said_at = console, time.monotonic()

    def on_start(self, board: SweepStatus) -> None:
        """Print the headline."""
        self._print(_headline(board))

    def on_event(self, cell: SweepRun, word: str, board: SweepStatus) -> None:
        """Print what happened to a run."""
        self._print(f"{_event(cell, word, board)}  ({_progress(board)})")

    def on_tick(self, board: SweepStatus) -> None:
        """Print where the running ones stand, if nothing was printed for a while."""
        if time.monotonic() - self._said_at < _LINE_EVERY:
            return
        for name, job in board.running.items():
            self._print(f"{name}  " + "  ".join(_facts(board, job.cell)))

    def _print(self, line: str) -> None:
        self._said_at = time.monotonic()
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


class LiveTable:
    """A table of all runs, those that run on top."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def on_start(self, board: SweepStatus) -> None:
        """Print the headline above the table."""
        self._live.console.print(_headline(board), highlight=False, soft_wrap=True, markup=False)

    def on_event(self, cell: SweepRun, word: str, board: SweepStatus) -> None:
        """Keep failures on the screen above the table."""
        if word in ("failed", "again"):
            self._live.console.print(_event(cell, word, board), highlight=False, markup=False)

    def on_tick(self, board: SweepStatus) -> None:
        """Draw the table anew."""
        self._live.update(board_table(board, self._live.console.width), refresh=True)


def board_table(board: SweepStatus, width: int) -> Table:
    """Every run with its state, round, accuracy and time left; a line about the whole."""
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
    text = {"again": "will be tried again", "joined": "is running already"}.get(word, word)
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
    """Print every grid point: mean ± standard deviation over its finished seeds."""
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
