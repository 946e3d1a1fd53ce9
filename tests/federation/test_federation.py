"""The server's training rounds: averaging, client sampling and failures."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp
from hypothesis import example, given
from hypothesis import strategies as st

from fedeas_flwr.client_app import app as client_app
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.config import parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation import federation as federation_module
from fedeas_flwr.federation import messages, training_round
from fedeas_flwr.federation.federation import Federation, evaluate_on_clients
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.messages import EvaluateReport, TrainReport
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.policies.interface import Share
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.records import to_record
from fedeas_flwr.strategies.registry import build_strategy

START = Checkpoint(0, {"w": np.zeros(2, np.float32)}, {"n": np.array(0, np.int64), "mean": np.zeros(1, np.float32)})
EXAMPLES = (30, 10, 60)
DIGITS = messages.classes_digest(dataset_info("digits").classes)
VALUES = (1.0, 5.0, 2.0)


def toy_app(misbehave: Callable[[int, Message], Message | None] = lambda client, message: None) -> ClientApp:
    """Return clients that each reply with a constant model, so that averages can be computed by hand."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Any) -> Message:
        node = context.node_config
        client = node["partition-id"]
        numbers = {"partitions": node["num-partitions"], "examples": EXAMPLES[client], "classes": DIGITS}
        return messages.build_query_reply(message, client, **numbers)

    @app.train()
    def train(message: Message, context: Any) -> Message:
        client = context.node_config["partition-id"]
        odd = misbehave(client, message)
        if odd is not None:
            return odd
        value = VALUES[client]
        trained = {"w": np.full(2, value, np.float32)}
        buffers = {"n": np.array(client + 2, np.int64), "mean": np.array([value], np.float32)}
        report = TrainReport(client, EXAMPLES[client], value, EXAMPLES[client] // 10, 10 * client, 0, 0.0, 0.0)
        return messages.train_reply(message, report, trained, buffers, {})

    return app


class ShuffledGrid(InlineGrid):
    """Returns the replies in reverse order."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return list(super().send_and_receive(messages))[::-1]


def federation(folder: Path, app: ClientApp, grid: type[InlineGrid] = InlineGrid, **keys: Any) -> Federation:
    config = parse_config({"clients": 3, "participation": 1.0, "policy": "fedeas", "run-dir": str(folder), **keys})
    made = Federation(
        grid(app, 3, config.to_user_dict()), config, build_strategy(config), RunDirectory.start(config, {})
    )
    assert made.clients.discover() == 3
    made.clients.plan()
    return made


def test_average_is_weighted_and_counters_stay_integers(tmp_path: Path) -> None:
    state, outcome = federation(tmp_path, toy_app()).training.train_round(START)
    by_hand = (30 * 1.0 + 10 * 5.0 + 60 * 2.0) / 100
    assert state.trainable["w"] == pytest.approx([by_hand, by_hand])
    assert state.trainable["w"].dtype == np.float32
    assert state.buffers["mean"] == pytest.approx([by_hand])
    assert state.buffers["n"] == round((30 * 2 + 10 * 3 + 60 * 4) / 100)
    assert state.buffers["n"].dtype == np.int64
    assert state.buffers["n"].shape == ()
    assert state.accepted == {0: 1, 1: 1, 2: 1}
    assert sum(state.generated.values()) == 30
    assert outcome.failures == []


def test_aggregate_in_another_dtype_is_cast_like_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = federation(tmp_path, toy_app())
    monkeypatch.setattr(made.strategy, "aggregate_train", lambda *_: (to_record({"w": np.array([0.5, 2.0])}), None))
    state, _ = made.training.train_round(START)
    assert state.trainable["w"].tolist() == [0.5, 2.0] and state.trainable["w"].dtype == np.float32


def test_gamma_hat_is_weighted_by_samples(tmp_path: Path) -> None:
    def move(client: int, message: Message) -> Message:
        report = TrainReport(client, EXAMPLES[client], 0.0, 1, 0, 0, 0.0, 0.0)
        arrays = {"w": np.array([[1, 0], [0, 1], [0, 3]][client], np.float32)}
        return messages.train_reply(message, report, arrays, dict(START.buffers), {})

    made = federation(tmp_path, toy_app(move), **{"gamma-hat": "trainable"})
    _, outcome = made.training.train_round(START)
    assert outcome.gamma_hat is not None and outcome.gamma_hat() == pytest.approx(1 - 0.3**2 - 0.7**2)


def test_average_does_not_depend_on_reply_order(tmp_path: Path) -> None:
    first, _ = federation(tmp_path / "a", toy_app()).training.train_round(START)
    second, _ = federation(tmp_path / "b", toy_app(), ShuffledGrid).training.train_round(START)
    assert first.trainable["w"].tobytes() == second.trainable["w"].tobytes()


class ReversedGrid(InlineGrid):
    """Lists the nodes in descending order, as if they had connected in it."""

    def get_node_ids(self) -> list[int]:
        return sorted(super().get_node_ids(), reverse=True)


def test_matched_shares_do_not_depend_on_the_order_of_nodes(tmp_path: Path) -> None:
    keys = {"policy": "uniform", "total": 32}  # one per client and class, and 2 more
    shares = [
        federation(tmp_path / grid.__name__, client_app, grid, **keys).clients.shares
        for grid in (InlineGrid, ReversedGrid)
    ]
    assert shares[0] == shares[1] and len(set(shares[0].values())) > 1


def test_clients_with_most_steps_are_sent_tasks_first(tmp_path: Path) -> None:
    asked: list[int] = []
    federated = federation(tmp_path, toy_app(lambda client, message: asked.append(client)))
    state, _ = federated.training.train_round(START)
    state, _ = federated.training.train_round(state)
    assert asked == [0, 1, 2, 2, 0, 1]
    federated.training._steps.pop(1)  # as if not seen yet, so that it still has to generate
    federated.training.train_round(state)
    assert asked[6:] == [1, 2, 0]


def client_faults() -> dict[str, Callable[[int, Message], Message | None]]:
    def raises(client: int, message: Message) -> Message | None:
        if client == 1:
            raise ArithmeticError("out of luck")
        return None

    def sends_nan(client: int, message: Message) -> Message | None:
        if client != 1:
            return None
        report = TrainReport(1, 10, 0.0, 1, 0, 0, 0.0, 0.0)
        arrays = {"w": np.array([np.nan, 0], np.float32)}
        return messages.train_reply(message, report, arrays, START.buffers, {})

    return {"raises": raises, "NaN": sends_nan}


@pytest.mark.parametrize(("loss", "weight"), [(float("nan"), 0.0), (0.0, float("inf")), (0.0, 1e15)])
@pytest.mark.parametrize("clients", [{1}, {0, 1, 2}])
def test_divergence_of_most_clients_suggests_a_lower_rate(
    tmp_path: Path, loss: float, weight: float, clients: set[int]
) -> None:
    def diverges(client: int, message: Message) -> Message | None:
        if client not in clients:
            return None
        report = TrainReport(client, EXAMPLES[client], 0.0, 1, 0, 0, 0.0, 0.0)
        arrays = {"w": np.array([weight, 0], np.float32)}
        reply = messages.train_reply(message, report, arrays, START.buffers, {})
        (metrics,) = reply.content.metric_records.values()
        metrics["loss"] = loss
        return reply

    with pytest.raises(RunError) as stopped:
        federation(tmp_path, toy_app(diverges), **{"learning-rate": 80.0}).training.train_round(START)
    assert ("try a lower learning-rate (now 80)" in str(stopped.value)) is (len(clients) == 3)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["raises", "NaN"])
def test_failed_client_is_named_and_the_rest_averaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, threads: int
) -> None:
    monkeypatch.setattr(training_round, "threads_for", lambda model, models: threads)
    app = toy_app(client_faults()[kind])
    strict = federation(tmp_path / "strict", app)
    with pytest.raises(RunError, match=r"round 1: 1 of 3 clients failed and min-replies = 1 .* client 1: "):
        strict.training.train_round(START)
    state, outcome = federation(tmp_path / "lax", app, **{"min-replies": 0.5}).training.train_round(START)
    assert state.trainable["w"] == pytest.approx((30 * 1.0 + 60 * 2.0) / 90)
    assert [failure["client"] for failure in outcome.failures] == [1]
    assert 1 not in state.accepted


@pytest.mark.parametrize("threads", [1, 3])
def test_failed_clients_are_logged_in_client_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    def all_fail(client: int, message: Message) -> Message | None:
        raise ValueError(f"failure of {client}")

    place = f"(test_federation.py, line {all_fail.__code__.co_firstlineno + 1})"

    def first_is_slow(reply: Message) -> str:
        if "failure of 0" in reply.error.reason:
            time.sleep(0.2)
        return failure_reason(reply)

    logged: list[str] = []
    failure_reason = messages.failure_reason
    monkeypatch.setattr(messages, "failure_reason", first_is_slow)
    monkeypatch.setattr(training_round, "threads_for", lambda model, models: threads)
    for module in (messages, training_round):
        monkeypatch.setattr(module, "log", lambda level, text, *values: logged.append((text % values).splitlines()[0]))
    with pytest.raises(RunError, match="3 of 3 clients failed"):
        federation(tmp_path, toy_app(all_fail), policy="none").training.train_round(START)
    assert [re.sub("node [0-9]+ failed", "node failed", line) for line in logged] == [
        f"{who}: ValueError: failure of {k} {place}" for k in range(3) for who in ("node failed", f"client {k}")
    ]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        # 60 + 40 + 90: ten classes, each filled to ⌊β √(N / 10)⌋ at most
        ({}, " at most 190 in total; a node without the built-in generator trains it first"),
        ({"generator": "/a/model"}, " at most 190 in total"),
        ({"policy": "none"}, None),
    ],
)
def test_server_logs_who_generates_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], told: str | None
) -> None:
    def first_is_late(client: int, message: Message) -> Message | None:
        if client == 0 and messages.read_task(message).round == 1:
            raise TimeoutError("late")
        report = TrainReport(client, EXAMPLES[client], 0.0, 1, 0, 0, 0.0, 0.0)
        return messages.train_reply(message, report, {"w": np.zeros(2, np.float32)}, dict(START.buffers), {})

    logged: list[str] = []
    monkeypatch.setattr(training_round, "log", lambda level, text, *values: logged.append(text % values))
    made = federation(tmp_path, toy_app(first_is_late), **{"min-replies": 0.5, "beta": 4.0, **keys})
    state = START
    for _ in range(3):
        state, _ = made.training.train_round(state)
    lines = [line for line in logged if line.startswith("round ")]
    if told is None:
        assert lines == []
        return
    assert lines[0] == f"round 1: clients 0–2 generate images before they train,{told}"
    assert [line.partition(",")[0] for line in lines[1:]] == ["round 2: client 0 generates images before it trains"]


def test_round_without_any_valid_reply_fails(tmp_path: Path) -> None:
    def all_fail(client: int, message: Message) -> Message | None:
        raise ValueError("no")

    lax = federation(tmp_path, toy_app(all_fail), **{"min-replies": 0.01})
    with pytest.raises(RunError, match="3 of 3 clients failed"):
        lax.training.train_round(START)


def test_strategy_that_returns_no_model_fails_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = federation(tmp_path, toy_app())
    monkeypatch.setattr(made.strategy, "aggregate_train", lambda number, replies: (None, None))
    with pytest.raises(RunError, match=r"^round 1: strategy = 'fedavg' returned no model for 3 replies$"):
        made.training.train_round(START)


@pytest.mark.parametrize(("first", "warned"), [(1, [1]), (2, [2]), (4, [])])
def test_first_round_without_a_step_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, warned: list[int]
) -> None:
    def has_too_few_images(client: int, message: Message) -> Message | None:
        if messages.read_task(message).round < first:
            return None
        report = TrainReport(client, EXAMPLES[client], 0.0, 0, 0, 0, 0.0, 0.0)
        return messages.train_reply(message, report, {"w": np.zeros(2, np.float32)}, dict(START.buffers), {})

    logged: list[str] = []
    monkeypatch.setattr(federation_module, "log", lambda level, text, *values: logged.append(text % values))
    federation(tmp_path, toy_app(has_too_few_images), rounds=3).fit(START, lambda *_: {"accuracy": 0.5})
    lines = [line for line in logged if "training step" in line]
    assert [line.partition(":")[0] for line in lines] == [f"round {number}" for number in warned]
    assert all("min-batch = 2" in line for line in lines)


def test_rejected_plan_reply_is_recorded_with_round_1_only(tmp_path: Path) -> None:
    made = federation(tmp_path, toy_app(), rounds=3)
    made.clients.refused[1] = "plan: total = 9, but it is at most 5 with 10 samples"
    made.fit(START, lambda *model: {"accuracy": 0.5})
    refused = [{"client": 1, "reason": "plan: total = 9, but it is at most 5 with 10 samples"}]
    assert [record["failures"] for record in made.run.rounds()] == [refused, [], []]


def test_record_weights_losses_and_counts_all_images(tmp_path: Path) -> None:
    """The images of a client whose reply is missing are still in its cache."""

    def fail(client: int, message: Message) -> Message | None:
        if messages.read_task(message).round == 2 and client == 2:
            raise ValueError("no")
        return None

    made = federation(tmp_path, toy_app(fail), rounds=2, **{"min-replies": 0.5})
    made.fit(START, lambda *model: {"accuracy": 0.5})
    first, second = made.run.rounds()
    assert first["train_loss"] == (30 * 1.0 + 10 * 5.0 + 60 * 2.0) / 100
    assert second["train_loss"] == (30 * 1.0 + 10 * 5.0) / 40
    assert first["generated"] == second["generated"] == 10 + 20


def test_last_round_fails_if_its_checkpoint_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(checkpoint: Checkpoint) -> None:
        raise OSError("disk full")

    made = federation(tmp_path, toy_app(), rounds=2, **{"checkpoint-every": 50})
    monkeypatch.setattr(made.run, "save_checkpoint", fail)
    with pytest.raises(OSError, match="disk full"):
        made.fit(START, lambda *model: {"accuracy": 0.5})


def test_evaluation_without_any_test_image_fails(tmp_path: Path) -> None:
    app = toy_app()

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        return messages.evaluate_reply(message, EvaluateReport(context.node_config["partition-id"], 0, 0, 0.0))

    made = federation(tmp_path, app)
    with pytest.raises(RunError, match="evaluation: no client has test data of its own"):
        evaluate_on_clients(made.grid, made.config, made.clients.nodes, START)


def test_failed_round_keeps_images_bought_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(client: int, message: Message) -> Message | None:
        if messages.read_task(message).round == 2:
            raise ValueError("no")
        return None

    def buy(training: TrainingRounds, state: Checkpoint) -> None:
        training.clients.shares[0] = Share(base=10 * (state.round + 1))

    monkeypatch.setattr(federation_module, "buy_images", buy)
    made = federation(tmp_path, toy_app(fail), rounds=2, **{"failed-rounds": 2})
    made.fit(START, lambda *model: {"accuracy": 0.5})
    kept = made.run.load_checkpoint()
    assert kept is not None and kept.shares == {0: (20, 0, 0.0)}


def test_moving_average_is_slow_only_after_some_rounds(tmp_path: Path) -> None:
    training, zeros, ones = federation(tmp_path, toy_app()).training, START.trainable, {"w": np.ones(2, np.float32)}
    largest = training.config.generator_training.ema_decay
    first = {"w": np.random.default_rng(0).normal(size=100).astype(np.float32)}
    assert np.array_equal(training._average(START, first)["w"], first["w"])
    for number, decay in ((1, 2 / 11), (10**6, largest)):
        average = training._average(replace(START, round=number, average=zeros), ones)
        assert average["w"] == pytest.approx(1 - decay)


def test_resumed_run_names_both_checkpoints_to_its_clients(tmp_path: Path) -> None:
    federation(tmp_path, toy_app(), rounds=2, **{"checkpoint-every": 1}).fit(START, lambda *model: {"accuracy": 0.5})
    resumed = federation(tmp_path, toy_app(), rounds=3, resume=True, **{"checkpoint-every": 1})
    kept = resumed.run.load_checkpoint()
    assert kept is not None
    resumed.restore(kept)
    task = resumed.training.task_of(1, kept, "0" * 32)
    assert (task.round, task.accepted_round, task.checkpointed_round, task.previous_checkpointed_round) == (3, 2, 2, 1)


def test_task_holds_the_last_accepted_round_of_its_client(tmp_path: Path) -> None:
    sent: list[tuple[int, int, int]] = []

    def note(client: int, message: Message) -> Message | None:
        task = messages.read_task(message)
        sent.append((task.round, client, task.accepted_round))
        if task.round == 2 and client == 0:
            raise ValueError("reply lost")
        return None

    run = federation(tmp_path, toy_app(note), **{"min-replies": 0.5})
    state = START
    for _ in range(3):
        state, _ = run.training.train_round(state)
    assert [t for t in sent if t[1] == 0] == [(1, 0, 0), (2, 0, 1), (3, 0, 1)]
    assert [t for t in sent if t[1] == 1] == [(1, 1, 0), (2, 1, 1), (3, 1, 2)]


def test_client_sampling_depends_only_on_seed_and_round(tmp_path: Path) -> None:
    config = {"participation": 0.5}
    run = federation(tmp_path / "a", toy_app(), **config)
    run.clients.nodes = {client: 1000 - client for client in range(20)}
    other = federation(tmp_path / "b", toy_app(), **config)
    other.clients.nodes = {client: 7 * client + 1 for client in reversed(range(20))}
    draws = [run.training.sample(n) for n in range(1, 200)]
    assert draws == [other.training.sample(n) for n in range(1, 200)]
    assert all(len(set(d)) == 10 for d in draws)
    often = np.bincount(np.concatenate(draws), minlength=20)
    assert often.min() > 60  # in 199 rounds; 99.5 are expected
    different = federation(tmp_path / "c", toy_app(), seed=2, **config)
    different.clients.nodes = run.clients.nodes
    assert [different.training.sample(n) for n in range(1, 20)] != draws[:19]


@given(hundredths=st.integers(1, 100), asked=st.integers(1, 2000))
@example(hundredths=28, asked=25)
@example(hundredths=55, asked=100)
def test_min_replies_for_matches_exact_arithmetic(hundredths: int, asked: int) -> None:
    """0.28 · 25 is 7.000000000000001 in floats, but 7 of 25 replies are enough."""
    config = parse_config({"min-replies": hundredths / 100})
    assert config.min_replies_for(asked) == -(-hundredths * asked // 100)


def test_wrong_number_of_nodes_error_names_num_supernodes(tmp_path: Path) -> None:
    config = parse_config({"clients": 10, "run-dir": str(tmp_path), "node-wait": 0})
    grid = InlineGrid(toy_app(), 2, config.to_user_dict())
    run = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    with pytest.raises(RunError, match=r"clients = 10, but the federation has 2 nodes: .*num-supernodes=10"):
        run.clients.discover()
