"""CUDA's MPS around a run: the daemon is started and ended, clients get its variables, and no run fails by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import LONG

from fedeas_flwr.common import devices
from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.processes import MARK, ProcessTree, with_variable
from fedeas_flwr.config import parse_config
from fedeas_flwr.launch import mps, resources, sweep_jobs
from fedeas_flwr.launch.mps import LOG, PIPE, QUEUES, shared_gpu
from fedeas_flwr.launch.sweep import SweepRun, make_sweep
from fedeas_flwr.launch.sweep_jobs import SweepStatus, run_sweep


def control(folder: Path, code: int = 0) -> Path:
    """Write a control program that records its arguments, input and environment."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    program = bin_folder / mps.CONTROL
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -d ] && said=start || said=$(cat)\n'
        f'echo "$said $CUDA_MPS_PIPE_DIRECTORY" >> {folder}/calls\n[ "$1" = -d ] && exit {code}\nexit 0\n'
    )
    program.chmod(0o755)
    return bin_folder


def calls(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Set up a working MPS; return the environment for its clients."""
    path = f"{control(tmp_path)}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv(PIPE, raising=False)
    monkeypatch.delenv(QUEUES, raising=False)
    monkeypatch.setattr(mps, "TRIAL", [sys.executable, "-c", f"import os; assert os.environ['{PIPE}']"])
    return dict(os.environ)


def test_daemon_is_ended_when_the_run_fails(works: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), shared_gpu(tmp_path, works, 4) as own:
        assert own == {PIPE: str(tmp_path / "mps"), LOG: str(tmp_path / "mps-log"), QUEUES: "24"}
        assert Path(own[PIPE]).is_dir() and calls(tmp_path) == ["start"]
        raise ZeroDivisionError
    assert calls(tmp_path) == ["start", "quit"]
    assert all(line.endswith(str(tmp_path / "mps")) for line in (tmp_path / "calls").read_text().splitlines())


@pytest.fixture
def daemon_that_stays(works: dict[str, str], tmp_path: Path) -> Callable[[], psutil.Process]:
    """Set up a control program that cannot end its daemon process; return a function that finds the daemon."""
    program = tmp_path / "bin" / mps.CONTROL
    program.write_text(f'#!/bin/sh\nif [ "$1" = -d ]; then sleep 60 >{tmp_path}/out 2>&1 & else cat; exit 1; fi\n')

    def find() -> psutil.Process:
        (daemon,) = with_variable(PIPE, str(tmp_path / "mps"))
        return daemon

    return find


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_daemon_is_not_killed_with_the_processes_of_a_run(
    works: dict[str, str], tmp_path: Path, daemon_that_stays: Callable[[], psutil.Process]
) -> None:
    """A daemon killed before its clients cannot remove their work from the GPU in order, so it is asked to quit."""
    root = subprocess.Popen(["sleep", "60"], env={**works, MARK: "this-run"})
    with shared_gpu(tmp_path, {**works, MARK: "this-run"}, 4):
        ProcessTree(root, "this-run").end()
        assert not psutil.pid_exists(root.pid), "the run's process was not ended"
        assert is_alive(daemon_that_stays())


def test_daemon_that_ignores_quit_is_killed(
    works: dict[str, str], tmp_path: Path, daemon_that_stays: Callable[[], psutil.Process]
) -> None:
    with shared_gpu(tmp_path, works, 4):
        daemon = daemon_that_stays()
        assert is_alive(daemon)
    psutil.wait_procs([daemon], timeout=LONG)
    assert not is_alive(daemon)


def test_daemon_with_failing_trial_client_is_not_used(
    works: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mps, "TRIAL", [sys.executable, "-c", "raise RuntimeError('no\\ndevice')"])
    with shared_gpu(tmp_path, works, 4) as own:
        assert own == {}
    assert calls(tmp_path) == ["start", "quit"]
    assert "take turns" in caplog.text and "no device" in caplog.text


def test_daemon_that_does_not_start_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{control(tmp_path, code=1)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(PIPE, raising=False)
    with shared_gpu(tmp_path, dict(os.environ), 4) as own:
        assert own == {}


def test_daemon_of_the_user_is_not_touched(works: dict[str, str], tmp_path: Path) -> None:
    with shared_gpu(tmp_path, {**works, PIPE: "/tmp/users"}, 4) as own:
        assert own == {}
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("processes", [1, 3, 4, 12, 40])
def test_queues_of_all_processes_fit_in_the_pool(works: dict[str, str], tmp_path: Path, processes: int) -> None:
    """On an H200, three processes with 32 queues each work, and a fourth is out of memory."""
    with shared_gpu(tmp_path, works, processes) as own:
        assert int(own[QUEUES]) >= 2 and processes * int(own[QUEUES]) <= 96


def test_run_of_a_sweep_divides_the_sweeps_queues(works: dict[str, str], tmp_path: Path) -> None:
    given = {**works, PIPE: "/tmp/sweeps", QUEUES: "32"}
    with shared_gpu(tmp_path, given, 12) as own:
        assert own == {QUEUES: "2"}
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(("pipe", "wanted"), [("", "32"), ("/tmp/users", None)])
def test_pick_device_sets_no_queues_for_anothers_daemon(
    monkeypatch: pytest.MonkeyPatch, pipe: str, wanted: str | None
) -> None:
    monkeypatch.setenv(PIPE, pipe)
    monkeypatch.delenv(QUEUES, raising=False)
    configure_torch("cpu")
    assert os.environ.get(QUEUES) == wanted


def test_without_mps_no_variables_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with shared_gpu(tmp_path, dict(os.environ), 4) as own:
        assert own == {}
    assert not (tmp_path / "mps").exists()


def test_daemon_is_ended_if_its_trial_is_interrupted(
    works: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch takes seconds, during which Ctrl-C may come."""
    run = mps._run

    def interrupted(command: list[str], *more: Any, **words: Any) -> str:
        if command is mps.TRIAL:
            raise KeyboardInterrupt
        return run(command, *more, **words)

    monkeypatch.setattr(mps, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt), shared_gpu(tmp_path, works, 4):
        pytest.fail("the run started despite the interrupt")
    assert calls(tmp_path) == ["start", "quit"]


# ------------------------------------------------------------------------------------------------- of a sweep


CHILD = """
import os, pathlib, sys, time
from fedeas_flwr.config_files import read_config
from fedeas_flwr.runs.directory import RunDirectory
config = read_config(pathlib.Path(sys.argv[1]), sys.argv[2:])
run = RunDirectory.start(config, {})
(run.path / "pipe").write_text(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""))
(run.path / "there").write_text(str(os.path.isdir(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", ""))))
time.sleep(60 if config.seed == 99 else 0)
run.append_round({"round": 1, "accuracy": 0.5, "generated": 0, "failures": [], "seconds": {"clients": 0.0}})
run.set_status("finished")
"""
"""A run that only records its daemon variables; with seed 99 it never ends."""


class SilentWatcher:
    """Watcher that does nothing, or raises once a run has started."""

    def __init__(self, breaks: type[BaseException] | None = None) -> None:
        self._breaks = breaks

    def on_start(self, board: SweepStatus) -> None:
        pass

    def on_event(self, cell: SweepRun, word: str, board: SweepStatus) -> None:
        pass

    def on_tick(self, board: SweepStatus) -> None:
        if self._breaks and (board.sweep.folder / "seed-99" / "there").exists():
            raise self._breaks


@pytest.fixture
def on_a_gpu(works: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate a machine with a GPU and MPS, and runs that do nothing; return the measurements by seed."""
    measured: list[int] = []
    monkeypatch.setattr(devices, "pick_device", lambda wanted: "cpu" if wanted == "cpu" else "cuda")
    monkeypatch.setattr(resources, "max_parallel_clients", lambda config: measured.append(config.seed))
    (tmp_path / "child.py").write_text(CHILD)

    def command_of(conf: Path, resume: bool) -> list[str]:
        return [sys.executable, str(tmp_path / "child.py"), str(conf), *(["resume=true"] if resume else [])]

    monkeypatch.setattr(sweep_jobs, "command_of", command_of)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return measured


def swept(folder: Path, grid: list[str], at_once: int, **keys: Any) -> dict[str, str]:
    """Run a sweep of one round per run; return the daemon variables that each run got."""
    sweep = make_sweep({"clients": 4, "rounds": 1, "backend": "inline", **keys}, grid, folder / "s")
    assert run_sweep(sweep, at_once, 0, SilentWatcher()) == []
    return {cell.name: (cell.run.path / "pipe").read_text() for cell in sweep.cells}


def test_runs_of_a_sweep_share_one_daemon(on_a_gpu: list[int], tmp_path: Path) -> None:
    variables = swept(tmp_path, ["seed=1,2,3"], 3)
    (pipe,) = set(variables.values())
    assert pipe and not Path(pipe).exists()
    assert {path.read_text() for path in tmp_path.glob("s/*/there")} == {"True"}, "the daemon ended before its runs"
    assert calls(tmp_path) == ["start", "quit"]
    assert (tmp_path / "calls").read_text().split() == ["start", pipe, "quit", pipe]
    assert on_a_gpu == [1, 2, 3], "not all runs were measured before the first one started"


def test_sweep_that_trains_generators_measures_nothing(on_a_gpu: list[int]) -> None:
    configs = [parse_config({"task": "generator", "policy": "none", "clients": 4, "seed": seed}) for seed in (1, 2)]
    with mps.gpu_shared_by(configs, 2) as variables:
        assert variables(configs[0]) and on_a_gpu == []


@pytest.mark.parametrize(
    ("at_once", "grid", "keys"),
    [
        (1, ["seed=1,2"], {}),
        (2, ["seed=1"], {}),
        (2, ["seed=1,2"], {"mps": "off"}),
        (2, ["seed=1,2"], {"device": "cpu"}),
        (2, ["seed=1,2"], {"ray-address": "there:6379", "backend": "ray"}),
    ],
)
def test_sweep_without_shared_gpu_starts_no_daemon(
    on_a_gpu: list[int], tmp_path: Path, at_once: int, grid: list[str], keys: dict[str, Any]
) -> None:
    assert set(swept(tmp_path, grid, at_once, **keys).values()) == {""}
    assert not (tmp_path / "calls").exists() and on_a_gpu == []


def test_run_with_mps_off_gets_no_daemon_variables(on_a_gpu: list[int], tmp_path: Path) -> None:
    variables = swept(tmp_path, ["mps=auto,off", "seed=1,2"], 2, actors=5)
    assert [bool(variables[f"mps-{key}_seed-{seed}"]) for key in ("auto", "off") for seed in (1, 2)] == [True] * 2 + [
        False
    ] * 2
    assert calls(tmp_path) == ["start", "quit"]
    assert on_a_gpu == [], "measured although `actors` is set"


@pytest.mark.parametrize("breaks", [KeyboardInterrupt, OSError])
def test_aborted_sweep_ends_its_runs_before_its_daemon(
    on_a_gpu: list[int], tmp_path: Path, breaks: type[BaseException]
) -> None:
    sweep = make_sweep({"clients": 4, "rounds": 1, "backend": "inline"}, ["seed=99,1"], tmp_path / "s")
    with pytest.raises(breaks):
        run_sweep(sweep, 2, 0, SilentWatcher(breaks))
    assert sweep.cells[0].run.state() == "interrupted" and sweep.cells[0].run.processes() == []
    assert calls(tmp_path) == ["start", "quit"]
