"""The built-in generator: a small diffusion model of 8×8 digits, trained here on first use.

Hardware and time: about a minute on two slow CPU cores; 20-step samples are classified as asked by a support vector
machine trained on real digits at least 90 % of the time. It sees the train split only.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from fedeas_flwr.data import Dataset, open_dataset
from fedeas_flwr.paths import atomic_folder, cache_root

Progress = Callable[[int, int, float], None]

# Part of the folder's name: raise it when anything below changes what is learned.
VERSION = "1"
TRAIN_STEPS = 250

_BATCH = 64
_LEARNING_RATE = 3e-3
_WARM_UP_STEPS = 20
_EMA_DECAY = 0.97
_LABEL_DROPOUT = 0.1
_SEED = 0
_THREADS = 2
_CHECKSUMS = "checksums.json"

_CARD = """---
license: cc-by-4.0
library_name: diffusers
tags: [image-generation, class-conditional, digits]
---
# Digits, 8×8, class-conditional diffusion

Made by FedEAS on Flower on first use, as the built-in generator: {steps} steps of {batch} images, {seconds:.0f} s.

- **Data**: the {num_train} train images of scikit-learn's digits, from the project's fixed stratified 80/20 split. The
  {num_test} test images were not seen.
- **Data's licence**: Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), UCI Machine Learning
  Repository, CC BY 4.0.
- **Model**: UNet2DModel, v-prediction, cosine schedule, EMA weights. Class 10 is "no label", for guidance; labels were
  dropped {dropout:.0%} of the time.
- **Meant for**: trying the method on a CPU. It makes no useful digits for anything else.
"""


def ensure_builtin(progress: Progress | None = None, *, steps: int = TRAIN_STEPS) -> Path:
    """Return the built-in generator's folder, training it if it is not there or not whole.

    Processes that ask at the same time wait for the one that trains.

    Parameters
    ----------
    progress
        Called as ``progress(step, total, loss)`` after each training step.
    steps
        Training steps. Another number than the default is kept in a folder of its own.

    Returns
    -------
    Path
        A folder in diffusers' format.
    """
    if steps < 1:
        raise ValueError(f"steps: {steps} is not allowed; give at least 1")
    suffix = "" if steps == TRAIN_STEPS else f"-{steps}steps"
    folder = cache_root() / "generators" / f"digits-{VERSION}{suffix}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder):
            with atomic_folder(folder) as temporary:
                _train_into(temporary, open_dataset("digits"), steps, progress)
                sums = {name: _sha256(temporary / name) for name in _files_of(temporary)}
                (temporary / _CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    return folder


def _train_into(folder: Path, dataset: Dataset, steps: int, progress: Progress | None) -> None:
    from diffusers import DDIMScheduler

    schedule = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}
    scheduler: Any = DDIMScheduler(**schedule)  # type: ignore[no-untyped-call, unused-ignore]
    started = time.monotonic()
    with _reproducible():
        unet = _build_unet(len(dataset.classes))
        _train(unet, scheduler, dataset, steps, progress)
    unet.save_pretrained(folder / "unet", safe_serialization=True)
    scheduler.save_pretrained(folder / "scheduler")
    card = _CARD.format(
        steps=steps,
        batch=_BATCH,
        seconds=time.monotonic() - started,
        num_train=len(dataset.y_train),
        num_test=len(dataset.y_test),
        dropout=_LABEL_DROPOUT,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _build_unet(num_classes: int) -> Any:
    from diffusers import UNet2DModel

    # As small as still learns in a minute: wider or with attention it has not converged by then.
    return UNet2DModel(  # type: ignore[no-untyped-call, unused-ignore]
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        add_attention=False,
        norm_num_groups=8,  # the default, 32, would leave one channel to a group
        num_class_embeds=num_classes + 1,
    )


def _train(unet: Any, scheduler: Any, dataset: Dataset, steps: int, progress: Progress | None) -> None:
    from diffusers.training_utils import EMAModel

    images = torch.tensor(dataset.x_train).permute(0, 3, 1, 2).float() / 127.5 - 1
    labels = torch.tensor(dataset.y_train)
    random = torch.Generator().manual_seed(_SEED)
    optimizer = torch.optim.Adam(unet.parameters(), betas=(0.9, 0.99))
    average = EMAModel(unet.parameters(), decay=_EMA_DECAY, foreach=True)
    unet.train()
    for step in range(steps):
        rate = _LEARNING_RATE * min(1.0, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate
        loss = _batch_loss(unet, scheduler, images, labels, random)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        average.step(unet.parameters())
        if progress is not None:
            progress(step + 1, steps, float(loss.detach()))
    average.copy_to(unet.parameters())


def _batch_loss(
    unet: Any, scheduler: Any, images: torch.Tensor, labels: torch.Tensor, random: torch.Generator
) -> torch.Tensor:
    """Return the mean squared error of the velocity on one random batch."""
    chosen = torch.randint(len(images), (_BATCH,), generator=random)
    # One timestep from each of 64 equal slices: the loss varies less from batch to batch than with free draws.
    slices = (torch.arange(_BATCH) + torch.rand(_BATCH, generator=random)) / _BATCH
    times = (slices * scheduler.config.num_train_timesteps).long().clamp(max=scheduler.config.num_train_timesteps - 1)
    clean = images[chosen]
    noise = torch.randn(clean.shape, generator=random)
    no_label = unet.config.num_class_embeds - 1
    shown = torch.where(torch.rand(_BATCH, generator=random) < _LABEL_DROPOUT, no_label, labels[chosen])
    predicted = unet(scheduler.add_noise(clean, noise, times), times, class_labels=shown).sample
    return torch.nn.functional.mse_loss(predicted, scheduler.get_velocity(clean, noise, times))


@contextmanager
def _reproducible() -> Iterator[None]:
    """Fix what changes the last bits of training, and put it back afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(_SEED)  # initial weights
        torch.set_num_threads(_THREADS)
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)


def _files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(folder: Path) -> bool:
    try:
        sums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        return bool(sums) and all(_sha256(folder / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return False
