"""SCAFFOLD (Karimireddy et al., 2020, Algorithm 1, option II): control variates correct client drift.

    client   y ← y − η (g(y) − c_i + c)        every step, from y = x
             c_i⁺ = c_i − c + (x − y) / (T η)  after T steps, those on synthetic images included
    server   x ← x + η_g · mean of (y − x)     over the replies
             c ← c + (1/K) Σ (c_i⁺ − c_i)      over the replies, K all clients

The server stores c, and each client its c_i. A client stores c_i⁺ only if the server accepted its reply, so c is the
mean of all c_i after every round, even if replies are lost. Both cover trained parameters; buffers are averaged as in
FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.config import RunConfig
from fedeas_flwr.runs.checkpoints import StrategyState
from fedeas_flwr.strategies.averaging import cast_like, weighted_average
from fedeas_flwr.strategies.fedavg import FedAvg, settings
from fedeas_flwr.strategies.interface import Algorithm, ClientAlgorithm, ClientAlgorithmResult, ClientRound
from fedeas_flwr.strategies.records import ARRAYS, EXTRA, METRICS, WEIGHT, to_arrays, to_record
from fedeas_flwr.training.engine import State
from fedeas_flwr.training.objective import Inputs, Objective, Tensors


def build_scaffold(config: RunConfig) -> Scaffold:
    """Build SCAFFOLD; raise `ConfigError` with momentum or weight decay.

    (x − y)/(Tη) is the mean gradient for plain SGD only.
    """
    for key, value in (("momentum", config.momentum), ("weight-decay", config.weight_decay)):
        if value:
            raise ConfigError(f"{key} = {value:g}: must be 0 with strategy = 'scaffold', which is for plain SGD")
    return Scaffold(config)


class Scaffold(FedAvg):
    """SCAFFOLD's server part: updates the model and c."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(**settings())
        self._rate, self._clients = config.scaffold_server_rate, config.clients
        self._by_examples = config.scaffold_weighting == "examples"
        self._sent: Arrays = {}
        self._control: Arrays = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return FedAvg's messages; set c to zero in the first round."""
        self._sent = to_arrays(arrays)
        start = self._control or {key: array - array for key, array in self._sent.items()}
        self._control = cast_like(start, self._sent)  # a checkpoint has NumPy arrays in another order
        return super().configure_train(server_round, arrays, config, grid)

    def extra(self) -> Arrays:
        """Return c."""
        return self._control

    def expected_extra(self) -> Arrays:
        """Return c: a reply has c_i⁺ − c_i, with the same names, dtypes and shapes."""
        return self._control

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Update c and return the new model: the server's two formulas above."""
        contents = [reply.content for reply in replies]
        changes = [to_arrays(content.array_records[EXTRA]) for content in contents]
        self._control = updated_control(self._control, changes, self._clients)
        models = [to_arrays(content.array_records[ARRAYS]) for content in contents]
        examples = [float(content.metric_records[METRICS][WEIGHT]) for content in contents]  # type: ignore[arg-type]
        mean = weighted_average(models, examples if self._by_examples else [1.0] * len(models))
        # x + η_g (mean − x), written so that η_g = 1 gives the mean to the bit.
        return to_record(weighted_average([self._sent, mean], [1 - self._rate, self._rate])), None

    def state(self) -> StrategyState:
        """Return c."""
        return StrategyState(arrays=dict(self._control))

    def load_state(self, state: StrategyState) -> None:
        """Restore c; the state is empty before the first round."""
        self._control = dict(state.arrays)


def updated_control(control: Arrays, changes: Sequence[Arrays], clients: int) -> Arrays:
    """Return c + (|S|/K) · mean of (c_i⁺ − c_i), in new arrays: clients and the checkpoint may hold those of c."""
    mean, part = weighted_average(changes, [1.0] * len(changes)), len(changes) / clients
    return {key: control[key] + mean[key] * part for key in control}


class ScaffoldObjective(Objective):
    """Classification loss whose gradients are corrected by c − c_i."""

    def correct_gradients(self, weights: Tensors, gradients: Tensors, given: Tensors) -> None:
        """Set g ← g − c_i + c."""
        names = list(gradients)
        torch._foreach_add_([gradients[name] for name in names], [given[f"correction/{name}"] for name in names])


class ScaffoldClient(ClientAlgorithm):
    """SCAFFOLD's client part: stores c_i as its memory."""

    objective = ScaffoldObjective()

    def prepare(self, client_round: ClientRound) -> Inputs:
        """Return c − c_i, under ``correction/``."""
        control, own = client_round.tensors(client_round.extra), client_control_variate(client_round)
        return Inputs({f"correction/{name}": control[name] - own[name] for name in control})

    def finish(self, client_round: ClientRound, trainable: State, buffers: State) -> ClientAlgorithmResult:
        """Return c_i⁺ = c_i − c + (x − y)/(Tη) and its change; a client without a step keeps its c_i."""
        control, own = client_round.tensors(client_round.extra), client_control_variate(client_round)
        if client_round.steps == 0:
            return ClientAlgorithmResult(
                memory=own, extra={name: torch.zeros_like(value) for name, value in control.items()}
            )
        start, end = client_round.tensors(client_round.trainable), client_round.tensors(trainable)
        reach = client_round.steps * client_round.config.learning_rate_in(client_round.number)
        change = {name: (start[name] - end[name]) / reach - control[name] for name in control}
        return ClientAlgorithmResult(memory={name: own[name] + change[name] for name in change}, extra=change)


def client_control_variate(client_round: ClientRound) -> dict[str, torch.Tensor]:
    """Return c_i of the client's last accepted round; zero before the first."""
    if client_round.memory:
        return client_round.tensors(client_round.memory)
    return {name: torch.zeros_like(value) for name, value in client_round.tensors(client_round.extra).items()}


SCAFFOLD = Algorithm(
    build_scaffold,
    ScaffoldClient,
    discloses="nothing: the change of its control variate follows from its update and its number of steps",
    extra_models=2,
)
