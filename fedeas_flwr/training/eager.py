"""Plain PyTorch training on any device: the reference for faster engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedeas_flwr.training.augmentation import VIEWS, augment
from fedeas_flwr.training.engine import (
    LEARNING_RATE,
    LocalTrainingConfig,
    State,
    TrainResult,
    copy_state,
    read_state,
    stream_seed,
)
from fedeas_flwr.training.models import Normaliser, drawing, uses_rng
from fedeas_flwr.training.objective import CROSS_ENTROPY, NO_INPUTS, Batch, Inputs, Objective, Tensors, named
from fedeas_flwr.training.oom_fallback import Differentiate, full_batch_gradient


class SGD:
    """SGD with momentum and weight decay, bit for bit as torch.optim.SGD, which takes two seconds to import.

    Every round has a new one: momentum starts at zero.
    """

    def __init__(self, recipe: LocalTrainingConfig, weights: Sequence[torch.Tensor]) -> None:
        self._recipe, self._weights = recipe, weights
        self._momentum: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update the weights in place."""
        recipe, directions = self._recipe, list(gradients)
        if recipe.weight_decay:
            pairs = zip(directions, self._weights, strict=True)
            directions = [gradient.add(weight, alpha=recipe.weight_decay) for gradient, weight in pairs]
        if recipe.momentum:
            if self._momentum:
                for moving, direction in zip(self._momentum, directions, strict=True):
                    moving.mul_(recipe.momentum).add_(direction)
            else:
                self._momentum = [direction.clone() for direction in directions]
            directions = self._momentum
        for weight, direction in zip(self._weights, directions, strict=True):
            weight.add_(direction, alpha=-recipe.learning_rate)


class EagerEngine:
    """Train a model step by step; with precision ``bf16`` under autocast, with weights in float32.

    `Objective.precompute` gets ``samples_at_once`` samples per call: a batch by default, fewer if memory is short.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: LocalTrainingConfig,
        normalise: Normaliser,
        device: str,
        objective: Objective = CROSS_ENTROPY,
        differentiate: Differentiate = full_batch_gradient,
        precision: str = "fp32",
        samples_at_once: int | None = None,
    ) -> None:
        self._model, self._recipe, self._normalise, self._device = model.to(device), recipe, normalise, device
        self._objective, self._differentiate, self._use_bf16 = objective, differentiate, precision == "bf16"
        self._samples_at_once = samples_at_once or recipe.batch_size
        self._uses_rng: bool | None = None

    def train(
        self,
        trainable: State,
        buffers: State,
        images: torch.Tensor,
        labels: torch.Tensor,
        batches: np.random.Generator,
        inputs: Inputs = NO_INPUTS,
    ) -> tuple[TrainResult, State, State]:
        """Train from a state, with all samples shuffled uniformly in each epoch; return as `Engine.train`."""
        copy_state(self._model, trainable, buffers)
        if self._uses_rng is None:  # the images' shape is known only now
            two = torch.zeros((2, *images.shape[1:]), dtype=torch.uint8, device=self._device)
            self._uses_rng = uses_rng(self._model, self._normalise(two))
        # A model's random numbers must not depend on other work of this process, before or at the same time: clients
        # whose models draw train one after the other.
        with ExitStack() as one_at_a_time:
            one_at_a_time.enter_context(drawing)
            torch.default_generator.manual_seed(stream_seed(batches))
            if self._device != "cpu":
                torch.cuda.manual_seed(stream_seed(batches))
            if not self._uses_rng:
                one_at_a_time.close()
            return self._train(images, labels, batches, inputs), *read_state(self._model)

    def _train(
        self, images: torch.Tensor, labels: torch.Tensor, batches: np.random.Generator, inputs: Inputs
    ) -> TrainResult:
        model, recipe, device = self._model.train(), self._recipe, self._device
        names, weights = zip(*((k, p) for k, p in model.named_parameters() if p.requires_grad), strict=True)
        rate = float(inputs.constants.get(LEARNING_RATE, recipe.learning_rate))
        descent, steps = SGD(replace(recipe, learning_rate=rate), weights), 0
        precomputed = self._precompute(images, labels, inputs)
        for _ in range(recipe.epochs):
            order = torch.from_numpy(batches.permutation(len(labels))[: recipe.samples(len(labels))]).to(device)
            loss_sum, seen = torch.zeros((), device=device), 0
            for begin in range(0, len(order), recipe.batch_size):
                chosen = order[begin : begin + recipe.batch_size]
                given = {**inputs.constants, **{name: table[steps] for name, table in inputs.tables.items()}}
                pixels = images[chosen]
                if VIEWS in given:
                    pixels = augment(pixels, given[VIEWS][: len(chosen)])
                rows = {name: values[chosen] for name, values in precomputed.items()}
                batch = Batch(self._normalise(pixels), labels[chosen], given, torch.mean, precomputed=rows)
                with torch.autocast(device, torch.bfloat16, enabled=self._use_bf16):
                    loss, gradients = self._differentiate(self._objective, model, batch, weights)
                with torch.no_grad():
                    self._objective.correct_gradients(named(names, weights), named(names, gradients), given)
                descent.step(gradients)
                loss_sum += loss * len(chosen)
                seen += len(chosen)
                steps += 1
        return TrainResult(loss=float(loss_sum) / max(seen, 1), steps=steps)

    @torch.no_grad()
    def _precompute(self, images: torch.Tensor, labels: torch.Tensor, inputs: Inputs) -> Tensors:
        """Return `Objective.precompute` of all samples, ``[N, …]``; empty if it is not needed."""
        if not (len(labels) and self._objective.precomputes(inputs)):
            return {}
        found = []
        for begin in range(0, len(labels), self._samples_at_once):
            chunk = slice(begin, begin + self._samples_at_once)
            batch = Batch(self._normalise(images[chunk]), labels[chunk], inputs.constants, torch.mean)
            with torch.autocast(self._device, torch.bfloat16, enabled=self._use_bf16):
                found.append(self._objective.precompute(self._model, batch))
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}
