"""SCAFFOLD: two rounds by hand, and c stays the mean of all c_i even if replies are lost."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from lossy import federation, lossy_app
from quadratics import train
from rich.console import Console
from runners import client_state, finish, pass_models_by_reference, quick, weights

from fedeas_flwr import client_app
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.npy import Arrays, to_numpy
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.messages import TrainReport
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.interface import ClientAlgorithmResult, ClientRound
from fedeas_flwr.strategies.records import METRICS, WEIGHT, to_arrays, to_record
from fedeas_flwr.strategies.registry import build_strategy
from fedeas_flwr.strategies.scaffold import Scaffold, ScaffoldClient
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.models import split_state

# -------------------------------------------------------------------------------------- rounds by hand

A, STEPS, EXAMPLES = (4.0, -1.0), (2, 1), (30, 10)


class TwoClients:
    """Two clients with f = ½(w − a)² and η = ½, with the real server."""

    def __init__(self, kind: str, as_tensors: bool, **keys: Any) -> None:
        self.config = quick(Path("/nowhere"), strategy="scaffold", clients=2, learning_rate=0.5, **keys)
        self.kind, self.as_tensors, self.server = kind, as_tensors, build_strategy(self.config)
        assert isinstance(self.server, Scaffold)
        self.x: Arrays = self.array(0.0)
        self.controls: list[Mapping[str, Any]] = [{}, {}]

    def array(self, value: float) -> Arrays:
        return {"w": torch.tensor(value) if self.as_tensors else np.array(value, np.float32)}

    def client(self, client: int, steps: int) -> tuple[float, ClientAlgorithmResult]:
        assert isinstance(self.server, Scaffold)
        part = ScaffoldClient()
        task = ClientRound(
            self.config, 1, client, "cpu", self.x, {}, self.server.extra(), self.controls[client], torch.zeros(2), steps
        )
        inputs, start = part.prepare(task), float(self.x["w"])
        y = float(train(self.kind, part.objective, start, A[client], steps, inputs)["w"]) if steps else start
        return y, part.finish(task, self.array(y), {})

    def round(self, chosen: tuple[int, ...], steps: tuple[int, ...] = STEPS) -> list[float]:
        grid = InlineGrid(ClientApp(), 2, {})
        out = list(self.server.configure_train(1, to_record(self.x), ConfigRecord(), grid))
        ends, replies = [], []
        for client in chosen:
            y, finished = self.client(client, steps[client])
            report = TrainReport(client, EXAMPLES[client], 0.0, steps[client], 0, 0, 0.0, 0.0)
            extra = dict(finished.extra) if self.as_tensors else to_numpy(finished.extra)
            reply = messages.train_reply(out[client], report, self.array(y), {}, extra)
            messages.read_train_reply(reply, client, self.x, {}, self.server.expected_extra())  # type: ignore[attr-defined]
            replies.append(reply)
            ends.append(y)
            self.controls[client] = finished.memory
        arrays, _ = self.server.aggregate_train(1, replies)
        assert arrays is not None
        self.x = to_arrays(arrays)
        return ends

    @property
    def c(self) -> float:
        return float(self.server.state().arrays["w"])  # type: ignore[attr-defined]

    @property
    def c_i(self) -> list[float]:
        return [float(control["w"]) if control else 0.0 for control in self.controls]


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_two_rounds_by_hand(kind: str, as_tensors: bool) -> None:
    run = TwoClients(kind, as_tensors)
    assert run.round((0,)) == [3]  # client 2 does not take part; w = 0, 2, 3
    assert (float(run.x["w"]), run.c, run.c_i) == (3, -1.5, [-3, 0])
    assert run.round((0, 1)) == [2.625, 1.75]
    assert (float(run.x["w"]), run.c, run.c_i) == (2.1875, 1.4375, [-1.125, 4])


def test_server_learning_rate_and_weighting_by_hand() -> None:
    assert float(second_round_by_hand(scaffold_server_rate=0.5)) == 3 + 0.5 * (2.1875 - 3)
    assert float(second_round_by_hand(scaffold_weighting="examples")) == 0.75 * 2.625 + 0.25 * 1.75


def second_round_by_hand(**keys: Any) -> float:
    """Return x after the second round above, started from x = 3, which η_g would change in the first round."""
    run = TwoClients("eager", False, **keys)
    run.round((0,))
    run.x = run.array(3.0)
    run.round((0, 1))
    return float(run.x["w"])


def test_client_without_steps_keeps_its_control_variate() -> None:
    run = TwoClients("eager", False)
    run.round((0, 1))
    before = run.c, run.c_i
    assert before == (-1, [-3, 1])
    x = float(run.x["w"])
    assert run.round((0, 1), steps=(0, 0)) == [x, x]
    assert (run.c, run.c_i, float(run.x["w"])) == (*before, x)


@pytest.mark.parametrize("steps", [0, 1])
def test_reply_extra_has_the_order_of_the_model(steps: int) -> None:
    model = {name: np.ones(2, np.float32) for name in ("z", "a")}
    memory = {name: np.ones(2, np.float32) for name in ("a", "z")}
    config = quick(Path("/nowhere"), strategy="scaffold")
    task = ClientRound(config, 2, 0, "cpu", model, {}, model, memory, torch.zeros(1), steps)
    assert list(ScaffoldClient().finish(task, model, {}).extra) == ["z", "a"]


# ------------------------------------------------------------------------------------------- the invariant


def assert_c_is_the_mean_of_all_c_i(folder: Path, state: Checkpoint, clients: int) -> None:
    memories = [client_state(RunDirectory(folder), k, state.accepted.get(k, 0)).memory for k in range(clients)]
    assert any(memories)
    for key, c in state.strategy.arrays.items():
        mean = sum(memory[key].astype(np.float64) if memory else np.zeros(c.shape) for memory in memories) / clients
        np.testing.assert_allclose(c, mean, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("fate", ["lost", "NaN"])
def test_c_is_mean_of_c_i_even_with_rejected_replies(tmp_path: Path, fate: str) -> None:
    config = quick(tmp_path, strategy="scaffold", policy="none", participation=0.75, min_replies=0.1, rounds=5)
    run = federation(config, lossy_app(lambda client, number: fate if number in (2, 4) and client % 2 else ""))
    state, failed = Checkpoint(0, *split_state(build_network(config))), 0
    for _ in range(5):
        state, outcome = run.training.train_round(state)
        failed += len(outcome.failures)
        assert_c_is_the_mean_of_all_c_i(tmp_path, state, 4)
    assert failed >= 2


def test_resume_from_older_checkpoint_gives_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"strategy": "scaffold", "policy": "none", "rounds": 7, "checkpoint_every": 3}
    whole = finish(quick(tmp_path / "whole", **keys))
    note = RunDirectory.append_round

    def dies_in_round_5(run: RunDirectory, record: dict[str, Any]) -> None:
        if record["round"] == 5:  # its clients have trained rounds 4 and 5; the checkpoint is of round 3
            raise SystemError("power cut")
        note(run, record)

    with monkeypatch.context() as patch, pytest.raises(RunError, match="SystemError: power cut"):
        patch.setattr(RunDirectory, "append_round", dies_in_round_5)
        finish(quick(tmp_path / "parts", **keys))
    resumed = finish(quick(tmp_path / "parts", resume=True, **keys))
    assert weights(whole) == weights(resumed)
    last = resumed.load_checkpoint()
    assert last is not None
    assert_c_is_the_mean_of_all_c_i(resumed.path, last, 4)


# --------------------------------------------------------------------------------------------- whole runs


def test_scaffold_with_one_full_batch_step_equals_fedavg(tmp_path: Path) -> None:
    """With equal weights Σ (c − c_i) = 0, so the corrections cancel in the mean; the client models differ."""
    keys: dict[str, Any] = {"policy": "none", "participation": 1.0, "batch_size": 4096}
    scaffold = federation(quick(tmp_path / "scaffold", strategy="scaffold", **keys), client_app.app)
    fedavg = federation(quick(tmp_path / "fedavg", **keys), equal_weight_app())
    state = plain_state = Checkpoint(0, *split_state(build_network(scaffold.config)))
    for _ in range(4):
        state, outcome = scaffold.training.train_round(state)
        plain_state, _ = fedavg.training.train_round(plain_state)
        assert [report.steps for report in outcome.reports] == [1] * 4
    for key, array in state.trainable.items():
        np.testing.assert_allclose(array, plain_state.trainable[key], rtol=1e-4, atol=1e-6, err_msg=key)
    moved = [np.abs(array).max() for array in state.strategy.arrays.values()]
    assert max(moved) > 1e-3, "c did not change, so nothing was tested"


def equal_weight_app() -> ClientApp:
    """Return the real clients, each declaring one sample, so that FedAvg weights them equally."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        reply = client_app.query(message, context)
        reply.content.metric_records[METRICS]["examples"] = 1
        return reply

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = client_app.train_client(message, context)
        reply.content.metric_records[METRICS][WEIGHT] = 1
        return reply

    return app


@pytest.mark.parametrize("policy", ["none", "fedeas"])
def test_resume_and_passing_by_reference_give_equal_weights(
    tmp_path: Path, digits_generator: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    model = "users_models:with_batchnorm"
    keys: dict[str, Any] = {"strategy": "scaffold", "policy": policy, "beta": 1.0, "model": model}
    whole = finish(quick(tmp_path / "whole", rounds=4, **keys))
    finish(quick(tmp_path / "parts", rounds=2, **keys))
    assert weights(finish(quick(tmp_path / "parts", rounds=4, resume=True, **keys))) == weights(whole)
    assert (whole.summary()["total_generated"] > 0) == (policy == "fedeas")
    assert weights(finish(quick(tmp_path / "fedavg", rounds=4, **{**keys, "strategy": "fedavg"}))) != weights(whole)
    pass_models_by_reference(monkeypatch)
    finish(quick(tmp_path / "as_tensors", rounds=2, **keys))
    assert weights(finish(quick(tmp_path / "as_tensors", rounds=4, resume=True, **keys))) == weights(whole)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"momentum": 0.9}, "momentum = 0.9: must be 0 with strategy = 'scaffold'"),
        ({"weight_decay": 1e-4}, "weight-decay = 0.0001: must be 0 with strategy = 'scaffold'"),
        ({"dp": "server-fixed"}, "dp = 'server-fixed' does not cover all that strategy = 'scaffold' sends"),
    ],
)
def test_scaffold_rejects_momentum_weight_decay_and_dp(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        prepare(quick(tmp_path, strategy="scaffold", **keys), Console(file=io.StringIO()))
    assert "\n" not in str(refused.value)
