"""A sweep: one run-config over a grid of values, a run directory per grid point and seed, and their results.

DIR/NAME/       a run directory; NAME is made of the grid's values
DIR/sweep.json  the run-config, the grid, every run and the mean over seeds of every grid point
DIR/sweep.csv   one line per run

This module defines a sweep; sweep_jobs.py runs it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.tables import as_csv
from fedeas_flwr.config import KEYS_CHANGEABLE_ON_RESUME, RunConfig, parse_config
from fedeas_flwr.config_files import parse_overrides
from fedeas_flwr.config_keys import PATH_KEYS, keys_in_use
from fedeas_flwr.data.datasets import short_name
from fedeas_flwr.generators.opening import hash_own_inputs
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import summarise_so_far

MEASURES = {
    "classifier": {"last_20": "last_20", "peak": "peak", "images": "total_generated"},
    "generator": {"final_loss": "final_loss"},
}
"""Task → measure of a sweep → its key in a run's summary."""


@dataclass
class SweepRun:
    """One run of a sweep."""

    name: str
    values: dict[str, Any]
    """The grid's keys → this run's values."""
    config: RunConfig
    run: RunDirectory
    attempts: int = 0
    """Number of times that this sweep has started the run."""
    error: str = ""
    """Reason of the last failure, in one line."""
    _seen: tuple[Any, dict[str, Any]] | None = field(default=None, compare=False)
    """Versions of the record's files when last read, and their content."""

    @property
    def finished(self) -> bool:
        """Whether the run has finished all rounds, or a callback stopped it before."""
        reached = self.reached()
        complete = reached["rounds"] >= self.config.rounds or "stopped" in reached
        return complete and self.run.state() == "finished"

    def reached(self) -> dict[str, Any]:
        """Return the run's summary so far; for a damaged record, ``damage`` holds the error and its fix.

        A sweep calls this several times per second, so unchanged files are not read again.
        """
        now = [_version(self.run.path / name) for name in ("rounds.jsonl", "summary.json")]
        if self._seen is None or self._seen[0] != now:
            self._seen = (now, self._read())
        return self._seen[1]

    def _read(self) -> dict[str, Any]:
        try:
            return summarise_so_far(self.run, self.config) or {"rounds": 0}
        except RunError as error:
            return {"rounds": 0, "damage": f"{error}; after `fedeas runs rm {self.run.path}` the sweep repeats it"}

    def result(self) -> dict[str, Any]:
        """Return the run as a flat row: its values, state, rounds, measures and error."""
        reached, state = self.reached(), self.run.state()
        if "damage" in reached:
            state = "damaged"
        elif state == "unknown" or (state == "finished" and not self.finished):
            state = "waiting"
        measured = {name: reached.get(key) for name, key in MEASURES[self.config.task].items()}
        error = reached.get("damage") or self.error or self.run.status()[1]
        row = {"name": self.name, **self.values, "state": state, "rounds_done": reached["rounds"]}
        return {**row, **measured, "error": error}


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # reading the file raises the error
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass
class Sweep:
    """A folder of runs that differ only in the grid's keys."""

    folder: Path
    base: RunConfig
    """Config of the first run; all runs share it except for the grid's keys."""
    grid: dict[str, list[Any]]
    cells: list[SweepRun] = field(default_factory=list)

    def open(self) -> None:
        """Check the folder and write the sweep's record into it."""
        self.check()
        self.save()

    def check(self) -> None:
        """Raise `RunError` if the folder holds another sweep, or a run's folder another run."""
        self._check_same()
        for cell in self.cells:
            check_cell(cell)

    def _check_same(self) -> None:
        path = self.folder / "sweep.json"
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            before, keys = parse_config(found["config"]).to_user_dict(), list(found["grid"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(f"{path} is not a sweep's record: {error}") from None
        if keys != list(self.grid):
            raise RunError(
                f"{self.folder} holds another sweep, over {', '.join(keys)}, not {', '.join(self.grid)}: "
                "give another folder with --out"
            )
        if change := _first_change(before, self.base.to_user_dict(), {*KEYS_CHANGEABLE_ON_RESUME, *keys}):
            raise RunError(f"{self.folder} holds another sweep, with {change}: give another folder with --out")

    def save(self) -> None:
        """Write sweep.json and sweep.csv."""
        rows = [cell.result() for cell in self.cells]
        record = {
            "config": self.base.to_user_dict(),
            "grid": self.grid,
            "runs": rows,
            "points": points(rows, self.grid),
        }
        atomic_write(self.folder / "sweep.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
        atomic_write(self.folder / "sweep.csv", as_csv(rows).encode())


def check_cell(cell: SweepRun) -> None:
    """Raise `RunError` if the run's folder holds another run."""
    if not (cell.run.path / "config.json").exists():
        return
    # A run records the absolute path of custom data; the short name is enough to identify it.
    before, now = (
        {**config.to_user_dict(), "dataset": short_name(config.dataset)} for config in (cell.run.config(), cell.config)
    )
    if change := _first_change(before, now, {*KEYS_CHANGEABLE_ON_RESUME, *PATH_KEYS, "data-dir"}):
        way = "give another --out, or remove it (fedeas runs rm)"
        raise RunError(f"{cell.run.path} holds another run, with {change}: {way}")
    cell.run.check_own_inputs(hash_own_inputs(cell.config))


def _first_change(before: Mapping[str, Any], now: Mapping[str, Any], free: set[str]) -> str:
    """Return as text the first key, not ``free``, with another value than before; empty if there is none."""
    changed = (key for key in now if key not in free and before.get(key) != now[key])
    return next((f"{key} = {before.get(key)!r}, not {now[key]!r}" for key in changed), "")


# ------------------------------------------------------------------------------------------------- grid


def make_sweep(common: Mapping[str, Any], grid_words: Sequence[str], folder: Path) -> Sweep:
    """Return a sweep of every combination of the grid's values; raise `ConfigError` for an invalid key or value.

    All runs share the run-config keys ``common``, which need to be valid only together with the grid's values. Each of
    the ``grid_words`` is ``key=value,value…``; the last key varies fastest.
    """
    for key in ("run-dir", "resume"):
        if common.get(key):
            raise ConfigError(
                f"{key} = {common[key]!r}: a sweep names its folders itself; give their parent with --out"
            )
    if not grid_words:
        raise ConfigError("a sweep needs a grid, such as --grid policy=none,fedeas --grid seed=1,2,3")
    grid = parse_grid(grid_words)
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    configs, cells = [parse_config({**common, **given}) for given in combinations], []
    for config in configs:
        if not config.clients:
            raise ConfigError(
                "clients = 0: a sweep creates the federations and needs the number of clients, such as clients=10"
            )
        values = {key: config.to_user_dict()[key] for key in grid}
        name = cell_name(values)
        run = RunDirectory(folder / name)
        cells.append(SweepRun(name, values, config.with_changes(run_dir=str(run.path)), run))
    _check_no_duplicates(cells)
    settled = {key: list(dict.fromkeys(cell.values[key] for cell in cells)) for key in grid}
    _check_no_unused_keys(settled, configs)
    return Sweep(folder, configs[0], settled, cells)


def parse_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """Return the keys and values of ``key=value,value…`` strings."""
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--grid '{word}' is not key=value,value…")
        if key in ("run-dir", "resume"):
            raise ConfigError(f"--grid {word}: a sweep sets {key} itself")
        if key == "task":
            raise ConfigError(f"--grid {word}: the runs of a sweep have one task; give it as task=generator")
        if key in grid:
            raise ConfigError(f"--grid {word}: {key} is in the grid twice; give all its values in one --grid")
        grid[key] = [parse_overrides([f"{key}={value}"])[key] for value in text.split(",")]
    return grid


def _check_no_duplicates(cells: Sequence[SweepRun]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.name in seen:
            words = " ".join(f"{key}={_text(value)}" for key, value in cell.values.items())
            raise ConfigError(f"--grid: {words} is given twice")
        seen.add(cell.name)


def _check_no_unused_keys(grid: Mapping[str, Sequence[Any]], configs: Sequence[RunConfig]) -> None:
    """Raise `ConfigError` for several values of a key that no run uses: all results would be identical."""
    used = {key for config in configs for key in keys_in_use(config)}
    for key, values in grid.items():
        if len(values) > 1 and key not in used:
            words = f"{key}={','.join(map(_text, values))}"
            raise ConfigError(f"--grid {words}: no run of this grid uses {key}, all results would be identical")


def cell_name(values: Mapping[str, Any]) -> str:
    """Return a folder name made of a run's grid values.

    If a value is long or has characters unsuited to a folder name, part of its hash keeps the name unique.
    """
    return _plain("_".join(f"{key}-{_plain(_text(value), 40)}" for key, value in values.items()), 180)


def _plain(text: str, longest: int) -> str:
    clean = re.sub(r"[^A-Za-z0-9.+_-]+", "-", text)[:longest]
    return clean if clean == text else f"{clean}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---------------------------------------------------------------------------------------------- results


def points(rows: Sequence[Mapping[str, Any]], grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the mean and standard deviation over the finished seeds of each grid point.

    It is the sample standard deviation (n − 1), and ``None`` for one seed.
    """
    keys = [key for key in grid if key != "seed"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = []
    for values, group in groups.items():
        done = [row for row in group if row["state"] == "finished"]
        point = {**dict(zip(keys, values, strict=True)), "finished": len(done), "runs": len(group)}
        for measure in (name for names in MEASURES.values() for name in names if name in group[0]):
            numbers = [float(row[measure]) for row in done if row[measure] is not None]  # a stopped run may have none
            point[measure] = {
                "mean": statistics.fmean(numbers) if numbers else None,
                "sd": statistics.stdev(numbers) if len(numbers) > 1 else None,
            }
        found.append(point)
    return found
