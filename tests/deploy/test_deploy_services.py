"""Systemd units and containers of a deployment, run as they say but without systemd and without a container engine."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from namespaces import add_host
from runners import finish, small, weights
from services import Compose, give, kill, operate, start_unit
from waiting import wait_until

from fedeas_flwr.deploy.deployment import Deployment, write_deployment
from fedeas_flwr.runs.directory import RunDirectory

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_units_run_and_resume_after_a_crash(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"clients": 1, "rounds": 4, "participation": 1.0, "local_epochs": 1, "policy": "none"}
    lab = tmp_path / "lab"
    write_deployment(Deployment(("127.0.0.1",), 9092, 9093, 1, "/opt/fedeas"), lab)
    superlink, node = lab / "superlink", lab / "node-0"
    shutil.copytree(lab / "app", superlink / "app")
    words = [*run_config(keys), 'run-dir="/opt/fedeas/superlink/runs/first"']
    (superlink / "resume").write_text("\n".join(words))
    run = RunDirectory(superlink / "runs" / "first")
    for folder in (superlink, node):
        give(folder)
    with ExitStack() as stack:
        host = add_host(stack)
        server = start_unit(stack, host, superlink / "fedeas-superlink.service")
        start_unit(stack, host, superlink / "fedeas-gateway.service")
        wait_until(lambda: (superlink / "superlink.log").exists(), "Flower's log file is there")
        wait_until(lambda: "Uvicorn running" in said(superlink / "fedeas-superlink.log"), "the SuperLink listens")
        operate(host, lab, "fedeas", "deploy", "register", lab)
        client = start_unit(stack, host, node / "fedeas-node-0.service")
        operate(host, lab, "flwr", "run", lab / "app", "deployment", "--run-config", " ".join(words))
        wait_until(lambda: len(run.rounds()) >= 1, "round 1 is recorded")
        kill(server)
        assert len(run.rounds()) < keys["rounds"]
        start_unit(stack, host, superlink / "fedeas-superlink.service")  # Restart=always
        assert start_unit(stack, host, superlink / "fedeas-resume.service").wait() == 0
        wait_until(lambda: run.status()[0] in ("finished", "failed"), "the run ends")
        assert (run.status(), client.poll()) == (("finished", ""), None)
    assert [record["round"] for record in run.rounds()] == [1, 2, 3, 4]
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **keys)))


def test_composed_services_train_on_digits(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"clients": 3, "rounds": 2, "participation": 1.0, "local_epochs": 1, "policy": "none"}
    volume = tmp_path / "volume"
    volume.mkdir()
    give(volume)
    with ExitStack() as stack:
        compose = Compose(stack, volume)
        compose.up("init")
        assert not compose.is_healthy("superlink")
        for service in ("node-0", "node-1", "node-2"):
            compose.up(service)
        lab = "/opt/fedeas/lab/deployment"
        words = [*run_config(keys), "node-wait=280.0", 'run-dir="/opt/fedeas/superlink/runs/first"']
        started = compose.run("operator", "flwr", "run", f"{lab}/app", "deployment", "--run-config", " ".join(words))
        assert started.returncode == 0, started.stdout + started.stderr
        run = RunDirectory(volume / "deployment" / "superlink" / "runs" / "first")
        wait_until(lambda: run.rounds(), "round 1 is recorded")
        wait_until(lambda: run.status()[0] in ("finished", "failed"), "the run ends")
        checked = compose.run("operator", *compose.services["operator"]["command"])
        assert (checked.returncode, "all 3 are online" in checked.stdout) == (0, True), checked.stdout + checked.stderr
        assert run.status() == ("finished", "")
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **keys)))


def run_config(keys: dict[str, Any]) -> list[str]:
    return [f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in keys.items()]


def said(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
