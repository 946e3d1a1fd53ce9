"""MOON (Li, He, Song, 2021): a loss pulls features to the global model's and away from the client's last model's.

    ℓ = CE + μ · ℓ_con        ℓ_con = −log( e^{cos(z, z_glob)/τ} / (e^{cos(z, z_glob)/τ} + e^{cos(z, z_prev)/τ}) )

z are the features of the model in training, the input of its last layer ``fc``; z_glob are those of the received model,
z_prev those of the model that this client trained in its last accepted round, however long ago. Both models are in
evaluation mode, with their own BatchNorm statistics, and have no gradient. The reference features of an image are
therefore the same in every epoch of a round, and are computed once, before the first step. In its first round a client
has no previous model and uses the received one: ℓ_con is then ln 2 and its gradient zero.

The server is FedAvg's.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.strategies.fedavg import FedAvg, settings
from fedeas_flwr.strategies.interface import Algorithm, ClientAlgorithm, ClientAlgorithmResult, ClientRound
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.engine import State
from fedeas_flwr.training.objective import Batch, Inputs, Objective, Tensors, features_and_logits

RECEIVED, PREVIOUS = "received/", "previous/"


def build_moon(config: RunConfig) -> FedAvg:
    """Build FedAvg, after checking that the model has features and that they depend on one image only.

    A BatchNorm without running statistics uses the batch's in evaluation mode too, so an image's features would depend
    on its batch.
    """
    model = build_network(config)
    if not isinstance(getattr(model, "fc", None), nn.Linear):
        raise ConfigError(
            f"model = '{config.model}': strategy = 'moon' uses the input of the last layer, so that layer must be a "
            "Linear named fc"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            raise ConfigError(
                f"model = '{config.model}': strategy = 'moon' needs features that depend on one image only, so the "
                f"BatchNorm {name} must have track_running_stats=True"
            )
    return FedAvg(**settings())


def moon_client(config: RunConfig) -> ClientAlgorithm:
    """Build the client part; with μ = 0 it is FedAvg's, which stores no model."""
    return MoonClient(config) if config.moon_mu else ClientAlgorithm()


def contrastive_losses(
    z: torch.Tensor, z_received: torch.Tensor, z_previous: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return ℓ_con of each sample, as log(1 + e^{(cos(z, z_prev) − cos(z, z_glob))/τ}).

    The references are subtracted first, so that equal ones give a gradient of exactly zero.
    """
    unit, received, previous = (F.normalize(each.float(), dim=1, eps=1e-8) for each in (z, z_received, z_previous))
    return F.softplus((unit * (previous - received)).sum(dim=1) / temperature)


class ContrastiveObjective(Objective):
    """Classification loss with the model-contrastive term."""

    def __init__(self, mu: float, temperature: float) -> None:
        self.mu, self.temperature = mu, temperature

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return CE + μ ℓ_con; z and the logits come from one forward pass."""
        references = batch.precomputed or self.precompute(model, batch)
        z, logits = features_and_logits(model, batch.images)
        contrast = contrastive_losses(z, references[RECEIVED], references[PREVIOUS], self.temperature)
        return batch.mean(self.losses(logits, batch) + self.mu * contrast)

    def precompute(self, model: nn.Module, batch: Batch) -> Tensors:
        """Return z_glob and z_prev."""
        return {prefix: reference_features(model, batch, prefix) for prefix in (RECEIVED, PREVIOUS)}


@torch.no_grad()
def reference_features(model: nn.Module, batch: Batch, prefix: str) -> torch.Tensor:
    """Return the features under the given parameters and buffers; those of ``model`` stay unchanged."""
    state = {key.removeprefix(prefix): value for key, value in batch.given.items() if key.startswith(prefix)}
    model.eval()
    try:
        return features_and_logits(model, batch.images, state)[0]
    finally:
        model.train()


class MoonClient(ClientAlgorithm):
    """MOON's client part: stores its last model, buffers included, as its memory."""

    def __init__(self, config: RunConfig) -> None:
        self.objective = ContrastiveObjective(config.moon_mu, config.moon_temperature)

    def prepare(self, client_round: ClientRound) -> Inputs:
        """Return the two reference models."""
        received = client_round.tensors({**client_round.trainable, **client_round.buffers})
        previous = client_round.tensors(client_round.memory) if client_round.memory else received
        return Inputs(
            {f"{RECEIVED}{key}": value for key, value in received.items()}
            | {f"{PREVIOUS}{key}": previous[key] for key in received}
        )

    def finish(self, client_round: ClientRound, trainable: State, buffers: State) -> ClientAlgorithmResult:
        """Return the trained model as memory."""
        return ClientAlgorithmResult(memory={**trainable, **buffers})


MOON = Algorithm(build_moon, moon_client)
