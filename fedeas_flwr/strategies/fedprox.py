"""FedProx (Li et al., 2020): a client minimises F_k(w) + (μ/2) ‖w − wᵗ‖², wᵗ the model it received.

The server is FedAvg's. A step adds the term's gradient, μ (w − wᵗ), to the loss's gradient. Buffers have no such term.
"""

from __future__ import annotations

import torch

from fedeas_flwr.config import RunConfig
from fedeas_flwr.strategies.fedavg import FedAvg
from fedeas_flwr.strategies.interface import Algorithm, ClientAlgorithm, ClientRound
from fedeas_flwr.training.objective import Inputs, Objective, Tensors


class ProximalObjective(Objective):
    """Classification loss with the proximal term."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def correct_gradients(self, weights: Tensors, gradients: Tensors, given: Tensors) -> None:
        """Set g ← g + μ (w − wᵗ)."""
        if self.mu == 0:
            return  # so that results equal FedAvg's bit for bit
        names = list(gradients)
        drift = torch._foreach_sub([weights[name] for name in names], [given[f"start/{name}"] for name in names])
        torch._foreach_add_([gradients[name] for name in names], drift, alpha=self.mu)


class FedProxClient(ClientAlgorithm):
    """FedProx's client part: passes the received model to the objective."""

    def __init__(self, config: RunConfig) -> None:
        self.objective = ProximalObjective(config.fedprox_mu)

    def prepare(self, client_round: ClientRound) -> Inputs:
        """Return wᵗ, under ``start/``."""
        return Inputs({f"start/{name}": value for name, value in client_round.tensors(client_round.trainable).items()})


FEDPROX = Algorithm(FedAvg, FedProxClient)
