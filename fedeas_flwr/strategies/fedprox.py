"""FedProx (Li et al., 2020): a client minimises F_k(w) + (μ/2) ‖w − wᵗ‖², wᵗ the model it received.

The server is FedAvg's. The term's gradient, μ (w − wᵗ), is added to the loss's; over trained parameters alone.
"""

from __future__ import annotations

import torch

from fedeas_flwr.config import RunConfig
from fedeas_flwr.strategies.interface import ClientAlgorithm, ClientRound
from fedeas_flwr.training.objective import Inputs, Objective, Tensors


class ProximalObjective(Objective):
    """Cross-entropy with the proximal term."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def correct(self, weights: Tensors, gradients: Tensors, given: Tensors) -> None:
        """g ← g + μ (w − wᵗ)."""
        if self.mu == 0:
            return  # FedAvg to the bit
        names = list(gradients)
        drift = torch._foreach_sub([weights[name] for name in names], [given[f"start/{name}"] for name in names])
        torch._foreach_add_([gradients[name] for name in names], drift, alpha=self.mu)


class FedProxClient(ClientAlgorithm):
    """Keeps to the received model."""

    def __init__(self, config: RunConfig) -> None:
        self.objective = ProximalObjective(config.fedprox_mu)

    def prepare(self, task: ClientRound) -> Inputs:
        """Wᵗ, under ``start/``."""
        return Inputs({f"start/{name}": value for name, value in task.tensors(task.trainable).items()})
