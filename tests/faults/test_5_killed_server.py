"""Row 5: the server is killed at any time, also while it writes a checkpoint. A resumed run ends with the same weights.

A separate process runs the federation and sends itself SIGKILL at one step of writing one file. test_run_inline.py
tests SIGKILL, SIGTERM and Ctrl-C from outside, with generation; row 1 tests runs under Ray.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from runners import finish, quick, weights, with_fixed_noise_key
from waiting import LONG, wait_until

from fedeas_flwr.common import files
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory

KEYS: dict[str, Any] = {"policy": "none", "rounds": 4, "participation": 0.5, "local_epochs": 1}
forks = multiprocessing.get_context("forkserver")
STEPS = ["begun", "half written", "written", "synced", "about to be renamed", "renamed", "folder synced"]
STATEFUL: dict[str, dict[str, Any]] = {
    "scaffold": {},
    "moon": {},
    "fedadam": {},
    "fedavgm": {"dp": "server-adaptive", "dp_noise_multiplier": 0.1, "participation": 1.0},
    "fedgen": {"disclose_label_counts": True, "fedgen_steps": 2},
    "fedavg": {},
}


def die_at(name: str, step: str, times: int) -> None:
    """Kill this process at a step of the ``times``-th write of a file of this name."""
    seen = dict.fromkeys(STEPS, 0)

    def at(now: str, path: object) -> None:
        if f".{name}" in str(path):
            seen[now] += 1
            if now == step and seen[now] == times:
                os.kill(os.getpid(), signal.SIGKILL)

    def write_bytes(path: Path, content: bytes) -> int:
        at("begun", path)
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
            file.flush()
            at("half written", path)
            file.write(content[len(content) // 2 :])
        at("written", path)
        return len(content)

    def sync(path: Path) -> None:
        before(path)
        at("synced" if path.is_file() else "folder synced", path if path.is_file() else last.renamed)

    last = threading.local()  # a checkpoint is written while the next round's clients write, too

    def rename(source: Any, target: Any) -> None:
        at("about to be renamed", source)
        replace(source, target)
        last.renamed = str(source)
        at("renamed", source)

    before, replace = files._sync, os.replace
    files._sync, Path.write_bytes, os.replace = sync, write_bytes, rename  # type: ignore[assignment,method-assign]


def run_and_die(folder: Path, keys: dict[str, Any], name: str, step: str, times: int) -> None:
    die_at(name, step, times)
    finish(quick(folder, **keys))


def forked(target: Any, *given: Any) -> Any:
    """Start a function in a fork of a process that has imported everything and computed nothing.

    A fork of this process would lack its threads, and torch would wait for them.
    """
    forks.set_forkserver_preload(["fedeas_flwr.server_app", "fedeas_flwr.client_app", "fedeas_flwr.launch.run"])
    child = forks.Process(target=target, args=given)
    child.start()
    return child


def ended_by_kill(child: Any) -> bool:
    child.join(LONG)
    return child.exitcode == -signal.SIGKILL


QUICK = [("scaffold", "half written"), ("scaffold", "about to be renamed"), ("scaffold", "renamed")]
ALL = [(strategy, step) for strategy in STATEFUL for step in STEPS]


@pytest.mark.parametrize(
    ("strategy", "step"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_server_killed_while_writing_a_checkpoint_resumes(tmp_path: Path, strategy: str, step: str) -> None:
    keys = {**KEYS, "strategy": strategy, **STATEFUL[strategy]}
    run = RunDirectory(with_fixed_noise_key(tmp_path / "r"))
    assert ended_by_kill(forked(run_and_die, run.path, keys, "checkpoint.safetensors", step, 2))
    assert run.state() == "interrupted"
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None
    assert checkpoint.round == (2 if step in ("renamed", "folder synced") else 1)
    resumed = finish(quick(tmp_path / "r", resume=True, **keys))
    assert weights(resumed) == weights(finish(quick(with_fixed_noise_key(tmp_path / "whole"), **keys)))
    assert [record["round"] for record in resumed.rounds()] == [1, 2, 3, 4]
    assert not list((tmp_path / "r").glob(".*.tmp")), "temporary files of a killed writer are left"


def run_and_die_before_round_2_is_saved(folder: Path, keys: dict[str, Any], where: str) -> None:
    """Die before round 2's record or between its record and its checkpoint, after round 3's clients have trained."""
    save, record = RunDirectory.save_checkpoint, RunDirectory.append_round

    def die(number: int) -> None:
        if number == 2:
            while len(list(folder.glob("clients/*/state-000003.safetensors"))) < 2:  # half of four clients train
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def append_round(run: RunDirectory, found: Any) -> None:
        if where == "before the record":
            die(found["round"])
        record(run, found)

    def save_checkpoint(run: RunDirectory, checkpoint: Any) -> None:
        die(checkpoint.round)
        save(run, checkpoint)

    RunDirectory.save_checkpoint, RunDirectory.append_round = save_checkpoint, append_round  # type: ignore[method-assign]
    finish(quick(folder, **keys))


@pytest.mark.parametrize("where", ["before the record", "before the checkpoint"])
@pytest.mark.parametrize(
    "strategy", [s if s == "scaffold" else pytest.param(s, marks=pytest.mark.slow) for s in STATEFUL]
)
def test_server_killed_after_next_rounds_clients_trained_resumes(tmp_path: Path, strategy: str, where: str) -> None:
    keys = {**KEYS, "strategy": strategy, **STATEFUL[strategy], "participation": 0.5}
    if strategy == "fedavgm":
        keys |= {"dp": "none", "dp_noise_multiplier": 0.0}
    assert ended_by_kill(forked(run_and_die_before_round_2_is_saved, tmp_path / "r", keys, where))
    run = RunDirectory(tmp_path / "r")
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None and checkpoint.round == 1
    assert len(run.rounds()) == (1 if where == "before the record" else 2)
    resumed = finish(quick(tmp_path / "r", resume=True, **keys))
    whole = finish(quick(tmp_path / "whole", **keys))
    assert weights(resumed) == weights(whole)
    same = [[{**record, "seconds": {}} for record in run.rounds()] for run in (resumed, whole)]
    assert same[0] == same[1]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["state-00000", "model.safetensors", "summary.json", "status.json", "config.json"])
def test_server_killed_while_writing_any_other_file_resumes(tmp_path: Path, name: str, step: str) -> None:
    keys = {**KEYS, "strategy": "scaffold"}
    times = 3 if name == "state-00000" else 1
    assert ended_by_kill(forked(run_and_die, tmp_path / "r", keys, name, step, times))
    started = (tmp_path / "r" / "config.json").exists()
    resumed = finish(quick(tmp_path / "r", resume=started, **keys))
    assert weights(resumed) == weights(finish(quick(tmp_path / "whole", **keys)))


def test_resume_repeats_the_round_of_a_truncated_record(tmp_path: Path) -> None:
    keys = {**KEYS, "strategy": "fedadam"}
    finish(quick(tmp_path / "r", **{**keys, "rounds": 2}))
    with (tmp_path / "r" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "accuracy": 0.')
    resumed = finish(quick(tmp_path / "r", resume=True, **keys))
    assert weights(resumed) == weights(finish(quick(tmp_path / "whole", **keys)))


def run_to_round_and_wait(rounds: int, folder: Path, keys: dict[str, Any]) -> None:
    """Start or resume a run and pause it after ``rounds`` rounds, to be killed."""
    train_round = TrainingRounds.train_round

    def held(self: TrainingRounds, state: Checkpoint) -> Any:
        while state.round >= rounds:
            time.sleep(0.01)
        return train_round(self, state)

    TrainingRounds.train_round = held  # type: ignore[method-assign]
    finish(quick(folder, resume=(folder / "config.json").exists(), **keys))


@pytest.mark.slow
def test_server_killed_repeatedly_at_random_times_resumes(tmp_path: Path) -> None:
    draws, run = random.Random(7), RunDirectory(tmp_path / "r")
    keys = {**KEYS, "strategy": "scaffold", "rounds": 12, "checkpoint_every": 2}
    whole = finish(quick(tmp_path / "whole", **keys))
    for life in range(10):
        child = forked(run_to_round_and_wait, life + 2, run.path, keys)
        if life % 2:  # half of the processes may be killed before they start
            wait_until(lambda life=life: len(run.rounds()) > life, "another round is recorded")
        child.join(draws.uniform(0.0, 0.2 if life % 2 else 1.0))
        child.kill()
        assert ended_by_kill(child)
    assert 0 < len(run.rounds()) < 12
    resumed = finish(quick(run.path, resume=True, **keys))
    assert resumed.state() == "finished" and weights(resumed) == weights(whole)
