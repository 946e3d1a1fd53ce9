"""A run's record: config, rounds and summary, without weights, images or paths of this machine."""

from __future__ import annotations

from pathlib import Path

from fedeas_flwr.errors import RunError
from fedeas_flwr.paths import atomic_write
from fedeas_flwr.run_files import holds_others_files
from fedeas_flwr.runs import RunDirectory
from fedeas_flwr.sizes import counted


def export(run: RunDirectory, folder: Path) -> None:
    """Copy the record of a finished run to a folder."""
    config = run.config().outside()
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
