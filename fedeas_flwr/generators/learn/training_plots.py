"""Plots of a generator's training: samples and loss curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedeas_flwr.common.files import atomic_path
from fedeas_flwr.common.image_sheet import classes_to_show, save_sheet
from fedeas_flwr.config import SAMPLER_STEPS
from fedeas_flwr.data.datasets import Dataset, Images, Labels, short_name
from fedeas_flwr.generators.diffusion.denoising import Denoiser
from fedeas_flwr.generators.diffusion.sampler import initial_noise
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.learn.trainer import Trainer

_GRID = 10
"""Maximum number of classes, and minimum number of images per class, in samples.png."""
_MIN_SAMPLES = 60
"""Minimum number of images in samples.png, which the verdict is based on."""


def draw_pictures(folder: Path, trainer: Trainer, dataset: Dataset) -> tuple[Images, Labels]:
    """Write samples.png and loss.png; return the samples and their labels."""
    from matplotlib.figure import Figure

    classes = classes_to_show(len(dataset.classes), _GRID)
    columns = max(_GRID, _MIN_SAMPLES // len(classes))
    samples = [SampleId(0, 0, label, index) for label in classes for index in range(columns)]
    images = _sample(trainer, dataset, samples)
    save_sheet(list(images.reshape(-1, columns, *images.shape[1:])), columns, folder / "samples.png")
    figure = Figure(figsize=(7, 4), layout="constrained", dpi=120)
    axes = figure.subplots()
    axes.plot(*np.array(trainer.state.curve).reshape(-1, 2).T, color="#d1495b", lw=1)
    axes.set(
        xlabel="step", ylabel="loss", yscale="log", title=f"{short_name(dataset.name)}, preset {trainer.preset.name}"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(folder / "loss.png") as temporary:
        figure.savefig(temporary, format="png")
    return images, np.array([sample.label for sample in samples])


def _sample(trainer: Trainer, dataset: Dataset, samples: Sequence[SampleId]) -> Images:
    """Return images of the averaged weights, without guidance."""
    height, width, channels = dataset.x_train.shape[1:]
    schedule = {"beta_schedule": trainer.preset.beta_schedule, "prediction_type": trainer.preset.prediction}
    on_cuda = trainer.device.type == "cuda"
    denoiser = Denoiser(
        trainer.averaged().to(trainer.device),
        schedule,
        sampler="dpm++",
        steps=SAMPLER_STEPS["dpm++"],
        precision="tf32" if on_cuda else "fp32",
    )
    noise = np.stack([initial_noise(sample, (channels, height, width)) for sample in samples])
    images = denoiser.start(noise, [sample.label for sample in samples])()
    denoiser.forget()
    return images
