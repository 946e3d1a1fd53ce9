"""The built-in generator: a small diffusion model of 8×8 digits, trained on first use.

Training takes about a minute on two slow CPU cores and uses the train split only. A support vector machine trained on
real digits classifies at least 85 % of 20-step samples as their label.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from fedeas_flwr.common.files import atomic_folder, cache_root, is_whole, write_checksums
from fedeas_flwr.common.progress import log_progress
from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.generators.learn.presets import DIGITS
from fedeas_flwr.generators.learn.run import save_model
from fedeas_flwr.generators.learn.trainer import Trainer, TrainingProgress

logger = logging.getLogger(__name__)

# Part of the folder's name: raise it when anything changes the trained weights.
VERSION = "2"


def ensure_builtin(progress: Callable[[int, int, float], None] | None = None) -> Path:
    """Return the built-in generator's folder, in diffusers' format; train the generator if it is missing or damaged.

    Concurrent processes wait for the one that trains. After each step it calls ``progress(step, total, loss)``; without
    this callback it logs its progress.
    """
    folder, steps = builtin_folder(), DIGITS.steps
    folder.parent.mkdir(parents=True, exist_ok=True)
    log_step = log_progress(logger, "training steps of the built-in generator")

    def show(now: TrainingProgress) -> None:
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
                write_checksums(temporary)
    return folder


def builtin_folder() -> Path:
    """Return the folder of the built-in generator, which may not exist yet."""
    return cache_root() / "generators" / f"digits-{VERSION}"
