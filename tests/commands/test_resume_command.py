"""`fedeas resume`: what it continues from, what it rejects before changing anything, and finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runners import finish, quick, run_in_process, small

from fedeas_flwr.common.errors import RunFailedError
from fedeas_flwr.config import RunConfig


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


def test_resume_of_a_finished_run_prints_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    started: list[RunConfig] = []
    monkeypatch.setattr("fedeas_flwr.commands.run.start", lambda config, _: started.append(config))
    again = run_in_process("resume", str(run.path))
    mean, final = (f"{100 * run.summary()[key]:.1f} %" for key in ("last_20", "final"))
    line = f"accuracy: mean of all rounds {mean} · final {final} · peak "
    assert again.stdout.startswith(f"already finished: {run.path}\n{line}")
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
    assert refused.stderr.startswith(f"error: {checkpoint} cannot be read: its content does not match its digest")
    assert (run.path / "rounds.jsonl").read_bytes() == before and run.status()[0] == "finished"


def test_checkpoint_of_another_shape_drops_no_records(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    before = (run.path / "rounds.jsonl").read_bytes()
    found = run.load_checkpoint()
    assert found is not None
    larger = {key: value[..., None] for key, value in found.trainable.items()}
    run.save_checkpoint(replace(found, round=1, trainable=larger))
    refused = run_in_process("resume", str(run.path), "rounds=3")
    assert refused.returncode == 1 and "does not hold the arrays of model 'users_models:tiny'" in refused.stderr
    assert (run.path / "rounds.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("word", "why"), [("rounds=1", "already done 2"), ("alpha=0.5", "alpha = 0.1"), ("callbacks=nothing", "callbacks")]
)
def test_rejected_resume_keeps_the_last_checkpoint(word: str, why: str, tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2))
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    refused = run_in_process("resume", str(run.path), "--previous", word)
    assert (refused.returncode, refused.stdout) == (2, "") and why in refused.stderr
    assert before == {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
