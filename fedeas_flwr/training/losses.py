"""Classification losses against label skew that need no added images: class weights and logit adjustment.

Every algorithm's objective computes the loss of a sample with this module (`Objective.losses`). The constants in the
client's inputs select the loss, so objectives and captured graphs are the same for all losses. Counts cover all images
that the client trains on, added ones included; they never leave the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional as F

WEIGHTS, OFFSETS = "class-weights", "logit-offsets"
"""Names of the constants; without them the loss is plain cross-entropy."""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return −log softmax(z)_y of each sample, ``[B]``."""
    return F.cross_entropy(logits, labels, reduction="none")


def sample_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    given: Mapping[str, torch.Tensor],
    entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy,
) -> torch.Tensor:
    """Return the loss of each sample, ``[B]``: w_y · (−log softmax(z + o)_y), with w = 1 and o = 0 by default.

    ``entropy`` is `cross_entropy` or a faster equivalent.
    """
    adjusted = logits + given[OFFSETS] if OFFSETS in given else logits
    losses = entropy(adjusted, labels)
    return losses * given[WEIGHTS].index_select(0, labels) if WEIGHTS in given else losses


def loss_constants(loss: str, labels: torch.Tensor, classes: int, tau: float) -> dict[str, torch.Tensor]:
    """Return the constants of the run-config's `loss` for a client that trains on these labels."""
    if loss == "class-weighted":
        return {WEIGHTS: class_weights(torch.bincount(labels, minlength=classes))}
    if loss == "logit-adjusted":
        return {OFFSETS: logit_offsets(torch.bincount(labels, minlength=classes), tau)}
    return {}


# w_c = N / (H n_c) over the H classes the client holds: inverse frequency, scaled so that Σ_c n_c w_c / N = 1
def class_weights(counts: torch.Tensor) -> torch.Tensor:
    """Return weights that give every class the client holds the same total weight, float32 ``[C]``.

    Their mean over the client's samples is 1, so the step size keeps its meaning; equal counts give exactly 1. A class
    without samples gets 1, which is never used.
    """
    counts = counts.double()
    held = counts > 0
    weights = counts.sum() / (held.sum() * counts.clamp(min=1))
    return torch.where(held, weights, 1.0).float()


# Menon et al. (2021), Eq. 10: −log softmax(z + τ log π)_y, π the label prior; prediction uses z alone
def logit_offsets(counts: torch.Tensor, tau: float) -> torch.Tensor:
    """Return the offsets added to the logits in training: τ log π_c, π the client's label prior, float32 ``[C]``.

    A class without samples counts as one sample. With log 0 = −∞ no step would ever lower its logit, and τ = 0 would
    give 0 · ∞. One sample is the minimum of a class that is present, so an absent class is adjusted like the rarest
    possible one. π then sums to slightly more than 1, which shifts all logits equally and does not change softmax.
    """
    counts = counts.double()
    return (tau * torch.log(counts.clamp(min=1) / counts.sum().clamp(min=1))).float()
