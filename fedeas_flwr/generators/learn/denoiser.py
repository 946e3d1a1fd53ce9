"""The denoiser of a class-conditional diffusion model: its network, initial weights, loss and learning rate.

`trainer.py` trains it on all images of a dataset, `federated.py` on the images of each client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from fedeas_flwr.generators.diffusion.model_folder import CLASSES
from fedeas_flwr.generators.learn.presets import Preset

# diffusers takes seconds to import, so only functions import it.

TIMESTEPS = 1000
BETAS = (0.9, 0.99)
"""Adam's decay rates."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's names of its two moments."""
MAX_GRADIENT_NORM = 1.0


class NoisyBatch(NamedTuple):
    """Inputs of a training step: noisy images [N, C, H, W], timesteps, labels, and what the network should predict."""

    noisy: torch.Tensor
    times: torch.Tensor
    labels: torch.Tensor
    target: torch.Tensor


class DenoisingLoss:
    """The weighted squared error of a network's prediction on noisy images; see `Preset` for target and weights.

    ``mirrored_keeps_class`` allows flips, if the preset has them.
    """

    def __init__(self, preset: Preset, num_classes: int, mirrored_keeps_class: bool, device: torch.device) -> None:
        self.scheduler = build_scheduler(preset)
        self._preset, self._device, self._no_label = preset, device, num_classes
        self._flips = preset.flips and mirrored_keeps_class
        signal_to_noise = self.scheduler.alphas_cumprod / (1 - self.scheduler.alphas_cumprod)
        self._weights = loss_weights(preset, signal_to_noise).to(device)

    def random_batch(
        self, images: torch.Tensor, labels: torch.Tensor, batch: int, generator: torch.Generator | None = None
    ) -> NoisyBatch:
        """Draw ``batch`` images with replacement from uint8 images [N, C, H, W], and their timesteps and noise.

        ``generator`` is the source of all random numbers; None: torch's default generator of the device.
        """
        device = self._device
        draw: dict[str, Any] = {"device": device, "generator": generator}
        chosen = torch.randint(len(images), (batch,), **draw)
        times = self._stratified_times(torch.rand(batch, **draw))
        clean = images[chosen].float() / 127.5 - 1
        if self._flips:
            mirrored = torch.rand(batch, 1, 1, 1, **draw) < 0.5
            clean = torch.where(mirrored, clean.flip(3), clean)
        noise = torch.randn(clean.shape, **draw)
        dropped = torch.rand(batch, **draw) < self._preset.label_dropout
        shown = torch.where(dropped, self._no_label, labels[chosen])
        return self._add_noise(clean, noise, times, shown)

    def of_batch(self, network: Callable[..., Any], batch: NoisyBatch) -> torch.Tensor:
        """Return the loss of every image of a batch."""
        with torch.autocast("cuda", dtype=torch.bfloat16) if self._device.type == "cuda" else nullcontext():
            predicted = network(batch.noisy, batch.times, class_labels=batch.labels, return_dict=False)[0]
        errors: torch.Tensor = (predicted.float() - batch.target).square().mean(dim=(1, 2, 3))
        return self._weights[batch.times] * errors

    @torch.no_grad()
    def of_each_image(
        self, network: Callable[..., Any], images: torch.Tensor, labels: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the loss of every image with its own label, at a timestep and with noise from ``generator``.

        The draws come from a CPU generator, so that every device and every model gets the same ones.
        """
        clean = images.float() / 127.5 - 1
        within = torch.rand(len(images), generator=generator).to(self._device)
        noise = torch.randn(clean.shape, generator=generator).to(self._device)
        return self.of_batch(network, self._add_noise(clean, noise, self._stratified_times(within), labels))

    def _stratified_times(self, within: torch.Tensor) -> torch.Tensor:
        """Return one timestep from each of N equal slices: the loss varies less than with independent timesteps."""
        slices = (torch.arange(len(within), device=within.device) + within) / len(within)
        return (slices * TIMESTEPS).long().clamp(max=TIMESTEPS - 1)

    def _add_noise(
        self, clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, labels: torch.Tensor
    ) -> NoisyBatch:
        noisy = self.scheduler.add_noise(clean, noise, times)
        if self._device.type == "cuda":
            noisy = noisy.contiguous(memory_format=torch.channels_last)
        velocity = self._preset.prediction == "v_prediction"
        target = self.scheduler.get_velocity(clean, noise, times) if velocity else noise
        return NoisyBatch(noisy, times, labels, target)


def rate_factor(preset: Preset, step: int, done: float) -> float:
    """Return the factor of the learning rate at a step; `done` is the fraction of the planned length completed."""
    warm = min(1.0, (step + 1) / preset.warm_up) if preset.warm_up else 1.0
    if preset.decay == "never":
        return warm
    begin = 0.0 if preset.decay == "cosine" else 0.8
    fallen = max(0.0, done - begin) / (1 - begin)
    return warm * 0.5 * (1 + math.cos(math.pi * fallen))


def loss_weights(preset: Preset, signal_to_noise: torch.Tensor) -> torch.Tensor:
    """Return the min-SNR-γ weight of each timestep: min(SNR, γ) on the image's error, converted to the target's."""
    if preset.min_snr is None:
        return torch.ones_like(signal_to_noise)
    # The squared error of ε is SNR times that of the image, the error of v is SNR + 1 times.
    own = signal_to_noise + 1 if preset.prediction == "v_prediction" else signal_to_noise
    return signal_to_noise.clamp(max=preset.min_snr) / own


def build_scheduler(preset: Preset) -> Any:
    """Return the noise schedule, as diffusers' DDIM scheduler."""
    from diffusers import DDIMScheduler

    scheduler: Any = DDIMScheduler
    return scheduler(num_train_timesteps=TIMESTEPS, **preset.schedule)


def build_unet(preset: Preset, classes: Sequence[str], image_shape: Sequence[int]) -> Any:
    """Return a UNet for images of a shape (height, width, channels); torch's generator draws its initial weights."""
    from diffusers import UNet2DModel

    height, width, channels = image_shape
    unet_class: Any = UNet2DModel
    unet = unet_class(
        sample_size=height if height == width else (height, width),
        in_channels=channels,
        out_channels=channels,
        num_class_embeds=len(classes) + 1,  # the last one is "no label"
        **preset.unet,
    )
    unet.register_to_config(**{CLASSES: list(classes)})
    return unet
