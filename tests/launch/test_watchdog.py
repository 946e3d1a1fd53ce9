"""A killed launcher leaves no process running; a launcher that exits cleanly is not disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from runners import run_in_process
from waiting import wait_until

from fedeas_flwr.common.processes import MARK
from fedeas_flwr.doctor import findings
from fedeas_flwr.launch.watchdog import dead_launches, is_watchdog, launch_folder, watchdog

LAUNCHER = """
import os, subprocess, sys, time
from pathlib import Path
from fedeas_flwr.launch.watchdog import watchdog

inside = os.environ | {"FEDEAS_LAUNCH": sys.argv[1]}
root = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True)
sockets = os.environ | {"ITS_SOCKETS": sys.argv[1] + "/mps"}
daemon = subprocess.Popen(["sleep", "600"], env=sockets, start_new_session=True)
alone = ["sh", "-c", "sleep 600 > /dev/null 2>&1 & echo $!"]
orphan = subprocess.run(alone, env=inside, capture_output=True, text=True)
with watchdog(root.pid, Path(sys.argv[1])):
    print(root.pid, daemon.pid, orphan.stdout.strip(), flush=True)
    time.sleep(600)
"""


def watchdogs_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-1:] == [str(folder)] and process.cmdline()[2:3] == ["fedeas_flwr.launch.watchdog"]:
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_watchdog_kills_processes_of_a_killed_launcher(number: int, tmp_path: Path) -> None:
    folder = tmp_path / "fe-folder"
    (folder / "deep").mkdir(parents=True)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert launcher.stdout
    root, daemon, orphan = (psutil.Process(int(pid)) for pid in launcher.stdout.readline().split())
    assert orphan.environ()[MARK] == str(folder)
    wait_until(lambda: len(root.children()) == 2 and watchdogs_of(folder), "all processes have started")
    started = [root, daemon, orphan, *root.children()]
    os.killpg(launcher.pid, number)
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: not any(map(is_alive, started)), "all started processes have ended")
    wait_until(lambda: not folder.exists() and not watchdogs_of(folder), "the folder and the watchdog are gone")


@pytest.fixture
def root() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def only_watchdog_of(folder: Path) -> psutil.Process:
    wait_until(lambda: watchdogs_of(folder), "it has its command line, which a new process gets late")
    (found,) = watchdogs_of(folder)
    return found


def test_watchdog_does_nothing_after_a_clean_exit(tmp_path: Path, root: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ZeroDivisionError), watchdog(root.pid, tmp_path):
        raise ZeroDivisionError
    assert root.poll() is None and tmp_path.exists() and not watchdogs_of(tmp_path)
    with watchdog(root.pid, tmp_path):
        assert not is_watchdog(psutil.Process(root.pid)) and is_watchdog(only_watchdog_of(tmp_path))


def test_killed_watchdog_is_no_error(tmp_path: Path, root: subprocess.Popen[bytes]) -> None:
    with watchdog(root.pid, tmp_path):
        only_watchdog_of(tmp_path).kill()


DEAD_LAUNCHER = """
import os, subprocess, time
from fedeas_flwr.launch.watchdog import launch_folder, watchdog

with launch_folder() as folder:
    inside = os.environ | {"FEDEAS_LAUNCH": str(folder)}
    root = subprocess.Popen(["sh", "-c", "env -i sleep 600 & sleep 600"], env=inside, start_new_session=True)
    with watchdog(root.pid, folder):
        print(root.pid, folder, flush=True)
        time.sleep(600)
"""


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("own_temporary_folder")
def test_next_command_ends_what_a_dead_watchdog_left(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", DEAD_LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout
    pid, name = launcher.stdout.readline().split()
    root, folder = psutil.Process(int(pid)), Path(name)
    wait_until(lambda: len(root.children()) == 2 and watchdogs_of(folder), "all are there")
    left = [root, *root.children()]
    assert dead_launches() == {}
    assert run_in_process("keys").stderr == "" and all(map(is_alive, left))
    watchdogs_of(folder)[0].kill()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert all(map(is_alive, left))
    monkeypatch.setattr(findings, "CHECKS", {"left processes": findings.CHECKS["left processes"]})
    line = f"a killed run left {pid}, "
    assert line in " ".join(run_in_process("doctor").stdout.split())
    assert all(map(is_alive, left)) and folder.exists()
    assert run_in_process("keys").stderr == "ended 2 processes of a killed run\n"
    assert not any(map(is_alive, left)) and not folder.exists()
    assert run_in_process("keys").stderr == ""


def test_living_launches_and_other_users_folders_stay(own_temporary_folder: Path) -> None:
    with launch_folder() as folder:
        assert dead_launches() == {}
        about_to_lock = own_temporary_folder / "fe-new"
        about_to_lock.mkdir()
        (about_to_lock / "launcher.lock").touch()
        (own_temporary_folder / "fe-no-lock").mkdir()
        assert dead_launches() == {}
    assert not folder.exists()
    (about_to_lock / "launcher.lock").write_bytes(b"locked")
    (own_temporary_folder / "fe-link").symlink_to(about_to_lock)
    assert dead_launches() == {str(about_to_lock): []}
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    os.chown(about_to_lock, 65534, 65534)
    assert dead_launches() == {}
