"""Attacks that infer from a diffusion model whether it was trained on an image: by its loss, and PIA.

Both give an error per image, lower for images that the model was trained on. At timestep t, with noise ε and
x_t = √ᾱ_t x + √(1 − ᾱ_t) ε:

- ``loss``: ‖ε − ε_θ(x_t, t)‖², the training loss without its weights (Matsumoto et al., 2023; Carlini et al., 2023).
  ε is the same for all images, so that a score does not depend on the order of images.
- ``pia``: the same in the ℓ4 norm with ε = ε_θ(x, 0), the model's own prediction (proximal initialisation attack, Kong
  et al., 2024, arXiv 2305.18355: their R with p = 4, which they use for DDPM at t = 200). It needs no random numbers.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedeas_flwr.common.devices import one_thread
from fedeas_flwr.common.progress import log_progress
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.data.datasets import Images, Labels
from fedeas_flwr.generators.diffusion.denoising import make_solver
from fedeas_flwr.generators.diffusion.model_folder import load_unet, read_model

logger = logging.getLogger(__name__)

ATTACKS = ("loss", "pia")
_TIMES = (0.05, 0.1, 0.2, 0.4)
"""Timesteps of both attacks, as fractions of the model's."""
_NOISES = 2
"""Number of noise tensors per timestep of ``loss``."""
_BATCHES = {"cpu": 64, "cuda": 512}


@torch.no_grad()
def membership_errors(
    folder: Path, images: Images, labels: Labels, num_classes: int, seed: int = 0, device: str = "cpu"
) -> dict[str, NDArray[np.float64]]:
    """Return each image's errors: ``loss`` and ``pia``, and both at single timesteps (``loss t=50``).

    The first two are means over the timesteps, in units of the images' mean error at each. ``folder`` has a diffusion
    model in diffusers' format. Batches are padded to one size, so that an image's errors do not depend on its batch.
    """
    config, schedule, (height, width, channels), weights = read_model(folder, num_classes)
    unet = torch.nn.Module.to(load_unet(config, weights), device)
    alphas = make_solver("ddim", schedule, 1).alphas_cumprod.tolist()
    times, size = [int(fraction * len(alphas)) for fraction in _TIMES], _BATCHES[torch.device(device).type]
    drawn = stream(seed, "audit noise").standard_normal((_NOISES, channels, height, width), np.float32)
    noises = torch.from_numpy(drawn).to(device)
    found = np.empty((len(ATTACKS), len(times), len(images)))
    report = log_progress(logger, "membership inference, images")
    report(0, len(images))
    for start in range(0, len(images), size):
        rows = np.minimum(np.arange(start, start + size), len(images) - 1)
        clean = torch.tensor(images[rows], device=device).permute(0, 3, 1, 2).float() / 127.5 - 1
        classes = torch.tensor(labels[rows], device=device)

        def error(noise: torch.Tensor, time: int, x: torch.Tensor = clean, y: torch.Tensor = classes) -> torch.Tensor:
            noisy = math.sqrt(alphas[time]) * x + math.sqrt(1 - alphas[time]) * noise
            return _predict(unet, schedule, alphas[time], noisy, time, y) - noise

        with one_thread(torch.device(device)):
            own = _predict(unet, schedule, alphas[0], clean, 0, classes)
            for place, time in enumerate(times):
                losses = [error(noise, time).square().mean(dim=(1, 2, 3)) for noise in noises]
                both = torch.stack([torch.stack(losses).mean(dim=0), error(own, time).flatten(1).norm(p=4, dim=1)])
                found[:, place, start : start + size] = both[:, : len(images) - start].cpu().numpy()
        report(min(start + size, len(images)), len(images))
    means = (found / found.mean(axis=2, keepdims=True)).mean(axis=1)
    single = {
        f"{attack} t={time}": found[number, place]
        for number, attack in enumerate(ATTACKS)
        for place, time in enumerate(times)
    }
    return dict(zip(ATTACKS, means, strict=True)) | single


def _predict(
    unet: Any, schedule: dict[str, Any], alpha: float, x: torch.Tensor, time: int, labels: torch.Tensor
) -> torch.Tensor:
    """Return ε_θ(x, t), converted from what the model predicts; ``alpha`` is ᾱ_t."""
    output: torch.Tensor = unet(x, time, class_labels=labels, return_dict=False)[0]
    signal, noise = math.sqrt(alpha), math.sqrt(1 - alpha)
    if schedule["prediction_type"] == "v_prediction":
        return signal * output + noise * x
    if schedule["prediction_type"] == "sample":
        return (x - signal * output) / noise
    return output
