"""The objective of a client's training step: the classification loss and an algorithm's terms.

An algorithm overrides `Objective.loss` (an extra term) or `Objective.correct_gradients`, and `Objective.precompute` if
the loss needs values per sample that no step changes. All three are pure: everything that differs between clients,
rounds and steps is passed as `Inputs`, never stored in the object. One CUDA graph can serve every client: the engine
copies the inputs into fixed buffers. A step whose control flow depends on a tensor's values cannot be captured, and
runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call

from fedeas_flwr.training.augmentation import VIEWS
from fedeas_flwr.training.losses import cross_entropy, sample_losses

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Tensors that an objective needs besides the batch, for one client and round.

    Names, dtypes and shapes are constant over a run, except the tables' first dimension.
    """

    constants: Tensors = field(default_factory=dict)
    """Tensors for all steps: reference weights, control variates, class weights."""
    tables: Tensors = field(default_factory=dict)
    """Tensors ``[steps, …]``: row t is for step t, such as an algorithm's random numbers."""

    def __or__(self, other: Inputs) -> Inputs:
        return Inputs({**self.constants, **other.constants}, {**self.tables, **other.tables})


@dataclass(frozen=True)
class Batch:
    """The arguments of a loss in one step."""

    images: torch.Tensor
    """Normalised images ``[B, C, H, W]``."""
    labels: torch.Tensor
    given: Tensors
    """The inputs' constants, and this step's row of each table."""
    mean: Callable[[torch.Tensor], torch.Tensor]
    """Averages values ``[B]`` over the samples, without the rows with which a graph pads a short batch."""
    cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy
    """The engine's cross-entropy of logits and labels, per sample."""
    precomputed: Tensors = field(default_factory=dict)
    """Results of `Objective.precompute` for these samples, ``[B, …]``; empty if the engine did not call it."""
    first: int = 0
    """Position of the first sample in the step's batch: above 0 if the batch is trained on in parts."""


class Objective:
    """FedAvg's objective: the classification loss only. Algorithms derive from it."""

    needs_double_backward = False
    """Whether the loss contains a gradient; fused layers cannot be differentiated twice."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scalar that the step minimises."""
        return batch.mean(self.losses(model(batch.images), batch))

    def losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the classification loss of each sample, ``[B]``, as set by the run-config's `loss`."""
        return sample_losses(logits, batch.labels, batch.given, batch.cross_entropy)

    def precompute(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return values per sample that are constant over a round, ``[B, …]``, without a gradient; by default none.

        An engine calls this before the first step, for all samples in chunks, and passes every batch its rows as
        `Batch.precomputed`. A row may therefore depend only on its own sample and the inputs' constants: a chunk has
        other samples than a step's batch, may end with padding, and comes before the tables' first row. With random
        augmentation (augmentation.py) images differ in every step: no engine calls this, and the loss must.
        """
        return {}

    def precomputes(self, inputs: Inputs) -> bool:
        """Return whether an engine calls `precompute`: it is overridden, and no random views change the images."""
        return type(self).precompute is not Objective.precompute and VIEWS not in inputs.tables

    def correct_gradients(self, weights: Tensors, gradients: Tensors, given: Tensors) -> None:
        """Change the gradients in place, before weight decay and momentum; the default changes nothing."""


CROSS_ENTROPY, NO_INPUTS = Objective(), Inputs()
"""FedAvg's objective, and its inputs."""


def features_and_logits(
    model: nn.Module, images: torch.Tensor, state: Tensors | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input and the output of the last linear layer ``fc`` from one forward pass.

    With ``state``, the network uses those parameters and buffers; its own stay unchanged. A model without such a layer
    raises ValueError.
    """
    head = getattr(model, "fc", None)
    if not isinstance(head, nn.Linear):
        raise ValueError("model: this strategy uses the features, so the last layer must be a Linear named fc")
    seen: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        # The state has tied parameters under both names, each with its own copy of the value.
        logits = model(images) if state is None else functional_call(model, dict(state), (images,), tie_weights=False)
    finally:
        handle.remove()
    return seen[0], logits


def mean_of_first(count: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mean of the first ``count`` of values ``[B]``; the rest of the batch is padding."""
    mask = torch.arange(len(values), device=values.device) < count
    return (values * mask).sum() / count


def named(parameters: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by parameter name."""
    return dict(zip(parameters, tensors, strict=True))
