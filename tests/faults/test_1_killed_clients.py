"""Row 1: client processes are killed with SIGKILL. Messages are retried, or the run fails with an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.app import Error, Message
from runners import finish, small, weights
from test_federation import START, federation, toy_app

from fedeas_flwr.common.errors import ProcessesDiedError, RunError
from fedeas_flwr.federation.federation import evaluate_on_clients
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.launch import ray_head
from fedeas_flwr.runs.directory import RunDirectory

pytestmark = pytest.mark.flower


class PoolGrid(InlineGrid):
    """Flower's actor pool under Ray: a stack of client processes; the handle of a dead one goes back on top.

    A dead process fails after one time unit, a live one replies after three.
    """

    stack: tuple[str, ...] = ("alive", "dead")
    killed_after = 3
    """Number of messages that get a reply before the dead processes die: the identity queries of three clients."""
    late_refusals = 0
    """Number of times that the dead process fails later than a live one replies, as on a busy machine."""

    def __init__(self, *given: Any, **keys: Any) -> None:
        super().__init__(*given, **keys)
        self.pool, self.count, self.failed = list(self.stack), 0, 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        waiting, busy, clock = list(messages)[::-1], list[tuple[int, int, str, Message]](), 0
        while waiting or busy:
            while waiting and self.pool:
                self.count += 1
                process = self.pool.pop() if self.count > self.killed_after else "alive"
                takes = 3 if process == "alive" else 10 if self.failed < self.late_refusals else 1
                heappush(busy, (clock + takes, self.count, process, waiting.pop()))
            clock, number, process, message = heappop(busy)
            if process == "dead":
                self.failed += 1
                message.metadata.__dict__["_message_id"] = str(number)
                yield Message(Error(0, "<class 'ActorDiedError'>: it died"), reply_to=message)
            else:
                yield from super().send_and_receive([message])
            if number > self.killed_after:
                self.pool.append(process)


def test_messages_are_retried_until_a_live_process_replies(tmp_path: Path) -> None:
    undisturbed, _ = federation(tmp_path / "whole", toy_app()).training.train_round(START)
    made = federation(tmp_path / "killed", toy_app(), PoolGrid)
    state, outcome = made.training.train_round(START)
    assert outcome.failures == []
    assert np.array_equal(state.trainable["w"], undisturbed.trainable["w"])
    assert made.grid.failed > 2  # type: ignore[attr-defined]  # a single message, too, reached it again


class BusyPool(PoolGrid):
    late_refusals = 12


def test_retries_reach_a_live_process_on_a_busy_machine(tmp_path: Path) -> None:
    undisturbed, _ = federation(tmp_path / "whole", toy_app()).training.train_round(START)
    made = federation(tmp_path / "killed", toy_app(), BusyPool)
    state, outcome = made.training.train_round(START)
    assert outcome.failures == []
    assert np.array_equal(state.trainable["w"], undisturbed.trainable["w"])
    assert made.grid.failed > BusyPool.late_refusals  # type: ignore[attr-defined]


class StarvedPool(PoolGrid):
    """A pool whose dead process gets all messages at first, because the threads of the live ones are not scheduled."""

    starved_passes = 3

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        if self.count < self.killed_after or not self.starved_passes:
            return super().send_and_receive(messages, timeout=timeout)
        self.starved_passes, hidden, self.pool = self.starved_passes - 1, self.pool, ["dead"]
        replies = list(super().send_and_receive(messages, timeout=timeout))
        self.pool = hidden
        return replies


def test_retries_go_on_while_a_dead_process_gets_all_messages(tmp_path: Path) -> None:
    made = federation(tmp_path, toy_app(), StarvedPool)
    _, outcome = made.training.train_round(START)
    assert outcome.failures == [] and made.grid.starved_passes == 0  # type: ignore[attr-defined]


class DeadPool(PoolGrid):
    stack = ("dead", "dead")


def test_round_without_live_processes_raises_processes_died(tmp_path: Path) -> None:
    with pytest.raises(ProcessesDiedError, match=r"round 1: 3 of 3 clients failed .* it died"):
        federation(tmp_path, toy_app(), DeadPool).training.train_round(START)


def test_evaluation_without_live_processes_raises_processes_died(tmp_path: Path) -> None:
    made = federation(tmp_path, toy_app(), DeadPool)
    with pytest.raises(ProcessesDiedError, match=r"evaluation: 3 of 3 clients failed .* it died"):
        evaluate_on_clients(made.grid, made.config, made.clients.nodes, START)
    with pytest.raises(RunError, match=r"^evaluation: no client is online$"):
        evaluate_on_clients(made.grid, made.config, {}, START)


def test_error_raised_by_a_client_is_not_retried(tmp_path: Path) -> None:
    tries: list[int] = []

    def fail(client: int, message: Message) -> Message | None:
        tries.append(client)
        raise ValueError("mine")

    with pytest.raises(RunError, match="3 of 3 clients failed"):
        federation(tmp_path, toy_app(fail)).training.train_round(START)
    assert sorted(tries) == [0, 1, 2]


def test_launcher_stops_after_max_restarts_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed: list[bool] = []

    def dies(config: Any, run: RunDirectory, progress: Any, isolated: bool) -> None:
        assert run.status()[0] == "running"
        resumed.append(config.resume)
        if len(resumed) <= 3:
            run.append_round({"round": len(resumed), "accuracy": 0.5, "generated": 0, "failures": []})
        raise ProcessesDiedError("killed")

    monkeypatch.setattr("fedeas_flwr.launch.run._run_ray", dies)
    with pytest.raises(RunError, match="killed"):
        finish(small(tmp_path / "r", backend="ray", restarts=2))
    assert resumed == [False, *[True] * 5]  # three starts with a new round, three without: one start and two restarts
    assert RunDirectory(tmp_path / "r").status() == ("failed", "killed")


# -------------------------------------------------------------------------------------------- real runs, under Ray


def processes_with(word: str) -> list[psutil.Process]:
    """Return the processes of this test's run of whose command a word begins with this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(each.startswith(word) for each in process.cmdline()[:2]):
                found.append(process)
    return found


def client_processes() -> list[psutil.Process]:
    return processes_with("ray::ClientAppActor")


def kill_when(ready: Callable[[], bool], whom: Callable[[], list[int]], killed: list[int]) -> threading.Thread:
    def work() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and not (ready() and whom()):
            time.sleep(0.01)
        for pid in whom():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def training_pids() -> list[int]:
    return [process.pid for process in client_processes() if process.cmdline()[0] == "ray::ClientAppActor.run"]


KEYS = {"clients": 6, "rounds": 6, "policy": "none", "local_epochs": 30, "participation": 1.0}


@pytest.mark.slow
@pytest.mark.usefixtures("no_leftovers")
@pytest.mark.parametrize("kind", ["one client process", "all client processes", "the server", "Ray"])
def test_killed_processes_do_not_change_the_result(tmp_path: Path, kind: str) -> None:
    whole = finish(small(tmp_path / "whole", **KEYS))
    folder, killed = tmp_path / "killed", list[int]()

    def third_round() -> bool:
        return len(RunDirectory(folder).rounds()) >= 2

    def whom() -> list[int]:
        if kind == "the server":
            return [p["pid"] for p in RunDirectory(folder).processes() if p["pid"] != os.getpid()]
        if kind == "Ray":
            return [p.pid for p in processes_with(ray_head.__file__)]
        return training_pids()[:1] if kind == "one client process" else [p.pid for p in client_processes()]

    killer = kill_when(third_round, whom, killed)
    run = finish(small(folder, backend="ray", actors=2, **KEYS))
    killer.join()
    assert killed
    assert weights(run) == weights(whole)
    assert [record["failures"] for record in run.rounds()] == [[]] * 6
    log = (folder / "flower.log").read_text()
    assert kind == "Ray" or ("sending them again" in log) == (kind != "the server")
    assert log.count("Run directory: ") == (1 if kind == "one client process" else 2), "restarted by the launcher"


@pytest.mark.slow
@pytest.mark.usefixtures("no_leftovers")
def test_processes_that_always_die_fail_the_run_and_keep_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"))
    run = finish(small(tmp_path / "r", policy="none", rounds=1, model="users_models:that_may_kill"))
    monkeypatch.setenv("KILLS_ITS_PROCESS", "1")
    keys = {"policy": "none", "rounds": 3, "model": "users_models:that_may_kill", "restarts": 0, "resume": True}
    with pytest.raises(RunError, match=r"round 2: .* clients failed"):
        finish(small(tmp_path / "r", backend="ray", actors=2, **keys))
    assert run.status()[0] == "failed"
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None and checkpoint.round == 1
