"""What a run leaves in its folder, by name: nothing else there is its own, and nothing else is ever removed.

config.json            the run-config, the environment it ran in, what the labels are called and what was in its files
rounds.jsonl           one object a round
checkpoint.safetensors everything the server needs to go on after the last checkpointed round
clients/ID/            what client ID keeps between rounds (simulation; see federation/client_state.py)
identity               the run's name, in its checkpoint and among nodes that keep this themselves (data/node.py)
noise-key              the secret of `dp`'s noise, for its owner alone, and which models it was drawn for
model.safetensors      the final model
summary.json           the run in a few numbers
tensorboard/           the rounds as TensorBoard reads them (`tensorboard = true`)
service.json           the generator that all clients share: its process and what it has made (simulation under Ray)
status.json            running and in which processes, finished, interrupted, or failed with the reason in one line
.status.lock           held while a process changes status.json
run.toml, output.log   of a run that a sweep started: its run-config, and what it said
flower.log             what the server and Flower said, with the traceback of any client that failed
superlink.log          what the launcher's own SuperLink said
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

STATUS_LOCK = ".status.lock"
_SWEEP_FILES = ("run.toml", "output.log")
_START_FILES = (*_SWEEP_FILES, "status.json", STATUS_LOCK, "flower.log", "superlink.log", "noise-key")
"""What may be there before a run has begun, or is left where one ended before it had; a noise-key to repeat a run."""
_IN_FOLDERS = ("clients/*/state-*", "clients/*/.state-*.tmp", "tensorboard/events.out.tfevents.*")
_FILES = (
    "checkpoint.safetensors",
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
    "config.json",  # last: what is left of a removal that was interrupted is still a run
)
_LEFT_BY_KILLED = tuple(f".{name}.*.tmp" for name in _FILES)
"""Of writers that were killed (common/files.py)."""
_UNMISTAKABLE = 2
"""A config.json alone is anybody's: a folder with so many of a run's files is a run, though its config is damaged."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory: its config.json is that of a run, of this version or another."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and set(found) - {"classes", "files"} == {"config", "environment"}


def is_damaged_run(folder: Path) -> bool:
    """Whether a folder was a run directory, and its config.json is lost or can no longer be read."""
    kept = [
        name for name in ("config.json", "rounds.jsonl", "status.json", "summary.json") if (folder / name).is_file()
    ]
    return len(kept) >= _UNMISTAKABLE and not is_run(folder)


def holds_others_files(folder: Path) -> bool:
    """Whether a folder has something in it and is no run: a new run would mix its files with somebody's own."""
    if not folder.is_dir() or is_run(folder):
        return False
    own = (*_START_FILES, *_LEFT_BY_KILLED)
    return any(not any(fnmatchcase(path.name, pattern) for pattern in own) for path in folder.iterdir())


def files_of_run(folder: Path) -> list[Path]:
    """The files in a run directory that a run writes, what killed writers left too; none behind a link."""
    patterns = [*_IN_FOLDERS, *_LEFT_BY_KILLED, *_FILES]
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    inside = folder.resolve()
    return [path for path in found if path.is_file() and path.parent.resolve().is_relative_to(inside)]


def remove_files(folder: Path, files: Sequence[Path]) -> int:
    """Remove some of a run's files, and its folders that are empty then; return how many bytes they had."""
    freed = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    for emptied in (*folder.glob("clients/*"), folder / "clients", folder / "tensorboard", folder):
        if emptied.is_dir() and not emptied.is_symlink():
            with suppress(OSError):  # not empty
                emptied.rmdir()
    return freed
