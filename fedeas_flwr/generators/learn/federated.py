"""A denoiser that a federation trains (`task = "generator"`): one client's steps, its loss on images, the result.

A client continues from the averaged weights and, with `average-moments`, from the averaged moments of Adam, which
travel as buffers of the model: buffers are checked, averaged by real samples and checkpointed under any strategy.

The random numbers of a step are seeded by (seed, round, client, step) only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedeas_flwr.common.files import atomic_folder, atomic_write
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import Labels, dataset_info
from fedeas_flwr.generators.learn.denoiser import (
    BETAS,
    MAX_GRADIENT_NORM,
    MOMENTS,
    DenoisingLoss,
    build_scheduler,
    build_unet,
    rate_factor,
    step_seed,
)
from fedeas_flwr.generators.learn.presets import PRESETS, Preset
from fedeas_flwr.training.engine import State, TrainResult, copy_state, read_state
from fedeas_flwr.training.models import drawing, split_state

_EVALUATED_AT_ONCE = 256


def federated_preset(config: RunConfig) -> Preset:
    """Return the preset of a federated training, with the settings of the table `generator-training`."""
    recipe = config.generator_training
    auto = "digits" if config.dataset == "digits" else "cifar-small"
    preset = PRESETS[auto if recipe.preset == "auto" else recipe.preset]
    return replace(
        preset,
        batch=recipe.batch_size,
        learning_rate=recipe.learning_rate or preset.learning_rate,
        warm_up=recipe.warm_up * recipe.local_steps,
        decay="cosine",
    )


def initial_unet(config: RunConfig) -> Any:
    """Return the network with its initial weights; raise ValueError if it does not fit the size of the images."""
    info, preset = dataset_info(config.dataset), federated_preset(config)
    preset.check_size(*info.image_shape[:2])
    with drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(step_seed(config.seed, 0))
        return build_unet(preset, info.classes, info.image_shape)


def initial_state(config: RunConfig) -> tuple[Arrays, Arrays]:
    """Return the initial weights, and Adam's moments, which are 0; no moments if they are not averaged."""
    trainable, buffers = split_state(initial_unet(config))
    assert not buffers
    names = [f"{moment}/{name}" for moment in MOMENTS for name in trainable]
    zeros = {name: np.zeros_like(trainable[name.partition("/")[2]]) for name in names}
    return dict(trainable), zeros if config.generator_training.average_moments else {}


def split_held_out(config: RunConfig, client: int, samples: int) -> tuple[Labels, Labels]:
    """Return the indices of the images that a client trains on, and of those that it holds out."""
    order = stream(config.seed, "held-out", client).permutation(samples)
    held_out = round(config.generator_training.held_out * samples)
    return np.sort(order[held_out:]), order[:held_out]


class LocalDenoiser:
    """Trains and evaluates the denoiser of a run on images of a client, one client after another."""

    def __init__(self, config: RunConfig, device: str) -> None:
        self._config, self._preset, self._device = config, federated_preset(config), torch.device(device)
        self._unet = initial_unet(config).to(self._device)
        info = dataset_info(config.dataset)
        self._loss = DenoisingLoss(self._preset, len(info.classes), info.mirrored_keeps_class, self._device)

    def train(
        self, trainable: State, buffers: State, images: torch.Tensor, labels: torch.Tensor, number: int, client: int
    ) -> tuple[TrainResult, State, State]:
        """Take a client's steps of round ``number`` on uint8 images [N, H, W, C]; return weights and moments after it.

        A client without images, or with fewer than a batch if `small-clients` is skip, returns what it received.
        """
        recipe = self._config.generator_training
        chosen = torch.from_numpy(split_held_out(self._config, client, len(labels))[0]).to(self._device)
        images, labels = images[chosen].permute(0, 3, 1, 2).contiguous(), labels[chosen]
        if len(labels) < (recipe.batch_size if recipe.small_clients == "skip" else 1):
            return TrainResult(0.0, 0), trainable, buffers
        first, total = (number - 1) * recipe.local_steps, self._config.rounds * recipe.local_steps
        with drawing:  # torch has one generator per process, from which dropout draws too
            copy_state(self._unet, trainable, {})
            self._unet.train()
            adam = self._optimizer(buffers, first)
            losses = []
            for step in range(recipe.local_steps):
                factor = rate_factor(self._preset, first + step, (first + step) / total)
                adam.param_groups[0]["lr"] = self._preset.learning_rate * factor
                torch.manual_seed(step_seed(self._config.seed, number, client, step))
                loss = self._loss.of_random_batch(self._unet, images, labels, self._preset.batch)
                adam.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                torch.nn.utils.clip_grad_norm_(self._unet.parameters(), MAX_GRADIENT_NORM)
                adam.step()
                losses.append(loss.detach())
            result = TrainResult(float(torch.stack(losses).mean()), recipe.local_steps)
            states = {name: adam.state[parameter] for name, parameter in self._unet.named_parameters()}
            moments = {name: states[name.partition("/")[2]][name.partition("/")[0]].clone() for name in buffers}
            return result, read_state(self._unet)[0], moments

    def loss(self, trainable: State, images: torch.Tensor, labels: torch.Tensor, seed: int) -> float:
        """Return the mean loss of weights on uint8 images [N, H, W, C]; 0 without images.

        Each image has one timestep and one noise, which depend on ``seed`` and the image's position only.
        """
        generator, total = torch.Generator().manual_seed(seed), 0.0
        with drawing:
            copy_state(self._unet, trainable, {})
            self._unet.eval()
            for begin in range(0, len(labels), _EVALUATED_AT_ONCE):
                part = slice(begin, begin + _EVALUATED_AT_ONCE)
                clean = images[part].permute(0, 3, 1, 2)
                total += float(self._loss.of_each_image(self._unet, clean, labels[part], generator).sum())
        return total / max(len(labels), 1)

    def _optimizer(self, moments: State, steps: int) -> torch.optim.Adam:
        """Return Adam after ``steps`` steps that left these moments; without moments, a new one."""
        adam = torch.optim.Adam(self._unet.parameters(), betas=BETAS)
        for name, parameter in self._unet.named_parameters() if moments else ():
            found = {key: _copied(moments[f"{key}/{name}"], parameter) for key in MOMENTS}
            # Adam keeps its step count on the CPU for every device.
            adam.state[parameter] = {"step": torch.tensor(float(steps)), **found}
        return adam


@lru_cache(maxsize=1)
def local_denoiser(config: RunConfig, device: str) -> LocalDenoiser:
    """Return the denoiser of a run, built once per process."""
    return LocalDenoiser(config, device)


def _copied(array: Any, like: torch.Tensor) -> torch.Tensor:
    source = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))
    return torch.empty_like(like).copy_(source)


_CARD = """---
library_name: diffusers
tags: [image-generation, class-conditional, federated]
---
# {dataset}, {height}×{width}, class-conditional diffusion, trained by a federation

Made by FedEAS on Flower with preset `{preset}`: {clients} clients, {rounds} rounds, {participation:.0%} of the clients
per round, {steps} local steps of {batch} images per client and round; {seen:,} images in all.

- **Data**: each client's own train images of {dataset}; {held_out:.0%} of them were held out. No image left a client.
- **What left the clients**: after each of its rounds, a client sent its weights{moments}, its number of
  images, its mean training loss, its number of steps and its times. {dp}
- **Model**: UNet2DModel, {parameters:.1f} M parameters, {prediction}, schedule {schedule}; the moving average of the
  server's weights (decay {ema:g} per round) in float32. Class {no_label} is "no label", for guidance; labels were
  dropped {dropout:.0%} of the time.
- **Held-out loss**: {loss}.
- **Data's licence**: see the dataset's; a model may reproduce images that it was trained on.
- **Seed**: {seed}.
"""


def write_model(folder: Path, config: RunConfig, weights: Arrays) -> Any:
    """Write weights as a folder in diffusers' format, without a model card; return the network."""
    unet = initial_unet(config)
    copy_state(unet, {name: weights[name] for name in unet.state_dict()}, {})  # without moments, if no round succeeded
    unet.eval().requires_grad_(False)
    with atomic_folder(folder / "unet") as temporary:
        unet.save_pretrained(temporary, safe_serialization=True)
    with atomic_folder(folder / "scheduler") as temporary:
        build_scheduler(federated_preset(config)).save_pretrained(temporary)
    return unet


def write_generator(folder: Path, config: RunConfig, weights: Arrays, summary: Mapping[str, Any]) -> None:
    """Write a finished training's weights as a folder in diffusers' format, with a model card."""
    preset, info, recipe = federated_preset(config), dataset_info(config.dataset), config.generator_training
    unet = write_model(folder, config, weights)
    privacy = f"Updates had differential privacy (`dp = {config.dp}`)." if config.dp != "none" else ""
    card = _CARD.format(
        dataset=info.name,
        height=info.image_shape[0],
        width=info.image_shape[1],
        preset=preset.name,
        clients=config.clients,
        rounds=summary["rounds"],
        participation=config.participation,
        steps=recipe.local_steps,
        batch=recipe.batch_size,
        seen=summary["steps"] * recipe.batch_size,
        held_out=recipe.held_out,
        moments=" and Adam's two moments, three times the size of the model" if recipe.average_moments else "",
        dp=privacy or "They had no differential privacy.",
        parameters=sum(value.numel() for value in unet.parameters()) / 1e6,
        prediction=preset.prediction,
        schedule=preset.beta_schedule,
        ema=recipe.ema_decay,
        no_label=len(info.classes),
        dropout=preset.label_dropout,
        loss=f"{summary['final_loss']:.5f} ({config.evaluation} evaluation)",
        seed=config.seed,
    )
    atomic_write(folder / "README.md", card.encode())
