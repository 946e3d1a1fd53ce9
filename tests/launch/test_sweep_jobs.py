"""Runs of a sweep: failed runs are restarted and reported, Ctrl-C stops all runs, and the time left is estimated."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_runs import write_run
from rich.console import Console
from runners import command, fedeas, run_in_process, start_interruptible
from test_sweep import ROOT, base
from waiting import LONG, wait_until

from fedeas_flwr.commands.sweep import watching
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.text import show_seconds
from fedeas_flwr.config_files import read_config
from fedeas_flwr.launch import sweep_jobs
from fedeas_flwr.launch.sweep import SweepRun, make_sweep
from fedeas_flwr.launch.sweep_jobs import Job, RunProgress, SweepStatus, run_sweep
from fedeas_flwr.runs.directory import RunDirectory

CHILD = """
import pathlib, sys, time
from fedeas_flwr.config_files import read_config
from fedeas_flwr.runs.listing import check_removable
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.runs.directory import RunDirectory
config = read_config(pathlib.Path(sys.argv[1]), sys.argv[2:])
if config.seed == 13:
    sys.exit("error: thirteen cannot be had")
if config.seed == 22:
    print("error: what was given is wrong", file=sys.stderr)
    sys.exit(2)
run = RunDirectory.start(config, {})
for number in range(len(run.rounds()) + 1, config.rounds + 1):
    if config.seed == 7 and number == 2 and not config.resume:
        run.set_status("failed", "a reason of its own")
        sys.exit(1)
    time.sleep(60 if config.seed == 99 else 0)
    record = {"round": number, "accuracy": 0.5, "generated": 0, "failures": [], "seconds": {"clients": 0.0}}
    run.append_round(record)
run.set_status("finished")
"""
"""A fake run: it always fails (seed 13), fails once in round 2 (7), is rejected (22), or never ends (99)."""


class RecordingWatcher:
    """Watcher that records the events of a sweep."""

    def __init__(self, interrupt_at: str = "") -> None:
        self.words: list[tuple[str, str]] = []
        self._interrupt_at = interrupt_at

    def on_start(self, board: SweepStatus) -> None:
        self.words.append(("", "began"))

    def on_event(self, cell: SweepRun, word: str, board: SweepStatus) -> None:
        self.words.append((cell.name, word))

    def on_tick(self, board: SweepStatus) -> None:
        if self._interrupt_at and (board.sweep.folder / self._interrupt_at / "config.json").exists():
            raise KeyboardInterrupt


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace real runs with runs that do nothing."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def command_of(conf: Path, resume: bool) -> list[str]:
        return [sys.executable, str(script), str(conf), *(["resume=true"] if resume else [])]

    monkeypatch.setattr(sweep_jobs, "command_of", command_of)
    return tmp_path / "s"


def test_failed_runs_are_retried_at_the_end_and_listed(quick: Path) -> None:
    sweep, watcher = make_sweep(base(), ["seed=13,7,1"], quick), RecordingWatcher()
    (failed,) = run_sweep(sweep, 1, 1, watcher)
    assert watcher.words == [
        ("", "began"),
        ("seed-13", "started"),
        ("seed-13", "again"),
        ("seed-7", "started"),
        ("seed-7", "again"),
        ("seed-1", "started"),
        ("seed-1", "finished"),
        ("seed-13", "started"),
        ("seed-13", "failed"),
        ("seed-7", "started"),
        ("seed-7", "finished"),
    ]
    assert (failed.name, failed.error) == ("seed-13", "thirteen cannot be had")
    record = json.loads((quick / "sweep.json").read_text())
    assert [(run["state"], run["rounds_done"], run["error"]) for run in record["runs"]] == [
        ("failed", 0, "thirteen cannot be had"),
        ("finished", 3, ""),
        ("finished", 3, ""),
    ]


def test_rejected_run_is_not_retried(quick: Path) -> None:
    sweep, watcher = make_sweep(base(), ["seed=22,1"], quick), RecordingWatcher()
    (failed,) = run_sweep(sweep, 1, 5, watcher)
    assert watcher.words[1:4] == [("seed-22", "started"), ("seed-22", "failed"), ("seed-1", "started")]
    assert (failed.name, failed.error, failed.attempts) == ("seed-22", "what was given is wrong", 1)
    assert failed.run.status() == ("failed", "what was given is wrong")


def test_runs_of_a_sweep_have_the_paths_of_its_command_line(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = make_sweep(base(), ["generator=generators/a"], quick)
    assert run_sweep(sweep, 1, 0, RecordingWatcher()) == []
    written = read_config(sweep.cells[0].run.path / "run.toml")
    assert written.generator == str(tmp_path / "generators" / "a")


DAMAGES: dict[str, tuple[str | None, str]] = {
    "empty": ("", "holds 0 valid records, but summary.json counts 3 rounds: fix line 1"),
    "gone": (None, "holds 0 valid records, but summary.json counts 3 rounds: fix line 1"),
    "strange": (
        '{"round": 1}\n' * 3,
        "holds 0 valid records, but summary.json counts 3 rounds: fix line 1 (accuracy = null, must be from 0 to 1)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_sweep_reports_damaged_run_and_finishes_the_others(quick: Path, damage: str) -> None:
    text, reason = DAMAGES[damage]
    sweep, watcher = make_sweep(base(), ["seed=1,2"], quick), RecordingWatcher()
    record = write_run(sweep.cells[0].run.path, [0.5] * 3, **sweep.cells[0].config.to_user_dict()).path / "rounds.jsonl"
    record.unlink() if text is None else record.write_text(text)
    (failed,) = run_sweep(sweep, 1, 1, watcher)
    assert watcher.words == [("", "began"), ("seed-1", "failed"), ("seed-2", "started"), ("seed-2", "finished")]
    assert (failed.name, failed.attempts) == ("seed-1", 0)
    assert failed.error == f"{record} {reason}; after `fedeas runs rm {failed.run.path}` the sweep repeats it"
    found = json.loads((quick / "sweep.json").read_text())
    assert [(run["state"], run["error"]) for run in found["runs"]] == [("damaged", failed.error), ("finished", "")]
    assert (found["points"][0]["finished"], found["points"][0]["last_20"]["mean"]) == (1, 0.5)
    assert run_in_process("runs", "rm", str(failed.run.path), "--yes").returncode == 0
    assert run_sweep(make_sweep(base(), ["seed=1,2"], quick), 1, 1, RecordingWatcher()) == []


def test_sweep_repeats_finished_run_without_rounds(quick: Path) -> None:
    sweep = make_sweep(base(), ["seed=1"], quick)
    RunDirectory.start(sweep.cells[0].config, {}).set_status("finished")
    assert run_sweep(sweep, 1, 1, RecordingWatcher()) == [] and sweep.cells[0].result()["rounds_done"] == 3


def test_ctrl_c_stops_all_runs_and_the_next_sweep_resumes(quick: Path) -> None:
    sweep = make_sweep(base(), ["seed=1,99"], quick)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, 2, 1, RecordingWatcher(interrupt_at="seed-99"))
    stopped = sweep.cells[1].run
    assert stopped.processes() == [] and stopped.state() == "interrupted"
    assert json.loads((quick / "sweep.json").read_text())["runs"][1]["state"] == "interrupted"


def test_ctrl_c_prints_resume_command_and_ends_all_runs(tmp_path: Path) -> None:
    conf = tmp_path / "conf.toml"
    conf.write_text('clients = 4\npolicy = "none"\nbackend = "inline"\nrounds = 500\n')
    words = ["sweep", str(conf), "--grid", "seed=1,2", "--out", str(tmp_path / "out")]
    child = start_interruptible(command(*words))
    run = RunDirectory(tmp_path / "out" / "seed-1")
    wait_until(lambda: [p for p in run.processes() if p["pid"] != child.pid], "a run has started")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=LONG)
    assert child.returncode == 130
    assert errors == f"stopped; resume with: fedeas {shlex.join(words)}\n"
    assert run.state() == "interrupted" and run.processes() == []
    assert not (tmp_path / "out" / "seed-2").exists()


def test_live_table_shows_every_run_and_keeps_failures(quick: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with watching(console) as watcher:
        run_sweep(make_sweep(base(), ["seed=13,1"], quick), 2, 0, watcher)
    shown = console.file.getvalue()
    assert f"2 runs, 2 at once → {quick}" in shown
    assert "seed-13  failed: thirteen cannot be had" in shown
    assert re.search(r"seed-1 +finished +3/3 +50\.0", shown)
    assert "1 finished, 1 failed" in shown and not re.search(r"\b0 s", shown)


def test_second_sweep_in_a_folder_is_rejected(quick: Path) -> None:
    watcher = RecordingWatcher()
    with sweep_jobs._lock_folder(quick), pytest.raises(RunError, match="another sweep is already running in"):
        run_sweep(make_sweep(base(), ["seed=1"], quick), 1, 1, watcher)
    assert watcher.words == []


def test_second_sweep_is_rejected_without_output(tmp_path: Path) -> None:
    words = ("sweep", str(ROOT / "conf" / "quickstart.toml"), "--grid", "seed=1", "--out", str(tmp_path / "s"))
    with sweep_jobs._lock_folder(tmp_path / "s"):
        done = run_in_process(*words)
    line = f"error: another sweep is already running in {tmp_path / 's'}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.slow
def test_sweep_lists_failed_run_and_finishes_the_others(tmp_path: Path) -> None:
    """The run fails in training; test_sweep.py covers input rejected before the first run."""
    words = ("policy=none", "rounds=1", "clients=4", "backend=inline", "--retries", "0", "--out", "out")
    grid = ("--grid", "learning-rate=100,0.05")
    done = fedeas("sweep", str(ROOT / "conf/quickstart.toml"), *words, *grid, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("failed: learning-rate-100.0: round 1: ") and "loss = nan" in line
    assert RunDirectory(tmp_path / "out" / "learning-rate-0.05").state() == "finished"
    assert RunDirectory(tmp_path / "out" / "learning-rate-100.0").state() == "failed"


def test_time_left_is_estimated_from_observed_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make_sweep(base(rounds=10), ["seed=1,2,3"], tmp_path)
    one, two, three = sweep.cells
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    board = SweepStatus(
        sweep, 2, running={one.name: Job(one, None, 2, began=80.0), two.name: Job(two, None, 0, began=99.0)}
    )
    board.progress = {
        one.name: RunProgress("running", 2, None),
        two.name: RunProgress("running", 0, None),
        three.name: RunProgress("waiting", 0, None),
    }
    assert board.seconds_left(one) is None and board.all_seconds_left() is None
    board.progress[one.name].rounds = 6  # four rounds in 20 s; four are left
    assert board.seconds_left(one) == 20
    assert board.seconds_left(three) == pytest.approx(10 * 21 / 4)
    assert board.all_seconds_left() == pytest.approx((20 + 2 * 52.5) / 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.01, "1 s"), (1, "1 s"), (89.2, "90 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")],
)
def test_show_seconds_never_rounds_to_zero(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def test_smaller_grid_keeps_and_counts_other_runs(quick: Path) -> None:
    words = ("sweep", str(ROOT / "conf" / "quickstart.toml"), "policy=none", "backend=inline", "--out", str(quick))
    whole = run_in_process(*words, "--grid", "seed=1,2,3")
    fewer = run_in_process(*words, "--grid", "seed=2")
    assert (whole.returncode, fewer.returncode) == (0, 0), whole.stderr + fewer.stderr
    assert "left out" not in whole.stdout
    assert f"left out 2 runs in {quick}: not in this grid" in fewer.stdout
    assert len(list(quick.glob("seed-*"))) == 3


def test_kill_ends_a_run_with_a_child_that_has_just_ended(tmp_path: Path) -> None:
    """A process that has ended, and whose parent has not noticed yet, has no command line."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '']); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code])
    run = write_run(tmp_path / "run", [0.5], finished=False)
    run.set_status("running", pid=process.pid)
    children = psutil.Process(process.pid).children
    wait_until(lambda: [child.status() for child in children()] == [psutil.STATUS_ZOMBIE], "its child has ended")
    Job(SweepRun("run", {}, run.config(), run), process, 0).kill()
    try:
        assert process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()
