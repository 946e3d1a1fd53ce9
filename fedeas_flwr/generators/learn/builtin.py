"""The built-in generator: a small diffusion model of 8×8 digits, trained on first use.

Training takes about a minute on two slow CPU cores and uses the train split only. A support vector machine trained on
real digits classifies at least 85 % of 20-step samples as their label.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from fedeas_flwr.common.files import atomic_folder, cache_root, sha256_of
from fedeas_flwr.common.progress import log_progress
from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.generators.learn.presets import DIGITS
from fedeas_flwr.generators.learn.run import save_model
from fedeas_flwr.generators.learn.trainer import Progress, Trainer

logger = logging.getLogger(__name__)

# Part of the folder's name: raise it when anything changes the trained weights.
VERSION = "2"

_CHECKSUMS = "checksums.json"


def ensure_builtin(progress: Callable[[int, int, float], None] | None = None, *, steps: int = DIGITS.steps) -> Path:
    """Return the built-in generator's folder, in diffusers' format; train the generator if it is missing or damaged.

    Concurrent processes wait for the one that trains. After each step it calls ``progress(step, total, loss)``; without
    this callback it logs its progress. A model with another number of steps than the default has its own folder.
    """
    if steps < 1:
        raise ValueError(f"steps: {steps} is not allowed; give at least 1")
    suffix = "" if steps == DIGITS.steps else f"-{steps}steps"
    folder = builtin_folder().with_name(f"digits-{VERSION}{suffix}")
    folder.parent.mkdir(parents=True, exist_ok=True)

    log_step = log_progress(logger, "training steps of the built-in generator")

    def show(now: Progress) -> None:
        if progress is not None:
            progress(now.step, steps, now.loss)
        else:
            log_step(now.step, steps)

    with FileLock(f"{folder}.lock"):
        if not is_whole(folder):
            with atomic_folder(folder) as temporary:
                dataset = open_dataset("digits")
                trainer = Trainer(DIGITS, dataset)
                if progress is None:
                    log_step(0, steps)
                trainer.run(steps=steps, report=show)
                save_model(temporary, trainer, dataset)
                sums = {name: sha256_of(temporary / name) for name in _files_of(temporary)}
                (temporary / _CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    return folder


def builtin_folder() -> Path:
    """Return the folder of the built-in generator, which may not exist yet."""
    return cache_root() / "generators" / f"digits-{VERSION}"


def _files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def is_whole(folder: Path) -> bool:
    """Return whether every file of a built-in generator has its checksum."""
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        return bool(sums) and all(sha256_of(folder / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return False
