"""Plain PyTorch training on any device: the reference every faster engine is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn

from fedeas_flwr.training.augmentation import VIEWS, augment
from fedeas_flwr.training.engine import LocalTrainingConfig, State, TrainResult, copy_state, read_state, stream_seed
from fedeas_flwr.training.models import Normaliser, drawing, uses_rng
from fedeas_flwr.training.objective import CROSS_ENTROPY, NO_INPUTS, Batch, Inputs, Objective, Tensors, named
from fedeas_flwr.training.oom_fallback import Differentiate, full_batch_gradient
from fedeas_flwr.training.precompute import needs_precompute


class SGD:
    """SGD with momentum and weight decay, bit for bit torch.optim.SGD's, which takes two seconds to import.

    Fresh each round: the momentum starts from nothing.
    """

    def __init__(self, recipe: LocalTrainingConfig, weights: Sequence[torch.Tensor]) -> None:
        self._recipe, self._weights = recipe, weights
        self._momentum: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Move the weights."""
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
    """A model that is trained step by step; with ``bf16`` as its precision under autocast, the weights in float32.

    Before the steps the objective sees so many samples ``at_a_time``: a batch, unless there is memory for fewer.
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
        at_a_time: int | None = None,
    ) -> None:
        self._model, self._recipe, self._normalise, self._device = model.to(device), recipe, normalise, device
        self._objective, self._differentiate, self._halved = objective, differentiate, precision == "bf16"
        self._at_a_time = at_a_time or recipe.batch_size
        self._draws: bool | None = None

    def train(
        self,
        trainable: State,
        buffers: State,
        images: torch.Tensor,
        labels: torch.Tensor,
        batches: np.random.Generator,
        inputs: Inputs = NO_INPUTS,
    ) -> tuple[TrainResult, State, State]:
        """Train from a state, the whole set shuffled uniformly each epoch."""
        copy_state(self._model, trainable, buffers)
        if self._draws is None:  # not before: now the images' shape is known
            two = torch.zeros((2, *images.shape[1:]), dtype=torch.uint8, device=self._device)
            self._draws = uses_rng(self._model, self._normalise(two))
        # What a model draws itself must not depend on what this process did before, nor on what it does meanwhile: such
        # clients train one after the other in it.
        with ExitStack() as one_at_a_time:
            one_at_a_time.enter_context(drawing)
            torch.default_generator.manual_seed(stream_seed(batches))
            if self._device != "cpu":
                torch.cuda.manual_seed(stream_seed(batches))
            if not self._draws:
                one_at_a_time.close()
            return self._train(images, labels, batches, inputs), *read_state(self._model)

    def _train(
        self, images: torch.Tensor, labels: torch.Tensor, batches: np.random.Generator, inputs: Inputs
    ) -> TrainResult:
        model, recipe, device = self._model.train(), self._recipe, self._device
        names, weights = zip(*((k, p) for k, p in model.named_parameters() if p.requires_grad), strict=True)
        descent, steps = SGD(recipe, weights), 0
        kept = self._precompute(images, labels, inputs)
        loss_sum, seen = torch.zeros((), device=device), 0
        for _ in range(recipe.epochs):
            order = torch.from_numpy(batches.permutation(len(labels))[: recipe.samples(len(labels))]).to(device)
            loss_sum, seen = torch.zeros((), device=device), 0
            for begin in range(0, len(order), recipe.batch_size):
                chosen = order[begin : begin + recipe.batch_size]
                given = {**inputs.constants, **{name: table[steps] for name, table in inputs.tables.items()}}
                pixels = images[chosen]
                if VIEWS in given:
                    pixels = augment(pixels, given[VIEWS][: len(chosen)])
                rows = {name: of_all[chosen] for name, of_all in kept.items()}
                batch = Batch(self._normalise(pixels), labels[chosen], given, torch.mean, precomputed=rows)
                with torch.autocast(device, torch.bfloat16, enabled=self._halved):
                    loss, gradients = self._differentiate(self._objective, model, batch, weights)
                with torch.no_grad():
                    self._objective.correct(named(names, weights), named(names, gradients), given)
                descent.step(gradients)
                loss_sum += loss * len(chosen)
                seen += len(chosen)
                steps += 1
        return TrainResult(loss=float(loss_sum) / max(seen, 1), steps=steps)

    @torch.no_grad()
    def _precompute(self, images: torch.Tensor, labels: torch.Tensor, inputs: Inputs) -> Tensors:
        """What the objective knows of every sample before the first step, ``[N, …]``."""
        if not (len(labels) and needs_precompute(self._objective, inputs)):
            return {}
        found = []
        for begin in range(0, len(labels), self._at_a_time):
            chunk = slice(begin, begin + self._at_a_time)
            batch = Batch(self._normalise(images[chunk]), labels[chunk], inputs.constants, torch.mean)
            with torch.autocast(self._device, torch.bfloat16, enabled=self._halved):
                found.append(self._objective.precompute(self._model, batch))
        return {name: torch.cat([each[name] for each in found]) for name in found[0]}
