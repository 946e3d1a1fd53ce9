"""What a learning algorithm may define besides Flower's `Strategy`: a client's part, a server's part, a disclosure.

    prepare   from what was received and remembered to the inputs of the steps
    (the engine trains, with the part's objective)
    finish    from what was trained to the next memory and the reply's extra arrays

FedAvg's client part does nothing, and so does that of any algorithm that lives on the server alone.

A `Disclosure` is what an algorithm must know of the clients' data. The clients are asked once, before training, and
only if the run-config's `disclose-…` key allows it: without the key the run does not start, and a client that is asked
refuses. The answers are kept in the checkpoint, so a resumed run does not ask again. A client that was not there to be
asked takes no part in the run, resumed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import ArrayRecord

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.federated import Images, Labels
from fedeas_flwr.runs.checkpoints import Arrays, StrategyState, is_tensor, to_numpy
from fedeas_flwr.strategies.records import to_arrays
from fedeas_flwr.training.engine import State
from fedeas_flwr.training.objective import CROSS_ENTROPY, NO_INPUTS, Inputs, Objective


@dataclass(frozen=True)
class ClientRound:
    """One client in one round, as its part of an algorithm sees it. States hold arrays or tensors."""

    config: RunConfig
    number: int
    client: int
    device: str
    trainable: State
    """The global model as received, and below its buffers."""
    buffers: State
    extra: State
    """What the server's part sent beside the model."""
    memory: State
    """What this client's part kept in its last accepted round; empty before the first."""
    labels: torch.Tensor
    """Of everything the client trains on, synthetic images included."""
    steps: int
    """How many steps this round takes."""

    def tensors(self, state: State) -> dict[str, torch.Tensor]:
        """A state as tensors on the client's device."""
        return {key: self._tensor(value) for key, value in state.items()}

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        return torch.from_numpy(np.require(value, requirements="W")).to(self.device)  # of read-only ones torch warns


@dataclass(frozen=True)
class ClientAlgorithmResult:
    """What a client's part has to say after training."""

    memory: Mapping[str, Any] = field(default_factory=dict)
    """Kept on this client if the server uses the reply."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Sent beside the model, encoded where the model is; the server's part says which arrays it expects."""


class ClientAlgorithm:
    """FedAvg's: cross-entropy, nothing kept, nothing more sent."""

    objective: Objective = CROSS_ENTROPY

    def prepare(self, task: ClientRound) -> Inputs:
        """The inputs that the objective needs for this client and round."""
        return NO_INPUTS

    def finish(self, task: ClientRound, trainable: State, buffers: State) -> ClientAlgorithmResult:
        """Look at the trained model."""
        return ClientAlgorithmResult()


@dataclass(frozen=True)
class Disclosure:
    """One question that is answered with arrays."""

    question: str
    what: str
    """What every client gives away, as a table of strategies says it."""
    arrays: Callable[[RunConfig, Images, Labels], Arrays]
    """The answer, from the client's real images [N, H, W, C] and their labels."""
    expected: Callable[[RunConfig], Arrays]
    """Arrays with the names, kinds and shapes of an answer."""

    @property
    def key(self) -> str:
        """The run-config key that allows it."""
        return f"disclose-{self.question}"

    def check_allowed(self, config: RunConfig) -> None:
        """Refuse in one line unless the key is set.

        Raises
        ------
        ConfigError
            It says what would be disclosed.
        """
        if not config.to_user_dict()[self.key]:
            raise ConfigError(
                f"{self.key} = false: strategy = '{config.strategy}' needs it to be true, "
                f"and then discloses of every client {self.what}"
            )

    def answer(self, config: RunConfig, images: Images, labels: Labels) -> Arrays:
        """What a client answers, or its refusal."""
        self.check_allowed(config)
        if len(labels) == 0:
            raise ValueError(f"{self.key} = true: this client holds 0 images, wanted 1 or more to tell anything of")
        return self.arrays(config, images, labels)


@runtime_checkable
class NeedsDisclosure(Protocol):
    """A strategy that must be told something of every client before the first round."""

    disclosure: Disclosure

    def disclosing_clients(self) -> Collection[int]:
        """The clients that told it, perhaps before an interrupt; empty before they were asked."""
        ...

    def receive_disclosures(self, told: Mapping[int, Arrays]) -> None:
        """Take what each client disclosed, by client id; a `MessageError` refuses it."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A strategy that remembers something between rounds: what `state` gives, `load_state` takes back on resume."""

    def state(self) -> StrategyState:
        """All that changes from round to round, the model itself left out."""
        ...

    def load_state(self, state: StrategyState) -> None:
        """Go on from there."""
        ...


@runtime_checkable
class SendsExtra(Protocol):
    """A strategy whose two parts exchange arrays beside the model, in a record of their own (`records.EXTRA`).

    They are of the model's own kind: NumPy arrays, or tensors where models are handed over within the process.
    """

    def extra(self) -> Arrays:
        """What goes to every client of the round; asked after `configure_train`."""
        ...

    def expected_extra(self) -> Arrays:
        """Arrays with the names, kinds and shapes that a reply must bring; empty if it brings none."""
        ...


def match_model_backend(model: ArrayRecord, arrays: Arrays) -> Arrays:
    """The arrays as extra ones must be: tensors where the model's lie if it is handed over, else NumPy's."""
    first = next(iter(to_arrays(model).values()), None)
    if first is None or not is_tensor(first):
        return to_numpy(arrays)
    import torch  # only where models are tensors already

    return {key: torch.as_tensor(array, device=first.device) for key, array in arrays.items()}
