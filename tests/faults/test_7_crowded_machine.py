"""Row 7: other runs, busy ports, full or read-only disks, clock jumps. The run works or fails with a one-line error."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import psutil
import pytest
from runners import fedeas, finish, small, weights
from small_disks import remount, tiny_disk
from waiting import wait_until

from fedeas_flwr.common import processes
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.launch import superlink
from fedeas_flwr.launch.superlink import free_port, own_environment
from fedeas_flwr.runs.directory import RunDirectory

pytestmark = pytest.mark.flower

CONF = 'clients = 4\nrounds = 2\nlocal-epochs = 1\npolicy = "none"\nalpha = 0.1\n'


def test_port_of_another_process_is_not_our_superlinks() -> None:
    """A SuperLink whose port is taken exits; until then the other process accepts connections there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert superlink.is_listening(port)
        assert processes.listens(os.getpid(), port)
        ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"])
        assert not superlink._is_ready(ours, port, isolated=False)
        assert ours.wait() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_leftovers")
def test_superlink_with_a_taken_port_starts_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = chain([taken.getsockname()[1]], iter(free_port, None))
        monkeypatch.setattr(superlink, "free_port", lambda: next(ports))
        environment, run = own_environment(tmp_path), RunDirectory(tmp_path)
        started, tree = superlink.start_superlink(environment, tmp_path, stack, run)
        assert started.poll() is None
        tree.end()


@pytest.mark.slow
@pytest.mark.usefixtures("no_leftovers")
def test_two_runs_at_once_ignore_a_stale_superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flwr run` would find the stale SuperLink by its port, and a Ray cluster by its address."""
    whole = finish(small(tmp_path / "whole", policy="none", rounds=2))
    (tmp_path / "conf.toml").write_text(CONF)
    (tmp_path / "home").mkdir()
    port = free_port()
    environment = {
        **own_environment(tmp_path / "home"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "RAY_ADDRESS": "127.0.0.1:1",
    }
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        stale = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    tree = processes.ProcessTree(stale, str(tmp_path / "home"))
    try:
        wait_until(lambda: superlink.is_listening(port), "the stale SuperLink listens")
        words = [sys.executable, "-m", "fedeas_flwr", "run", str(tmp_path / "conf.toml"), "actors=1"]
        both = [
            subprocess.Popen([*words, f"run-dir={tmp_path / name}"], env=environment, stderr=subprocess.PIPE, text=True)
            for name in "ab"
        ]
        for run in both:
            _, errors = run.communicate(timeout=400)
            assert run.returncode == 0, errors
        assert stale.poll() is None, "the stale SuperLink was ended"
        assert weights(RunDirectory(tmp_path / "a")) == weights(RunDirectory(tmp_path / "b")) == weights(whole)
    finally:
        tree.end()


# ---------------------------------------------------------------------------------------------------- disks


def test_read_only_run_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "conf.toml").write_text(CONF + 'backend = "inline"\n')
    with tiny_disk(tmp_path / "disk", "size=1m") as disk:
        remount(disk, "ro")
        done = fedeas("run", str(tmp_path / "conf.toml"), f"run-dir={disk / 'r'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: run-dir = '{disk / 'r'}' cannot be written: Read-only file system\n"


def test_full_disk_during_a_run_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    keys = {"policy": "none", "rounds": 40}
    with tiny_disk(tmp_path / "disk", "size=2m") as disk:
        finish(small(disk / "r", **{**keys, "rounds": 1}))
        used = shutil.disk_usage(disk).used
        remount(disk, f"size={used + 20_000}")
        with pytest.raises((RunError, OSError), match="No space left"):
            finish(small(disk / "r", resume=True, **keys))
        run = RunDirectory(disk / "r")
        checkpoint = run.load_checkpoint()
        assert checkpoint is not None and checkpoint.round >= 1
        remount(disk, "size=10m")
        keys["rounds"] = 4
        resumed = finish(small(disk / "r", resume=True, **keys))
        assert weights(resumed) == weights(finish(small(tmp_path / "whole", **keys)))


@pytest.mark.slow
def test_run_with_full_dev_shm_works_or_fails_in_one_line(tmp_path: Path) -> None:
    """Ray stores objects there and falls back to the disk. The run has a mount namespace of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace of one's own needs a privilege")
    (tmp_path / "conf.toml").write_text(CONF)
    whole = finish(small(tmp_path / "whole", policy="none", rounds=2))
    script = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 64k /dev/zero > /dev/shm/full; "
        f"exec {sys.executable} -m fedeas_flwr run {tmp_path / 'conf.toml'} run-dir={tmp_path / 'r'} actors=1"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=400)
    if done.returncode == 0:
        assert weights(RunDirectory(tmp_path / "r")) == weights(whole)
    else:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------------------- clock


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_running_state_ignores_jumps_of_the_system_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """A process's wall-clock start time moves with the clock; comparing it would let a second run into the folder."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("only Linux tells when a process started without the time of day")
    run = RunDirectory(tmp_path)
    run.set_status("running")
    created, now = psutil.Process.create_time, time.time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + jump)
    monkeypatch.setattr(time, "time", lambda: now() + jump)
    assert run.state() == "running"
    assert [process["pid"] for process in run.processes()] == [os.getpid()]
    (announced,) = run.processes()
    assert not processes.is_alive({**announced, "started": announced["started"] + "0"})
