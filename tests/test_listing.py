"""Run directories: where a run really stands, what is removed and what never, and what is shown of a record."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from runners import fedeas, small, typed
from test_sweep import ROOT

from fedeas_flwr.listing import check_removable
from fedeas_flwr.runs import RunDirectory, RunError


def test_a_killed_run_is_interrupted_a_living_one_runs_and_a_number_used_again_is_another(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "r"), {})
    assert run.state() == "running" and [p["pid"] for p in run.processes()] == [os.getpid()]
    path = run.path / "status.json"
    found = json.loads(path.read_text())
    for change, state in (({"started": 1.0}, "interrupted"), ({"host": "another"}, "elsewhere")):
        path.write_text(json.dumps({**found, "processes": [{**found["processes"][0], **change}]}))
        assert run.state() == state and run.processes() == []


def test_rm_removes_runs_and_nothing_else(tmp_path: Path) -> None:
    run = RunDirectory.start(small(tmp_path / "done"), {})
    run.set_status("interrupted")
    RunDirectory.start(small(tmp_path / "going"), {})  # by this very process, which lives
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"config": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "done")
    for bad, why in (
        ("going", "is running, in process"),
        ("other", "not a run directory"),
        ("link", "not a run directory"),
        ("nowhere", "not a run directory"),
        (".", "not a run directory"),
    ):
        with pytest.raises(RunError, match=why):
            check_removable(tmp_path / bad)
    done = typed("runs", "rm", "done", "going", "--yes", cwd=tmp_path)
    assert done.returncode == 1 and "going is running" in done.stderr and len(done.stderr.splitlines()) == 1
    asked = typed("runs", "rm", "done", cwd=tmp_path)
    assert asked.returncode == 1 and "--yes" in asked.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"done", "going", "other", "link"}
    assert fedeas("resume", "going", cwd=tmp_path).stderr.startswith(f"error: {tmp_path}/going is still running")
    assert typed("runs", "rm", "done", "--yes", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "done").exists() and (tmp_path / "going").exists()


def test_a_committed_record_is_listed_shown_and_exported() -> None:
    rows = json.loads(typed("runs", "ls", "results/quickstart", "--format", "json", cwd=ROOT).stdout)
    found = {Path(row["path"]).name: row for row in rows}
    summary = RunDirectory(ROOT / "results" / "quickstart" / "fedeas").summary()
    assert found["fedeas"]["state"] == "finished" and found["fedeas"]["last_20"] == pytest.approx(summary["last_20"])
    shown = json.loads(typed("runs", "show", "results/quickstart/uniform", "--format", "json", cwd=ROOT).stdout)
    assert shown["changes"]["policy"] == {"value": "uniform", "default": "fedeas"}
    assert "alpha" not in shown["changes"] and shown["summary"]["total_generated"] == 893
    table = list(csv.DictReader(typed("runs", "csv", "results/quickstart/fedeas", cwd=ROOT).stdout.splitlines()))
    record = RunDirectory(ROOT / "results" / "quickstart" / "fedeas").rounds()[4]
    assert float(table[4]["seconds.clients"]) == record["seconds"]["clients"]
    assert json.loads(table[4]["clients"]) == record["clients"]
