"""Clients that train in a group end as each of them would alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from runners import finish, pass_models_by_reference, small
from torch import nn
from users_models import with_batchnorm, with_dropout

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.gathering import Gathering
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.launch.resources import clients_at_once
from fedeas_flwr.strategies.registry import client_part
from fedeas_flwr.training.build import EnginePool, why_not_grouped
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, State, TrainResult, read_state
from fedeas_flwr.training.grouped import GroupedEngine, why_not_stackable
from fedeas_flwr.training.models import Normaliser, SmallCNN
from fedeas_flwr.training.objective import CROSS_ENTROPY, Inputs

Ended = tuple[TrainResult, State, State]
SHAPE = (8, 8, 1)


class Normalised(Normaliser):
    """Gives images the dtype of the model."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__((0.3,), (0.4,), device)
        self._dtype = dtype

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().__call__(pixels).to(self._dtype)


def client_data(samples: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (samples, *SHAPE), dtype=np.uint8)
    return torch.tensor(images, device=device), torch.tensor(rng.integers(0, 10, samples), device=device)


def together(calls: Sequence[Callable[[], Any]], at_once: int = 0) -> list[Any]:
    """Call in threads of one gathering; return the results, or the errors."""
    workers = at_once or len(calls)
    gathering = Gathering(workers)

    def run(call: Callable[[], Any]) -> Any:
        configure_torch("cpu")  # one thread of torch per client
        with gathering.client():
            try:
                return call()
            except Exception as error:
                return error

    with ThreadPoolExecutor(workers) as pool, gathering.expect(len(calls)):
        return list(pool.map(run, calls))


class Clients:
    """Clients of given sizes, trained by the two engines from one state."""

    def __init__(
        self, sizes: Sequence[int], recipe: LocalTrainingConfig, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        configure_torch("cpu")
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.manual_seed(0)
        model, normalise = SmallCNN(10, SHAPE).to(device, dtype), Normalised(device, dtype)
        self.start = read_state(model)
        self.data = [client_data(size, k, device) for k, size in enumerate(sizes)]
        self.eager = EagerEngine(copy.deepcopy(model), recipe, normalise, device)
        self.groups: list[int] = []
        self.grouped = GroupedEngine(
            copy.deepcopy(model), recipe, normalise, device, SHAPE, 10, lambda: nullcontext(self.eager)
        )
        train_group = self.grouped._train_group
        self.grouped._train_group = lambda group: (self.groups.append(len(group)), train_group(group))[1]  # type: ignore

    def call(self, engine: Any, k: int, inputs: Inputs | None = None) -> Callable[[], Ended]:
        return lambda: engine.train(*self.start, *self.data[k], np.random.default_rng(k), inputs or Inputs())

    def check(self, ends: Sequence[Ended], rtol: float = 2e-4, atol: float = 2e-5, inputs: Any = None) -> None:
        for k, (result, trained, buffers) in enumerate(ends):
            alone, weights, _ = self.call(self.eager, k, inputs)()
            assert (result.steps, buffers) == (alone.steps, {})
            assert result.loss == pytest.approx(alone.loss, rel=1e-4, abs=1e-6)
            assert list(trained) == list(weights)
            for key in weights:
                torch.testing.assert_close(trained[key], weights[key], rtol=rtol, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_group_ends_as_its_clients_do_alone(momentum: float, decay: float, device: str) -> None:
    """Sizes give 0, 1, 2 and 4 batches per epoch, and last batches of 8, 0, 1 (skipped), 2 and 5."""
    recipe = LocalTrainingConfig(2, 8, 0.05, momentum, decay)
    clients = Clients([16, 17, 29, 10, 1, 3], recipe, device)
    for size in (6, 6, 2):  # nothing of an earlier group may remain in the buffers
        clients.check(together([clients.call(clients.grouped, k) for k in range(size)]))
    assert clients.groups == [6, 6, 2]


def test_float64_group_ends_as_its_clients_do_alone() -> None:
    clients = Clients([20, 9, 3], LocalTrainingConfig(3, 8, 0.0625, 0.5, 0.25), dtype=torch.float64)
    clients.check(together([clients.call(clients.grouped, k) for k in range(3)]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gathered", [True, False])
def test_single_client_trains_at_once(gathered: bool) -> None:
    clients = Clients([20], LocalTrainingConfig(1, 8, 0.05))
    call = clients.call(clients.grouped, 0)
    clients.check(together([call]) if gathered else [call()])
    assert clients.groups == [1]


def test_rate_of_the_round_is_used() -> None:
    clients, inputs = Clients([20, 9], LocalTrainingConfig(1, 8, 0.05)), Inputs({"learning-rate": torch.tensor(0.25)})
    clients.check(together([clients.call(clients.grouped, k, inputs) for k in range(2)]), inputs=inputs)


def test_more_clients_than_threads_train_in_full_groups() -> None:
    clients = Clients([20, 9, 3, 12, 4], LocalTrainingConfig(1, 8, 0.05))
    clients.check(together([clients.call(clients.grouped, k) for k in range(5)], at_once=2))
    assert clients.groups == [2, 2, 1]


def test_failing_client_leaves_the_others_of_its_group() -> None:
    clients = Clients([20, 9, 3, 12], LocalTrainingConfig(1, 8, 0.05))
    good = [clients.call(clients.grouped, k) for k in range(4)]
    images, labels = clients.data[0]
    state, stream = clients.start, np.random.default_rng(0)

    def raises() -> None:
        raise ZeroDivisionError

    bad = [
        lambda: clients.grouped.train(*state, images, labels + 5, stream),
        lambda: clients.grouped.train(*state, images[:, :4], labels, stream),
        lambda: clients.grouped.train({}, {}, images, labels, stream),
        raises,
    ]
    *ends, labels_error, images_error, state_error, other = together([*good, *bad])
    clients.check(ends)
    assert "labels: must be whole numbers from 0 to 9" in str(labels_error)
    assert "images: [20, 4, 8, 1], must be [20, 8, 8, 1]" in str(images_error)
    assert "state: the names differ" in str(state_error)
    assert isinstance(other, ZeroDivisionError)
    assert clients.groups == [5] and not clients.grouped._broken


def test_diverging_client_leaves_the_others_of_its_group() -> None:
    clients = Clients([20, 9], LocalTrainingConfig(2, 8, 0.05))
    diverged = {"learning-rate": torch.tensor(1e30)}
    first, second = together(
        [clients.call(clients.grouped, 0), clients.call(clients.grouped, 1, Inputs(diverged))],
    )
    clients.check([first])
    assert not all(weight.isfinite().all() for weight in second[1].values())


def test_clients_train_alone_if_their_group_fails(caplog: pytest.LogCaptureFixture) -> None:
    clients = Clients([20, 9, 3], LocalTrainingConfig(1, 8, 0.05))

    def fails(group: object) -> None:
        raise torch.OutOfMemoryError("no memory for a group")

    clients.grouped._train_group = fails  # type: ignore
    for _ in range(2):
        clients.check([(r, t, {}) for r, t, _ in together([clients.call(clients.grouped, k) for k in range(3)])])
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "clients cannot train in groups (no memory for a group); from here on one by one"
    ]


def test_interrupted_round_releases_clients_that_wait() -> None:
    clients, gathering = Clients([20], LocalTrainingConfig(1, 8, 0.05)), Gathering(2)

    def waits() -> Ended:
        with gathering.client():
            return clients.call(clients.grouped, 0)()

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt), gathering.expect(2):
            pending = pool.submit(waits)
            while not gathering._waiting:
                pass
            raise KeyboardInterrupt
        clients.check([pending.result(timeout=10)])


# ------------------------------------------------------------------------------------------------- choice


class MixesSamples(nn.Module):
    """Its buffers are none, but a sample's logits depend on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        logits: torch.Tensor = self.fc(flat - flat.mean(0))
        return logits


def test_networks_whose_clients_cannot_be_stacked_are_named() -> None:
    assert why_not_stackable(SmallCNN(10, SHAPE), SHAPE) == ""
    assert "buffers" in why_not_stackable(with_batchnorm(10, SHAPE), SHAPE)
    assert "fails or differs" in why_not_stackable(with_dropout(10, SHAPE), SHAPE)
    assert "fails or differs" in why_not_stackable(MixesSamples(), SHAPE)


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "ray"},
        {"strategy": "fedprox"},
        {"loss": "class-weighted"},
        {"views": "flip-crop"},
        {"model": "resnet18"},
    ],
)
def test_unsupported_runs_use_the_usual_engines(
    tmp_path: Path, change: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tmp_path, engine="grouped", **change)
    objective = client_part(config).objective
    assert why_not_grouped(config, "cpu", objective)
    with EnginePool().borrow(config, "cpu", objective) as engine:
        assert not isinstance(engine, GroupedEngine)
    assert "clients train one by one" in caplog.text
    assert why_not_grouped(run_config(tmp_path, engine="grouped", precision="bf16"), "cuda", CROSS_ENTROPY)


def run_config(folder: Path, **changes: Any) -> RunConfig:
    return small(folder, **{"policy": "none", "device": "cpu", "model": "small-cnn", "participation": 1.0, **changes})


@pytest.mark.parametrize("by_reference", [False, True])
def test_run_in_groups_ends_as_without(
    tmp_path: Path, by_reference: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []
    train_group = GroupedEngine._train_group
    monkeypatch.setattr(
        GroupedEngine, "_train_group", lambda self, group: (sizes.append(len(group)), train_group(self, group))[1]
    )
    alone = finish(run_config(tmp_path / "alone", rounds=2, local_epochs=1, batch_size=64))
    if by_reference:
        pass_models_by_reference(monkeypatch)
    config = run_config(tmp_path / "together", rounds=2, local_epochs=1, batch_size=64, engine="grouped")
    run = finish(config)
    assert sizes == ([2, 2] * 2 if by_reference else [4, 4])
    assert clients_at_once(config, False) == 4 and clients_at_once(config.with_changes(actors=3), False) == 3
    for one, other in zip(alone.rounds(), run.rounds(), strict=True):
        assert (one["clients"], one["steps"]) == (other["clients"], other["steps"])
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-3)
    mine, theirs = run.load_model(), alone.load_model()
    for key, array in theirs.items():
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=1e-4)


def test_grid_starts_a_group_without_a_client_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = InlineGrid._deliver
    train = "train"

    def fail_first(grid: InlineGrid, message: Any) -> Any:
        if message.metadata.message_type == train and message.metadata.dst_node_id == 1:
            message.content["config"]["server-round"] = -1
        return deliver(grid, message)

    monkeypatch.setattr(InlineGrid, "_deliver", fail_first)
    run = finish(run_config(tmp_path / "run", rounds=1, engine="grouped", min_replies=0.5))
    (record,) = run.rounds()
    assert record["clients"] == [1, 2, 3] and [failure["client"] for failure in record["failures"]] == [0]
