"""Classification losses that answer label skew without an image more: weighted classes, and adjusted logits.

Every algorithm's objective takes the loss of a sample from here (`Objective.losses`). Which loss that is follows from
the constants that come with the client's inputs, so an objective, and the graph captured of it, need not know. Counts
are of what the client trains on, added images included; they are used where they are and never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

WEIGHTS, OFFSETS = "class-weights", "logit-offsets"
"""Names of the constants; without either the loss is plain cross-entropy."""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """−log softmax(z)_y of each sample, ``[B]``."""
    return F.cross_entropy(logits, labels, reduction="none")


def sample_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy,
) -> torch.Tensor:
    """Loss of each sample, ``[B]``: w_y · (−log softmax(z + o)_y), with w = 1 or o = 0 where they are not given.

    ``entropy`` computes what `cross_entropy` does, perhaps faster.
    """
    adjusted = logits + given[OFFSETS] if OFFSETS in given else logits
    losses = entropy(adjusted, labels)
    return losses * given[WEIGHTS].index_select(0, labels) if WEIGHTS in given else losses


def loss_constants(loss: str, labels: torch.Tensor, classes: int, tau: float) -> dict[str, torch.Tensor]:
    """What the run-config's `loss` needs of a client that trains on these labels; cross-entropy needs nothing."""
    if loss == "class-weighted":
        return {WEIGHTS: class_weights(torch.bincount(labels, minlength=classes))}
    if loss == "logit-adjusted":
        return {OFFSETS: logit_offsets(torch.bincount(labels, minlength=classes), tau)}
    return {}


# w_c = N / (H n_c) over the H classes the client holds: inverse frequency, scaled so that Σ_c n_c w_c / N = 1
def class_weights(counts: torch.Tensor) -> torch.Tensor:
    """Weights under which every class the client holds counts alike, float32 ``[C]``.

    Their mean over the client's samples is 1, so the step size means what it means without them; equal counts give
    exactly 1. A class it has none of gets 1: no sample of it is there to be weighed.
    """
    counts = counts.double()
    held = counts > 0
    weights = counts.sum() / (held.sum() * counts.clamp(min=1))
    return torch.where(held, weights, 1.0).float()


# Menon et al. (2021), Eq. 10: −log softmax(z + τ log π)_y, π the label prior; prediction uses z alone
def logit_offsets(counts: torch.Tensor, tau: float) -> torch.Tensor:
    """What is added to the logits in training: τ log π_c, π the client's own label prior, float32 ``[C]``.

    A class it has none of is counted as one sample. With log 0 = −∞ no step would ever lower its logit, whatever the
    images, and τ = 0 would be 0 · ∞. One sample is the least a class can have, so that a class never seen is adjusted
    like the rarest that could be seen; that π then sums to a little more than 1 shifts all logits alike, which softmax
    does not see.
    """
    counts = counts.double()
    return (tau * torch.log(counts.clamp(min=1) / counts.sum().clamp(min=1))).float()
