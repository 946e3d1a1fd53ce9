"""Run directories: find, describe, export and remove them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import files_of_run, holds_others_files, is_damaged_run, is_run, remove_files
from fedeas_flwr.runs.metrics import summarise

_DEPTH = 4
"""How far below a folder runs are looked for: runs/sweep/NAME is two."""


def find_runs(
    folders: Sequence[Path], depth: int = _DEPTH, unreadable: list[str] | None = None
) -> Iterator[RunDirectory]:
    """Every run directory among and below some folders, damaged ones too, once however it is reached.

    A link below a folder is not followed. A folder that cannot be looked into gets a line in ``unreadable``, once
    too; without such a list it is an error.
    """
    seen: set[str] = set()
    for folder, error in _runs_below(folders, depth):
        real = os.path.realpath(folder)  # Path.resolve raises where links lead in a circle
        if real in seen:
            continue
        seen.add(real)
        if error is None:
            yield RunDirectory(folder)
        elif unreadable is None:
            raise error
        else:
            unreadable.append(f"{folder}: {error.strerror or error}")


def _runs_below(folders: Sequence[Path], depth: int) -> Iterator[tuple[Path, OSError | None]]:
    """Run directories, and folders that cannot be looked into with the reason, each as often as it is reached."""
    for folder in folders:
        try:
            found = is_run(folder) or is_damaged_run(folder)
            inside = [] if found or not depth else _folders_in(folder)
        except OSError as error:
            yield folder, error
            continue
        if found:
            yield folder, None
        yield from _runs_below(inside, depth - 1)


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())


def summarise_so_far(run: RunDirectory, config: RunConfig) -> dict[str, Any] | None:
    """A run in a few numbers, from the rounds there are, before the first ``None``; a damaged record is one line."""
    rounds = run.checked_rounds()
    with invalid_rounds_as_run_error(run):
        return summarise(rounds, config.threshold) if rounds else None


@contextmanager
def invalid_rounds_as_run_error(run: RunDirectory) -> Iterator[None]:
    """Bring what goes wrong with the rounds of a damaged record to one line."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"{run.path / 'rounds.jsonl'} holds what is no round's record: {error!r}") from None


def describe(run: RunDirectory) -> dict[str, Any]:
    """One run as a row; a run that is damaged, or of another version and cannot be read, still has one."""
    files = [found for path in files_of_run(run.path) if (found := _stat(path))]
    row: dict[str, Any] = {"path": str(run.path), "state": run.state(), "rounds_done": 0, "rounds": None}
    row |= {"last_20": None, "peak": None, "images": None, "missing_replies": None}
    try:
        row["rounds_done"] = len(run.rounds())
        config = run.config()
        row["rounds"] = config.rounds
        if summary := summarise_so_far(run, config):
            row |= {"last_20": summary["last_20"], "peak": summary["peak"], "images": summary["total_generated"]}
            row["missing_replies"] = summary["failures"]
    except RunError as error:
        could_be_read = row["rounds"] is not None or not is_run(run.path)
        row |= {"state": "damaged" if could_be_read else "unreadable", "error": str(error)}
    return row | {"changed": max(file.st_mtime for file in files), "bytes": sum(file.st_size for file in files)}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # a run at work replaces its files
        return None


def describe_in_full(run: RunDirectory) -> dict[str, Any]:
    """One run's row, its config with the keys that differ from their defaults, environment and summary."""
    if not is_run(run.path) and not is_damaged_run(run.path):
        raise RunError(f"{run.path} is not a run directory")
    config = run.config().to_user_dict()
    defaults = parse_config({}).to_user_dict()
    changes = {key: {"value": config[key], "default": defaults[key]} for key in config if config[key] != defaults[key]}
    row = describe(run)
    return {
        **row,
        "error": row.get("error") or run.status()[1],
        "changes": changes,
        "config": config,
        "environment": run.environment(),
        "files": run.files(),
        "summary": run.summary() if (run.path / "summary.json").exists() else None,
    }


def check_removable(folder: Path) -> RunDirectory:
    """Refuse to remove what is not surely a run directory, or is at work."""
    if not folder.is_symlink() and is_damaged_run(folder):
        raise RunError(f"{folder} is damaged, its config.json is not a run's: nothing is removed")
    if folder.is_symlink() or not is_run(folder):
        raise RunError(f"{folder} is not a run directory: nothing is removed")
    run = RunDirectory(folder)
    state = run.state()
    if state == "running":
        raise RunError(f"{folder} is running, in process {run.processes()[0]['pid']}: nothing is removed")
    if state == "elsewhere":
        raise RunError(f"{folder} was running on another machine when last heard of: nothing is removed")
    return run


def prunable_files(run: RunDirectory, model: bool = False) -> list[Path]:
    """What a finished run keeps only to be gone on with: checkpoint, noise-key, client states; on demand its model."""
    if run.state() != "finished":
        raise RunError(f"{run.path} is {run.state()}, not finished: it needs its checkpoint, nothing is removed")
    run.checked_rounds()  # a damaged record may be mended, and gone on with
    names = ("checkpoint.safetensors", "noise-key", "clients", *(("model.safetensors",) if model else ()))
    return [path for path in files_of_run(run.path) if path.relative_to(run.path).parts[0] in names]


def remove(runs: Sequence[RunDirectory]) -> list[str]:
    """Remove what runs wrote, and their folders where nothing else is in them; say what stayed.

    The runs were found removable. One that lies in another's folder goes first.
    """
    stayed = []
    for run in sorted(runs, key=lambda run: -len(run.path.parts)):
        remove_files(run.path, files_of_run(run.path))
        if run.path.exists():
            first, *others = sorted(path.name for path in run.path.iterdir())
            more = f" and {len(others)} more" if others else ""
            stayed.append(f"{run.path} stays: no run wrote {first}{more}")
    return stayed


def flat_rounds(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rounds as rows of a table: ``seconds.clients`` for what is inside, lists as JSON."""
    return [dict(_flat(record)) for record in rounds]


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value) if isinstance(value, list) else value


def export(run: RunDirectory, folder: Path) -> None:
    """Copy the record of a finished run to a folder."""
    config = run.config().to_user_dict()
    if not (run.path / "summary.json").exists():
        raise RunError(f"{run.path} has not finished: there is no summary.json to export")
    run.checked_rounds()
    check_export(run, folder)
    config |= {"run-dir": "", "data-dir": "", "resume": False}  # without a run-dir there is nothing to resume
    config |= {key: without_folder(config[key]) for key in ("dataset", "generator", "weights")}
    copy = RunDirectory(folder)
    copy.write_json("config.json", run.read_json("config.json") | {"config": config})
    copy.write_json("summary.json", run.summary())
    atomic_write(folder / "rounds.jsonl", (run.path / "rounds.jsonl").read_bytes())


def check_export(run: RunDirectory, folder: Path) -> None:
    """Refuse to export over anything but an earlier record of this very run, which may have gone on since."""
    if (folder / "status.json").exists():
        raise RunError(f"{folder} is a run directory, and no place for a record: name another folder")
    if holds_others_files(folder):
        raise RunError(f"{folder} is not empty and holds no record; name a new folder")
    there = RunDirectory(folder)
    rounds = there.rounds()
    if there.is_record() and (not rounds or rounds != run.rounds()[: len(rounds)]):
        other = there.config()
        done = counted(len(rounds), "round")
        what = f"{other.policy}, {other.strategy}, {other.dataset}, seed {other.seed}, {done}"
        raise RunError(f"{folder} holds the record of another run ({what}): name another folder, or remove it")


def without_folder(spec: str) -> str:
    """The last name of a path, with the kind that may stand before it: ``bank:/home/me/images.npz``."""
    kind, colon, where = spec.partition(":")
    is_kind = colon and "/" not in kind  # a folder's name may hold a colon, too
    return kind + colon + Path(where).name if is_kind else Path(spec).name
