"""What plain `flwr run` says of its SuperLink, of keys without effect, of GPU shares, of the plan and of the result."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from runners import quick

import fedeas_flwr
from fedeas_flwr import client_app, server_app
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.processes import MARK
from fedeas_flwr.config import LAUNCHER_KEYS, RunConfig, parse_config
from fedeas_flwr.config_keys import run_keys
from fedeas_flwr.federation import flwr_run
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.generators.ray_service import gpu_share
from fedeas_flwr.planning.run_plan import describe_plan, planned_allocation, planned_counts

PACKAGE = Path(fedeas_flwr.__file__).parent


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.delenv(MARK, raising=False)
    caplog.set_level(logging.INFO, "flwr")
    return caplog


def ray_with(gpus: float, free: float) -> Any:
    """Return a stand-in for a running Ray with this number of GPUs, of which a part is free."""
    return SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 8.0, "GPU": gpus},
        available_resources=lambda: {"GPU": free},
    )


# ------------------------------------------------------------------------------------------------ the SuperLink


def test_superlink_line_names_process_home_and_python(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A ServerApp is a descendant of its SuperLink, and has its environment."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    (tmp_path / "flower-superlink").write_text(
        "import subprocess, sys\nsys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)"
    )
    code = "from fedeas_flwr.federation.flwr_run import describe_superlink; print(describe_superlink())"
    command = [sys.executable, str(tmp_path / "flower-superlink"), code]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as superlink:
        line = superlink.communicate()[0].strip()
    assert re.fullmatch(
        rf"process {superlink.pid} of user \S+, started \d{{4}}-\d\d-\d\d \d\d:\d\d in {tmp_path}, "
        rf"home {tmp_path}/home, Python {sys.executable}",
        line,
    )


def test_superlink_that_is_no_ancestor_is_described_without_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.Process.parents", lambda self: [])
    assert flwr_run.describe_superlink().startswith("home ")


@pytest.mark.parametrize(
    ("installed", "warning"),
    [
        ("same", ""),
        ("other", "has other code of fedeas-flwr, in .*/fedeas_flwr"),
        ("none", "has no fedeas-flwr, so another project may have started it"),
    ],
)
def test_superlink_of_another_project_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: str, warning: str
) -> None:
    """The app itself is unpacked by Flower, so its own folder does not count."""
    if installed != "none":
        shutil.copytree(PACKAGE, tmp_path / "fedeas_flwr", ignore=shutil.ignore_patterns("__pycache__"))
    if installed == "other":
        (tmp_path / "fedeas_flwr" / "allocation.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(PACKAGE.parent), str(tmp_path)])
    assert re.fullmatch(warning, flwr_run.describe_foreign_environment())


@pytest.mark.parametrize("foreign", ["", "has no fedeas-flwr"])
def test_simulation_logs_its_superlink_and_warns_of_another_projects(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, foreign: str
) -> None:
    monkeypatch.setattr(flwr_run, "describe_foreign_environment", lambda: foreign)
    flwr_run.log_surroundings(object.__new__(flwr_run.SimulationGrid), RunConfig())
    first, *others = [(record.levelname, record.getMessage()) for record in said.records]
    assert first == ("INFO", f"SuperLink: {flwr_run.describe_superlink()}")
    warning = f"This SuperLink's environment {foreign}; to use another: docs/flwr-run.md"
    assert others == [("WARNING", warning)] * bool(foreign)


# ------------------------------------------------------------------------------------------------ keys and shares


def test_launcher_keys_are_those_that_say_so() -> None:
    described = {key.name for key in run_keys() if "`fedeas run`" in key.meaning} - {"run-dir"}
    assert set(LAUNCHER_KEYS) == described


def test_keys_without_effect_are_one_line() -> None:
    assert flwr_run.keys_without_effect(RunConfig()) == ""
    config = parse_config({"actors": 5, "gpu-share": 0.2, "backend": "inline", "rounds": 3})
    assert flwr_run.keys_without_effect(config) == "backend = 'inline', actors = 5, gpu-share = 0.2"


@pytest.mark.parametrize(
    ("gpus", "free", "device", "warned"),
    [(1, 1, "cuda", True), (0, 0, "cuda", True), (1, 0.01, "cuda", False), (1, 1, "cpu", False)],
)
def test_clients_without_gpu_share_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    said: pytest.LogCaptureFixture,
    gpus: float,
    free: float,
    device: str,
    warned: bool,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_with(gpus, free))
    flwr_run.warn_without_gpu_share(device)
    assert [record.levelname for record in said.records] == ["WARNING"] * warned
    assert ("no share of this machine's GPU" in said.text) == warned


def test_deployment_says_nothing_of_gpu_shares(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    flwr_run.warn_without_gpu_share("cuda")
    assert said.records == []


def test_shares_that_leave_no_room_name_flowers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    with pytest.raises(ConfigError, match=r"^client-resources-num-gpus: .* 0\.099 for ten clients at a time, 0\.249"):
        gpu_share(ray_with(1, 0), RunConfig(), 1)


# ------------------------------------------------------------------------------------------------ a whole run


def test_run_logs_keys_without_effect_its_plan_and_its_result(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    devices: list[str] = []
    monkeypatch.setattr(server_app, "is_plain_run", lambda grid: True)
    monkeypatch.setattr(server_app, "warn_without_gpu_share", devices.append)
    values = quick(tmp_path / "r", policy="oversample", rounds=2).to_user_dict()
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=values)
    server_app.app(InlineGrid(client_app.app, 4, values), context)
    lines = [record.getMessage() for record in said.records]
    assert devices == ["cpu"], "the clients' GPU shares were not checked"
    assert any(line.startswith("backend = 'inline': no effect with `flwr run`") for line in lines)
    planned = planned_allocation(parse_config(values), planned_counts(parse_config(values))).sum()
    assert f"Plan: policy oversample, β = 4: {planned} synthetic images for 4 clients" in lines
    assert re.fullmatch(
        rf"Result: accuracy [\d.]+ % after 2 rounds \(peak [\d.]+ % in round [12]\), 0 images generated; "
        rf"see {tmp_path}/r",
        lines[-1],
    )


@pytest.mark.parametrize(
    ("keys", "budget", "images"),
    [
        ({"policy": "none", "beta": 4.0}, "policy none", "0 synthetic images"),
        ({"policy": "fedeas", "beta": 0.5}, "policy fedeas, β = 0.5", "3 synthetic images"),
        ({"policy": "uniform", "total": 50}, "policy uniform, total = 50", "50 synthetic images"),
    ],
)
def test_describe_plan_names_what_sets_the_number(keys: dict[str, Any], budget: str, images: str) -> None:
    config, counts = parse_config(keys), np.array([[90, 0], [0, 4]])
    assert describe_plan(config, counts) == f"{budget}: {images} for 2 clients"
    assert describe_plan(config, None) == budget
