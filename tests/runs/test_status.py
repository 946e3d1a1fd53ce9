"""The status of a run: a final one stays, and concurrent writers do not overwrite each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from runners import small

from fedeas_flwr.runs.directory import RunDirectory


@pytest.mark.parametrize(("status", "error"), [("finished", ""), ("failed", "a reason")])
def test_interrupt_after_the_end_keeps_the_final_status(tmp_path: Path, status: str, error: str) -> None:
    run = RunDirectory.start(small(tmp_path / "r"), {})
    run.set_status(status, error)
    run.set_status("interrupted")  # Ctrl-C while the launcher cleans up
    assert run.status() == (status, error)


def test_interrupt_of_a_resumed_run_is_recorded(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "r"), {})
    for status in ("finished", "running", "interrupted"):
        run.set_status(status)
    assert run.status()[0] == "interrupted"


def test_interrupt_of_a_run_whose_processes_died_is_recorded(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "r"), {})
    run.set_status("failed", "killed", died=True)  # the launcher may still resume it
    run.set_status("interrupted")
    assert run.status()[0] == "interrupted"


def test_start_of_a_run_is_its_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.time", lambda: now)
    run = RunDirectory.start(small(tmp_path / "r"), {})
    now = 130.0
    run.set_status("running")  # the ServerApp's
    now = 142.0
    assert run.seconds_since_start() == 42.0
    run.set_status("running", pid=os.getpid())  # started again, after processes died
    assert run.seconds_since_start() == 0.0
    run.set_status("interrupted")
    now = 200.0
    run.set_status("running")  # resumed
    now = 201.0
    assert run.seconds_since_start() == 1.0
    now = 0.0  # the clock was set back
    assert run.seconds_since_start() == 0.0
    run.set_status("finished")
    assert run.seconds_since_start() == 0.0, "a run that does not run has no start"


def test_started_process_replaces_those_that_run_it(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "r"), {})
    assert [process["pid"] for process in run.processes()] == [os.getpid()]
    run.set_status("running", pid=os.getppid())
    assert [process["pid"] for process in run.processes()] == [os.getppid()]
    for _ in range(2):
        run.set_status("running")
    assert [process["pid"] for process in run.processes()] == [os.getppid(), os.getpid()]


def test_concurrent_status_writers_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, server = (RunDirectory(RunDirectory.start(small(tmp_path / "r"), {}).path) for _ in range(2))
    has_read, may_write = threading.Event(), threading.Event()
    read = launcher.processes

    def read_and_wait() -> list[dict[str, object]]:
        found = read()
        has_read.set()
        may_write.wait(10)
        return found

    monkeypatch.setattr(launcher, "processes", read_and_wait)
    first = threading.Thread(target=launcher.set_status, args=("running",))
    second = threading.Thread(target=server.set_status, args=("finished",))
    first.start()
    assert has_read.wait(10)
    second.start()
    second.join(0.5)  # without a lock the server writes here, and the launcher overwrites it
    may_write.set()
    first.join(10)
    second.join(10)
    assert server.status()[0] == "finished"
