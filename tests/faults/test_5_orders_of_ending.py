"""Row 5: evaluations, interrupts, errors and kills in different orders.

A round's evaluation, record and checkpoint run during the next round. However a run ends, its files must be
consistent: a checkpoint, the records up to its round, and the client states of that round.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from logging import ERROR
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from runners import finish, pass_models_by_reference, quick, weights
from test_5_killed_server import forked
from test_federation import START, federation, toy_app
from waiting import LONG, wait_until

from fedeas_flwr import client_app, server_app
from fedeas_flwr.common.errors import ConfigError, ProcessesDiedError, RunError
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation import federation as loop
from fedeas_flwr.federation import learners, messages
from fedeas_flwr.federation.client_state import ClientState, ClientStore
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.training import evaluation
from fedeas_flwr.training.evaluation import Evaluate

KEYS: dict[str, Any] = {"policy": "none", "strategy": "scaffold", "participation": 1.0, "rounds": 6}


@pytest.fixture
def states_in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep client states on disk or, if the parameter is true, in memory until the next checkpoint as on a GPU."""
    if request.param:
        pass_models_by_reference(monkeypatch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights of an uninterrupted run; they do not depend on `checkpoint-every`."""
    return weights(finish(quick(tmp_path_factory.mktemp("uninterrupted") / "whole", **KEYS)))


def assert_resumes_to_same_weights(folder: Path, uninterrupted: str, keys: dict[str, Any]) -> None:
    """Resume the run and compare its weights and records with those of an uninterrupted one."""
    resumed = finish(quick(folder, resume=True, **keys))
    assert weights(resumed) == uninterrupted
    assert [record["round"] for record in resumed.rounds()] == list(range(1, keys["rounds"] + 1))


def break_evaluation(monkeypatch: pytest.MonkeyPatch, number: int, when: threading.Event) -> None:
    """Let the evaluation of one round fail, after ``when`` is set."""
    central_test = evaluation.central_test

    def central(*given: Any) -> Evaluate:
        working, evaluated = central_test(*given), []

        def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            evaluated.append(1)
            if len(evaluated) == number:
                when.wait(LONG)
                raise RunError("the test images are gone")
            return working(trainable, buffers)

        return evaluate

    monkeypatch.setattr(learners, "central_test", central)


@pytest.mark.parametrize("states_in_memory", [False, True], indirect=True)
@pytest.mark.parametrize("checkpoint_every", [1, 2, 50])
@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.usefixtures("states_in_memory")
def test_failed_evaluation_after_next_rounds_training_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: str, checkpoint_every: int, interrupted: bool
) -> None:
    """The round before the failed one is recorded, but its client states are gone, so it must not be checkpointed."""
    keys = {**KEYS, "checkpoint_every": checkpoint_every}
    train_round, trained = TrainingRounds.train_round, threading.Event()

    def train(self: TrainingRounds, state: Checkpoint) -> Any:
        outcome = train_round(self, state)
        if state.round == 4:
            trained.set()
            if interrupted:
                raise KeyboardInterrupt
        return outcome

    with monkeypatch.context() as meanwhile:
        break_evaluation(meanwhile, 4, trained)
        meanwhile.setattr(TrainingRounds, "train_round", train)
        with pytest.raises(KeyboardInterrupt if interrupted else RunError):
            finish(quick(tmp_path / "r", **keys))
    stopped = RunDirectory(tmp_path / "r")
    assert stopped.state() == ("interrupted" if interrupted else "failed")
    assert [record["round"] for record in stopped.rounds()] == [1, 2, 3]
    checkpoint = stopped.load_checkpoint()
    assert (checkpoint.round if checkpoint else 0) == {1: 3, 2: 2, 50: 0}[checkpoint_every]
    assert_resumes_to_same_weights(tmp_path / "r", uninterrupted, keys)


@pytest.mark.parametrize("states_in_memory", [False, True], indirect=True)
@pytest.mark.parametrize("error", [RunError("below the quorum"), ProcessesDiedError("killed"), SystemExit(0)])
@pytest.mark.usefixtures("states_in_memory")
def test_error_checkpoints_the_last_finished_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uninterrupted: str, error: BaseException
) -> None:
    keys = {**KEYS, "checkpoint_every": 50}
    train_round = TrainingRounds.train_round

    def train(self: TrainingRounds, state: Checkpoint) -> Any:
        outcome = train_round(self, state)
        if state.round == 4:
            raise error
        return outcome

    with monkeypatch.context() as meanwhile, pytest.raises(RunError):
        meanwhile.setattr(TrainingRounds, "train_round", train)
        finish(quick(tmp_path / "r", **keys))
    checkpoint = RunDirectory(tmp_path / "r").load_checkpoint()
    assert checkpoint is not None and checkpoint.round == 4
    assert_resumes_to_same_weights(tmp_path / "r", uninterrupted, keys)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RunError("below the quorum")])
def test_run_error_is_raised_if_last_checkpoint_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Any
) -> None:
    said: list[str] = []
    run = federation(tmp_path, toy_app(), rounds=5, **{"checkpoint-every": 50})
    train_round = run.training.train_round

    def train(state: Checkpoint) -> Any:
        if state.round == 2:
            raise ending
        return train_round(state)

    def full(checkpoint: Checkpoint) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.training, "train_round", train)
    monkeypatch.setattr(run.run, "save_checkpoint", full)
    monkeypatch.setattr(loop, "log", lambda level, text, *given: said.append(text % given))
    with pytest.raises(KeyboardInterrupt if ending is KeyboardInterrupt else RunError):
        run.fit(START, lambda trainable, buffers: {"accuracy": 0.5})
    assert [record["round"] for record in run.run.rounds()] == [1, 2]
    assert "No space left" in said[-1]


WHERE: list[set[str]] = [set(), {"__exit__", "result"}, {"__exit__", "shutdown", "join"}, set()]
"""Functions the main thread is in at each Ctrl-C: any of round 4, `BackgroundTask`'s two waits, any after them."""


def main_thread_is_in(functions: set[str]) -> bool:
    """Return whether functions of all these names are on the main thread's stack."""
    frame, found = sys._current_frames()[threading.main_thread().ident or 0], set[str]()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return functions <= found


def run_and_interrupt(folder: Path, keys: dict[str, Any], times: int) -> None:
    """Send Ctrl-C ``times`` times: in round 4, then while the server waits for round 3's evaluation."""
    delivered, released = list[int](), threading.Event()
    central_test = evaluation.central_test

    def hear(number: int, frame: object) -> None:
        delivered.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hear)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)

    def is_delivered(before: int) -> bool:
        # A signal just before the main thread waits for a lock is handled only when that wait ends or is
        # interrupted; another signal, without effect, interrupts it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return len(delivered) > before

    def central(*given: Any) -> Evaluate:
        working, evaluated = central_test(*given), []

        def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            evaluated.append(1)
            if len(evaluated) == 3:
                wait_until(lambda: len(list(folder.glob("clients/*/state-000004.*"))) == 4, "all clients have trained")
                for where in WHERE[:times]:
                    wait_until(lambda where=where: main_thread_is_in(where), f"the main thread is in {where}")
                    before = len(delivered)
                    os.kill(os.getpid(), signal.SIGINT)
                    wait_until(lambda before=before: is_delivered(before), "Ctrl-C is delivered")
                if times > 2:
                    released.wait(LONG)
                    raise RunError("the process has ended")
            return working(trainable, buffers)

        return evaluate

    learners.central_test = central
    try:
        finish(quick(folder, **keys))
    finally:
        released.set()


@pytest.mark.parametrize("times", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpoint_every", [pytest.param(1, marks=pytest.mark.slow), 50])
def test_repeated_ctrl_c_leaves_a_resumable_run(
    tmp_path: Path, uninterrupted: str, times: int, checkpoint_every: int
) -> None:
    keys = {**KEYS, "checkpoint_every": checkpoint_every}
    child = forked(run_and_interrupt, tmp_path / "r", keys, times)
    child.join(LONG)
    assert child.exitcode == 1
    stopped = RunDirectory(tmp_path / "r")
    assert stopped.state() == "interrupted"
    checkpoint = stopped.load_checkpoint()
    if times <= 2:
        assert [record["round"] for record in stopped.rounds()] == [1, 2, 3], (
            "the server did not wait for the evaluation"
        )
        assert checkpoint is not None and checkpoint.round == 3
    else:  # the server did not wait for the evaluation
        assert (checkpoint.round if checkpoint else 0) == {1: 2, 50: 0}[checkpoint_every]
    assert_resumes_to_same_weights(tmp_path / "r", uninterrupted, keys)


def test_failed_evaluation_is_logged_before_the_round_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may take hours, and no grid can stop waiting for them."""
    said, in_time = threading.Event(), list[bool]()

    def evaluate(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        raise RunError("the test images are gone")

    def listen(client: int, message: Message) -> Message | None:
        if messages.read_task(message).round == 2:
            in_time.append(said.wait(LONG))
        return None

    def log(level: int, text: str, *given: Any) -> None:
        if level == ERROR and text % given == "round 1 is not recorded: the test images are gone":
            said.set()

    monkeypatch.setattr(loop, "log", log)
    with pytest.raises(RunError, match="the test images are gone"):
        federation(tmp_path, toy_app(listen), rounds=5).fit(START, evaluate)
    assert in_time == [True] * 3


# ------------------------------------------------------------------------------------------------ late clients


def test_late_client_does_not_drop_a_later_rounds_state(tmp_path: Path) -> None:
    """Under Ray another process may train the same client: round 4 timed out here, and round 5 was accepted."""
    store = ClientStore(tmp_path)
    store.save(3, ClientState((3,)), (2, 2))
    store.save(5, ClientState((5,)), (3, 3))
    store.save(4, ClientState((4,)), (3, 2))
    assert [store.load(number).generate for number in (3, 5)] == [(3,), (5,)]
    store.save(6, ClientState((6,)), (5, 5))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["state-000005", "state-000006"]


# ------------------------------------------------------------------------------------------- records and folders


@pytest.mark.parametrize("damage", ["a line", "the last line", "all", "the file"])
def test_resume_with_damaged_records_is_rejected_unchanged(tmp_path: Path, damage: str) -> None:
    """A damaged line must not silently drop the records after it."""
    finish(quick(tmp_path / "r", **{**KEYS, "rounds": 3}))
    path = tmp_path / "r" / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    damaged = {
        "a line": [lines[0], "{" + lines[1][5:], lines[2]],
        "the last line": [*lines[:2], lines[2][:20]],
        "all": [],
        "the file": [],
    }[damage]
    path.unlink() if damage == "the file" else path.write_text("".join(damaged))
    good = {"a line": "1 valid record", "the last line": "2 valid records"}.get(damage, "0 valid records")
    with pytest.raises(RunError, match=rf"rounds\.jsonl holds {good}, but the checkpoint is of round 3"):
        finish(quick(tmp_path / "r", resume=True, **KEYS))
    assert damage == "the file" or path.read_text() == "".join(damaged), "records were dropped"


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_a_running_process_is_rejected(tmp_path: Path, resume: bool) -> None:
    """This holds from the start of that process, also before its first round."""
    if resume:
        finish(quick(tmp_path / "r", **{**KEYS, "rounds": 1}))
    run = RunDirectory(tmp_path / "r")
    (tmp_path / "r").mkdir(exist_ok=True)
    other = forked(time.sleep, LONG)
    try:
        run.set_status("running", pid=other.pid)
        before = {path.name: path.read_bytes() for path in run.path.glob("*.json*")}
        with pytest.raises(RunError, match=rf"^{tmp_path}/r is still running, in process {other.pid}$"):
            finish(quick(tmp_path / "r", resume=resume, **KEYS))
        with pytest.raises(RunError, match="is still running, in process"):
            start_server_app(quick(tmp_path / "r", resume=resume, **KEYS))
        assert {path.name: path.read_bytes() for path in run.path.glob("*.json*")} == before
    finally:
        other.kill()
        other.join()
    assert finish(quick(tmp_path / "r", resume=resume, **{**KEYS, "rounds": 2})).summary()["rounds"] == 2


def start_server_app(config: RunConfig, nodes: int = 4) -> None:
    """Start the ServerApp directly, as `flwr run` does."""
    values = config.to_user_dict()
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values)
    server_app.app(InlineGrid(client_app.app, nodes, values), context)


def test_resume_of_a_finished_run_changes_nothing_though_no_node_is_online(tmp_path: Path) -> None:
    config = quick(tmp_path / "r", **{**KEYS, "node_wait": 0, "rounds": 1})
    start_server_app(config)
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    start_server_app(config.with_changes(resume=True), nodes=0)
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == before
    with pytest.raises(RunError, match="0 nodes"):
        start_server_app(config.with_changes(resume=True, rounds=2), nodes=0)
    with pytest.raises(RunError, match="learning-rate"):
        start_server_app(config.with_changes(resume=True, learning_rate=0.5))


def test_resume_with_another_number_of_nodes_is_rejected(tmp_path: Path) -> None:
    """The config leaves the number of clients to the federation, as under `flwr run`."""
    keys = {**KEYS, "clients": 0, "node_wait": 0}
    start_server_app(quick(tmp_path / "r", **{**keys, "rounds": 1}))
    with pytest.raises(RunError, match="one of 6 partitions, but the federation has 4 clients"):
        start_server_app(quick(tmp_path / "r", resume=True, **keys), nodes=6)
    run = RunDirectory(tmp_path / "r")
    assert run.config().clients == 4 and len(run.rounds()) == 1
    start_server_app(quick(tmp_path / "r", resume=True, **{**keys, "rounds": 2}))
    assert run.state() == "finished" and len(run.rounds()) == 2


# --------------------------------------------------------------------------------------------- SystemExit, errors


@pytest.mark.parametrize("code", [0, 3])
def test_client_that_exits_the_interpreter_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Inline, it would otherwise end the whole run, with code 0 as if it had succeeded."""

    def leave(*given: Any) -> Any:
        raise SystemExit(code)

    monkeypatch.setattr("fedeas_flwr.federation.learners.client_part", leave)
    with pytest.raises(
        RunError, match=rf"round 1: 2 of 2 clients failed .* SystemExit: {code} \(test_5_\w+.py, line \d+\)$"
    ):
        finish(quick(tmp_path / "r", policy="none", participation=0.5))
    assert RunDirectory(tmp_path / "r").status()[0] == "failed"


def test_server_that_exits_with_code_0_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's processes handle SIGTERM and Ctrl-C by exiting with code 0."""

    def leave(self: TrainingRounds, state: Checkpoint) -> Any:
        raise SystemExit(0)

    monkeypatch.setattr(TrainingRounds, "train_round", leave)
    with pytest.raises(RunError, match="interrupted"):
        finish(quick(tmp_path / "r", policy="none"))
    assert RunDirectory(tmp_path / "r").state() == "interrupted"


def test_unexpected_error_is_one_line_and_traceback_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TrainingRounds, state: Checkpoint) -> Any:
        raise TypeError("two\nlines")

    monkeypatch.setattr(TrainingRounds, "train_round", broken)
    with pytest.raises(RunError, match=r"^TypeError: two lines \(test_5_\w+.py, line \d+\)$"):
        finish(quick(tmp_path / "r", policy="none"))
    assert "Traceback" in (tmp_path / "r" / "flower.log").read_text()


@pytest.mark.parametrize(
    "error", [ConfigError("beta = -1: must be 0 or more"), RunError("no"), TypeError("two\nlines")]
)
def test_flower_logs_tracebacks_only_of_unexpected_errors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Under `flwr run`, Flower logs what the ServerApp has raised."""
    expected, logger = not isinstance(error, TypeError), logging.getLogger("flwr")
    monkeypatch.setattr(logger, "filters", [])
    with server_app.user_errors_in_one_line(cast(Grid, None)):
        assert logger.filters == []
    with pytest.raises(type(error)), server_app.user_errors_in_one_line(cast(Grid, None)):
        raise error
    logging.getLogger("flwr").error("%s raised an exception", "Simulation", exc_info=error)
    (record,) = caplog.records
    assert (record.exc_info is None) == expected
    assert record.getMessage() == "Simulation raised an exception" + (f": {error}" if expected else "")
