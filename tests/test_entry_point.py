"""The entry point of `fedeas`: signals before and after a command, and settings made before imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from runners import run_in_process, start_interruptible

from fedeas_flwr.commands.app import _terminated

ROOT = Path(__file__).parents[1]


def test_command_started_by_nohup_ignores_sighup(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def note() -> list[Any]:
        found.append([signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)])
        return []

    monkeypatch.setattr("fedeas_flwr.commands.listings.run_keys", note)
    for before in (signal.SIG_DFL, signal.SIG_IGN):
        usual = signal.signal(signal.SIGHUP, before)
        run_in_process("keys")
        signal.signal(signal.SIGHUP, usual)
    assert [found[0], found[-1]] == [[_terminated, _terminated], [signal.SIG_IGN, _terminated]]


WAIT = "print('waiting', flush=True); import time; time.sleep(60)"
MOMENTS = {
    "while Python loads what the command needs": f"""
import sys
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            {WAIT}
sys.meta_path.insert(0, Slow())
""",
    "while Python closes down": f"""
import atexit
def close():
    {WAIT}
atexit.register(close)
""",
    "again, when the command has just been stopped": f"""
from fedeas_flwr.commands import app as cli
def stopped():
    try:
        {WAIT}
    finally:
        raise KeyboardInterrupt
cli.main = stopped
""",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_during_start_and_exit_prints_one_line(moment: str) -> None:
    start = "import sys; sys.argv = ['fedeas', '--version']\nfrom fedeas_flwr.__main__ import main; main()"
    code = f"{MOMENTS[moment]}\n{start}"
    process = start_interruptible([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stdout is not None
    while process.stdout.readline() not in ("waiting\n", ""):
        pass
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("stopped\n", 130)


@pytest.mark.parametrize(("code", "waits"), [(130, False), (0, True)])
def test_stopped_command_does_not_wait_for_threads(code: int, waits: bool) -> None:
    script = f"""
import sys, time
from concurrent.futures import ThreadPoolExecutor
from fedeas_flwr import __main__; from fedeas_flwr.commands import app as cli
def end():
    def work():
        time.sleep(3)
        print("worked", flush=True)
    ThreadPoolExecutor(1).submit(work)
    print("stopped; resume with: …", flush=True)
    sys.exit({code})
cli.main = end
__main__.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, "worked" in done.stdout, "resume with" in done.stdout) == (code, waits, True), done.stderr


def test_ctrl_c_without_anything_to_resume_prints_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedeas_flwr.commands.listings.run_keys", stop)
    done = run_in_process("keys")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
    monkeypatch.setattr("fedeas_flwr.runs.listing.find_runs", lambda *_, **__: stop())
    assert run_in_process("runs", "ls", str(ROOT)).stderr == "stopped\n", (
        "must be printed once, also by a nested command group"
    )


def test_main_sets_passive_wait_policy_by_default() -> None:
    code = "import os, sys; sys.argv = ['fedeas', '--version']\nfrom fedeas_flwr.__main__ import main\ntry: main()\n"
    code += "finally: print(os.environ['OMP_WAIT_POLICY'])"
    usual = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, found in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        inside = {**usual, "PYTHONPATH": str(ROOT), **given}
        done = subprocess.run([sys.executable, "-c", code], env=inside, capture_output=True, text=True, check=False)
        assert done.stdout.splitlines()[-1] == found, done.stderr


def test_console_script_uses_the_ctrl_c_entry_point() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"] == {
        "fedeas": "fedeas_flwr.__main__:main"
    }
