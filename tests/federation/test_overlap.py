"""The server's test goes on beside the next round: nothing else may change by it."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from runners import NEEDS, finish, hand_models_over, quick, weights
from test_federation import START, federation, toy_app
from timelines import Timelines
from waiting import LONG

from fedeas_flwr import server_app
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.npy import Arrays, to_numpy
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.federation import BackgroundTask, Federation
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import WALL_CLOCK, seconds_of
from fedeas_flwr.strategies.registry import ALGORITHMS

OK = {"accuracy": 0.5, "loss": 1.0}


def rounds_of_clients(then: Callable[[int, int], None]) -> Callable[[int, Message], Message | None]:
    """What a toy client does when it is asked to train: ``then(round, client)``."""

    def train(client: int, message: Message) -> Message | None:
        then(messages.read_task(message).round, client)
        return None

    return train


def background_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("end-of-round")]


def recorded(run: RunDirectory) -> list[int]:
    return [record["round"] for record in run.rounds()]


@pytest.mark.parametrize("checkpoint_every", [1, 2, 50])
def test_a_rounds_test_waits_for_the_next_rounds_clients(tmp_path: Path, checkpoint_every: int) -> None:
    """A test that ends only when clients of the next round have begun, so that it would hang if it came first."""
    begun = {number: threading.Event() for number in range(1, 5)}
    tested: list[int] = []

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        number = len(tested) + 1
        if number < 4:
            assert begun[number + 1].wait(LONG), "the next round waited for the test"
        tested.append(number)
        return OK

    app = toy_app(rounds_of_clients(lambda number, client: begun[number].set()))
    run = federation(tmp_path, app, rounds=4, **{"checkpoint-every": checkpoint_every})
    run.fit(START, test)
    assert tested == recorded(run.run) == [1, 2, 3, 4]
    assert not background_threads()


def test_records_and_checkpoints_come_in_order_and_one_round_behind_at_most(tmp_path: Path) -> None:
    """The slowest test there can be: one that is over only when its round is to be recorded."""
    happened: list[tuple[str, int]] = []
    sent: dict[int, list[tuple[int, int]]] = {}
    federated: Federation

    def train(client: int, message: Message) -> Message | None:
        task = messages.read_task(message)
        if client == 0:
            happened.append(("train", task.round))
            released.set()
        sent.setdefault(task.round, []).append((task.accepted_round, task.checkpointed_round))
        return None

    released = threading.Event()

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        released.wait(0.2)
        released.clear()
        return OK

    federated = federation(tmp_path, toy_app(train), rounds=6, **{"checkpoint-every": 2})
    save, before = federated.run.save_checkpoint, federated.before_checkpoint

    def save_noted(checkpoint: Checkpoint) -> None:
        assert recorded(federated.run)[-1] == checkpoint.round, "a checkpoint goes before its record"
        happened.append(("checkpoint", checkpoint.round))
        save(checkpoint)

    def before_noted() -> None:
        assert threading.current_thread() is threading.main_thread(), "clients must not be training meanwhile"
        happened.append(("states", max(number for what, number in happened if what == "train")))
        before()

    federated.run.save_checkpoint = save_noted  # type: ignore[method-assign]
    federated.before_checkpoint = before_noted
    federated.on_round_end = lambda record: happened.append(("record", record["round"]))
    federated.fit(START, test)

    for kind in ("train", "record"):
        assert [number for what, number in happened if what == kind] == list(range(1, 7))
    assert [number for what, number in happened if what == "checkpoint"] == [2, 4, 6]
    for number in range(1, 5):  # before round n + 2 begins, round n is recorded
        assert happened.index(("record", number)) < happened.index(("train", number + 2))
    for number in (2, 4):  # and, where that is due, checkpointed, and the clients' states are on disk before that
        assert happened.index(("states", number)) < happened.index(("train", number + 1))
        assert happened.index(("states", number)) < happened.index(("checkpoint", number))
        assert happened.index(("checkpoint", number)) < happened.index(("train", number + 2))
    # A client is told no checkpoint that is not on disk yet, and of the last round but one it is.
    for number, tasks in sent.items():
        assert {accepted for accepted, _ in tasks} == {number - 1}
        assert {told for _, told in tasks} <= {(number - 1) // 2 * 2, (number - 2) // 2 * 2, 0}
    log = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in log] == list(range(1, 7))


def test_seconds_of_a_test_count_once_and_only_where_they_held_a_round_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Timelines(monkeypatch)

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        times.spend(0.25)
        return OK

    def slow_in_round_2(number: int, client: int) -> None:
        if number == 2 and client == 0:
            times.spend(0.5)

    run = federation(tmp_path, toy_app(rounds_of_clients(slow_in_round_2)), rounds=4)
    run.fit(START, test)
    seconds = [record["seconds"] for record in run.run.rounds()]
    assert [s["evaluate"] for s in seconds] == [0.25] * 4
    assert [s["clients"] for s in seconds] == [0, 0.5, 0, 0]
    first, beside_long, beside_short, last = (s["end_wait"] for s in seconds)
    assert first == beside_long == 0, "round 1's test is over when round 2's clients are"
    assert beside_short == 0.25, "round 3's clients were done at once and waited for round 2's test"
    assert last == 0.5, "the last one waited for round 3's test and for its own"
    assert sum(s[phase] for s in seconds for phase in WALL_CLOCK) == times.perf_counter() == 1.25
    older = {"clients": 1.0, "gamma_hat": 0.25, "evaluate": 0.5}  # records from before there was such a wait
    assert seconds_of("end_wait", older) == 0.75 and seconds_of("end_wait", {**older, "test_wait": 0.125}) == 0.375
    assert seconds_of("evaluate", {}) == seconds_of("clients", {}) == 0.0
    assert run.run.summary()["seconds"]["end_wait"] == pytest.approx(sum(s["end_wait"] for s in seconds), abs=1e-3)
    assert not {"evaluate", "gamma_hat"} & set(WALL_CLOCK)


def test_gamma_hat_is_worked_out_beside_the_next_round_and_its_models_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, begun = Timelines(monkeypatch), {number: threading.Event() for number in range(1, 5)}
    held: list[list[weakref.ref[Any]]] = []
    kept: list[int] = []

    def gamma_hat(start: Arrays, ends: Sequence[Arrays], weights: Sequence[float]) -> float:
        held.append([weakref.ref(array) for end in ends for array in end.values()])
        if len(held) < 4:
            assert begun[len(held) + 1].wait(LONG), "the next round waited for Γ̂"
        times.spend(0.125)
        return len(held) / 8

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        kept.append(sum(ref() is not None for refs in held[:-1] for ref in refs))
        return OK

    monkeypatch.setattr("fedeas_flwr.federation.training_round.gradient_dissimilarity", gamma_hat)
    app = toy_app(rounds_of_clients(lambda number, client: begun[number].set()))
    run = federation(tmp_path, app, rounds=4)
    run.fit(START, test)
    records = run.run.rounds()
    assert [record["gamma_hat"] for record in records] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert [record["seconds"]["gamma_hat"] for record in records] == [0.125] * 4
    waited = [record["seconds"]["end_wait"] for record in records]
    assert waited == [0, 0.125, 0.125, 0.25], "each for the one before, and the last for its own"
    assert all(held) and kept == [0, 0, 0, 0], "the models of the rounds before are still there"


def test_an_error_in_the_test_ends_the_run_with_the_rounds_before_recorded(tmp_path: Path) -> None:
    tested: list[int] = []

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        tested.append(1)
        if len(tested) == 2:
            raise RunError("the test images are gone")
        return OK

    run = federation(tmp_path, toy_app(), rounds=5)
    with pytest.raises(RunError, match=r"^the test images are gone$"):
        run.fit(START, test)
    assert recorded(run.run) == [1]
    checkpoint = run.run.load_checkpoint()
    assert checkpoint is not None and checkpoint.round == 1
    assert len(tested) == 2 and not background_threads()
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "model.safetensors").exists()


def test_a_round_that_fails_leaves_the_one_before_recorded_and_checkpointed(tmp_path: Path) -> None:
    fails = threading.Event()

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        fails.wait(LONG)
        return OK

    def fail(number: int, client: int) -> None:
        if number == 2:
            fails.set()
            raise ValueError("no")

    run = federation(tmp_path, toy_app(rounds_of_clients(fail)), rounds=5)
    with pytest.raises(RunError, match="round 2: 3 of 3 clients failed"):
        run.fit(START, test)
    checkpoint = run.run.load_checkpoint()
    assert recorded(run.run) == [1] and checkpoint is not None and checkpoint.round == 1
    assert not background_threads()


def test_of_two_errors_the_earlier_rounds_is_told(tmp_path: Path) -> None:
    fails = threading.Event()

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        fails.wait(LONG)
        raise RunError("the test images are gone")

    def fail(number: int, client: int) -> None:
        if number == 2:
            fails.set()
            raise ValueError("no")

    run = federation(tmp_path, toy_app(rounds_of_clients(fail)), rounds=5)
    with pytest.raises(RunError, match="the test images are gone"):
        run.fit(START, test)
    assert recorded(run.run) == []


def test_a_round_below_its_quorum_that_may_pass_is_tested_like_any(tmp_path: Path) -> None:
    def fail(number: int, client: int) -> None:
        if number == 2:
            raise ValueError("no")

    seen: list[float] = []

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        seen.append(float(trainable["w"][0]))
        return OK

    run = federation(tmp_path, toy_app(rounds_of_clients(fail)), rounds=3, **{"failed-rounds": 2})
    run.fit(START, test)
    assert recorded(run.run) == [1, 2, 3]
    assert [len(record["failures"]) for record in run.run.rounds()] == [0, 3, 0]
    assert seen == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize("test_fails", [False, True])
def test_an_interruption_waits_for_the_test_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test_fails: bool
) -> None:
    interrupted = threading.Event()

    def central_test(*given: Any) -> Any:
        def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            interrupted.wait(LONG)
            threading.Event().wait(0.2)
            if test_fails:
                raise RunError("the test images are gone")
            return OK

        return test

    train_round = TrainingRounds.train_round

    def interrupt_round_2(self: TrainingRounds, state: Checkpoint) -> Any:
        if state.round == 1:
            interrupted.set()
            raise KeyboardInterrupt
        return train_round(self, state)

    monkeypatch.setattr(server_app, "central_test", central_test)
    monkeypatch.setattr(TrainingRounds, "train_round", interrupt_round_2)
    with pytest.raises(KeyboardInterrupt):
        finish(quick(tmp_path / "r", policy="none"))
    run = RunDirectory(tmp_path / "r")
    assert run.status()[0] == "interrupted"
    assert recorded(run) == ([] if test_fails else [1])
    assert not background_threads()


def test_an_error_in_the_test_is_one_line_of_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def central_test(*given: Any) -> Any:
        def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            raise ArithmeticError("out of\nluck")

        return test

    monkeypatch.setattr(server_app, "central_test", central_test)
    with pytest.raises((RunError, ArithmeticError)):
        finish(quick(tmp_path / "r", policy="none"))
    assert RunDirectory(tmp_path / "r").status() == ("failed", "ArithmeticError: out of luck")


def test_what_is_done_beside_is_waited_for_and_its_error_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Timelines(monkeypatch)

    def fail() -> None:
        raise ZeroDivisionError

    with BackgroundTask() as beside:
        assert beside.wait() == 0  # there is nothing to wait for
        beside.start(lambda: times.spend(2))
        times.spend(0.5)
        assert beside.wait() == 1.5
        beside.start(fail)
        with pytest.raises(ZeroDivisionError):
            beside.wait()
        beside.wait()
    with pytest.raises(ZeroDivisionError), BackgroundTask() as beside:
        beside.start(fail)
    with pytest.raises(SystemExit), BackgroundTask() as beside:
        beside.start(fail)
        raise SystemExit


QUICK = ("fedavg", "scaffold", "fedavgm")


@pytest.mark.parametrize(
    "strategy", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in sorted(ALGORITHMS)]
)
@pytest.mark.parametrize("live", [False, True])
def test_a_rounds_state_is_not_changed_by_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, live: bool
) -> None:
    """What is tested and checkpointed beside the next round: the arrays themselves, seen again when all is over."""
    held: list[tuple[Arrays, dict[str, np.ndarray[Any, Any]]]] = []
    train_round = TrainingRounds.train_round

    def hold(self: TrainingRounds, state: Checkpoint) -> Any:
        after, outcome = train_round(self, state)
        for arrays in (after.trainable, after.buffers, after.strategy.arrays):
            held.append((arrays, {key: value.copy() for key, value in to_numpy(arrays).items()}))
        return after, outcome

    monkeypatch.setattr(TrainingRounds, "train_round", hold)
    if live:
        hand_models_over(monkeypatch)
    keys = {"policy": "none", "participation": 1.0, "strategy": strategy, "device": "cpu", **NEEDS.get(strategy, {})}
    run = finish(quick(tmp_path / "r", **keys))
    assert len(held) == 9 and recorded(run) == [1, 2, 3]
    assert any(isinstance(value, torch.Tensor) for arrays, _ in held for value in arrays.values()) or not live
    for arrays, then in held:
        for key, value in to_numpy(arrays).items():
            assert np.array_equal(value, then[key]), key


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "scaffold"])
def test_what_is_measured_and_tested_beside_the_clients_is_what_it_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, live: bool
) -> None:
    if live:
        hand_models_over(monkeypatch)
    keys = {"policy": "none", "rounds": 5, "strategy": strategy, "gamma_hat": "all-state", "device": "cpu"}
    beside = finish(quick(tmp_path / "beside", **keys))
    monkeypatch.setattr(BackgroundTask, "start", lambda self, work: work())
    alone = finish(quick(tmp_path / "alone", **keys))
    assert all(record["gamma_hat"] > 0 for record in beside.rounds())
    assert weights(beside) == weights(alone)
    same = [[{**record, "seconds": {}} for record in run.rounds()] for run in (beside, alone)]
    assert same[0] == same[1]
