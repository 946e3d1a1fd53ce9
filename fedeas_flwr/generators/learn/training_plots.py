"""Plots of a generator's training: samples and loss curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedeas_flwr.common.files import atomic_path
from fedeas_flwr.common.image_sheet import classes_to_show, save_sheet
from fedeas_flwr.config import SAMPLER_STEPS
from fedeas_flwr.data.datasets import Dataset, Images, Labels, short_name
from fedeas_flwr.generators.diffusion.denoising import Denoiser
from fedeas_flwr.generators.diffusion.sampler import initial_noise
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.learn.presets import Preset
from fedeas_flwr.generators.learn.trainer import Trainer

_GRID = 10
"""Maximum number of classes, and minimum number of images per class, in samples.png."""
_MIN_SAMPLES = 60
"""Minimum number of images in samples.png, which the verdict is based on."""


def draw_pictures(folder: Path, trainer: Trainer, dataset: Dataset) -> tuple[Images, Labels]:
    """Write samples.png and loss.png; return the samples and their labels."""
    unet, title = trainer.averaged().to(trainer.device), f"{short_name(dataset.name)}, preset {trainer.preset.name}"
    samples = draw_samples(folder, unet, trainer.preset, len(dataset.classes), dataset.x_train.shape[1:])
    draw_losses(folder, {"loss": trainer.state.curve}, "step", title)
    return samples


def draw_samples(
    folder: Path, unet: Any, preset: Preset, num_classes: int, image_shape: Sequence[int]
) -> tuple[Images, Labels]:
    """Write samples.png, with images of a network, on its device and without guidance; return them and their labels."""
    classes = classes_to_show(num_classes, _GRID)
    columns = max(_GRID, _MIN_SAMPLES // len(classes))
    samples = [SampleId(0, 0, label, index) for label in classes for index in range(columns)]
    denoiser = Denoiser(
        unet,
        preset.schedule,
        sampler="dpm++",
        steps=SAMPLER_STEPS["dpm++"],
        precision="tf32" if unet.device.type == "cuda" else "fp32",
    )
    height, width, channels = image_shape
    noise = np.stack([initial_noise(sample, (channels, height, width)) for sample in samples])
    labels = [sample.label for sample in samples]
    images = denoiser.start(noise, labels)()
    denoiser.forget()
    save_sheet(list(images.reshape(-1, columns, *images.shape[1:])), columns, folder / "samples.png")
    return images, np.array(labels)


def draw_losses(folder: Path, curves: Mapping[str, Sequence[tuple[int, float]]], unit: str, title: str) -> None:
    """Write loss.png: by name, curves of points (step or round, loss)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained", dpi=120)
    axes = figure.subplots()
    for (name, curve), colour in zip(curves.items(), ("#d1495b", "#30638e"), strict=False):
        axes.plot(*np.array(curve).reshape(-1, 2).T, color=colour, lw=1, label=name)
    axes.set(xlabel=unit, ylabel="loss", yscale="log", title=title)
    if len(curves) > 1:
        axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(folder / "loss.png") as temporary:
        figure.savefig(temporary, format="png")
