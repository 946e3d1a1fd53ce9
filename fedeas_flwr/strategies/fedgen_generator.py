"""FedGen's generator: maps noise and a label to inputs of the classifier's last layer.

    [ε ~ N(0, 1)¹²⁸, one-hot y] → Linear 256 → BatchNorm → ReLU → Linear F

Its weights are a mapping of tensors and its functions are pure: the server trains, sends and checkpoints the mapping,
and a client's captured step reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.common.randomness import stream

NOISE, HIDDEN = 128, 256
WEIGHT_DECAY = 1e-2
TRAINED = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "features.weight", "features.bias")
ALL = (*TRAINED, "norm.mean", "norm.var")
Weights = Mapping[str, torch.Tensor]


def new_generator(features: int, classes: int, seed: int) -> dict[str, torch.Tensor]:
    """Return an untrained generator, with torch's initial weights drawn from a separate stream."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(stream(seed, "fedgen start").integers(2**63)))
        hidden, norm = nn.Linear(NOISE + classes, HIDDEN), nn.BatchNorm1d(HIDDEN)
        last = nn.Linear(HIDDEN, features)
    parts: dict[str, nn.Module] = {"hidden": hidden, "norm": norm, "features": last}
    made = {f"{name}.{key}": p.detach() for name, part in parts.items() for key, p in part.named_parameters()}
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return {**made, "norm.mean": norm.running_mean, "norm.var": norm.running_var}


def generate(weights: Weights, noise: torch.Tensor, labels: torch.Tensor, training: bool = False) -> torch.Tensor:
    """Return G(ε, y), ``[B, F]``. In training, BatchNorm uses the batch's statistics and updates its own in place."""
    classes = weights["hidden.weight"].shape[1] - NOISE
    one_hot = torch.eye(classes, dtype=noise.dtype, device=noise.device).index_select(0, labels)
    hidden = F.linear(torch.cat([noise, one_hot], 1), weights["hidden.weight"], weights["hidden.bias"])
    mean, var, scale, shift = (weights[f"norm.{name}"] for name in ("mean", "var", "weight", "bias"))
    active = F.relu(F.batch_norm(hidden, mean, var, scale, shift, training=training))
    return F.linear(active, weights["features.weight"], weights["features.bias"])


# ------------------------------------------------------------------------------- training on the server


@dataclass(frozen=True)
class Heads:
    """Last layers h_k of a round's clients, stacked, and their numbers of images per class."""

    weight: torch.Tensor  # [S, C, F]
    bias: torch.Tensor  # [S, C]
    counts: torch.Tensor  # [S, C]

    def losses(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return CE(h_k(features_b), y_b), ``[S, B]``."""
        logits = torch.einsum("bf,kcf->kbc", features, self.weight) + self.bias[:, None, :]
        clients, samples, classes = logits.shape
        losses = F.cross_entropy(logits.reshape(-1, classes), labels.repeat(clients), reduction="none")
        return losses.view(clients, samples)

    def label_weights(self, labels: torch.Tensor) -> torch.Tensor:
        """Return w_{k, y_b} = n_{k, y_b} / Σ_{j ∈ S} n_{j, y_b}, ``[S, B]``; some client must hold each label."""
        held = self.counts.index_select(1, labels)
        return held / held.sum(0)


def ensemble_loss(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return Σ_k mean_b [w_{k, y_b} · CE(h_k(G_b), y_b)] of two ``[S, B]`` (Zhu et al. 2021, Algorithm 1)."""
    return (weights * losses).mean(1).sum()


def diversity_loss(noise: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return exp(−mean_{i,j} (mean_d (ε_i − ε_j)² · mean_d |G_i − G_j|)): different noise, different features."""
    far_noise = (noise[:, None] - noise[None]).square().mean(2)
    far_made = (made[:, None] - made[None]).abs().mean(2)
    return torch.exp(-(far_noise * far_made).mean())


def generator_loss(weights: Weights, heads: Heads, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of a server step: ensemble loss plus diversity loss."""
    made = generate(weights, noise, labels, training=True)
    return ensemble_loss(heads.losses(made, labels), heads.label_weights(labels)) + diversity_loss(noise, made)


@dataclass(frozen=True)
class GeneratorState:
    """A generator with Adam's moments after ``steps`` steps: everything that the next round continues from."""

    weights: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]
    second: dict[str, torch.Tensor]
    steps: int = 0

    @classmethod
    def untrained(cls, weights: dict[str, torch.Tensor]) -> GeneratorState:
        """Return the state before the first step, with zero moments."""
        zeros = {name: torch.zeros_like(weights[name]) for name in TRAINED}
        return cls(weights, zeros, zeros)


def train_generator(
    start: GeneratorState, heads: Heads, steps: int, batch: int, rate: float, draws: np.random.Generator
) -> GeneratorState:
    """Take ``steps`` steps of Adam and return the result; ``start`` stays unchanged, since clients may hold it.

    Labels are uniform over those that the round's clients hold. If noisy counts are zero for all, return ``start``.
    """
    device = heads.weight.device
    held = np.flatnonzero(heads.counts.sum(0).cpu().numpy() > 0)
    if len(held) == 0:
        return start
    weights = {name: value.to(device, copy=True) for name, value in start.weights.items()}
    trained = [weights[name].requires_grad_() for name in TRAINED]
    adam = torch.optim.Adam(trained, lr=rate, weight_decay=WEIGHT_DECAY)
    for name in TRAINED:
        adam.state[weights[name]] = {
            "step": torch.tensor(float(start.steps)),
            "exp_avg": start.first[name].to(device, copy=True),
            "exp_avg_sq": start.second[name].to(device, copy=True),
        }
    for _ in range(steps):
        labels = torch.from_numpy(draws.choice(held, batch)).to(device)
        noise = torch.from_numpy(draws.standard_normal((batch, NOISE), dtype=np.float32)).to(device)
        adam.zero_grad()
        generator_loss(weights, heads, noise, labels).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return GeneratorState(
        {name: value.detach() for name, value in weights.items()},
        {name: adam.state[weights[name]]["exp_avg"] for name in TRAINED},
        {name: adam.state[weights[name]]["exp_avg_sq"] for name in TRAINED},
        start.steps + steps,
    )
