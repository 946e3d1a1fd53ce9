"""A denoiser that a federation trains (`task = "generator"`): one client's steps, its loss on images, the result.

A client continues from the averaged weights and from the averaged moments of Adam (`average-moments`), which travel as
buffers of the model: buffers are checked, averaged by real samples and checkpointed under any strategy. Weights and
each moment are one flat array. A SuperLink stores every array of a message on its own, in one transaction: with
hundreds of arrays from each client, its database stays locked for longer than other requests wait.

The random numbers of a step are seeded by (seed, round, client, step) only.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import vector_to_parameters

from fedeas_flwr.common.cuda import LAST, CaptureError, capture, capturing, own_stream
from fedeas_flwr.common.files import atomic_write, expanded
from fedeas_flwr.common.launcher import launch, on_stream
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.randomness import stream, torch_seed
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import Labels, dataset_info, short_name
from fedeas_flwr.generators.diffusion.denoising import try_to_fuse
from fedeas_flwr.generators.diffusion.model_folder import init_from_pretrained, write_model_folder
from fedeas_flwr.generators.learn.data_licences import describe_data
from fedeas_flwr.generators.learn.denoiser import (
    BETAS,
    MAX_GRADIENT_NORM,
    MOMENTS,
    DenoisingLoss,
    build_scheduler,
    build_unet,
    rate_factor,
)
from fedeas_flwr.generators.learn.presets import PRESETS, Preset
from fedeas_flwr.generators.learn.training_plots import draw_losses, draw_samples
from fedeas_flwr.training.engine import State, TrainResult
from fedeas_flwr.training.models import drawing

logger = logging.getLogger(__name__)

_EVALUATED_AT_ONCE = 256
WEIGHTS = "unet"
"""Name of the array of the weights; that of a moment has Adam's name of the moment."""
AVERAGED = {"both": MOMENTS, "second": MOMENTS[1:], "neither": ()}
"""Adam's moments that clients send, by the values of `average-moments`."""


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
    """Return the network with random initial weights; raise ValueError if it does not fit the size of the images.

    A run needs a dozen copies; copying one takes a tenth of the time of drawing its weights.
    """
    return deepcopy(_drawn_unet(config))


@lru_cache(maxsize=1)
def _drawn_unet(config: RunConfig) -> Any:
    info, preset = dataset_info(config.dataset), federated_preset(config)
    preset.check_size(*info.image_shape[:2])
    with drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(config.seed, 0))
        return build_unet(preset, info.classes, info.image_shape)


def initial_state(config: RunConfig) -> tuple[Arrays, Arrays]:
    """Return the initial weights, and those of Adam's moments that are averaged, which are 0; each as one array."""
    unet, preset = initial_unet(config), federated_preset(config)
    if start := config.generator_training.start:
        key = "generator-training.start"
        init_from_pretrained(unet, expanded(start, key), preset.schedule, key)
    weights = _flat(list(unet.parameters())).numpy()
    sent = AVERAGED[config.generator_training.average_moments]
    return {WEIGHTS: weights}, {moment: np.zeros_like(weights) for moment in sent}


def split_held_out(config: RunConfig, client: int, samples: int) -> tuple[Labels, Labels]:
    """Return the indices of the images that a client trains on, and of those that it holds out."""
    order = stream(config.seed, "held-out", client).permutation(samples)
    held_out = round(config.generator_training.held_out * samples)
    return np.sort(order[held_out:]), order[:held_out]


def trains(config: RunConfig, images: int) -> bool:
    """Return whether a client with this number of images, without those held out, trains; see `small-clients`."""
    recipe = config.generator_training
    return images >= (recipe.batch_size if recipe.small_clients == "skip" else 1)


class LocalDenoiser:
    """Trains and evaluates the denoiser of a run on images of a client, one client at a time.

    On a GPU it has its own stream, on which it replays a step (forward, backward, update) as one CUDA graph, so several
    denoisers train at once; the GPU serves those of lower ``rank`` first. There is no dropout, whose random numbers
    would come from a generator that all of them share.
    """

    def __init__(self, config: RunConfig, device: str, rank: int = LAST) -> None:
        self._config, self._preset, self._device = config, federated_preset(config), torch.device(device)
        info, on_cuda = dataset_info(config.dataset), self._device.type == "cuda"
        height, width, channels = info.image_shape
        self._stream = own_stream(rank) if on_cuda else None
        self._loss = DenoisingLoss(self._preset, len(info.classes), info.mirrored_keeps_class, self._device)
        self._generator = torch.Generator(self._device)
        with on_stream(self._stream):
            self._unet = initial_unet(config).to(self._device).eval()
            if on_cuda:
                try_to_fuse(self._unet)
            rate = torch.zeros((), device=self._device) if on_cuda else 0.0
            self._weights = list(self._unet.parameters())
            self._adam = torch.optim.Adam(self._weights, rate, BETAS, capturable=on_cuda, fused=on_cuda)
            self._moments = {moment: [torch.zeros_like(weight) for weight in self._weights] for moment in MOMENTS}
            self._steps = [torch.zeros((), device=self._device) for _ in self._weights]
            for weight, step, *moments in zip(self._weights, self._steps, *self._moments.values(), strict=True):
                self._adam.state[weight] = {"step": step, **dict(zip(MOMENTS, moments, strict=True))}
            self._total_loss = torch.zeros((), device=self._device)
            image = torch.zeros((1, channels, height, width), dtype=torch.uint8, device=self._device)
            label = torch.zeros(1, dtype=torch.long, device=self._device)
            self._batch = self._loss.random_batch(image, label, self._preset.batch, self._generator)
        self._update: Callable[[], None] = self._take_step

    def capture(self) -> None:
        """Capture a step as a CUDA graph; on the CPU do nothing."""
        if self._stream is None or self._config.engine == "eager":
            return
        with capturing, on_stream(self._stream):
            try:
                self._update = capture(self._take_step, self._stream)
            except CaptureError as error:
                logger.warning("no CUDA graph; training continues without one: %s", one_line(error))

    def train(
        self, trainable: State, buffers: State, images: torch.Tensor, labels: torch.Tensor, number: int, client: int
    ) -> tuple[TrainResult, State, State]:
        """Take a client's steps of round ``number`` on uint8 images [N, H, W, C]; return weights and moments after it.

        A client that does not train (`trains`) returns what it received.
        """
        recipe = self._config.generator_training
        own = torch.from_numpy(split_held_out(self._config, client, len(labels))[0]).to(self._device)
        if not trains(self._config, len(own)):
            return TrainResult(0.0, 0), trainable, buffers
        first = (number - 1) * recipe.local_steps
        with on_stream(self._stream):
            images, labels = images[own].permute(0, 3, 1, 2).contiguous(), labels[own]
            _copy_flat(self._weights, trainable[WEIGHTS])
            torch._foreach_zero_([*self._steps, *chain(*self._moments.values()), self._total_loss])
            for moment, array in buffers.items():
                _copy_flat(self._moments[moment], array)
            if buffers:
                torch._foreach_add_(self._steps, float(first))

            def step(index: int) -> None:
                self._set_rate(first, index)
                self._generator.manual_seed(torch_seed(self._config.seed, number, client, index))
                batch = self._loss.random_batch(images, labels, self._preset.batch, self._generator)
                for kept, drawn in zip(self._batch, batch, strict=True):
                    kept.copy_(drawn)
                self._update()

            launch(self._stream, [partial(step, index) for index in range(recipe.local_steps)])
            loss = float(self._total_loss) / recipe.local_steps
            weights = {WEIGHTS: _flat(self._weights)}
            moments = {moment: _flat(self._moments[moment]) for moment in buffers}
            return TrainResult(loss, recipe.local_steps), weights, moments

    def loss(self, trainable: State, images: torch.Tensor, labels: torch.Tensor, seed: int) -> float:
        """Return the mean loss of weights on uint8 images [N, H, W, C]; 0 without images.

        Each image has one timestep and one noise, which depend on ``seed`` and the image's position only.
        """
        generator, losses = torch.Generator().manual_seed(seed), [torch.zeros(0)]
        with on_stream(self._stream):
            _copy_flat(self._weights, trainable[WEIGHTS])
            for begin in range(0, len(labels), _EVALUATED_AT_ONCE):
                part = slice(begin, begin + _EVALUATED_AT_ONCE)
                clean = images[part].permute(0, 3, 1, 2)
                losses.append(self._loss.of_each_image(self._unet, clean, labels[part], generator).cpu())
        return float(torch.cat(losses).sum()) / max(len(labels), 1)

    def _set_rate(self, first: int, index: int) -> None:
        recipe, step = self._config.generator_training, first + index
        done = step / (self._config.rounds * recipe.local_steps)
        rate = self._preset.learning_rate * rate_factor(self._preset, step, done)
        if recipe.average_moments == "second":
            # Adam corrects both moments for all steps, but the first moment has seen only those of this round.
            rate *= (1 - BETAS[0] ** (step + 1)) / (1 - BETAS[0] ** (index + 1))
        group = self._adam.param_groups[0]
        if self._stream is None:
            group["lr"] = rate
        else:  # the graph reads it from this tensor
            group["lr"].fill_(rate)

    def _take_step(self) -> None:
        loss = self._loss.of_batch(self._unet, self._batch).mean()
        self._adam.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self._total_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._unet.parameters(), MAX_GRADIENT_NORM)
        self._adam.step()


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of several tensors, of any memory layout, as one array."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def _copy_flat(tensors: Sequence[torch.Tensor], array: Any) -> None:
    """Copy one flat array or tensor into several tensors, in their order."""
    flat = array if isinstance(array, torch.Tensor) else torch.from_numpy(np.array(array))
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(one.shape) for part, one in zip(parts, tensors, strict=True)])


class DenoiserPool:
    """Denoisers of one run-config, shared by the clients of a process: on a GPU, as many as its memory holds."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._config: RunConfig | None = None
        self._free: list[LocalDenoiser] = []
        self._count = self._bytes = 0

    @contextmanager
    def borrow(self, config: RunConfig, device: str) -> Iterator[LocalDenoiser]:
        """Yield a free denoiser, or a new one; wait for a free one if there is no memory for another."""
        with self._changed:
            if self._config != config:
                self._config, self._free, self._count = config, [], 0
            while not self._free and self._count and not self._has_room(device):
                self._changed.wait()
            free = self._free
            if not free:
                before = torch.cuda.memory_reserved() if device == "cuda" else 0
                free.append(LocalDenoiser(config, device, self._count))
                free[0].capture()
                self._bytes = torch.cuda.memory_reserved() - before if device == "cuda" else 0
                self._count += 1
            denoiser = free.pop()
        try:
            yield denoiser
        finally:
            with self._changed:
                free.append(denoiser)
                self._changed.notify()

    def release(self) -> None:
        """Free the denoisers, none of which may be in use."""
        with self._changed:
            if not self._count:
                return
            self._config, self._free, self._count = None, [], 0
            gc.collect()  # a denoiser refers to itself by its step
            torch.cuda.empty_cache()

    def _has_room(self, device: str) -> bool:
        """Return whether another denoiser leaves a tenth of the GPU's memory to the server, which averages models."""
        if device == "cpu":
            return True
        free, total = torch.cuda.mem_get_info()
        return free - self._bytes > total / 10


_SENT = {"both": " and Adam's two moments", "second": " and Adam's second moment", "neither": ""}

_CARD = """---
license: {licence}
library_name: diffusers
tags: [image-generation, class-conditional, federated, {dataset}]
---
# {dataset}, {info.image_shape[0]}×{info.image_shape[1]}, class-conditional diffusion, trained by a federation

Made by FedEAS on Flower with preset `{preset.name}`: {config.clients} clients, {rounds} rounds,
{config.participation:.0%} of the clients per round, {recipe.local_steps} local steps of {recipe.batch_size} images per
client and round; {seen:,} images in all.

- **Data**: each client's own images of {dataset}, {split}; {recipe.held_out:.0%} of them were held out.
  No image left a client.
- **Data's licence**: {licence_text} A model may reproduce images that it was trained on.
- **What left the clients**: after each of its rounds, a client sent its weights{moments}, {sent:.1f} MB in
  all, its number of images, its mean training loss, its number of steps and its times{evaluated}. {dp}
- **Model**: UNet2DModel, {parameters:.1f} M parameters, {preset.prediction}, schedule {preset.beta_schedule}; the
  moving average of the server's weights (decay {recipe.ema_decay:g} per round) in float32. Class {no_label} is "no
  label", for guidance; labels were dropped {preset.label_dropout:.0%} of the time.
- **Initial weights**: {start}.
- **Loss on images not trained on**: {loss}.
- **Software**: torch {torch}, diffusers {diffusers} on the server.
- **Seed**: {config.seed}.
"""


def write_model(folder: Path, config: RunConfig, model: Arrays) -> Any:
    """Write the weights of a model as a folder in diffusers' format, without a model card; return the network."""
    unet = initial_unet(config)
    vector_to_parameters(torch.tensor(model[WEIGHTS]), unet.parameters())
    unet.eval().requires_grad_(False)
    write_model_folder(folder, unet, build_scheduler(federated_preset(config)))
    return unet


def write_generator(
    folder: Path,
    config: RunConfig,
    model: Arrays,
    rounds: Sequence[Mapping[str, Any]],
    final_loss: float | None,
    device: str,
) -> None:
    """Write a finished training's model as a folder in diffusers' format, with a model card, samples and losses."""
    preset, info, recipe = federated_preset(config), dataset_info(config.dataset), config.generator_training
    unet = write_model(folder, config, model)
    privacy = f"Updates had differential privacy (`dp = {config.dp}`)." if config.dp != "none" else ""
    split, licence, licence_text = describe_data(config.dataset)
    parameters = sum(value.numel() for value in unet.parameters())
    card = _CARD.format(
        config=config,
        recipe=recipe,
        preset=preset,
        info=info,
        dataset=short_name(config.dataset),
        split="train and test images together" if config.protocol == "paper" else f"train images (split: {split})",
        licence=licence,
        licence_text=licence_text,
        sent=parameters * 4 * (1 + len(AVERAGED[recipe.average_moments])) / 1e6,
        evaluated=", and for evaluations its held-out loss" if config.evaluation == "federated" else "",
        rounds=len(rounds),
        seen=sum(record["steps"] for record in rounds) * recipe.batch_size,
        moments=_SENT[recipe.average_moments],
        dp=privacy or "They had no differential privacy.",
        parameters=parameters / 1e6,
        no_label=len(info.classes),
        loss="not evaluated" if final_loss is None else f"{final_loss:.5f} ({config.evaluation} evaluation)",
        torch=version("torch"),
        diffusers=version("diffusers"),
        start=f"`{Path(recipe.start).name}`" if recipe.start else "random",
    )
    atomic_write(folder / "README.md", card.encode())
    draw_samples(folder, unet.to(device), preset, len(info.classes), info.image_shape)
    losses = {
        name: [(record["round"], record[key]) for record in rounds if record[key] is not None]
        for name, key in (("training", "train_loss"), ("evaluation", "loss"))
    }
    draw_losses(folder, losses, "round", f"{short_name(config.dataset)}, preset {preset.name}, federated")
