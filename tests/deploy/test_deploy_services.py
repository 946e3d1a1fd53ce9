"""The systemd units of a deployment, run as they say: another user, a read-only root, one host."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from namespaces import add_host
from runners import finish, small, weights
from services import give, kill, operate, start_unit
from waiting import wait_until

from fedeas_flwr.deploy.deployment import Deployment, write_deployment
from fedeas_flwr.runs.directory import RunDirectory

pytestmark = [pytest.mark.flower, pytest.mark.slow]


def test_units_run_and_resume_after_a_crash(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"clients": 1, "rounds": 4, "participation": 1.0, "local_epochs": 1, "policy": "none"}
    lab = tmp_path / "lab"
    write_deployment(Deployment(("127.0.0.1",), 9092, 9093, 1, "/opt/fedeas"), lab)
    superlink, node = lab / "superlink", lab / "node-0"
    shutil.copytree(lab / "app", superlink / "app")
    values = {**keys, "run_dir": "/opt/fedeas/superlink/runs/first"}
    words = [f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in values.items()]
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


def said(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
