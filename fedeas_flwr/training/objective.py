"""What a client's step minimises: the classification loss, and whatever an algorithm adds to it.

An algorithm overrides `Objective.loss` (an extra term) or `Objective.correct` (a change of the gradients), and
`Objective.precompute` where the loss needs something of every sample that no step changes. All are pure: everything
that differs between clients, rounds and steps comes in as `Inputs`, never from the object. So one CUDA graph can serve
every client: the engine copies the inputs into buffers that never move. A step that looks at a tensor's values cannot
be captured, and is taken eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call

from fedeas_flwr.training.losses import cross_entropy, sample_losses

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """What an objective needs beside the batch, for one client and round.

    Names, kinds and shapes stay the same for a whole run, but for the tables' first dimension.
    """

    constants: Tensors = field(default_factory=dict)
    """The same in every step: reference weights, control variates, class weights."""
    tables: Tensors = field(default_factory=dict)
    """``[steps, …]``: row t is for step t, such as draws of an algorithm's own."""

    def __or__(self, other: Inputs) -> Inputs:
        return Inputs({**self.constants, **other.constants}, {**self.tables, **other.tables})


@dataclass(frozen=True)
class Batch:
    """One step as a loss sees it."""

    images: torch.Tensor
    """Normalised, ``[B, C, H, W]``."""
    labels: torch.Tensor
    given: Tensors
    """The inputs' constants, and this step's row of each of their tables."""
    mean: Callable[[torch.Tensor], torch.Tensor]
    """Of values ``[B]``, over the samples that count: a graph pads a short batch, and the padding does not."""
    cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy
    """Of logits and labels, by sample: the engine's own."""
    precomputed: Tensors = field(default_factory=dict)
    """``[B, …]``: what `Objective.precompute` gave of these samples; empty where it was not asked before the steps."""


class Objective:
    """The classification loss alone: FedAvg's. Algorithms derive from it."""

    needs_double_backward = False
    """Whether the loss holds a gradient itself, which fast layers cannot differentiate once more."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The scalar that the step minimises."""
        return batch.mean(self.losses(model(batch.images), batch))

    def losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Classification loss of each sample, ``[B]``, as the run-config's `loss` has it."""
        return sample_losses(logits, batch.labels, batch.given, batch.cross_entropy)

    def precompute(self, model: nn.Module, batch: Batch) -> Tensors:
        """What of each sample stays the same through a round, ``[B, …]``, without a gradient; by default nothing.

        An engine asks once before the first step, for all samples in chunks, and gives every batch its rows as
        `Batch.precomputed`. So a row may depend on its own sample and the inputs' constants alone: a chunk holds other
        samples than a step does, at its end maybe padding, and comes before the tables' first row. Under random views
        (augmentation.py) the images are other ones in every step: no engine asks, and the loss has to.
        """
        return {}

    def correct(self, weights: Tensors, gradients: Tensors, given: Tensors) -> None:
        """Change the gradients in place, before weight decay and momentum; by default not at all."""


CROSS_ENTROPY, NO_INPUTS = Objective(), Inputs()
"""FedAvg's step, which needs nothing."""


def features_and_logits(
    model: nn.Module, images: torch.Tensor, state: Tensors | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward pass: what the last linear layer ``fc`` is fed with, and what it makes of it.

    With ``state``, as the same network with those parameters and buffers would; its own are left alone.

    Raises
    ------
    ValueError
        If the model has no ``fc``.
    """
    head = getattr(model, "fc", None)
    if not isinstance(head, nn.Linear):
        raise ValueError("model: this strategy looks at the features, so the last layer must be a Linear named fc")
    seen: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        # Tied parameters come under both of their names, each with its own copy of the value.
        logits = model(images) if state is None else functional_call(model, dict(state), (images,), tie_weights=False)
    finally:
        handle.remove()
    return seen[0], logits


def mean_of_first(count: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The mean of values ``[B]`` over the first so many of them: the rest of the batch is padding."""
    mask = torch.arange(len(values), device=values.device) < count
    return (values * mask).sum() / count


def named(parameters: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the parameters' names."""
    return dict(zip(parameters, tensors, strict=True))
