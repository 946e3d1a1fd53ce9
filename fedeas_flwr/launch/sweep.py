"""A sweep: one run-config over a grid of values, a run directory for each point and seed, and what they amount to.

DIR/NAME/   a run directory; NAME is made of the grid's values
DIR/sweep.json  the run-config, the grid, every run and the mean over seeds of every grid point
DIR/sweep.csv   one line a run

Here is what a sweep is; sweep_jobs.py runs it.
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
from fedeas_flwr.config_keys import keys_in_use
from fedeas_flwr.data.datasets import short_name
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import summarise_so_far

PATH_KEYS = ("generator", "data-dir", "weights")
"""Keys that a run writes down otherwise than they were given, as absolute paths."""

MEASURES = {"last_20": "last_20", "peak": "peak", "images": "total_generated"}
"""What a sweep tells of its runs → its name in a run's summary."""


@dataclass
class SweepRun:
    """One run of a sweep."""

    name: str
    values: dict[str, Any]
    """The grid's keys → this run's values."""
    config: RunConfig
    run: RunDirectory
    attempts: int = 0
    """How often this sweep has started it."""
    error: str = ""
    """Why the last attempt failed, in one line."""
    _seen: tuple[Any, dict[str, Any]] | None = field(default=None, compare=False)
    """The record's files as they were last read, and what they said."""

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.run.state() == "finished" and self.reached()["rounds"] >= self.config.rounds

    def reached(self) -> dict[str, Any]:
        """The run's summary from the rounds there are; if they are damaged, ``damage`` says so and what to do.

        A sweep asks several times a second: files that have not changed are not read again.
        """
        now = [_version(self.run.path / name) for name in ("rounds.jsonl", "summary.json")]
        if self._seen is None or self._seen[0] != now:
            self._seen = (now, self._read())
        return self._seen[1]

    def _read(self) -> dict[str, Any]:
        try:
            return summarise_so_far(self.run, self.config) or {"rounds": 0}
        except RunError as error:
            return {"rounds": 0, "damage": f"{error}; after `fedeas runs rm {self.run.path}` the sweep does it anew"}

    def result(self) -> dict[str, Any]:
        """The run as a flat row: its values, where it stands and what it reached so far."""
        reached, state = self.reached(), self.run.state()
        if "damage" in reached:
            state = "damaged"
        elif state == "unknown" or (state == "finished" and not self.finished):
            state = "waiting"
        measured = {name: reached.get(key) for name, key in MEASURES.items()}
        error = reached.get("damage") or self.error or self.run.status()[1]
        row = {"name": self.name, **self.values, "state": state, "rounds_done": reached["rounds"]}
        return {**row, **measured, "error": error}


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:  # reading it says what is wrong
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass
class Sweep:
    """A folder of runs that differ in the grid's keys alone."""

    folder: Path
    base: RunConfig
    """What all runs have in common; of the grid's keys it has one run's values."""
    grid: dict[str, list[Any]]
    cells: list[SweepRun] = field(default_factory=list)

    def open(self) -> None:
        """Make the folder, or see that what lies there belongs to this very sweep, before anything starts."""
        self.check()
        self.save()

    def check(self) -> None:
        """Refuse a folder that holds another sweep, or another run in the place of one of these."""
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
                "name another folder with --out"
            )
        if changed := _first_change(before, self.base.to_user_dict(), {*KEYS_CHANGEABLE_ON_RESUME, *keys}):
            key, old, new = changed
            raise RunError(
                f"{self.folder} holds another sweep, with {key} = {old!r}, not {new!r}: name another folder with --out"
            )

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
    """Refuse another run in the place of one that is to be done."""
    if not (cell.run.path / "config.json").exists():
        return
    # A run writes the path of data of one's own down in full; its name is enough to tell it from other data.
    before, now = (
        {**config.to_user_dict(), "dataset": short_name(config.dataset)} for config in (cell.run.config(), cell.config)
    )
    if changed := _first_change(before, now, {*KEYS_CHANGEABLE_ON_RESUME, *PATH_KEYS}):
        key, old, new = changed
        way = "name another --out, or remove it (fedeas runs rm)"
        raise RunError(f"{cell.run.path} holds another run, with {key} = {old!r}, not {new!r}: {way}")


def _first_change(before: Mapping[str, Any], now: Mapping[str, Any], free: set[str]) -> tuple[str, Any, Any] | None:
    changes = ((key, before.get(key), now[key]) for key in now if key not in free)
    return next((change for change in changes if change[1] != change[2]), None)


# ------------------------------------------------------------------------------------------------- grid


def make_sweep(common: Mapping[str, Any], grid_words: Sequence[str], folder: Path) -> Sweep:
    """Lay out a sweep: every combination of the grid's values, all of them valid run-configs.

    Parameters
    ----------
    common
        The run-config's keys that all runs have in common; it need be valid with the grid's values only.
    grid_words
        ``key=value,value…``, a word for each key; the last key varies fastest.
    folder
        Where the runs go.

    Raises
    ------
    ConfigError
        One line for a key or a value that cannot be.
    """
    for key in ("run-dir", "resume"):
        if common.get(key):
            raise ConfigError(f"{key} = {common[key]!r}: a sweep names its folders itself; say where with --out")
    if not grid_words:
        raise ConfigError("a sweep needs a grid, such as --grid policy=none,fedeas --grid seed=1,2,3")
    grid = parse_grid(grid_words)
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    configs, cells = [parse_config({**common, **given}) for given in combinations], []
    for config in configs:
        if not config.clients:
            raise ConfigError("clients = 0: a sweep makes the federations itself, so say how many clients they have")
        values = {key: config.to_user_dict()[key] for key in grid}
        name = cell_name(values)
        run = RunDirectory(folder / name)
        cells.append(SweepRun(name, values, config.with_changes(run_dir=str(run.path)), run))
    _check_no_duplicates(cells)
    settled = {key: list(dict.fromkeys(cell.values[key] for cell in cells)) for key in grid}
    _check_no_unused_keys(settled, configs)
    return Sweep(folder, configs[0], settled, cells)


def parse_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """Read ``key=value,value…`` words."""
    grid: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--grid '{word}' is not key=value,value…")
        if key in ("run-dir", "resume"):
            raise ConfigError(f"--grid {word}: a sweep sets {key} itself")
        if key in grid:
            raise ConfigError(f"--grid {word}: {key} is in the grid twice; name all its values in one --grid")
        grid[key] = [parse_overrides([f"{key}={value}"])[key] for value in text.split(",")]
    return grid


def _check_no_duplicates(cells: Sequence[SweepRun]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.name in seen:
            words = " ".join(f"{key}={_text(value)}" for key, value in cell.values.items())
            raise ConfigError(f"--grid: {words} is there twice")
        seen.add(cell.name)


def _check_no_unused_keys(grid: Mapping[str, Sequence[Any]], configs: Sequence[RunConfig]) -> None:
    """Refuse several values of a key that plays no part in any run: all would come out the same."""
    used = {key for config in configs for key in keys_in_use(config)}
    for key, values in grid.items():
        if len(values) > 1 and key not in used:
            words = f"{key}={','.join(map(_text, values))}"
            raise ConfigError(f"--grid {words}: no run of this grid takes notice of {key}, all would be the same")


def cell_name(values: Mapping[str, Any]) -> str:
    """A folder's name that says which values it has, and is one plain name whatever they are.

    Where a value has characters that a folder's name should not have, or is long, a few digits of its hash keep it
    apart from others that would look the same.
    """
    return _plain("_".join(f"{key}-{_plain(_text(value), 40)}" for key, value in values.items()), 180)


def _plain(text: str, longest: int) -> str:
    clean = re.sub(r"[^A-Za-z0-9.+_-]+", "-", text)[:longest]
    return clean if clean == text else f"{clean}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---------------------------------------------------------------------------------------------- results


def points(rows: Sequence[Mapping[str, Any]], grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the finished seeds of each grid point.

    The deviation is the sample's (n − 1), and ``None`` for one seed.
    """
    keys = [key for key in grid if key != "seed"]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = []
    for values, group in groups.items():
        done = [row for row in group if row["state"] == "finished"]
        point = {**dict(zip(keys, values, strict=True)), "finished": len(done), "runs": len(group)}
        for measure in MEASURES:
            numbers = [float(row[measure]) for row in done]
            point[measure] = {
                "mean": statistics.fmean(numbers) if numbers else None,
                "sd": statistics.stdev(numbers) if len(numbers) > 1 else None,
            }
        found.append(point)
    return found
