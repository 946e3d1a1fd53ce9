"""Train the clients of a round together, for clients of a few images: one step for the stacked weights of all.

A small network's step on ten images is mostly the launching of its kernels. `GroupedEngine` stacks the weights of all
clients that wait, and takes step t of every client at once, each with its own batches from its own stream. Short
batches are padded, and clients that have finished stay unchanged, so a client ends with the weights that it would have
alone, up to rounding. `Gathering` (common/gathering.py) decides when the waiting clients are a complete group.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fedeas_flwr.common.cuda import capture, own_stream
from fedeas_flwr.common.gathering import Gathering
from fedeas_flwr.common.launcher import launch, on_stream
from fedeas_flwr.common.text import one_line
from fedeas_flwr.training.engine import (
    LEARNING_RATE,
    Engine,
    LocalTrainingConfig,
    State,
    TrainResult,
    batch_table,
    check_state,
    stream_seed,
)
from fedeas_flwr.training.losses import cross_entropy
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import NO_INPUTS, Inputs

logger = logging.getLogger(__name__)

MAX_GROUP = 128
"""Maximum number of clients that train together: each needs memory for the activations of a batch."""


@dataclass(eq=False)
class Member:
    """A client that waits to be trained in a group."""

    trainable: State
    images: torch.Tensor
    labels: torch.Tensor
    table: np.ndarray[Any, np.dtype[np.int64]]
    """The samples of each step (`batch_table`)."""
    counts: np.ndarray[Any, np.dtype[np.float32]]
    """Number of samples of each step."""
    rate: float
    order: int
    """Position in the group, from the client's stream: it does not depend on the order of arrival."""
    end: tuple[dict[str, torch.Tensor], np.ndarray[Any, Any]] | None = None
    """Weights after training, and the mean loss of each step; None if the group could not be trained."""
    error: Exception | None = None
    """What is wrong with this client's data."""


class GroupedEngine:
    """An engine that all clients of a process share: `train` returns when the client's group is trained.

    Weights, images and batches of a group are in buffers that are refilled in place. On a GPU the step is a CUDA graph,
    captured for the largest group so far; on a CPU it is the same function. If a group cannot be trained, its clients
    and all later ones train one after the other with the engines of ``alone``, with a warning.

    ``model`` is a network that `why_not_stackable` accepts, ``image`` the shape [H, W, C], and ``alone`` lends an
    engine for one client.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: LocalTrainingConfig,
        normalise: Normaliser,
        device: str,
        image: Sequence[int],
        classes: int,
        alone: Callable[[], AbstractContextManager[Engine]],
    ) -> None:
        self._recipe, self._normalise, self._device, self._alone = recipe, normalise, device, alone
        self._image, self._classes, model = tuple(image), classes, model.to(device).train()
        self._gradients, self._expected = stacked_gradients(model), model.state_dict()
        self._stream = own_stream() if device == "cuda" else None
        self._lock, self._one_at_a_time, self._broken = threading.Lock(), threading.Lock(), False
        self._size: tuple[int, ...] = (0, 0, 0)

    def train(
        self,
        trainable: State,
        buffers: State,
        images: torch.Tensor,
        labels: torch.Tensor,
        batches: np.random.Generator,
        inputs: Inputs = NO_INPUTS,
    ) -> tuple[TrainResult, State, State]:
        """Train in a group, as `Engine.train`; of the inputs it uses only the learning rate."""
        start: Any = batches.bit_generator.state
        if not self._broken:
            check_state(self._expected, {**trainable, **buffers})
            if tuple(images.shape) != (len(labels), *self._image):
                raise ValueError(f"images: {list(images.shape)}, must be {[len(labels), *self._image]}")
            table, full, rest = batch_table(len(labels), self._recipe, batches)
            epoch = [self._recipe.batch_size] * full + [rest] * (rest > 0)
            counts = np.array(epoch * self._recipe.epochs, dtype=np.float32)
            rate = float(inputs.constants.get(LEARNING_RATE, self._recipe.learning_rate))
            member = Member(trainable, images, labels, table, counts, rate, stream_seed(batches))
            Gathering.work_together(member, self._train_group_or_warn)
            if member.error is not None:
                raise member.error
            if member.end is not None:
                trained, losses = member.end
                last = slice(len(counts) - len(epoch), None)
                return TrainResult(float(losses[last] @ counts[last]) / max(sum(epoch), 1), len(counts)), trained, {}
        batches.bit_generator.state = start
        with self._one_at_a_time, self._alone() as engine:
            return engine.train(trainable, buffers, images, labels, batches, inputs)

    def _train_group_or_warn(self, group: Sequence[Member]) -> None:
        try:
            with self._lock, on_stream(self._stream):
                self._train_group(sorted(group, key=lambda member: member.order))
        except Exception as error:  # such as too little memory for a group, or a step that cannot be captured
            self._broken = True
            logger.warning("clients cannot train in groups (%s); from here on one by one", one_line(error))

    def _train_group(self, group: Sequence[Member]) -> None:
        rows = max(len(member.table) for member in group)
        self._reserve(len(group), max(len(member.labels) for member in group), rows)
        self._fill(group)
        launch(self._stream, [self._step] * rows)
        stacked = {name: weight[: len(group)].clone() for name, weight in self._weights.items()}
        losses = self._losses[:rows].cpu().numpy()  # waits for the stream
        for slot, member in enumerate(group):
            member.end = {name: weight[slot] for name, weight in stacked.items()}, losses[: len(member.table), slot]

    def _reserve(self, slots: int, samples: int, rows: int) -> None:
        """Make the buffers large enough, and capture the step if they change; on a CPU they have the group's size."""
        wanted = (slots, max(samples, 1), max(rows, 1))
        if self._stream is not None and any(size < each for size, each in zip(self._size, wanted, strict=True)):
            grown = (self._size[0], self._size[1] * 3 // 2, self._size[2] * 3 // 2)  # rarely, for the next capture
            wanted = tuple(max(pair) for pair in zip(wanted, grown, strict=True))  # type: ignore[assignment]
        elif self._stream is not None or wanted == self._size:
            return
        self._size = (0, 0, 0)  # so that an error below leaves no graph of freed buffers
        (slots, samples, rows), zeros = wanted, partial(torch.zeros, device=self._device)
        self._pixels = zeros((slots, samples, *self._image), dtype=torch.uint8)
        self._labels = zeros((slots, samples), dtype=torch.long)
        self._table = zeros((rows, slots, self._recipe.batch_size), dtype=torch.long)
        self._counts, self._losses, self._rates = zeros(rows, slots), zeros(rows, slots), zeros(slots)
        self._weights = {name: weight.new_zeros(slots, *weight.shape) for name, weight in self._expected.items()}
        moving = self._weights if self._recipe.momentum else {}
        self._momentum = {name: torch.zeros_like(weight) for name, weight in moving.items()}
        self._row, self._step = zeros(1, dtype=torch.long), self._take_step
        if self._stream is not None:
            self._step = capture(self._take_step, self._stream, before_each=self._row.zero_)
        self._size = wanted

    def _fill(self, group: Sequence[Member]) -> None:
        """Copy the clients of a group into the buffers."""
        for name, stacked in self._weights.items():
            given = [member.trainable[name] for member in group]
            if all(array is given[0] for array in given):  # the same for all if models are passed by reference
                given = given[:1]
            arrays = [a if isinstance(a, torch.Tensor) else torch.from_numpy(np.array(a)) for a in given]
            stacked[: len(group)].copy_(torch.stack(arrays))
        table, counts = np.zeros(self._table.shape, dtype=np.int64), np.zeros(self._counts.shape, dtype=np.float32)
        for slot, member in enumerate(group):
            self._pixels[slot, : len(member.images)].copy_(member.images)
            self._labels[slot, : len(member.labels)].copy_(member.labels)
            table[: len(member.table), slot], counts[: len(member.table), slot] = member.table, member.counts
        wrong = (self._labels < 0) | (self._labels >= self._classes)
        for member, is_wrong in zip(group, wrong.any(1).tolist(), strict=False):
            if is_wrong:  # the loss would raise for the whole group
                member.error = ValueError(f"labels: must be whole numbers from 0 to {self._classes - 1}")
        self._labels.masked_fill_(wrong, 0)
        table += np.arange(self._size[0])[:, None] * self._size[1]  # positions among the images of all clients
        self._table.copy_(torch.from_numpy(table))
        self._counts.copy_(torch.from_numpy(counts))
        self._rates[: len(group)].copy_(torch.tensor([member.rate for member in group]))
        for zeroed in (self._row, *self._momentum.values()):
            zeroed.zero_()

    @torch.no_grad()
    def _take_step(self) -> None:
        """Take the step at the row counter for all clients, as `eager.SGD`; a client without samples in it stays."""
        recipe, chosen = self._recipe, self._table.index_select(0, self._row).view(-1)
        counts = self._counts.index_select(0, self._row)[0]
        images = self._normalise(self._pixels.flatten(0, 1).index_select(0, chosen))
        labels = self._labels.view(-1).index_select(0, chosen).view(-1, recipe.batch_size)
        gradients, losses = self._gradients(
            self._weights, images.view(*labels.shape, *images.shape[1:]), labels, counts
        )
        for name, weight in self._weights.items():
            trains, rate = (each.view(-1, *[1] * (weight.dim() - 1)) for each in (counts > 0, self._rates))
            direction = gradients[name]
            if recipe.weight_decay:
                direction = direction.add(weight, alpha=recipe.weight_decay)
            if recipe.momentum:
                direction = self._momentum[name].mul_(recipe.momentum).add_(direction)
            weight.copy_(torch.where(trains, weight - rate * direction, weight))
        self._losses.index_copy_(0, self._row, losses[None].float())
        self._row.add_(1)


def stacked_gradients(model: nn.Module) -> Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return a function that computes the gradients and losses of several clients.

    Its arguments are stacked: the clients' weights, images, labels and numbers of samples; the rest of a batch is
    padding.
    """

    def loss(
        weights: Mapping[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor, count: torch.Tensor
    ) -> torch.Tensor:
        losses = cross_entropy(functional_call(model, dict(weights), (images,)), labels)
        used = torch.arange(len(labels), device=labels.device) < count
        return torch.where(used, losses, 0).sum() / count.clamp(min=1)

    return vmap(grad_and_value(loss))


def why_not_stackable(model: nn.Module, image: Sequence[int]) -> str:
    """Return why clients cannot train a network in groups, or an empty text: two clients try a step.

    With BatchNorm a client's step would depend on the padding, and with dropout on the group. ``image`` is [H, W, C].
    """
    state, (height, width, channels) = model.state_dict(keep_vars=True), image
    if len(state) != len([weight for weight in model.parameters() if weight.requires_grad]):
        return "the network has buffers, frozen weights or shared weights"
    images = torch.rand(2, 3, channels, height, width, generator=torch.Generator().manual_seed(0))
    counts, labels = (2, 3), torch.zeros(2, 3, dtype=torch.long)
    try:
        stacked = {name: torch.stack([weight.detach()] * 2) for name, weight in state.items()}
        found, _ = stacked_gradients(model.train())(stacked, images, labels, torch.tensor(counts))
        for client, count in enumerate(counts):
            loss = cross_entropy(model(images[client, :count]), labels[client, :count]).mean()
            for name, gradient in zip(state, torch.autograd.grad(loss, list(state.values())), strict=True):
                torch.testing.assert_close(found[name][client], gradient, rtol=1e-2, atol=1e-4)
    except Exception as error:  # a network's own code may raise anything
        return f"a step of two clients fails or differs: {one_line(error)}"
    return ""
