"""A launch that fails before its ServerApp runs: one line, and no run that is recorded as running."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console
from runners import quick

from fedeas_flwr.common.errors import RunFailedError
from fedeas_flwr.common.processes import MARK
from fedeas_flwr.launch import prepare, run, superlink
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.server_app import log_to


def test_missing_flower_command_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flwr").touch(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RunFailedError, match=r"^flower-superlink is missing: .*python -m pip install"):
        prepare.check_config(quick(tmp_path / "r", policy="none", backend="ray"))
    assert not (tmp_path / "r").exists()


def test_reason_why_a_flower_command_crashed_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flwr").write_text("#!/bin/sh\necho 'ImportError: no flwr' >&2\nexit 1\n")
    (tmp_path / "flwr").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    answer = superlink.run_flwr_json(["run"], dict(os.environ), tmp_path)
    assert answer == {"error-message": "ImportError: no flwr"}


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file", "flwr"), RunFailedError("no SuperLink")])
def test_launch_that_fails_records_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run, "_run_ray", fail)
    with pytest.raises(type(error)):
        run.launch(quick(tmp_path / "r", policy="none", backend="ray"), Console(file=io.StringIO()))
    assert RunDirectory(tmp_path / "r").status() == ("failed", str(error))


def test_ctrl_c_while_the_superlink_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def spawn(*_: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], env={MARK: str(tmp_path)}))
        return started[0]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(superlink, "_spawn_superlink", spawn)
    monkeypatch.setattr(superlink, "watchdog", interrupt)
    with pytest.raises(KeyboardInterrupt), ExitStack() as stack:
        superlink.start_superlink({}, tmp_path, stack, RunDirectory(tmp_path))
    ended = started[0].poll() is not None
    started[0].kill()
    assert ended


def test_status_from_a_file_is_one_short_line(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"status": "failed", "error": "a\nb\x1b" + "c" * 5000}))
    status, error = RunDirectory(tmp_path).status()
    assert status == "failed" and error.startswith("a b�c") and len(error) == 600


def test_log_on_a_full_disk_prints_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with log_to(Path("/dev/full")):
        logging.getLogger("fedeas_flwr").error("lost")
    assert "Traceback" not in capfd.readouterr().err
