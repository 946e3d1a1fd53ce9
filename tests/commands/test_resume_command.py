"""`fedeas resume`: what it continues from, what it rejects before changing anything, and finished runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runners import finish, quick, run_in_process, small, weights

from fedeas_flwr.common.errors import RunFailedError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.runs.checkpoints import read_arrays, write_arrays


def test_resume_with_another_config_is_rejected(tmp_path: Path) -> None:
    finish(small(tmp_path / "r", policy="none", rounds=1))
    done = run_in_process("resume", str(tmp_path / "r"), "alpha=0.5")
    assert (done.returncode, done.stdout) == (2, ""), "printed output before the rejection"
    assert "alpha = 0.5, but the run to resume has alpha = 0.1" in done.stderr


def write_images(path: Path, classes: Sequence[str]) -> Path:
    """Write forty images of two labels with the given names."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    np.savez(path, x=images, y=np.arange(40) % 2, classes=np.array(classes))
    return path


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (("healthy", "sick"), "its class 1 is 'sick', but 'ill' in the run"),
        (("ill", "healthy"), "its class 0 is 'ill', but 'healthy' in the run"),
        (("healthy", "ill", "unclear"), "its class 2 is 'unclear', but missing in the run"),
    ],
)
def test_resume_with_data_of_other_classes_is_rejected(now: tuple[str, ...], why: str, tmp_path: Path) -> None:
    images = write_images(tmp_path / "images.npz", ("healthy", "ill"))
    keys: dict[str, Any] = {"policy": "none", "rounds": 1, "clients": 2, "alpha": 10.0}
    run = finish(small(tmp_path / "r", dataset=f"own:{images}", **keys))
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    write_images(images, now)
    for words in (("resume", str(run.path), "rounds=2"), ("evaluate", str(run.path))):
        refused = run_in_process(*words)
        assert (refused.returncode, refused.stdout) == (2, "")
        line = f"error: dataset = 'own:{images}': {why} {run.path}: restore its classes, or start a new run\n"
        assert refused.stderr == line
    assert before == {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    with pytest.raises(RunFailedError, match=why):  # as `flwr run` starts it, without the checks of a command
        finish(run.config().with_changes(resume=True, rounds=2))
    assert len(run.rounds()) == 1 and why in run.status()[1], "the reason is not in the run's status"
    write_images(images, ("healthy", "ill"))
    assert run_in_process("resume", str(run.path), "rounds=2").returncode == 0 and len(run.rounds()) == 2


def test_resume_of_a_run_without_classes_records_them(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images.npz", ("healthy", "ill"))
    run = finish(small(tmp_path / "r", dataset=f"own:{images}", policy="none", rounds=1, clients=2, alpha=10.0))
    kept = run.read_json("config.json")
    assert kept.pop("classes") == ["healthy", "ill"]
    run.write_json("config.json", kept)
    write_images(images, ("well", "ill"))
    assert run_in_process("evaluate", str(run.path)).returncode == 0
    assert run_in_process("resume", str(run.path), "rounds=2").returncode == 0
    assert run.read_json("config.json")["classes"] == ["well", "ill"]
    run.write_json("config.json", {**kept, "classes": 7})
    assert "config.json is not a run's config: classes = 7" in run_in_process("evaluate", str(run.path)).stderr
    run.write_json("config.json", {**kept, "files": ["a"]})
    assert "config.json is not a run's config: files = ['a']" in run_in_process("runs", "show", str(run.path)).stderr


def test_resume_of_a_finished_run_prints_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    started: list[RunConfig] = []
    monkeypatch.setattr("fedeas_flwr.commands.run.start", started.append)
    again = run_in_process("resume", str(run.path))
    accuracy = 100 * run.summary()["last_20"]
    assert again.stdout.startswith(f"already finished: {run.path}\nlast-2 accuracy {accuracy:.1f} % · peak ")
    assert (again.returncode, started) == (0, [])
    assert before == {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    run_in_process("resume", str(run.path), "rounds=3")
    (run.path / "model.safetensors").unlink()
    run_in_process("resume", str(run.path))
    assert [config.rounds for config in started] == [3, 2], "more rounds and a lost model must start a run"
    (run.path / "rounds.jsonl").write_text("")
    (run.path / "model.safetensors").touch()
    assert "holds 0 valid records" in run_in_process("resume", str(run.path)).stderr, (
        "a damaged record must be rejected"
    )


def test_resume_of_unreadable_checkpoint_is_rejected_at_once(tmp_path: Path) -> None:
    run = finish(small(tmp_path / "r", policy="none", rounds=1))
    whole = (run.path / "rounds.jsonl").read_bytes()
    (run.path / "rounds.jsonl").write_bytes(whole[: len(whole) // 2])
    short = run_in_process("resume", str(run.path), "rounds=2")
    (run.path / "rounds.jsonl").write_bytes(whole)
    (run.path / "checkpoint.safetensors").write_bytes(b"nothing")
    damaged = run_in_process("resume", str(run.path), "rounds=2")
    assert [(done.returncode, done.stdout) for done in (short, damaged)] == [(2, ""), (2, "")]
    assert "holds 0 valid records" in short.stderr and "checkpoint.safetensors" in damaged.stderr
    assert run.status()[0] == "finished", "the status changed"


def test_resume_with_another_runs_checkpoint_is_rejected(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    other = finish(quick(tmp_path / "other", policy="none", rounds=1, strategy="fedadam"))
    checkpoint, before = run.path / "checkpoint.safetensors", (run.path / "rounds.jsonl").read_bytes()
    checkpoint.write_bytes((other.path / "checkpoint.safetensors").read_bytes())
    refused = run_in_process("resume", str(run.path), "rounds=3")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        refused.stderr
        == f"error: {checkpoint} belongs to another run: restore the run's own checkpoint, or start a new run\n"
    )
    assert (run.path / "rounds.jsonl").read_bytes() == before and run.status()[0] == "finished"


def test_resume_of_a_checkpoint_without_run_name(tmp_path: Path) -> None:
    whole = finish(quick(tmp_path / "whole", policy="none", rounds=3))
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    arrays, metadata = read_arrays(path := run.path / "checkpoint.safetensors")
    older = json.loads(metadata["state"])
    assert older.pop("run") == run.identity()
    write_arrays(path, arrays, {"state": json.dumps(older)})
    assert run_in_process("resume", str(run.path), "rounds=3").returncode == 0
    assert weights(run) == weights(whole)


def test_checkpoint_of_another_shape_drops_no_records(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    before = (run.path / "rounds.jsonl").read_bytes()
    arrays, metadata = read_arrays(path := run.path / "checkpoint.safetensors")
    state = {key: value for key, value in json.loads(metadata["state"]).items() if key != "run"}
    larger = {key: value[..., None] for key, value in arrays.items()}
    write_arrays(path, larger, {"state": json.dumps(state | {"round": 1})})
    refused = run_in_process("resume", str(run.path), "rounds=3")
    assert refused.returncode == 1 and "does not hold the arrays of model 'users_models:tiny'" in refused.stderr
    assert (run.path / "rounds.jsonl").read_bytes() == before
