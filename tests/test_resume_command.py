"""`fedeas resume`: what it goes on from, what it refuses before anything is cut, what a finished run is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runners import finish, quick, small, typed, weights

from fedeas_flwr.checkpoints import read_arrays, write_arrays
from fedeas_flwr.config import RunConfig


def test_resume_of_another_config_is_refused(tmp_path: Path) -> None:
    finish(small(tmp_path / "r", policy="none", rounds=1))
    done = typed("resume", str(tmp_path / "r"), "alpha=0.5")
    assert (done.returncode, done.stdout) == (2, ""), "it is refused before its headline"
    assert "alpha = 0.5, but the run to resume has alpha = 0.1" in done.stderr


def test_a_finished_run_tells_its_result_again_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    begun: list[RunConfig] = []
    monkeypatch.setattr("fedeas_flwr.cli.start", begun.append)
    again = typed("resume", str(run.path))
    accuracy = 100 * run.summary()["last_20"]
    assert again.stdout.startswith(f"finished already: {run.path}\nlast-2 accuracy {accuracy:.1f} % · peak ")
    assert (again.returncode, begun) == (0, [])
    assert before == {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    typed("resume", str(run.path), "rounds=3")
    (run.path / "model.safetensors").unlink()
    typed("resume", str(run.path))
    assert [config.rounds for config in begun] == [3, 2], "more rounds are done, and a lost model is written again"
    (run.path / "rounds.jsonl").write_text("")
    (run.path / "model.safetensors").touch()
    assert "holds 0 whole records" in typed("resume", str(run.path)).stderr, "a damaged record is no result"


def test_a_checkpoint_that_cannot_be_read_is_refused_before_the_headline(tmp_path: Path) -> None:
    run = finish(small(tmp_path / "r", policy="none", rounds=1))
    whole = (run.path / "rounds.jsonl").read_bytes()
    (run.path / "rounds.jsonl").write_bytes(whole[: len(whole) // 2])
    short = typed("resume", str(run.path), "rounds=2")
    (run.path / "rounds.jsonl").write_bytes(whole)
    (run.path / "checkpoint.safetensors").write_bytes(b"nothing")
    damaged = typed("resume", str(run.path), "rounds=2")
    assert [(done.returncode, done.stdout) for done in (short, damaged)] == [(2, ""), (2, "")]
    assert "holds 0 whole records" in short.stderr and "checkpoint.safetensors" in damaged.stderr
    assert run.status()[0] == "finished", "nothing was begun"


def test_another_runs_checkpoint_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    other = finish(quick(tmp_path / "other", policy="none", rounds=1, strategy="fedadam"))
    checkpoint, before = run.path / "checkpoint.safetensors", (run.path / "rounds.jsonl").read_bytes()
    checkpoint.write_bytes((other.path / "checkpoint.safetensors").read_bytes())
    refused = typed("resume", str(run.path), "rounds=3")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"error: {checkpoint} is of another run: put back the run's own, or begin anew\n"
    assert (run.path / "rounds.jsonl").read_bytes() == before and run.status()[0] == "finished"


def test_a_checkpoint_from_before_it_named_its_run_is_gone_on_from(tmp_path: Path) -> None:
    whole = finish(quick(tmp_path / "whole", policy="none", rounds=3))
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    arrays, metadata = read_arrays(path := run.path / "checkpoint.safetensors")
    older = json.loads(metadata["state"])
    assert older.pop("run") == run.identity()
    write_arrays(path, arrays, {"state": json.dumps(older)})
    assert typed("resume", str(run.path), "rounds=3").returncode == 0
    assert weights(run) == weights(whole)


def test_an_older_checkpoint_of_another_shape_cuts_nothing(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    before = (run.path / "rounds.jsonl").read_bytes()
    arrays, metadata = read_arrays(path := run.path / "checkpoint.safetensors")
    state = {key: value for key, value in json.loads(metadata["state"]).items() if key != "run"}
    larger = {key: value[..., None] for key, value in arrays.items()}
    write_arrays(path, larger, {"state": json.dumps(state | {"round": 1})})
    refused = typed("resume", str(run.path), "rounds=3")
    assert refused.returncode == 1 and "does not hold the arrays of model 'users_models:tiny'" in refused.stderr
    assert (run.path / "rounds.jsonl").read_bytes() == before
