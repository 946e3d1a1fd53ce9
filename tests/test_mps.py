"""CUDA's MPS around a run: started, told to clients, ended; and never the reason why a run fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedeas_flwr import mps
from fedeas_flwr.mps import LOG, PIPE, shared_gpu


def control(folder: Path, code: int = 0) -> Path:
    """A control program that writes down how it is called, with what, and where."""
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
    """MPS that works; returns the environment of processes to come."""
    path = f"{control(tmp_path)}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv(PIPE, raising=False)
    monkeypatch.setattr(mps, "TRIAL", [sys.executable, "-c", f"import os; assert os.environ['{PIPE}']"])
    return dict(os.environ)


def test_a_daemon_of_its_own_is_started_and_ended_even_when_the_run_fails(
    works: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError), shared_gpu(tmp_path, works) as own:
        assert own == {PIPE: str(tmp_path / "mps"), LOG: str(tmp_path / "mps-log")}
        assert Path(own[PIPE]).is_dir() and calls(tmp_path) == ["start"]
        raise ZeroDivisionError
    assert calls(tmp_path) == ["start", "quit"]
    assert all(line.endswith(str(tmp_path / "mps")) for line in (tmp_path / "calls").read_text().splitlines())


def test_a_daemon_whose_clients_fail_is_not_used(
    works: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mps, "TRIAL", [sys.executable, "-c", "raise RuntimeError('no\\ndevice')"])
    with shared_gpu(tmp_path, works) as own:
        assert own == {}
    assert calls(tmp_path) == ["start", "quit"]
    assert "take turns" in caplog.text and "no device" in caplog.text


def test_one_that_does_not_start_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{control(tmp_path, code=1)}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(PIPE, raising=False)
    with shared_gpu(tmp_path, dict(os.environ)) as own:
        assert own == {}


def test_the_users_own_daemon_is_left_alone(works: dict[str, str], tmp_path: Path) -> None:
    with shared_gpu(tmp_path, {**works, PIPE: "/tmp/users"}) as own:
        assert own == {}
    assert not (tmp_path / "calls").exists()


def test_without_mps_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with shared_gpu(tmp_path, dict(os.environ)) as own:
        assert own == {}
    assert not (tmp_path / "mps").exists()
