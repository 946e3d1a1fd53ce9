"""A learning algorithm, and its interfaces beyond Flower's `Strategy`: client part, server part and disclosure.

A client runs `ClientAlgorithm` around its local training:

    prepare   turns received and remembered arrays into the inputs of the training steps
    (the engine trains with the algorithm's objective)
    finish    turns the trained model into the next memory and the reply's extra arrays

The client part of FedAvg, and of algorithms that differ on the server only, does nothing.

On the server a strategy may implement `Stateful`, `SendsExtra` and `NeedsDisclosure`. A `Disclosure` is information
about the clients' data that an algorithm needs. The server asks every client once, before training, and only if the
run-config's `disclose-…` key is true: otherwise the run does not start, and a client rejects the question. The
checkpoint stores the answers, so a resumed run does not ask again. A client that did not answer is excluded from the
run, also after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.npy import Arrays, is_tensor, to_numpy
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import Images, Labels
from fedeas_flwr.runs.checkpoints import StrategyState
from fedeas_flwr.strategies.records import to_arrays
from fedeas_flwr.training.engine import State
from fedeas_flwr.training.objective import CROSS_ENTROPY, NO_INPUTS, Inputs, Objective


@dataclass(frozen=True)
class ClientRound:
    """One client in one round, as passed to its `ClientAlgorithm`. States hold NumPy arrays or tensors."""

    config: RunConfig
    number: int
    client: int
    device: str
    trainable: State
    """Trained parameters of the received global model; `buffers` are its other arrays."""
    buffers: State
    extra: State
    """Arrays that the server part sent with the model (`SendsExtra`)."""
    memory: State
    """Arrays that this client stored in its last accepted round; empty before the first."""
    labels: torch.Tensor
    """Labels of all images that the client trains on, synthetic ones included."""
    steps: int = 0
    """Number of training steps of a classifier in this round."""
    most_samples: int = 0
    """Estimate of the most samples that any client of this process trains on."""

    def tensors(self, state: State) -> dict[str, torch.Tensor]:
        """Return a state as tensors on the client's device."""
        return {key: self._tensor(value) for key, value in state.items()}

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        return torch.from_numpy(np.require(value, requirements="W")).to(self.device)  # torch warns of read-only


@dataclass(frozen=True)
class ClientAlgorithmResult:
    """Arrays that a client part returns after training."""

    memory: Mapping[str, Any] = field(default_factory=dict)
    """Stored on this client if the server accepts the reply."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Sent with the model, encoded if the model is; `SendsExtra.expected_extra` defines names, dtypes and shapes."""


class ClientAlgorithm:
    """FedAvg's client part: cross-entropy, no memory, no extra arrays. Algorithms derive from it."""

    objective: Objective = CROSS_ENTROPY

    def prepare(self, client_round: ClientRound) -> Inputs:
        """Return the inputs that the objective needs for this client and round."""
        return NO_INPUTS

    def finish(self, client_round: ClientRound, trainable: State, buffers: State) -> ClientAlgorithmResult:
        """Return the memory and the extra arrays that follow from the trained model."""
        return ClientAlgorithmResult()


@dataclass(frozen=True)
class Disclosure:
    """One question about a client's data, answered with arrays."""

    question: str
    what: str
    """What every client discloses, and to whom, as the table of strategies prints it."""
    arrays: Callable[[RunConfig, Images, Labels], Arrays]
    """Computes the answer from the client's real images [N, H, W, C] and their labels."""
    expected: Callable[[RunConfig], Arrays]
    """Returns arrays with the names, dtypes and shapes of an answer."""

    @property
    def key(self) -> str:
        """Return the run-config key that allows it."""
        return f"disclose-{self.question}"

    def check_allowed(self, config: RunConfig) -> None:
        """Raise `ConfigError` unless the run-config has the key and it is true."""
        allowed = config.to_user_dict().get(self.key)
        if allowed is None:
            raise ConfigError(f"strategy = '{config.strategy}' needs the key {self.key}, which the run-config lacks")
        if not allowed:
            raise ConfigError(
                f"{self.key} = false: strategy = '{config.strategy}' needs it to be true, "
                f"and then discloses of every client {self.what}"
            )

    def answer(self, config: RunConfig, images: Images, labels: Labels) -> Arrays:
        """Return a client's answer; raise if the key is false or the client has no images."""
        self.check_allowed(config)
        if len(labels) == 0:
            raise ValueError(f"{self.key} = true: this client holds 0 images, wanted 1 or more")
        return self.arrays(config, images, labels)


@dataclass(frozen=True)
class Algorithm:
    """A learning algorithm: how its server and client parts are built, and its row in the table of strategies.

    Both builders are called by keyword: with `config`, the run-config, if they name it, and with those of
    `strategy-args` that they name. The server's also gets those arguments of `registry.offered` that it names.
    """

    build: Callable[..., Strategy]
    """Builds the server part: a function, or the strategy's class."""
    client: Callable[..., ClientAlgorithm] = ClientAlgorithm
    """Builds the client part."""
    discloses: str = "nothing"
    """What a client discloses in addition to its model update and number of real samples, which FedAvg needs."""
    extra_models: float = 0
    """Traffic per client and round beyond sending the model and receiving it back, in units of one model."""
    disclosure: Disclosure | None = None
    """What every client discloses before training; None: nothing. The run-config must set `Disclosure.key` to true."""


@runtime_checkable
class NeedsDisclosure(Protocol):
    """A strategy that needs a disclosure from every client before the first round."""

    disclosure: Disclosure

    def disclosing_clients(self) -> Collection[int]:
        """Return the ids of the clients that answered, also before a resume; empty before they were asked."""
        ...

    def receive_disclosures(self, answers: Mapping[int, Arrays]) -> None:
        """Store each client's answer, by client id; raise `MessageError` if one is invalid."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A strategy with state beyond the model: `load_state` restores on resume what `state` returned.

    A user's strategy in `FlowerStrategyAdapter` may implement it too.
    """

    def state(self) -> StrategyState:
        """Return everything that changes from round to round, except the model."""
        ...

    def load_state(self, state: StrategyState) -> None:
        """Restore a state that `state` returned; in a new run it is empty."""
        ...


@runtime_checkable
class SendsExtra(Protocol):
    """A strategy whose server and client parts exchange arrays besides the model, in the record `records.EXTRA`.

    They are NumPy arrays, or tensors if models are passed by reference within the process.
    """

    def extra(self) -> Arrays:
        """Return the arrays for every client of the round; called after `configure_train`."""
        ...

    def expected_extra(self) -> Arrays:
        """Return arrays with the names, dtypes and shapes that a reply must have; empty if it has none."""
        ...


def match_model_backend(model: ArrayRecord, arrays: Arrays) -> Arrays:
    """Return arrays in the model's form: tensors on its device if it is passed by reference, else NumPy arrays."""
    first = next(iter(to_arrays(model).values()), None)
    if first is None or not is_tensor(first):
        return to_numpy(arrays)
    return {key: torch.as_tensor(array, device=first.device) for key, array in arrays.items()}
