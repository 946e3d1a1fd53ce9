"""The files that a run writes to its folder; no other file is ever removed.

config.json            the run-config, the environment, the class names, the hashes of the input files and, if its
                       training ended with one, a warning of the generator
rounds.jsonl           one JSON object per round
checkpoint.safetensors everything the server needs to resume after the last checkpointed round
checkpoint-previous.safetensors   the checkpoint before it, in case the last one is damaged
clients/ID/            state of client ID between rounds (simulation; see federation/client_state.py) and, under an
                       adaptive policy, the scores of its classes (runs/class_scores.py)
identity               the run's unique name, also in its checkpoint and in the folders of nodes (data/node.py)
noise-key              the secret key of the noise of `dp`, readable by its owner only, and its releases
model.safetensors      the final model
generator/             the trained generator in diffusers' format (`task = "generator"`)
generator-training/    run directory of the generator's training (`generator = "federated"` on SuperNodes)
summary.json           the results in a few numbers
tensorboard/           the rounds in TensorBoard's format (`callbacks = "tensorboard"`)
service.json           process and statistics of the generator that all clients share (simulation under Ray)
status.json            running and in which processes, finished (with the gaps in one line, if clients were missing, and
                       the warnings of callbacks), interrupted, or failed with the reason in one line
.status.lock           held while a process changes status.json
run.toml, output.log   run-config and output of a run that a sweep started
flower.log             log of the server and Flower, with the traceback of any client that failed
superlink.log          log of the SuperLink that the launcher started
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from fedeas_flwr.common.files import CHECKSUMS

STATUS_LOCK = ".status.lock"
CHECKPOINT, PREVIOUS_CHECKPOINT = "checkpoint.safetensors", "checkpoint-previous.safetensors"
WARNING = "generator_warning"
"""Key of config.json."""
GENERATOR = "generator"
TRAINING = "generator-training"
_SWEEP_FILES = ("run.toml", "output.log")
_START_FILES = (*_SWEEP_FILES, "identity", "status.json", STATUS_LOCK, "flower.log", "superlink.log", "noise-key")
"""Files that may exist before a run starts, or after it failed to start; a noise-key serves to repeat a run."""
_IN_FOLDERS = (
    *("clients/*/state-*", "clients/*/.state-*.tmp", "clients/*/scores-*", "clients/*/.scores-*.tmp"),
    "tensorboard/events.out.tfevents.*",
    *(f"{GENERATOR}/{name}" for name in ("README.md", CHECKSUMS, "*.png", "unet/*", "scheduler/*")),
)
_FILES = (
    CHECKPOINT,
    PREVIOUS_CHECKPOINT,
    "model.safetensors",
    "identity",
    "noise-key",
    "service.json",
    *_SWEEP_FILES,
    "flower.log",
    "superlink.log",
    "summary.json",
    "rounds.jsonl",
    "status.json",
    STATUS_LOCK,
    "config.json",  # last: after an interrupted removal the folder is still a run
)
_LEFT_BY_KILLED = tuple(f".{name}.*.tmp" for name in _FILES)
"""Temporary files of writers that were killed (common/files.py)."""
_MIN_FILES = 2
"""Number of a run's files that identify a run with a damaged config; a config.json alone may be of anything."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory: its config.json is that of a run, of any version."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and set(found) - {"classes", "files", WARNING, "digest"} == {"config", "environment"}


def is_damaged_run(folder: Path) -> bool:
    """Return whether a folder was a run directory whose config.json is lost or unreadable."""
    names = ("config.json", "rounds.jsonl", "status.json", "summary.json")
    return sum((folder / name).is_file() for name in names) >= _MIN_FILES and not is_run(folder)


def holds_others_files(folder: Path) -> bool:
    """Return whether a folder holds files and is no run: a new run would mix its files with the user's."""
    if not folder.is_dir() or is_run(folder):
        return False
    own = (*_START_FILES, *_LEFT_BY_KILLED)
    return any(not any(fnmatchcase(path.name, pattern) for pattern in own) for path in folder.iterdir())


def files_of_run(folder: Path) -> list[Path]:
    """Return the files in a folder that a run writes, with leftovers of killed writers; links are not followed."""
    patterns = [*_IN_FOLDERS, *_LEFT_BY_KILLED, *_FILES]
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    inside = folder.resolve()
    own = [path for path in found if path.is_file() and path.parent.resolve().is_relative_to(inside)]
    return [*(files_of_run(folder / TRAINING) if is_run(folder / TRAINING) else ()), *own]


def remove_files(folder: Path, files: Sequence[Path]) -> int:
    """Remove some of a run's files and the folders that become empty; return the number of bytes removed."""
    freed = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    for emptied in (*_folders_of_run(folder / TRAINING), *_folders_of_run(folder)):
        if emptied.is_dir() and not emptied.is_symlink():
            with suppress(OSError):  # not empty
                emptied.rmdir()
    return freed


def _folders_of_run(folder: Path) -> tuple[Path, ...]:
    """Return a run's folders, each after those inside it."""
    generator = folder / GENERATOR
    inside = *folder.glob("clients/*"), folder / "clients", folder / "tensorboard"
    return *inside, generator / "unet", generator / "scheduler", generator, folder
