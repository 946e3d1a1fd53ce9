"""FedGen (Zhu et al., 2021, Algorithm 1): the server trains a generator of features, and clients learn from it.

Server, in every round before averaging: train the generator (fedgen_generator.py) on the heads h_k of the replies,
each weighted per label by its client's share of that label, for `fedgen-steps` batches of `batch-size` labels (in the
authors' code, too, the server uses the clients' batch size). Client, from round 2 on, with the received generator G:

    L = CE(f(x), y) + β_t KL(softmax h(G(ε, y)) ‖ softmax f(x)) + α_t (B_G/B) CE(h(G(ε̂, ŷ)), ŷ)

The KL's first argument has no gradient; ŷ is uniform over the labels that any client holds; B_G is `fedgen-batch`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.allocation import MAX_COUNT
from fedeas_flwr.common.errors import ConfigError, MessageError
from fedeas_flwr.common.npy import Arrays, is_tensor
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import Images, Labels, dataset_info
from fedeas_flwr.runs.checkpoints import StrategyState
from fedeas_flwr.strategies.fedavg import FedAvg, settings
from fedeas_flwr.strategies.fedgen_generator import (
    ALL,
    NOISE,
    GeneratorState,
    Heads,
    generate,
    new_generator,
    train_generator,
)
from fedeas_flwr.strategies.interface import Algorithm, ClientAlgorithm, ClientRound, Disclosure, match_model_backend
from fedeas_flwr.strategies.records import ARRAYS, METRICS, to_arrays
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.objective import Batch, Inputs, Objective

DECAY, MIN_WEIGHT = 0.98, 1e-4
"""DECAY multiplies α, β and the generator's learning rate every round; MIN_WEIGHT is the minimum of α and β."""

# ------------------------------------------------------------------------------------------- disclosure


def label_counts(config: RunConfig, images: Images, labels: Labels) -> Arrays:
    """Return the number of real images per class, with noise if `fedgen-count-noise` is above 0.

    The noise is discrete Laplace of scale b: counts stay integers. Like the noise of `dp` it does not depend on the
    run's seed, which the server has: the noise must hide the counts from the server.
    """
    counts = np.bincount(labels, minlength=len(dataset_info(config.dataset).classes)).astype(np.int64)
    if config.fedgen_count_noise:
        up, down = np.random.default_rng().geometric(-math.expm1(-1 / config.fedgen_count_noise), (2, len(counts)))
        counts = np.maximum(0, counts + up - down)
    return {"counts": counts}


LABEL_COUNTS = Disclosure(
    "label-counts",
    "how many images of each class it holds, to the server",
    label_counts,
    lambda config: {"counts": np.zeros(len(dataset_info(config.dataset).classes), np.int64)},
)

# ----------------------------------------------------------------------------------------------- server


def build_fedgen(config: RunConfig) -> FedGen:
    """Build FedGen's server part; raise `ConfigError` unless the network ends in a trained Linear named ``fc``."""
    head = getattr(build_network(config), "fc", None)
    if not isinstance(head, nn.Linear) or not head.weight.requires_grad:
        raise ConfigError(
            f"model = '{config.model}': strategy = 'fedgen' needs a network that ends in a trained Linear named fc"
        )
    return FedGen(config, head.in_features)


class FedGen(FedAvg):
    """FedAvg with a generator, trained on the replies, of the ``features`` inputs of the network's last layer."""

    disclosure = LABEL_COUNTS

    def __init__(self, config: RunConfig, features: int) -> None:
        super().__init__(**settings())
        self.config = config
        classes = len(dataset_info(config.dataset).classes)
        self._generator = GeneratorState.untrained(new_generator(features, classes, config.seed))
        self._counts: dict[int, Labels] = {}
        self._sent: Arrays = {}

    def disclosing_clients(self) -> Collection[int]:
        """Return the ids of the clients whose counts are stored."""
        return self._counts.keys()

    def receive_disclosures(self, answers: Mapping[int, Arrays]) -> None:
        """Store the clients' counts; raise `MessageError` if they are invalid."""
        for client, arrays in answers.items():
            counts = arrays["counts"]
            if (wrong := np.flatnonzero((counts < 0) | (counts > MAX_COUNT))).size:
                found = f"images of class {wrong[0]} = {counts[wrong[0]]}"
                raise MessageError(f"client {client}: {found}, wanted 0 to {MAX_COUNT}")
        if not any(arrays["counts"].any() for arrays in answers.values()):
            raise MessageError(f"images of all {len(answers)} clients = 0, wanted 1 or more")
        self._counts = {client: arrays["counts"] for client, arrays in answers.items()}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return FedAvg's messages; `extra` then returns the generator in the model's form."""
        held = np.flatnonzero(np.sum(list(self._counts.values()), axis=0))
        generator = {f"generator/{name}": value for name, value in self._generator.weights.items()}
        self._sent = match_model_backend(arrays, {**generator, "labels": held})
        return super().configure_train(server_round, arrays, config, grid)

    def extra(self) -> Arrays:
        """Return the generator and the labels that any client holds."""
        return self._sent

    def expected_extra(self) -> Arrays:
        """Return nothing: a client's head is part of its model."""
        return {}

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Train the generator on the replies' heads; return FedAvg's mean."""
        replies = list(replies)
        self._generator = train_generator(
            self._generator,
            self._heads(replies),
            steps=self.config.fedgen_steps,
            batch=self.config.batch_size,
            rate=self.config.fedgen_rate * DECAY ** (server_round - 1),
            draws=stream(self.config.seed, "fedgen server", server_round),
        )
        return super().aggregate_train(server_round, replies)

    def _heads(self, replies: list[Message]) -> Heads:
        states = [to_arrays(reply.content.array_records[ARRAYS]) for reply in replies]
        weight = _stacked([state["fc.weight"] for state in states])
        has_bias = "fc.bias" in states[0]
        bias = _stacked([state["fc.bias"] for state in states]) if has_bias else weight.new_zeros(weight.shape[:2])
        clients = [int(cast(int, reply.content.metric_records[METRICS]["client-id"])) for reply in replies]
        counts = torch.from_numpy(np.stack([self._counts[client] for client in clients])).to(weight)
        return Heads(weight, bias, counts)

    def state(self) -> StrategyState:
        """Return the generator, Adam's moments and the clients' counts."""
        generator = self._generator
        parts = {"weights": generator.weights, "first": generator.first, "second": generator.second}
        arrays: Arrays = {f"{part}/{name}": value for part, found in parts.items() for name, value in found.items()}
        arrays["clients"] = np.array(list(self._counts), dtype=np.int64)
        arrays["counts"] = np.stack(list(self._counts.values()))
        return StrategyState(arrays, {"steps": generator.steps})

    def load_state(self, state: StrategyState) -> None:
        """Restore generator and counts; the state is empty before the first round."""
        if not state.arrays:
            return
        arrays = state.arrays
        self._counts = dict(zip(arrays["clients"].tolist(), arrays["counts"], strict=True))

        def part(prefix: str) -> dict[str, torch.Tensor]:
            found = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            return {name: torch.from_numpy(np.array(value)) for name, value in found.items()}

        self._generator = GeneratorState(part("weights/"), part("first/"), part("second/"), int(state.numbers["steps"]))


def _stacked(arrays: list[Any]) -> torch.Tensor:
    """Stack arrays into a tensor on the CPU, or tensors on their device."""
    return torch.stack(arrays) if is_tensor(arrays[0]) else torch.from_numpy(np.stack(arrays))


# ----------------------------------------------------------------------------------------------- client


class FedGenObjective(Objective):
    """Classification loss with the two generator terms."""

    def __init__(self, config: RunConfig) -> None:
        self.off = config.fedgen_alpha == config.fedgen_beta == 0
        self.ratio = config.fedgen_batch / config.batch_size

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return L."""
        if self.off:
            return super().loss(model, batch)  # FedAvg to the bit
        logits, head, given = model(batch.images), cast(nn.Linear, model.fc), batch.given
        with torch.no_grad():
            generator = {name: given[f"generator/{name}"] for name in ALL}
            like_own = generate(generator, given["noise"][batch.first :][: len(batch.labels)], batch.labels)
            teacher = F.log_softmax(head(like_own), 1)
            asked = generate(generator, given["asked noise"], given["asked labels"])
        divergence = F.kl_div(F.log_softmax(logits, 1), teacher, reduction="none", log_target=True).sum(1)
        # Plain cross-entropy under every `loss`: these labels are uniform already.
        answered = F.cross_entropy(head(asked), given["asked labels"])
        own = batch.mean(self.losses(logits, batch) + given["beta"] * divergence)
        return own + given["alpha"] * self.ratio * answered


def term_weight(first: float, round_number: int) -> float:
    """Return α_t or β_t: × 0.98 per round down to 1e-4; 0 in round 1, whose generator is untrained, and if off."""
    return 0.0 if round_number == 1 or first == 0 else max(MIN_WEIGHT, first * DECAY ** (round_number - 1))


class FedGenClient(ClientAlgorithm):
    """FedGen's client part: draws the noise and labels for which a step generates features."""

    def __init__(self, config: RunConfig) -> None:
        self.objective = FedGenObjective(config)

    def prepare(self, client_round: ClientRound) -> Inputs:
        """Return the generator, the terms' weights, and the noise and labels of every step."""
        config, number, steps = client_round.config, client_round.number, client_round.steps
        received = client_round.tensors(client_round.extra)
        held = received.pop("labels").cpu().numpy()
        draws = stream(config.seed, "fedgen client", number, client_round.client)
        tables = {
            "noise": draws.standard_normal((steps, config.batch_size, NOISE), dtype=np.float32),
            "asked noise": draws.standard_normal((steps, config.fedgen_batch, NOISE), dtype=np.float32),
            "asked labels": draws.choice(held, (steps, config.fedgen_batch)),
        }
        weights = {"alpha": config.fedgen_alpha, "beta": config.fedgen_beta}
        scalars = {n: torch.tensor(term_weight(w, number), device=client_round.device) for n, w in weights.items()}
        return Inputs({**received, **scalars}, client_round.tensors(tables))


FEDGEN = Algorithm(build_fedgen, FedGenClient, extra_models=0.015, disclosure=LABEL_COUNTS)
