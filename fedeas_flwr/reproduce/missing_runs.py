"""Runs the missing cells as a sweep (resumable, one process each, failures listed), and exports their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedeas_flwr.config import RunConfig
from fedeas_flwr.launch import sweep
from fedeas_flwr.launch.sweep_jobs import SweepStatus, Watcher
from fedeas_flwr.reproduce.cells import DEFAULT_COLUMN, cell
from fedeas_flwr.reproduce.items import Choice
from fedeas_flwr.reproduce.results import Results, experiment_key
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import remove_files
from fedeas_flwr.runs.listing import check_export, export, prunable_files


def make_missing_sweep(choice: Choice, missing: Mapping[str, Sequence[int]], folder: Path) -> sweep.Sweep:
    """Return a sweep of the missing runs (cell's name → seeds, in the order in which to run them) in a folder."""
    cells = []
    for name, seeds in missing.items():
        for seed in seeds:
            run = RunDirectory(folder / f"{name.replace('/', '_')}_s{seed}")
            config = cell(name).config(choice.scale, seed, choice.more).with_changes(run_dir=str(run.path))
            cells.append(sweep.SweepRun(run.path.name, {"cell": name, "seed": seed}, config, run))
    seeds_in_all = sorted({seed for seeds in missing.values() for seed in seeds})
    grid: dict[str, list[Any]] = {"cell": list(missing), "seed": seeds_in_all}
    # All cells of a scale share this config, so that a sweep rejects a folder of the other scale.
    return sweep.Sweep(folder, cell(f"{DEFAULT_COLUMN}/fedavg").config(choice.scale, 1), grid, cells)


def record_folder(records: Path, name: str, config: RunConfig) -> Path:
    """Return where a run's record goes in a folder of records, such as ``cifar10-k100-a0.1/scaffold-s1``.

    If that folder is the record of the same cell with another form of Γ̂, the form is appended to the new name. The
    older record is then found first, and counts where the form does not matter.
    """
    place, _, method = name.partition("/")
    if config.dataset != "digits":  # at smoke scale several columns share a config
        place = f"{config.dataset}-k{config.clients}-a{config.alpha:g}"
    usual = RunDirectory(records / place / f"{method}-s{config.seed}")
    before = usual.config() if usual.has_rounds() else config
    if before.gamma_hat != config.gamma_hat and experiment_key(before) == experiment_key(config):
        return usual.path.with_name(f"{usual.path.name}-{config.gamma_hat}")
    return usual.path


def archive_run(run: RunDirectory, record: Path | None) -> None:
    """Reduce a finished run to its model and its record, and copy the record to ``record`` if that is given.

    Removed is what would be needed to give it more rounds: up to 9 GB per run with SCAFFOLD or MOON, 100 clients and a
    ResNet-18. It is removed first, since the record may need the space.
    """
    remove_files(run.path, prunable_files(run))
    if record:
        export(run, record)


def archive_finished_runs(results: Results, runs: Path, folder: Path | None) -> None:
    """Archive the finished runs of a folder that no watcher saw finish: at a Ctrl-C, or after the sweep was killed.

    Raise `RunError` if the place of a run's record holds another run's.
    """
    for name, found in results.cells.items():
        for run in found:
            if run.path.resolve().parent != runs.resolve():
                continue
            record, directory = folder and record_folder(folder, name, run.config), RunDirectory(run.path)
            if record:
                check_export(directory, record)
            archive_run(directory, None if record and RunDirectory(record).has_rounds() else record)


class ArchivingWatcher:
    """A sweep's watcher that also archives each run when it finishes."""

    def __init__(self, inner: Watcher, folder: Path | None) -> None:
        self._inner, self._folder = inner, folder
        self.on_start, self.on_tick = inner.on_start, inner.on_tick

    def on_event(self, cell: sweep.SweepRun, event: str, status: SweepStatus) -> None:
        """Archive a finished run; pass every event on."""
        if event == "finished":
            archive_run(cell.run, self._folder and record_folder(self._folder, cell.values["cell"], cell.config))
        self._inner.on_event(cell, event, status)
