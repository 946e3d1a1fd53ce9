"""End-of-round work (Γ̂, evaluation, record, checkpoint) runs during the next round and changes no result."""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from runners import NEEDS, finish, pass_models_by_reference, quick, weights
from test_federation import START, federation, toy_app
from timelines import Timelines
from waiting import LONG

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.npy import Arrays, to_numpy
from fedeas_flwr.config import STRATEGIES
from fedeas_flwr.federation import learners, messages
from fedeas_flwr.federation.federation import BackgroundTask, Federation
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import WALL_CLOCK

OK = {"accuracy": 0.5, "loss": 1.0}


def on_train(then: Callable[[int, int], None]) -> Callable[[int, Message], Message | None]:
    """Return a hook for `toy_app` that calls ``then(round, client)`` when a client is asked to train."""

    def train(client: int, message: Message) -> Message | None:
        then(messages.read_task(message).round, client)
        return None

    return train


def background_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("end-of-round")]


def recorded_rounds(run: RunDirectory) -> list[int]:
    return [record["round"] for record in run.rounds()]


@pytest.mark.parametrize("checkpoint_every", [1, 2, 50])
def test_evaluation_overlaps_with_the_next_round(tmp_path: Path, checkpoint_every: int) -> None:
    """The evaluation returns only after the next round's clients have started, so running it first would hang."""
    begun = {number: threading.Event() for number in range(1, 5)}
    evaluated: list[int] = []

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        number = len(evaluated) + 1
        if number < 4:
            assert begun[number + 1].wait(LONG), "the next round waited for the evaluation"
        evaluated.append(number)
        return OK

    app = toy_app(on_train(lambda number, client: begun[number].set()))
    run = federation(tmp_path, app, rounds=4, **{"checkpoint-every": checkpoint_every})
    run.fit(START, evaluate)
    assert evaluated == recorded_rounds(run.run) == [1, 2, 3, 4]
    assert not background_threads()


def test_records_and_checkpoints_lag_at_most_one_round(tmp_path: Path) -> None:
    """Use the slowest possible evaluation: it ends only when its round has to be recorded."""
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

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        released.wait(0.2)
        released.clear()
        return OK

    federated = federation(tmp_path, toy_app(train), rounds=6, **{"checkpoint-every": 2})
    save = federated.run.save_checkpoint

    def save_noted(checkpoint: Checkpoint) -> None:
        assert recorded_rounds(federated.run)[-1] == checkpoint.round, "checkpointed before its record was written"
        happened.append(("checkpoint", checkpoint.round))
        save(checkpoint)

    def before_noted() -> Callable[[], None]:
        assert threading.current_thread() is threading.main_thread(), "client states were taken while clients train"
        number = max(number for what, number in happened if what == "train")
        happened.append(("states taken", number))
        return lambda: happened.append(("states", number))

    federated.run.save_checkpoint = save_noted  # type: ignore[method-assign]
    federated.before_checkpoint = before_noted
    federated.on_round_end = lambda record: happened.append(("record", record["round"]))
    federated.fit(START, evaluate)

    for kind in ("train", "record"):
        assert [number for what, number in happened if what == kind] == list(range(1, 7))
    assert [number for what, number in happened if what == "checkpoint"] == [2, 4, 6]
    for number in range(1, 5):  # round n is recorded before round n + 2 starts
        assert happened.index(("record", number)) < happened.index(("train", number + 2))
    for number in (2, 4):  # and checkpointed if due, after the client states are on disk
        assert happened.index(("states taken", number)) < happened.index(("train", number + 1))
        assert happened.index(("states", number)) < happened.index(("checkpoint", number))
        assert happened.index(("checkpoint", number)) < happened.index(("train", number + 2))
    # A task never names a checkpoint that is not on disk yet; that of the round before the last one always is.
    for number, tasks in sent.items():
        assert {accepted for accepted, _ in tasks} == {number - 1}
        assert {checkpointed for _, checkpointed in tasks} <= {(number - 1) // 2 * 2, (number - 2) // 2 * 2, 0}
    log = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in log] == list(range(1, 7))


def test_evaluation_time_counts_once_and_only_if_it_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Timelines(monkeypatch)

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        times.spend(0.25)
        return OK

    def slow_in_round_2(number: int, client: int) -> None:
        if number == 2 and client == 0:
            times.spend(0.5)

    run = federation(tmp_path, toy_app(on_train(slow_in_round_2)), rounds=4)
    run.fit(START, evaluate)
    seconds = [record["seconds"] for record in run.run.rounds()]
    assert [s["evaluate"] for s in seconds] == [0.25] * 4
    assert [s["clients"] for s in seconds] == [0, 0.5, 0, 0]
    first, second, third, last = (s["end_wait"] for s in seconds)
    assert first == second == 0, "round 1's evaluation ends before round 2's clients do"
    assert third == 0.25, "round 3's clients end at once and wait for round 2's evaluation"
    assert last == 0.5, "the last round waits for round 3's evaluation and for its own"
    assert sum(s[phase] for s in seconds for phase in WALL_CLOCK) == times.perf_counter() == 1.25
    assert run.run.summary()["seconds"]["end_wait"] == pytest.approx(sum(s["end_wait"] for s in seconds), abs=1e-3)
    assert not {"evaluate", "gamma_hat"} & set(WALL_CLOCK)


def test_gamma_hat_overlaps_next_round_and_frees_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times, begun = Timelines(monkeypatch), {number: threading.Event() for number in range(1, 5)}
    held: list[list[weakref.ref[Any]]] = []
    kept: list[int] = []

    def gamma_hat(start: Arrays, ends: Sequence[Arrays], weights: Sequence[float]) -> float:
        held.append([weakref.ref(array) for end in ends for array in end.values()])
        if len(held) < 4:
            assert begun[len(held) + 1].wait(LONG), "the next round waited for Γ̂"
        times.spend(0.125)
        return len(held) / 8

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        kept.append(sum(ref() is not None for refs in held[:-1] for ref in refs))
        return OK

    monkeypatch.setattr("fedeas_flwr.federation.training_round.gradient_dissimilarity", gamma_hat)
    app = toy_app(on_train(lambda number, client: begun[number].set()))
    run = federation(tmp_path, app, rounds=4)
    run.fit(START, evaluate)
    records = run.run.rounds()
    assert [record["gamma_hat"] for record in records] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert [record["seconds"]["gamma_hat"] for record in records] == [0.125] * 4
    waited = [record["seconds"]["end_wait"] for record in records]
    assert waited == [0, 0.125, 0.125, 0.25], "each round waits for the one before; the last also for its own"
    assert all(held) and kept == [0, 0, 0, 0], "models of earlier rounds are still in memory"


def test_evaluation_error_keeps_earlier_rounds_recorded(tmp_path: Path) -> None:
    evaluated: list[int] = []

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        evaluated.append(1)
        if len(evaluated) == 2:
            raise RunError("the test images are gone")
        return OK

    run = federation(tmp_path, toy_app(), rounds=5)
    with pytest.raises(RunError, match=r"^the test images are gone$"):
        run.fit(START, evaluate)
    assert recorded_rounds(run.run) == [1]
    checkpoint = run.run.load_checkpoint()
    assert checkpoint is not None and checkpoint.round == 1
    assert len(evaluated) == 2 and not background_threads()
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "model.safetensors").exists()


def test_failed_round_keeps_the_previous_round_checkpointed(tmp_path: Path) -> None:
    fails = threading.Event()

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        fails.wait(LONG)
        return OK

    def fail(number: int, client: int) -> None:
        if number == 2:
            fails.set()
            raise ValueError("no")

    run = federation(tmp_path, toy_app(on_train(fail)), rounds=5)
    with pytest.raises(RunError, match="round 2: 3 of 3 clients failed"):
        run.fit(START, evaluate)
    checkpoint = run.run.load_checkpoint()
    assert recorded_rounds(run.run) == [1] and checkpoint is not None and checkpoint.round == 1
    assert not background_threads()


def test_error_of_the_earlier_round_is_raised(tmp_path: Path) -> None:
    fails = threading.Event()

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        fails.wait(LONG)
        raise RunError("the test images are gone")

    def fail(number: int, client: int) -> None:
        if number == 2:
            fails.set()
            raise ValueError("no")

    run = federation(tmp_path, toy_app(on_train(fail)), rounds=5)
    with pytest.raises(RunError, match="the test images are gone"):
        run.fit(START, evaluate)
    assert recorded_rounds(run.run) == []


def test_tolerated_failed_round_is_evaluated(tmp_path: Path) -> None:
    def fail(number: int, client: int) -> None:
        if number == 2:
            raise ValueError("no")

    seen: list[float] = []

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        seen.append(float(trainable["w"][0]))
        return OK

    run = federation(tmp_path, toy_app(on_train(fail)), rounds=3, **{"failed-rounds": 2})
    run.fit(START, evaluate)
    assert recorded_rounds(run.run) == [1, 2, 3]
    assert [len(record["failures"]) for record in run.run.rounds()] == [0, 3, 0]
    assert seen == pytest.approx([2.0, 2.0, 2.0])


@pytest.mark.parametrize("evaluation_fails", [False, True])
def test_interrupt_waits_for_evaluation_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation_fails: bool
) -> None:
    interrupted = threading.Event()

    def central_test(*given: Any) -> Any:
        def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            interrupted.wait(LONG)
            threading.Event().wait(0.2)
            if evaluation_fails:
                raise RunError("the test images are gone")
            return OK

        return evaluate

    train_round = TrainingRounds.train_round

    def interrupt_round_2(self: TrainingRounds, state: Checkpoint) -> Any:
        if state.round == 1:
            interrupted.set()
            raise KeyboardInterrupt
        return train_round(self, state)

    monkeypatch.setattr(learners, "central_test", central_test)
    monkeypatch.setattr(TrainingRounds, "train_round", interrupt_round_2)
    with pytest.raises(KeyboardInterrupt):
        finish(quick(tmp_path / "r", policy="none"))
    run = RunDirectory(tmp_path / "r")
    assert run.status()[0] == "interrupted"
    assert recorded_rounds(run) == ([] if evaluation_fails else [1])
    assert not background_threads()


def test_evaluation_error_is_one_line_in_the_run_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def central_test(*given: Any) -> Any:
        def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            raise ArithmeticError("out of\nluck")

        return evaluate

    monkeypatch.setattr(learners, "central_test", central_test)
    with pytest.raises((RunError, ArithmeticError)):
        finish(quick(tmp_path / "r", policy="none"))
    state, reason = RunDirectory(tmp_path / "r").status()
    assert state == "failed" and re.fullmatch(r"ArithmeticError: out of luck \(test_overlap.py, line \d+\)", reason)


def test_background_task_is_joined_and_raises_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Timelines(monkeypatch)

    def fail() -> None:
        raise ZeroDivisionError

    with BackgroundTask() as background:
        assert background.wait() == 0  # nothing was started
        background.start(lambda: times.spend(2))
        times.spend(0.5)
        assert background.wait() == 1.5
        background.start(fail)
        with pytest.raises(ZeroDivisionError):
            background.wait()
        background.wait()
    with pytest.raises(ZeroDivisionError), BackgroundTask() as background:
        background.start(fail)
    with pytest.raises(SystemExit), BackgroundTask() as background:
        background.start(fail)
        raise SystemExit


QUICK = ("fedavg", "scaffold", "fedavgm")


@pytest.mark.parametrize(
    "strategy", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in sorted(STRATEGIES)]
)
@pytest.mark.parametrize("in_process", [False, True])
def test_round_state_is_not_modified_by_later_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, in_process: bool
) -> None:
    """The arrays that are evaluated and checkpointed in the background are unchanged at the end of the run."""
    held: list[tuple[Arrays, dict[str, np.ndarray[Any, Any]]]] = []
    train_round = TrainingRounds.train_round

    def hold(self: TrainingRounds, state: Checkpoint) -> Any:
        after, outcome = train_round(self, state)
        for arrays in (after.trainable, after.buffers, after.strategy.arrays):
            held.append((arrays, {key: value.copy() for key, value in to_numpy(arrays).items()}))
        return after, outcome

    monkeypatch.setattr(TrainingRounds, "train_round", hold)
    if in_process:
        pass_models_by_reference(monkeypatch)
    keys = {"policy": "none", "participation": 1.0, "strategy": strategy, "device": "cpu", **NEEDS.get(strategy, {})}
    run = finish(quick(tmp_path / "r", **keys))
    assert len(held) == 9 and recorded_rounds(run) == [1, 2, 3]
    assert any(isinstance(value, torch.Tensor) for arrays, _ in held for value in arrays.values()) or not in_process
    for arrays, then in held:
        for key, value in to_numpy(arrays).items():
            assert np.array_equal(value, then[key]), key


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "scaffold"])
def test_background_work_gives_the_same_results_as_foreground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, in_process: bool
) -> None:
    if in_process:
        pass_models_by_reference(monkeypatch)
    keys = {"policy": "none", "rounds": 5, "strategy": strategy, "gamma_hat": "all-state", "device": "cpu"}
    background = finish(quick(tmp_path / "background", **keys))
    monkeypatch.setattr(BackgroundTask, "start", lambda self, work: work())
    foreground = finish(quick(tmp_path / "foreground", **keys))
    assert all(record["gamma_hat"] > 0 for record in background.rounds())
    assert weights(background) == weights(foreground)
    same = [[{**record, "seconds": {}} for record in run.rounds()] for run in (background, foreground)]
    assert same[0] == same[1]
