"""A callback ends a run: which round is the last, what is saved, and how the run resumes."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_runs import grouped, write_run
from rich.console import Console
from runners import finish, pass_models_by_reference, quick, run_in_process, weights
from test_federation import START, federation, toy_app
from test_overlap import OK, on_train, recorded_rounds
from waiting import LONG

from fedeas_flwr.callbacks.early_stop import EarlyStop
from fedeas_flwr.callbacks.interface import StopRun
from fedeas_flwr.commands import run as run_command
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.config import parse_config
from fedeas_flwr.launch.sweep import SweepRun
from fedeas_flwr.runs.directory import RunDirectory


def stop_at(last: int) -> Any:
    return lambda record: "enough" if record["round"] == last else None


def stopped_after(accuracies: list[float], **arguments: Any) -> int:
    """Return the round after which the callback stops a run with these accuracies; 0 if it does not."""
    callback = EarlyStop(**arguments)
    callback.on_run_start(parse_config({}), [])
    for number, accuracy in enumerate(accuracies, 1):
        try:
            callback.on_round_end({"round": number, "accuracy": accuracy})
        except StopRun:
            return number
    return 0


def test_target_and_patience_decide_the_last_round() -> None:
    accuracies = [0.1, 0.5, 0.4, 0.5, 0.3, 0.8, 0.2]
    assert stopped_after(accuracies, target=0.5) == 2
    assert stopped_after(accuracies, target=0.9) == 0
    assert stopped_after(accuracies, patience=3) == 5, "an equal accuracy is no gain"
    assert stopped_after(accuracies, patience=4) == 0
    assert stopped_after(accuracies, target=0.8, patience=4) == 6
    assert stopped_after([0.0] * 4, patience=2) == 3


def test_a_resumed_run_counts_the_rounds_before() -> None:
    records = [{"round": n, "accuracy": a} for n, a in enumerate([0.5, 0.4, 0.3], 1)]
    callback = EarlyStop(patience=3)
    callback.on_run_start(parse_config({}), records)
    with pytest.raises(StopRun, match=r"^patience = 3 rounds without an accuracy above 0\.5000 of round 1$"):
        callback.on_round_end({"round": 4, "accuracy": 0.5})
    with pytest.raises(StopRun, match=r"^accuracy 0\.3000 has reached target = 0\.3$"):
        EarlyStop(target=0.3).on_run_start(parse_config({}), records)


@pytest.mark.parametrize("checkpoint_every", [1, 2, 50])
def test_round_that_trains_meanwhile_is_dropped(tmp_path: Path, checkpoint_every: int) -> None:
    """Round 3 is recorded only after round 4 has trained, and ends the run."""
    begun = {number: threading.Event() for number in range(1, 7)}
    evaluated: list[int] = []

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        evaluated.append(len(evaluated) + 1)
        assert begun[len(evaluated) + 1].wait(LONG)
        return OK

    app = toy_app(on_train(lambda number, client: begun[number].set()))
    run = federation(tmp_path, app, rounds=6, **{"checkpoint-every": checkpoint_every})
    run.on_round_end = stop_at(3)
    run.fit(START, evaluate)
    assert begun[4].is_set() and not begun[5].is_set()
    checkpoint = run.run.load_checkpoint()
    assert checkpoint is not None and checkpoint.round == 3 and checkpoint.accepted == {0: 3, 1: 3, 2: 3}
    assert recorded_rounds(run.run) == evaluated == [1, 2, 3]
    summary = run.run.summary()
    assert (summary["rounds"], summary["stopped"]) == (3, "enough") and run.run.stop_reason() == "enough"


def test_dropped_round_may_fail(tmp_path: Path) -> None:
    fails = threading.Event()

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        assert fails.wait(LONG)
        return OK

    def fail(number: int, client: int) -> None:
        if number == 2:
            fails.set()
            raise ValueError("no")

    run = federation(tmp_path, toy_app(on_train(fail)), rounds=5)
    run.on_round_end = stop_at(1)
    run.fit(START, evaluate)
    assert recorded_rounds(run.run) == [1] and run.run.summary()["stopped"] == "enough"


def test_stop_in_the_last_round_is_no_stop(tmp_path: Path) -> None:
    run = federation(tmp_path, toy_app(), rounds=2)
    run.on_round_end = stop_at(2)
    run.fit(START, lambda trainable, buffers: OK)
    assert recorded_rounds(run.run) == [1, 2] and "stopped" not in run.run.summary()


@pytest.mark.parametrize("in_process", [False, True])
def test_stopped_run_equals_a_shorter_one_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    if in_process:
        pass_models_by_reference(monkeypatch)
    keys: dict[str, Any] = {"policy": "none", "strategy": "scaffold", "checkpoint_every": 50, "device": "cpu"}
    short, whole = (finish(quick(tmp_path / f"{rounds}", rounds=rounds, **keys)) for rounds in (2, 4))
    config = quick(tmp_path / "stopped", rounds=4, callbacks="users_callbacks:StopAt(last=2)", **keys)
    run = finish(config)
    assert run.status() == ("finished", "") and weights(run) == weights(short)
    assert run.stop_reason() == "users_callbacks:StopAt: enough after 2"
    assert without_seconds(run) == without_seconds(short)
    finish(config.with_changes(resume=True, callbacks=""))
    assert weights(run) == weights(whole) and without_seconds(run) == without_seconds(whole)
    assert run.stop_reason() == "" and "stopped" not in run.summary()


def without_seconds(run: RunDirectory) -> list[Mapping[str, Any]]:
    return [{**record, "seconds": {}} for record in run.rounds()]


def test_federated_evaluation_stops_too_and_resume_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"policy": "none", "protocol": "paper", "evaluation": "federated"}
    config = quick(tmp_path / "r", callbacks="early-stop(target=0.001)", rounds=3, **keys)
    run = finish(config)
    before = weights(run)
    reason = f"early-stop: accuracy {run.rounds()[0]['accuracy']:.4f} has reached target = 0.001"
    assert recorded_rounds(run) == [1] and run.stop_reason() == reason
    finish(config.with_changes(resume=True, rounds=5))
    assert recorded_rounds(run) == [1] and run.stop_reason() == reason and weights(run) == before
    shown = io.StringIO()
    monkeypatch.setattr(run_command, "console", Console(file=shown, width=60))
    run_command.resume(run.path)
    assert f"\nstopped after round 1 of 5 by {reason}\n" in shown.getvalue()
    assert "already finished" in shown.getvalue()


def test_lists_sweeps_and_reports_take_it_as_a_shorter_run(tmp_path: Path) -> None:
    full = write_run(tmp_path / "a1", [0.2, 0.4], seed=1)
    run = write_run(tmp_path / "a2", [0.5], seed=2, rounds=2)
    unfinished = SweepRun("a2", {}, run.config(), RunDirectory(run.path))
    assert not unfinished.finished
    run.save_summary(run.summary() | {"stopped": "early-stop: enough"})
    assert SweepRun("a2", {}, run.config(), run).finished and unfinished.finished
    (group,) = grouped(full, run)
    assert group.seeds == [1, 2] and not group.excluded
    printed = run_in_process("report", str(tmp_path)).stdout
    assert "Stopped early: a2, 1 of 2 rounds, early-stop: enough" in printed.splitlines()
    data = json.loads(run_in_process("report", str(tmp_path), "--format", "json").stdout)
    assert data["groups"][0]["stopped"] == ["", "early-stop: enough"] and data["groups"][0]["unfinished"] == []
    shown = run_in_process("runs", "show", str(run.path)).stdout
    assert shown.startswith(f"{run.path}: finished, stopped early: early-stop: enough\n")
    run.append_round({**run.rounds()[0], "round": 2})  # it was resumed with other callbacks
    assert run.stop_reason() == ""
