"""Run a sweep, each run in its own process, so that its memory and GPU are free when it ends.

The runs of a killed sweep continue. The next sweep finds them by their run directories and waits for them instead of
starting them twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import tomli_w
from filelock import FileLock, Timeout

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.processes import ignore_sigint
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.config import RunConfig
from fedeas_flwr.config_files import absolute_paths
from fedeas_flwr.launch.mps import gpu_shared_by
from fedeas_flwr.launch.sweep import Sweep, SweepRun
from fedeas_flwr.launch.watchdog import is_watchdog
from fedeas_flwr.runs.directory import RunDirectory

REFUSED = 2
"""Exit code for invalid input (`app.exit_code`); the same command would fail again."""
_POLL_SECONDS = 0.2
_GRACE = 60.0
"""Seconds that a run has to end after SIGTERM: to finish the clients in training and to write a checkpoint, which with
all client states may be gigabytes; under Ray, to end all processes of the launcher."""


@dataclass
class Job:
    """A run in progress."""

    cell: SweepRun
    process: subprocess.Popen[bytes] | None
    """``None`` if this sweep did not start the run."""
    rounds_before: int
    began: float = field(default_factory=time.monotonic)

    def has_ended(self) -> bool:
        """Return whether the run has no process left."""
        if self.process is not None and self.process.poll() is None:
            return False
        return not self._others()

    def failure_reason(self) -> str:
        """Return one line on why the run ended without finishing."""
        run, log = self.cell.run, self.cell.run.path / "output.log"
        code = self.process.returncode if self.process is not None else None
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        logged = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
        done, wanted = self.cell.reached()["rounds"], self.cell.config.rounds
        return logged or run.status()[1] or f"ended after {done} of {wanted} rounds; see {log}"

    def ask_to_stop(self) -> None:
        """Send SIGTERM, on which the run stops as on Ctrl-C; it can be resumed."""
        for process in self._others()[:1]:  # the launcher, which ends its own processes
            with suppress(psutil.Error):
                psutil.Process(process["pid"]).terminate()

    def _others(self) -> list[dict[str, Any]]:
        """Return the run's processes without the sweep, which is registered briefly while it creates the folder."""
        return [process for process in self.cell.run.processes() if process["pid"] != os.getpid()]

    def kill(self) -> None:
        """Kill the run and the processes it started."""
        for registered in self._others():
            with suppress(psutil.Error):
                process = psutil.Process(registered["pid"])
                for one in (*process.children(recursive=True), process):
                    with suppress(psutil.Error):  # it may just have ended; the others have not
                        if not is_watchdog(one):
                            one.kill()


@dataclass
class RunProgress:
    """Progress of one run of the sweep, as displayed."""

    state: str
    """waiting, running, finished or failed."""
    rounds: int
    score: float | None
    """Final accuracy so far or, of a generator, the last loss."""


@dataclass
class SweepStatus:
    """Progress of a sweep and its estimated time left."""

    sweep: Sweep
    slots: int
    running: dict[str, Job] = field(default_factory=dict)
    progress: dict[str, RunProgress] = field(default_factory=dict)
    _seconds: float = 0.0
    _rounds: int = 0

    def look_at(self, cell: SweepRun, state: str) -> None:
        """Update the progress of a run."""
        reached = cell.reached()
        self.progress[cell.name] = RunProgress(
            state, reached["rounds"], reached.get("final", reached.get("final_loss"))
        )

    def note_end(self, job: Job) -> None:
        """Remove an ended job and add its time and rounds to the estimate for the others."""
        seconds, rounds = self._spent(job)
        self._seconds, self._rounds = self._seconds + seconds, self._rounds + rounds
        del self.running[job.cell.name]

    def count(self, state: str) -> int:
        """Return the number of runs in a state."""
        return sum(progress.state == state for progress in self.progress.values())

    def seconds_left(self, cell: SweepRun) -> float | None:
        """Return a run's estimated seconds left, by its own rounds or else by all runs'; ``None`` before any round."""
        seconds, rounds = self._spent(self.running[cell.name]) if cell.name in self.running else (0.0, 0)
        if not rounds:
            spent = [(self._seconds, self._rounds), *(self._spent(job) for job in self.running.values())]
            seconds, rounds = sum(pair[0] for pair in spent), sum(pair[1] for pair in spent)
        if not rounds:
            return None
        return max(cell.config.rounds - self.progress[cell.name].rounds, 0) * seconds / rounds

    def all_seconds_left(self) -> float | None:
        """Return the sweep's estimated seconds left: the sum divided by the slots, at least the longest run."""
        open_cells = [c for c in self.sweep.cells if self.progress[c.name].state in ("waiting", "running")]
        left = [self.seconds_left(cell) for cell in open_cells]
        known = [seconds for seconds in left if seconds is not None]
        if len(known) < len(left):
            return None
        return max([sum(known) / self.slots, *known], default=0.0)

    def _spent(self, job: Job) -> tuple[float, int]:
        done = max(self.progress[job.cell.name].rounds - job.rounds_before, 0)
        return time.monotonic() - job.began, done


class Watcher(Protocol):
    """Receives the events of a running sweep."""

    def on_start(self, status: SweepStatus) -> None:
        """Called first, once the sweep has locked and checked its folder."""

    def on_event(self, cell: SweepRun, event: str, status: SweepStatus) -> None:
        """Called when a run was started, joined, finished, skipped, failed, or will be restarted (`again`)."""

    def on_tick(self, status: SweepStatus) -> None:
        """Called several times per second with the current progress."""


def run_sweep(
    sweep: Sweep, slots: int, retries: int, watcher: Watcher, prepare: Callable[[], None] | None = None
) -> list[SweepRun]:
    """Run all unfinished runs of a sweep, ``slots`` at once; return those that failed, each with its ``error``.

    A failed run is restarted up to ``retries`` times, after all others; a run rejected for invalid input is not, and
    one with a damaged record is not started. ``prepare`` is called before the first run, once the folder is locked.

    If the user stops the sweep, its runs are stopped too, and the same sweep can continue. Runs are also stopped if the
    sweep itself fails, for example because the disk is full.
    """
    with _lock_folder(sweep.folder):
        sweep.open()
        status = SweepStatus(sweep, slots)
        damaged = [cell for cell in sweep.cells if "damage" in cell.reached() and not cell.run.processes()]
        for cell in damaged:
            cell.error = cell.reached()["damage"]
        for cell in sweep.cells:
            status.look_at(cell, "failed" if cell in damaged else "finished" if cell.finished else "waiting")
        watcher.on_start(status)
        if prepare:
            prepare()
        for cell in sweep.cells:
            if (state := status.progress[cell.name].state) != "waiting":
                watcher.on_event(cell, "skipped" if state == "finished" else state, status)
        left = [cell for cell in sweep.cells if status.progress[cell.name].state == "waiting"]
        left.sort(key=lambda cell: not cell.run.processes())  # running ones take their slots first
        try:
            with gpu_shared_by([cell.config for cell in left], slots) as variables, _stopping_runs_on_error(status):
                return [*damaged, *_work(status, deque(left), retries, watcher, variables)]
        finally:
            sweep.save()


@contextmanager
def _stopping_runs_on_error(status: SweepStatus) -> Iterator[None]:
    try:
        yield
    except BaseException:
        # Also runs that are not in the status yet: the error may have come right after one was started.
        alive = [cell for cell in status.sweep.cells if cell.name not in status.running and cell.run.processes()]
        stop([*status.running.values(), *(Job(cell, None, 0) for cell in alive)])
        raise


def _work(
    status: SweepStatus,
    waiting: deque[SweepRun],
    retries: int,
    watcher: Watcher,
    variables: Callable[[RunConfig], dict[str, str]],
) -> list[SweepRun]:
    failed: list[SweepRun] = []
    while waiting or status.running:
        while waiting and len(status.running) < status.slots:
            cell = waiting.popleft()
            job = status.running[cell.name] = start(cell, variables(cell.config))
            status.look_at(cell, "running")
            watcher.on_event(cell, "started" if job.process else "joined", status)
        time.sleep(_POLL_SECONDS)
        for job in list(status.running.values()):
            cell = job.cell
            status.look_at(cell, "running")
            if not job.has_ended():
                continue
            status.note_end(job)
            event = _classify_end(job, retries)
            status.look_at(cell, {"again": "waiting"}.get(event, event))
            if event == "again":
                waiting.append(cell)
            elif event == "failed":
                failed.append(cell)
            status.sweep.save()
            watcher.on_event(cell, event, status)
        watcher.on_tick(status)
    return failed


def _classify_end(job: Job, retries: int) -> str:
    """Return how a job ended (finished, failed or again), and record the reason of a failure."""
    cell = job.cell
    if cell.finished:
        cell.error = ""
        return "finished"
    cell.error = job.failure_reason()
    code = job.process.returncode if job.process is not None else None
    # A run rejected before it started has not written its status; a killed run counts as interrupted.
    if code in (1, REFUSED) and cell.run.status()[0] == "running":
        cell.run.set_status("failed", cell.error)
    return "again" if cell.attempts <= retries and code != REFUSED else "failed"


def start(cell: SweepRun, variables: Mapping[str, str]) -> Job:
    """Start or resume a run with additional environment variables, or join it if it is already running.

    A run whose processes were on another machine counts as interrupted: a restarted container has another host name,
    and waiting for the old one would never end.
    """
    run = cell.run
    rounds = cell.reached()["rounds"]
    if run.processes():
        return Job(cell, None, rounds)
    cell.attempts += 1
    begun = run.has_rounds()
    if not begun:
        RunDirectory.start(cell.config, describe_environment("not known yet"))
        run.set_status("interrupted")  # unregisters the sweep, which stopping the run would otherwise kill
    values = absolute_paths(cell.config.to_user_dict(), Path())
    atomic_write(run.path / "run.toml", tomli_w.dumps(values).encode())
    with (run.path / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command_of(run.path / "run.toml", resume=begun),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,  # the sweep handles Ctrl-C
        )
    try:
        run.set_status("running", pid=process.pid)
    except BaseException:  # Ctrl-C: nothing else knows the process
        process.terminate()
        process.wait()
        raise
    return Job(cell, process, rounds)


def command_of(conf: Path, resume: bool) -> list[str]:
    """Return the command that runs a config with this Python."""
    command = [sys.executable, "-m", "fedeas_flwr", "run", str(conf)]
    return [*command, "resume=true"] if resume else command


def stop(jobs: list[Job]) -> None:
    """Stop runs so that they can be resumed: send SIGTERM, wait, and kill what is left."""
    with ignore_sigint():
        for act in (Job.ask_to_stop, Job.kill):
            for job in jobs:
                act(job)
            deadline = time.monotonic() + _GRACE
            while not (ended := all(job.has_ended() for job in jobs)) and time.monotonic() < deadline:
                time.sleep(0.05)
            if ended:
                return


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".sweep.lock", timeout=0):
            yield
    except Timeout:
        raise RunError(f"another sweep is already running in {folder}") from None
