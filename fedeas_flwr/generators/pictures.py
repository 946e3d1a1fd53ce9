"""What a person looks at while a generator trains: its samples and its loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.data import Dataset, short_name
from fedeas_flwr.generators import SampleId
from fedeas_flwr.generators.denoising import Denoiser
from fedeas_flwr.generators.diffusion import initial_noise
from fedeas_flwr.generators.training import Trainer
from fedeas_flwr.paths import atomic_path

_GRID = 10


def draw_pictures(folder: Path, trainer: Trainer, dataset: Dataset) -> None:
    """Write samples.png and loss.png."""
    from matplotlib.figure import Figure
    from matplotlib.image import imsave

    images = _sample_grid(trainer, dataset)
    height, width, channels = images.shape[1:]
    rows = len(images) // _GRID
    grid = images.reshape(rows, _GRID, height, width, channels).transpose(0, 2, 1, 3, 4)
    grid = grid.reshape(rows * height, _GRID * width, channels)
    enlarged = np.repeat(np.repeat(grid, max(1, 64 // height), axis=0), max(1, 64 // height), axis=1)
    with atomic_path(folder / "samples.png") as temporary:
        imsave(temporary, np.broadcast_to(enlarged, (*enlarged.shape[:2], 3)).copy(), format="png")
    figure = Figure(figsize=(7, 4), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.plot(*np.array(trainer.diary.curve).reshape(-1, 2).T, color="#d1495b", lw=1)
    axes.set(
        xlabel="step", ylabel="loss", yscale="log", title=f"{short_name(dataset.name)}, preset {trainer.preset.name}"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(folder / "loss.png") as temporary:
        figure.savefig(temporary, format="png")


def _sample_grid(trainer: Trainer, dataset: Dataset) -> NDArray[np.uint8]:
    """Return `_GRID` images of each class, or of `_GRID` classes spread over all of them; 20 steps, no guidance."""
    number = len(dataset.classes)
    classes = sorted({round(i * (number - 1) / (_GRID - 1)) for i in range(_GRID)})
    samples = [SampleId(0, 0, label, index) for label in classes for index in range(_GRID)]
    height, width, channels = dataset.x_train.shape[1:]
    schedule = {"beta_schedule": trainer.preset.beta_schedule, "prediction_type": trainer.preset.prediction}
    on_cuda = trainer.device.type == "cuda"
    denoiser = Denoiser(
        trainer.averaged().to(trainer.device),
        schedule,
        sampler="dpm++",
        steps=20,
        precision="tf32" if on_cuda else "fp32",
    )
    noise = np.stack([initial_noise(sample, (channels, height, width)) for sample in samples])
    images = denoiser.start(noise, [sample.label for sample in samples])()
    denoiser.forget()
    return images
