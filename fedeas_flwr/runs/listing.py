"""Find, describe, export and remove run directories."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.hf_spec import HF, HfSpec
from fedeas_flwr.common.text import MAX_LINE, counted, one_line
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_keys import PATH_KEYS
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import (
    CHECKPOINT,
    PREVIOUS_CHECKPOINT,
    files_of_run,
    holds_others_files,
    is_damaged_run,
    is_run,
    remove_files,
)
from fedeas_flwr.runs.metrics import summarise

_DEPTH = 4
"""Number of folder levels below a folder that are searched for runs; runs/sweep/NAME is two levels below runs."""


def find_runs(
    folders: Sequence[Path], depth: int = _DEPTH, unreadable: list[str] | None = None
) -> Iterator[RunDirectory]:
    """Yield every run directory among and below some folders once, including damaged ones.

    Links below a folder are not followed. A folder that cannot be read adds one line to ``unreadable``; without that
    list its error is raised.
    """
    seen: set[str] = set()
    for folder, error in _runs_below(folders, depth):
        real = os.path.realpath(folder)  # Path.resolve raises on circular links
        if real in seen:
            continue
        seen.add(real)
        if error is None:
            yield RunDirectory(folder)
        elif unreadable is None:
            raise error
        else:
            unreadable.append(one_line(f"{folder}: {error.strerror or error}", MAX_LINE))


def _runs_below(folders: Sequence[Path], depth: int) -> Iterator[tuple[Path, OSError | None]]:
    """Yield run directories, and unreadable folders with the error; one folder may come several times."""
    for folder in folders:
        try:
            found = is_run(folder) or is_damaged_run(folder)
            entries = () if found or not depth else folder.iterdir()
            inside = sorted(path for path in entries if path.is_dir() and not path.is_symlink())
        except OSError as error:
            yield folder, error
            continue
        if found:
            yield folder, None
        yield from _runs_below(inside, depth - 1)


def summarise_so_far(run: RunDirectory, config: RunConfig) -> dict[str, Any] | None:
    """Return the summary of the rounds so far, or ``None`` before the first; raise `RunError` for a damaged record."""
    rounds = run.checked_rounds()
    if not rounds:
        return None
    with invalid_rounds_as_run_error(run):
        found = summarise(rounds, config.threshold)
    stopped = run.stop_reason()
    return found | ({"stopped": stopped} if stopped else {})


@contextmanager
def invalid_rounds_as_run_error(run: RunDirectory) -> Iterator[None]:
    """Raise an error from a damaged round record in the block as a one-line `RunError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"{run.path / 'rounds.jsonl'} holds an invalid round record: {error!r}") from None


def describe(run: RunDirectory) -> dict[str, Any]:
    """Return one run as a row; a damaged or unreadable run (of another version) has a row too."""
    files = [found for path in files_of_run(run.path) if (found := _stat(path))]
    unknown = dict.fromkeys(("rounds", "last_20", "final", "peak", "images", "missing_replies"))
    row: dict[str, Any] = {"path": str(run.path), "state": run.state(), "rounds_done": 0, **unknown}
    row |= {"gaps": "", "stopped": ""}
    try:
        row["rounds_done"] = len(run.rounds())
        config = run.config()
        row["rounds"] = config.rounds
        if summary := summarise_so_far(run, config):
            row |= {key: summary.get(key) for key in ("last_20", "final", "peak")}
            row |= {"images": summary["total_generated"], "missing_replies": summary["failures"]}
            row |= {key: summary.get(key, "") for key in ("gaps", "stopped")}
    except RunError as error:
        could_be_read = row["rounds"] is not None or not is_run(run.path)
        row |= {"state": "damaged" if could_be_read else "unreadable", "error": str(error)}
    changed = max((file.st_mtime for file in files), default=0.0)  # without files if it was removed since it was found
    return row | {"changed": changed, "bytes": sum(file.st_size for file in files)}


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # a running run replaces its files
        return None


def describe_in_full(run: RunDirectory) -> dict[str, Any]:
    """Return a run's row, its config with the keys that differ from their defaults, environment and summary."""
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
    """Return the run in a folder; raise `RunError` unless it is clearly a run directory and not running."""
    if not folder.is_symlink() and is_damaged_run(folder):
        raise RunError(f"{folder} is damaged, its config.json is not a run's: nothing is removed")
    if folder.is_symlink() or not is_run(folder):
        raise RunError(f"{folder} is not a run directory: nothing is removed")
    run = RunDirectory(folder)
    state = run.state()
    if state == "running":
        raise RunError(f"{folder} is running, in process {run.processes()[0]['pid']}: nothing is removed")
    if state == "elsewhere":
        raise RunError(f"{folder} is recorded as running on another machine: nothing is removed")
    return run


def prunable_files(run: RunDirectory, model: bool = False) -> list[Path]:
    """Return the files of a finished run that only resuming needs: checkpoint, noise-key, client states.

    With ``model``, the final model is included.
    """
    if run.state() != "finished":
        raise RunError(f"{run.path} is {run.state()}, not finished: it needs its checkpoint, nothing is removed")
    run.checked_rounds()  # a damaged record may be fixed and the run resumed
    names = (CHECKPOINT, PREVIOUS_CHECKPOINT, "noise-key", "clients", *(("model.safetensors",) if model else ()))
    return [path for path in files_of_run(run.path) if path.relative_to(run.path).parts[0] in names]


def remove(runs: Sequence[RunDirectory]) -> list[str]:
    """Remove the files of runs and the folders that become empty; return a line for every folder that remains.

    The caller has checked that the runs are removable. A run inside another's folder is removed first.
    """
    stayed = []
    for run in sorted(runs, key=lambda run: -len(run.path.parts)):
        remove_files(run.path, files_of_run(run.path))
        if run.path.exists():
            first, *others = sorted(path.name for path in run.path.iterdir())
            more = f" and {len(others)} more" if others else ""
            stayed.append(one_line(f"{run.path} stays: no run wrote {first}{more}", MAX_LINE))
    return stayed


def flat_round(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a round's record as a row of a table: nested keys as ``seconds.clients``, lists as JSON."""
    row: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            row |= flat_round(value, f"{prefix}{key}.")
        else:
            row[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return row


def export(run: RunDirectory, folder: Path) -> None:
    """Copy the record of a finished run to a folder, without paths, host names and addresses of its machines."""
    config = portable_config(run.config())
    if (state := run.state()) != "finished":
        raise RunError(f"{run.path} is {state}, not finished: there is nothing to export")
    run.checked_rounds()
    check_export(run, folder)
    summary = run.summary()
    if "stopped" in summary:
        summary["stopped"] = _without_places(summary["stopped"])
    copy = RunDirectory(folder)
    copy.write_json("config.json", run.facts() | {"config": config})
    copy.write_json("summary.json", summary)
    lines = "".join(json.dumps(_exported(record)) + "\n" for record in run.rounds())
    atomic_write(folder / "rounds.jsonl", lines.encode())  # without digests, which need the run's identity


def portable_config(config: RunConfig) -> dict[str, Any]:
    """Return a config as users write it, without paths, addresses and callbacks, whose arguments may hold either."""
    values = config.to_user_dict()
    # Without a run-dir there is nothing to resume.
    values |= {"run-dir": "", "data-dir": "", "ray-address": "", "resume": False, "callbacks": ""}
    return values | {key: without_folder(values[key]) for key in ("dataset", *PATH_KEYS)}


def check_export(run: RunDirectory, folder: Path) -> None:
    """Raise `RunError` if the folder holds anything but an earlier record of the same run."""
    if (folder / "status.json").exists():
        raise RunError(f"{folder} is a run directory, not a record: name another folder")
    if holds_others_files(folder):
        raise RunError(f"{folder} is not empty and holds no record; name a new folder")
    there = RunDirectory(folder)
    rounds = [_exported(record) for record in there.rounds()]
    if there.has_rounds() and (not rounds or rounds != [_exported(record) for record in run.rounds()[: len(rounds)]]):
        other = there.config()
        done = counted(len(rounds), "round")
        what = f"{other.policy}, {other.strategy}, {other.dataset}, seed {other.seed}, {done}"
        raise RunError(f"{folder} holds the record of another run ({what}): name another folder, or remove it")


def _exported(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round's record whose failure reasons, which clients may have written, name no place."""
    failures = [{**failure, "reason": _without_places(failure["reason"])} for failure in record["failures"]]
    return {**record, "failures": failures}


def _without_places(text: str) -> str:
    """Return a text up to the first path, address or name of this machine: what follows may be the rest of a path."""
    place = re.search(rf"{_PLACE}|\b{re.escape(platform.node() or 'localhost')}\b", text)
    return text if place is None else f"{text[: place.start()]}…"


_PLACE = r"\S*[/\\@]|\S*\b\d+\.\d+\.\d+\.\d+\b|[\w.-]+:\d|\S*\b[0-9a-f]*:[0-9a-f]*:[0-9a-f]"
"""Pattern of a path, a URL or user@host; an IPv4 address; HOST:PORT; an IPv6 address."""


def without_folder(spec: str) -> str:
    """Return the last part of a path, with its prefix if any: ``bank:images.npz`` for ``bank:/home/me/images.npz``."""
    if spec.startswith(HF):  # options may follow; a run's relative path is a name on the Hub
        dataset = HfSpec.parse(spec)
        path = Path(dataset.where)
        return f"{HF}{path.name if path.is_absolute() else path}{dataset.written}"
    kind, colon, where = spec.partition(":")
    is_kind = colon and "/" not in kind  # a folder's name may contain a colon
    return kind + colon + Path(where).name if is_kind else Path(spec).name
