"""Row 5: tests, interruptions, errors and kills in every order that was thought of.

A round's test, record and checkpoint go on beside the next round. However a run ends, what it left behind must belong
together: a checkpoint, the records up to it, and the clients' states of that very round.
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
from runners import finish, hand_models_over, quick, weights
from test_5_killed_server import forked
from test_federation import START, federation, toy_app
from waiting import LONG, wait_until

from fedeas_flwr import client_app, server_app
from fedeas_flwr.common.errors import ConfigError, ProcessesDiedError, RunError
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation import federation as loop
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_state import ClientState, ClientStore
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.training import evaluation
from fedeas_flwr.training.evaluation import Evaluate

KEYS: dict[str, Any] = {"policy": "none", "strategy": "scaffold", "participation": 1.0, "rounds": 6}


@pytest.fixture
def live_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that keep their states on disk, or in memory up to the next checkpoint as on a GPU."""
    if request.param:
        hand_models_over(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that nothing happened to, however often it writes checkpoints."""
    return weights(finish(quick(tmp_path_factory.mktemp("undisturbed") / "whole", **KEYS)))


def resumes_to_the_same(folder: Path, undisturbed: str, keys: dict[str, Any]) -> None:
    """The run goes on, and ends with the weights and the records of one that nothing happened to."""
    resumed = finish(quick(folder, resume=True, **keys))
    assert weights(resumed) == undisturbed
    assert [record["round"] for record in resumed.rounds()] == list(range(1, keys["rounds"] + 1))


def broken_test(monkeypatch: pytest.MonkeyPatch, number: int, when: threading.Event) -> None:
    """Let the test of one round fail, after ``when``."""
    central_test = evaluation.central_test

    def central(*given: Any) -> Evaluate:
        working, tested = central_test(*given), []

        def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            tested.append(1)
            if len(tested) == number:
                when.wait(LONG)
                raise RunError("the test images are gone")
            return working(trainable, buffers)

        return test

    monkeypatch.setattr(server_app, "central_test", central)


@pytest.mark.parametrize("live_or_not", [False, True], indirect=True)
@pytest.mark.parametrize("checkpoint_every", [1, 2, 50])
@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.usefixtures("live_or_not")
def test_a_failed_test_while_the_next_rounds_clients_have_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str, checkpoint_every: int, interrupted: bool
) -> None:
    """The round before the failed one is recorded, but its clients' states are gone: it must not be checkpointed."""
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
        broken_test(meanwhile, 4, trained)
        meanwhile.setattr(TrainingRounds, "train_round", train)
        with pytest.raises(KeyboardInterrupt if interrupted else RunError):
            finish(quick(tmp_path / "r", **keys))
    stopped = RunDirectory(tmp_path / "r")
    assert stopped.state() == ("interrupted" if interrupted else "failed")
    assert [record["round"] for record in stopped.rounds()] == [1, 2, 3]
    checkpoint = stopped.load_checkpoint()
    assert (checkpoint.round if checkpoint else 0) == {1: 3, 2: 2, 50: 0}[checkpoint_every]
    resumes_to_the_same(tmp_path / "r", undisturbed, keys)


@pytest.mark.parametrize("live_or_not", [False, True], indirect=True)
@pytest.mark.parametrize("error", [RunError("below the quorum"), ProcessesDiedError("killed"), SystemExit(0)])
@pytest.mark.usefixtures("live_or_not")
def test_an_error_keeps_every_round_that_is_done_however_rare_checkpoints_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: str, error: BaseException
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
    resumes_to_the_same(tmp_path / "r", undisturbed, keys)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, RunError("below the quorum")])
def test_what_ended_a_run_is_told_also_where_the_last_checkpoint_cannot_be_written(
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
"""What the main thread is in when Ctrl-C comes: anything of round 4, `BackgroundTask`'s two waits, anything after
them."""


def main_is_in(functions: set[str]) -> bool:
    """Whether the main thread is in calls of functions of these names."""
    frame, found = sys._current_frames()[threading.main_thread().ident or 0], set[str]()
    while frame is not None:
        found.add(frame.f_code.co_name)
        frame = frame.f_back
    return functions <= found


def interrupted_again_and_again(folder: Path, keys: dict[str, Any], times: int) -> None:
    """Ctrl-C in round 4, and again while the test of round 3 is waited for, and again."""
    heard, nobody_waits = list[int](), threading.Event()
    central_test = evaluation.central_test

    def hear(number: int, frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hear)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)

    def is_heard(before: int) -> bool:
        # A signal that comes just before the main thread begins to wait for a lock is heard when that wait is
        # interrupted or over: another one that means nothing interrupts it.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return len(heard) > before

    def central(*given: Any) -> Evaluate:
        working, tested = central_test(*given), []

        def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
            tested.append(1)
            if len(tested) == 3:
                wait_until(lambda: len(list(folder.glob("clients/*/state-000004.json"))) == 4, "all have trained")
                for where in WHERE[:times]:
                    wait_until(lambda where=where: main_is_in(where), f"it is in {where}")
                    before = len(heard)
                    os.kill(os.getpid(), signal.SIGINT)
                    wait_until(lambda before=before: is_heard(before), "it is heard")
                if times > 2:
                    nobody_waits.wait(LONG)
                    raise RunError("the process has ended")
            return working(trainable, buffers)

        return test

    server_app.central_test = central
    try:
        finish(quick(folder, **keys))
    finally:
        nobody_waits.set()


@pytest.mark.parametrize("times", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpoint_every", [pytest.param(1, marks=pytest.mark.slow), 50])
def test_ctrl_c_again_and_again_leaves_what_can_be_resumed(
    tmp_path: Path, undisturbed: str, times: int, checkpoint_every: int
) -> None:
    keys = {**KEYS, "checkpoint_every": checkpoint_every}
    child = forked(interrupted_again_and_again, tmp_path / "r", keys, times)
    child.join(LONG)
    assert child.exitcode == 1
    stopped = RunDirectory(tmp_path / "r")
    assert stopped.state() == "interrupted"
    checkpoint = stopped.load_checkpoint()
    if times <= 2:
        assert [record["round"] for record in stopped.rounds()] == [1, 2, 3], "the test was let to its end"
        assert checkpoint is not None and checkpoint.round == 3
    else:  # nobody waited for the test
        assert (checkpoint.round if checkpoint else 0) == {1: 2, 50: 0}[checkpoint_every]
    resumes_to_the_same(tmp_path / "r", undisturbed, keys)


def test_a_failed_test_is_said_at_once_though_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients may take hours, and no grid can be told to stop waiting for them."""
    said, heard = threading.Event(), list[bool]()

    def test(trainable: Arrays, buffers: Arrays) -> dict[str, Any]:
        raise RunError("the test images are gone")

    def listen(client: int, message: Message) -> Message | None:
        if messages.read_task(message).round == 2:
            heard.append(said.wait(LONG))
        return None

    def log(level: int, text: str, *given: Any) -> None:
        if level == ERROR and text % given == "round 1 is not recorded: the test images are gone":
            said.set()

    monkeypatch.setattr(loop, "log", log)
    with pytest.raises(RunError, match="the test images are gone"):
        federation(tmp_path, toy_app(listen), rounds=5).fit(START, test)
    assert heard == [True] * 3


# ------------------------------------------------------------------------------------------------ late clients


def test_a_client_that_ends_a_round_late_does_not_drop_a_later_rounds_state(tmp_path: Path) -> None:
    """Under Ray another process trains the same client meanwhile: round 4 timed out here, and round 5 was accepted."""
    store = ClientStore(tmp_path)
    store.save(3, ClientState((3,)), (2, 2))
    store.save(5, ClientState((5,)), (3, 3))
    store.save(4, ClientState((4,)), (3, 2))
    assert [store.load(number).generate for number in (3, 5)] == [(3,), (5,)]
    store.save(6, ClientState((6,)), (5, 5))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["state-000005", "state-000006"]


# ------------------------------------------------------------------------------------------- records and folders


@pytest.mark.parametrize("damage", ["a line", "the last line", "all", "the file"])
def test_records_that_are_gone_are_not_made_fewer_by_resuming(tmp_path: Path, damage: str) -> None:
    """A damaged line in the middle once cost all that came after it, without a word."""
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
    assert damage == "the file" or path.read_text() == "".join(damaged), "nothing more was lost"


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_another_process_runs_in_is_refused(tmp_path: Path, resume: bool) -> None:
    """Also between its first moment and its first round."""
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
            as_flwr_run_does(quick(tmp_path / "r", resume=resume, **KEYS))
        assert {path.name: path.read_bytes() for path in run.path.glob("*.json*")} == before
    finally:
        other.kill()
        other.join()
    assert finish(quick(tmp_path / "r", resume=resume, **{**KEYS, "rounds": 2})).summary()["rounds"] == 2


def as_flwr_run_does(config: RunConfig, nodes: int = 4) -> None:
    """Start the ServerApp itself, without `fedeas run` before it."""
    values = config.to_user_dict()
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values)
    server_app.app(InlineGrid(client_app.app, nodes, values), context)


def test_a_run_is_not_resumed_by_a_federation_of_another_size(tmp_path: Path) -> None:
    """Where the config leaves the number to the federation, as under `flwr run`."""
    keys = {**KEYS, "clients": 0, "node_wait": 0}
    as_flwr_run_does(quick(tmp_path / "r", **{**keys, "rounds": 1}))
    with pytest.raises(RunError, match="one of 6 partitions, but the federation has 4 clients"):
        as_flwr_run_does(quick(tmp_path / "r", resume=True, **keys), nodes=6)
    run = RunDirectory(tmp_path / "r")
    assert run.config().clients == 4 and len(run.rounds()) == 1
    as_flwr_run_does(quick(tmp_path / "r", resume=True, **{**keys, "rounds": 2}))
    assert run.state() == "finished" and len(run.rounds()) == 2


# ------------------------------------------------------------------------------------------- leaving by the door


@pytest.mark.parametrize("code", [0, 3])
def test_a_model_that_leaves_the_interpreter_is_a_client_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Inline it would end the whole run, and with code 0 as if it had succeeded."""

    def leave(*given: Any) -> Any:
        raise SystemExit(code)

    monkeypatch.setattr("fedeas_flwr.client_app.client_part", leave)
    with pytest.raises(RunError, match=rf"round 1: 2 of 2 clients failed .* SystemExit: {code}$"):
        finish(quick(tmp_path / "r", policy="none", participation=0.5))
    assert RunDirectory(tmp_path / "r").status()[0] == "failed"


def test_a_server_that_is_told_to_leave_was_interrupted_and_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's processes answer SIGTERM and Ctrl-C by leaving the interpreter with code 0."""

    def leave(self: TrainingRounds, state: Checkpoint) -> Any:
        raise SystemExit(0)

    monkeypatch.setattr(TrainingRounds, "train_round", leave)
    with pytest.raises(RunError, match="interrupted"):
        finish(quick(tmp_path / "r", policy="none"))
    assert RunDirectory(tmp_path / "r").state() == "interrupted"


def test_an_error_nobody_foresaw_is_one_line_with_its_traceback_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TrainingRounds, state: Checkpoint) -> Any:
        raise TypeError("two\nlines")

    monkeypatch.setattr(TrainingRounds, "train_round", broken)
    with pytest.raises(RunError, match=r"^TypeError: two lines$"):
        finish(quick(tmp_path / "r", policy="none"))
    assert "Traceback" in (tmp_path / "r" / "flower.log").read_text()


@pytest.mark.parametrize(
    "error", [ConfigError("beta = -1: must be 0 or more"), RunError("no"), TypeError("two\nlines")]
)
def test_flower_logs_a_traceback_only_of_what_nobody_foresaw(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Flower logs what the ServerApp raises after it has raised it, under `flwr run`."""
    foreseen, logger = not isinstance(error, TypeError), logging.getLogger("flwr")
    monkeypatch.setattr(logger, "filters", [])
    with server_app.user_errors_in_one_line(cast(Grid, None)):
        assert logger.filters == []
    with pytest.raises(type(error)), server_app.user_errors_in_one_line(cast(Grid, None)):
        raise error
    logging.getLogger("flwr").error("%s raised an exception", "Simulation", exc_info=error)
    (record,) = caplog.records
    assert (record.exc_info is None) == foreseen
    assert record.getMessage() == "Simulation raised an exception" + (f": {error}" if foreseen else "")
