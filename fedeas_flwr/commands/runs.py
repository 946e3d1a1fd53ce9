"""The commands `fedeas runs ls|show|csv|prune|rm`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedeas_flwr.commands.help import OrderedGroup
from fedeas_flwr.commands.output import FormatOption
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.tables import as_csv, print_table, table_width
from fedeas_flwr.common.text import counted, show_bytes
from fedeas_flwr.runs import listing
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import remove_files

runs_app = typer.Typer(cls=OrderedGroup, help="Manage run directories.", rich_markup_mode=None)

_MISSING, _LAST_20 = "missing", "last-20 %"
_HEAD = ("run", "state", "rounds", _LAST_20, "final %", "peak %", "images", _MISSING, "changed", "size")
_HIDDEN_WHEN_NARROW = (_LAST_20, "peak %", "images")
_WIDE = 100
"""Minimum terminal width, in characters, to show all columns."""


@runs_app.command(short_help="List runs: state, rounds, accuracy, images, age, size")
def ls(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="folders to search, with subfolders; default: runs")
    ] = None,
    output: FormatOption = "table",
) -> None:
    """List runs: state, rounds, accuracy, images, last change, size."""
    wanted = folders or [Path("runs")]
    if not folders and not wanted[0].exists():
        print("[]" if output == "json" else "no runs yet: there is no folder runs here")
        return
    if missing := [folder for folder in wanted if not folder.is_dir()]:
        raise RunError(f"{missing[0]} is not a folder")
    bad: list[str] = []
    rows = [listing.describe(run) for run in listing.find_runs(wanted, unreadable=bad)]
    if output == "json":
        print(json.dumps(rows, indent=1))
        _warn(bad)
        return
    console = Console()
    lost = any(row["missing_replies"] for row in rows)
    left_out = {*(() if lost else (_MISSING,)), *(() if table_width(console) >= _WIDE else _HIDDEN_WHEN_NARROW)}
    left_out |= set() if any(row["rounds_done"] > 20 for row in rows) else {_LAST_20}
    head = [name for name in _HEAD if name not in left_out]
    cells = [[shown[name] for name in head] for shown in map(_cells, rows)]
    print_table(console, head, cells, fold=["run"], right=_HEAD[2:])
    print(f"{counted(len(rows), 'run')}, {show_bytes(sum(row['bytes'] for row in rows))}")
    if lost:
        print(f"{_MISSING}: client replies that the run continued without")
    _warn([*(row["error"] for row in rows if "error" in row), *bad])


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


@runs_app.command(short_help="Show runs: where each stands, and what it is")
def show(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories")],
    output: FormatOption = "table",
) -> None:
    """Show runs: where each stands, the keys that are not at their default, its summary.

    The JSON of one run is an object, of several a list.
    """
    found = [listing.describe_in_full(RunDirectory(folder)) for folder in folders]
    if output == "json":
        print(json.dumps(found if len(found) > 1 else found[0], indent=1))
        return
    for run in found:
        _show(run)


def _show(found: Mapping[str, Any]) -> None:
    console = Console()
    reason = found["error"] or "; ".join(filter(None, (found["stopped"], found["gaps"])))
    print(f"{found['path']}: {_state(found)}{f': {reason}' if reason else ''}")
    words = ("value", "default")
    changes = [(key, *(_as_json(change[word]) for word in words)) for key, change in found["changes"].items()]
    print_table(console, ("key", *words), changes, fold=words)
    if found["summary"]:
        summary = [(key, _as_json(value)) for key, value in found["summary"].items()]
        print_table(console, ("summary", ""), summary, fold=[""])
    else:
        print("no summary: the run has not finished")


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@runs_app.command(short_help="Print a run's rounds as CSV")
def csv(folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]) -> None:
    """Print a run's rounds as CSV."""
    found = listing.describe_in_full(RunDirectory(folder))  # raises if the folder is not a run
    if found["state"] == "damaged":
        raise RunError(found["error"])
    sys.stdout.write(as_csv([listing.flat_round(record) for record in RunDirectory(folder).rounds()]))


@runs_app.command(short_help="Remove run directories")
def rm(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories")],
    yes: Annotated[bool, typer.Option("--yes", help="remove without asking")] = False,
) -> None:
    """Remove the files of runs, and their folders if empty; remove nothing if one is not a run or is running."""
    found = list({os.path.realpath(folder): listing.check_removable(folder.absolute()) for folder in folders}.values())
    size = show_bytes(sum(listing.describe(run)["bytes"] for run in found))
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"remove {counted(len(found), 'run')}, {size}?")):
        raise RunError("nothing was removed: confirm with y, or give --yes")
    kept = listing.remove(found)
    print("\n".join([f"removed {counted(len(found), 'run')}, {size}", *kept]))


@runs_app.command(short_help="Remove checkpoints and client states of finished runs")
def prune(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="finished runs, or folders that contain runs")
    ],
    model: Annotated[bool, typer.Option("--model", help="also remove the final models")] = False,
) -> None:
    """Remove checkpoints and client states of finished runs; keep records, summaries and models."""
    found = [listing.check_removable(run.path.absolute()) for run in listing.find_runs(folders)]
    heavy = [(run.path, listing.prunable_files(run, model)) for run in found]  # check all before removing anything
    freed = sum(remove_files(folder, files) for folder, files in heavy)
    print(f"pruned {counted(len(found), 'run')}, {show_bytes(freed)} freed")


def _state(row: Mapping[str, Any]) -> str:
    if row["state"] != "finished":
        return str(row["state"])
    return f"finished{', stopped early' if row['stopped'] else ''}{', with gaps' if row['gaps'] else ''}"


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    score = row["last_20"] if row["rounds_done"] > 20 else None  # else it is the mean of all rounds
    percents = ["-" if part is None else f"{100 * part:.1f}" for part in (score, row["final"], row["peak"])]
    images, missing = ("-" if row[key] is None else f"{row[key]:,}" for key in ("images", "missing_replies"))
    changed = datetime.fromtimestamp(row["changed"]).strftime("%Y-%m-%d %H:%M")
    rounds = f"{row['rounds_done']}/{row['rounds'] or '?'}"
    cells = [row["path"], _state(row), rounds, *percents, images, missing, changed, show_bytes(row["bytes"])]
    return dict(zip(_HEAD, cells, strict=True))
