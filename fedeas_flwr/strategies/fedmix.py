"""FedMix (Yoon et al., 2021): clients mix in other clients' mean images, by a first-order Taylor expansion.

Once, before training, every client k discloses x̄_k, the mean of all its normalised real images, and ȳ_k, its label
proportions. Every client receives all of them. A step draws the (x̄, ȳ) of another client and minimises, with
u = (1 − λ) x,

    L = (1 − λ) CE(f(u), y) + λ CE(f(u), ȳ) + λ (1 − λ) mean_b ⟨∂CE_b/∂u_b, x̄⟩          (its Proposition 1)

where CE_b is the loss on the true label. L is differentiated through the inner gradient, so a step needs a second
derivative. The server is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import nn

from fedeas_flwr.common.errors import MessageError
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import Images, Labels, dataset_info
from fedeas_flwr.runs.checkpoints import StrategyState
from fedeas_flwr.strategies.fedavg import FedAvg, settings
from fedeas_flwr.strategies.interface import Algorithm, ClientAlgorithm, ClientRound, Disclosure, match_model_backend
from fedeas_flwr.training.objective import Batch, Inputs, Objective

# ------------------------------------------------------------------------------------------- disclosure


def mean_image(config: RunConfig, images: Images, labels: Labels) -> Arrays:
    """Return x̄ [C, H, W] and ȳ [classes] of a client's real images; normalising is linear, so it follows the mean."""
    info = dataset_info(config.dataset)
    mean = (images.mean(axis=0, dtype=np.float64) / 255 - np.array(info.mean)) / np.array(info.std)
    counts = np.bincount(labels, minlength=len(info.classes))
    return {
        "image": mean.transpose(2, 0, 1).astype(np.float32, order="C"),
        "labels": (counts / len(labels)).astype(np.float32),
    }


def _expected(config: RunConfig) -> Arrays:
    info = dataset_info(config.dataset)
    height, width, channels = info.image_shape
    shapes = {"image": (channels, height, width), "labels": (len(info.classes),)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


MEAN_IMAGES = Disclosure(
    "mean-images", "the mean of its images and its label proportions, to all clients", mean_image, _expected
)

# ----------------------------------------------------------------------------------------------- server


class FedMix(FedAvg):
    """FedAvg that sends every client the means of all clients, one row per client."""

    disclosure = MEAN_IMAGES

    def __init__(self) -> None:
        super().__init__(**settings())
        self._means: Arrays = {}
        self._sent: Arrays = {}

    def disclosing_clients(self) -> Collection[int]:
        """Return the ids of the clients whose means are stored."""
        return self._means["clients"].tolist() if self._means else []

    def receive_disclosures(self, answers: Mapping[int, Arrays]) -> None:
        """Store the clients' means, in ascending client id; raise `MessageError` if proportions are invalid."""
        for client, arrays in answers.items():
            shares = arrays["labels"]
            if (wrong := np.flatnonzero((shares < 0) | (shares > 1))).size:
                found = f"proportion of class {wrong[0]} = {shares[wrong[0]]:g}"
                raise MessageError(f"client {client}: {found}, wanted 0 to 1")
            if abs(float(shares.sum()) - 1) > 1e-3:
                raise MessageError(f"client {client}: sum of its label proportions = {shares.sum():g}, wanted 1")
        self._means = {
            "means": np.stack([arrays["image"] for arrays in answers.values()]),
            "proportions": np.stack([arrays["labels"] for arrays in answers.values()]),
            "clients": np.array(list(answers), dtype=np.int64),
        }

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return FedAvg's messages; `extra` then returns the means in the model's form."""
        self._sent = self._sent or match_model_backend(arrays, self._means)
        return super().configure_train(server_round, arrays, config, grid)

    def extra(self) -> Arrays:
        """Return all clients' means, proportions and ids."""
        return self._sent

    def expected_extra(self) -> Arrays:
        """Return nothing: replies have no extra arrays."""
        return {}

    def state(self) -> StrategyState:
        """Return the disclosed means: clients are asked once per run."""
        return StrategyState(dict(self._means))

    def load_state(self, state: StrategyState) -> None:
        """Restore the disclosed means."""
        self._means = dict(state.arrays)


# ----------------------------------------------------------------------------------------------- client


class FedMixObjective(Objective):
    """Classification loss of images mixed with one mean image per step."""

    def __init__(self, part: float) -> None:
        self.part, self.needs_double_backward = part, part > 0

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return L: one forward pass; the last term holds a gradient, so its own gradient is a second derivative."""
        if self.part == 0:
            return super().loss(model, batch)  # FedAvg to the bit
        row = batch.given["other"].view(1)
        mean_image, proportions = (batch.given[name].index_select(0, row)[0] for name in ("means", "proportions"))
        part, inputs = self.part, ((1 - self.part) * batch.images).requires_grad_()
        logits = model(inputs)
        own = self.losses(logits, batch)
        # mean_b ⟨∂CE_b/∂u_b, x̄⟩ = Σ_b ⟨∂(mean CE)/∂u_b, x̄⟩: the inner gradient contains the mean already, exactly once.
        # Rows that pad a short batch do not contribute. With BatchNorm CE_b depends on every u_a of the batch: the
        # slope is then that of the batch's loss when x̄ is added to all inputs at once, which is what mixing does.
        (slopes,) = torch.autograd.grad(batch.mean(own), inputs, create_graph=True)
        taylor_term = (slopes * mean_image).sum()
        mixed = (1 - part) * own + part * self._losses_of_mixture(logits, proportions, batch)
        return batch.mean(mixed) + part * (1 - part) * taylor_term

    def _losses_of_mixture(self, logits: torch.Tensor, proportions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return CE(f(u), ȳ) = Σ_c ȳ_c CE(f(u), c) of each sample, with the run's `loss` as CE."""
        samples, classes = logits.shape
        labels = torch.arange(classes, device=logits.device).repeat(samples)
        losses = self.losses(logits.repeat_interleave(classes, 0), replace(batch, labels=labels))
        return (losses.view(samples, classes) * proportions).sum(1)


class FedMixClient(ClientAlgorithm):
    """FedMix's client part: draws another client's mean for each step."""

    def __init__(self, config: RunConfig) -> None:
        self.objective = FedMixObjective(config.fedmix_lambda)

    def prepare(self, client_round: ClientRound) -> Inputs:
        """Return all means, and for each step the row of another client, or its own if there is no other."""
        received = client_round.tensors(client_round.extra)
        clients = received.pop("clients").cpu().numpy()
        rows = np.flatnonzero(clients != client_round.client)
        rows = rows if len(rows) else np.arange(len(clients))
        draws = stream(client_round.config.seed, "fedmix", client_round.number, client_round.client)
        drawn = draws.choice(rows, client_round.steps)
        return Inputs(received, {"other": torch.as_tensor(drawn, device=client_round.device)})


FEDMIX = Algorithm(FedMix, FedMixClient, extra_models=0.03, disclosure=MEAN_IMAGES)
