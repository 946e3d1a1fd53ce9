"""Pruning of runs, tables as JSON, and estimates of the time left."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_runs import write_run
from rich.console import Console

from fedeas_flwr.commands import images as images_command
from fedeas_flwr.commands.app import app
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.config import KEYS, STRATEGIES
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.interface import SampleId, describe_generator
from fedeas_flwr.launch import progress
from fedeas_flwr.launch.progress import GenerationProgress, RoundProgress
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import export


def fedeas(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    app(list(args), standalone_mode=False)
    return capsys.readouterr().out


def with_weights(run: RunDirectory) -> RunDirectory:
    run.save_checkpoint(Checkpoint(1, {"w": np.zeros(1000, np.float32)}, {}))
    run.save_model({"w": np.zeros(1000, np.float32)})
    run.noise()
    (run.path / "clients" / "0").mkdir(parents=True)
    (run.path / "clients" / "0" / "state-000001.safetensors").write_bytes(b"x" * 500)
    return run


def test_prune_removes_checkpoint_and_client_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = with_weights(write_run(tmp_path / "runs" / "a", [0.5]))
    record = {name: (run.path / name).read_bytes() for name in ("config.json", "rounds.jsonl", "summary.json")}
    assert "pruned 1 run, 4." in fedeas(capsys, "runs", "prune", str(tmp_path / "runs"))
    left = {path.name for path in run.path.iterdir()}
    assert left == {*record, "status.json", ".status.lock", "model.safetensors", "identity"}
    assert all((run.path / name).read_bytes() == content for name, content in record.items())
    fedeas(capsys, "runs", "prune", str(run.path), "--model")
    assert not (run.path / "model.safetensors").exists()
    with pytest.raises(RunError, match=r"no model\.safetensors: it was pruned"):
        run.load_model()
    # Without a checkpoint a resumed run would start over and drop its records.
    config = run.config().with_changes(resume=True, rounds=2)
    with pytest.raises(RunError, match="was pruned: there is no checkpoint to resume from"):
        RunDirectory.start(config, {})
    assert (run.path / "rounds.jsonl").read_bytes() == record["rounds.jsonl"]


def test_run_without_status_file_is_not_a_record(tmp_path: Path) -> None:
    run = with_weights(write_run(tmp_path / "a", [0.5]))
    (run.path / "status.json").unlink()
    assert run.load_model()["w"].shape == (1000,)
    run.check_ready(run.config().with_changes(resume=True, rounds=2))
    for name in ("model", "checkpoint"):
        (run.path / f"{name}.safetensors").unlink()
    with pytest.raises(RunError, match="is an exported record without weights"):
        run.load_model()


def test_reading_a_record_writes_nothing(tmp_path: Path) -> None:
    export(write_run(tmp_path / "a", [0.5]), tmp_path / "record")
    record, files = RunDirectory(tmp_path / "record"), sorted((tmp_path / "record").iterdir())
    with pytest.raises(RunError, match="no earlier checkpoint"):
        record.return_to_previous_checkpoint()
    assert sorted(record.path.iterdir()) == files


def test_prune_rejects_damaged_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "r", [0.1, 0.2, 0.3])
    (run.path / "checkpoint.safetensors").write_bytes(b"to go on with")
    (run.path / "rounds.jsonl").write_text((run.path / "rounds.jsonl").read_text().splitlines(keepends=True)[0])
    with pytest.raises(RunError, match=r"holds 1 valid record, but summary\.json counts 3 rounds: fix line 2"):
        fedeas(capsys, "runs", "prune", str(run.path))
    assert (run.path / "checkpoint.safetensors").exists()


def test_prune_removes_nothing_if_one_run_is_unfinished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = with_weights(write_run(tmp_path / "a", [0.5]))
    with_weights(write_run(tmp_path / "b", [0.5], rounds=2, finished=False))
    with pytest.raises(RunError, match="b is interrupted, not finished: it needs its checkpoint, nothing is removed"):
        fedeas(capsys, "runs", "prune", str(tmp_path))
    assert (done.path / "checkpoint.safetensors").exists()


def test_tables_can_be_printed_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = json.loads(fedeas(capsys, "keys", "--format", "json"))
    assert tuple(row["key"] for row in keys) == KEYS and keys[0]["default"] == "digits"
    found = json.loads(fedeas(capsys, "strategies", "--format", "json"))
    assert len(found) == len(STRATEGIES)
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    assert json.loads(fedeas(capsys, "cache", "ls", "--format", "json")) == []
    for args in (["keys"], ["strategies"], ["cache", "ls"], ["sweep", "c.toml"], ["runs", "ls"], ["plan"], ["doctor"]):
        with pytest.raises(ConfigError, match="format = 'xml': must be table or json"):
            fedeas(capsys, *args, "--format", "xml")


def test_progress_estimates_time_left_from_observed_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "a", [0.5] * 3, rounds=12, finished=False)
    out, now = io.StringIO(), [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def ends_at(second: float, *rounds: int) -> list[str]:
        for number in rounds:
            run.append_round({"round": number, "accuracy": 0.5, "generated": 0, "failures": []})
        out.seek(0), out.truncate()
        now[0] = second
        shown.update()
        return [line.partition("generated 0  ")[2] for line in out.getvalue().splitlines()]

    with RoundProgress(run, 12, 3, Console(file=out, width=200)) as shown:  # three rounds were recorded before
        assert ends_at(900, 4, 5) == ["800 s", "800 s"]  # mostly start-up, so no estimate
        assert ends_at(910, 6) == ["810 s  about 60 s left"]  # 6 × 10 s
        assert ends_at(925, 7, 8) == ["825 s  about 63 s left", "825 s  about 34 s left"]  # 5 × 25/2 s, 4 × 25/3 s
        assert ends_at(950, 9, 10, 11, 12)[-1] == "850 s"


class Grey:
    """A generator of grey images for ten classes."""

    fingerprint, image_shape, num_classes = "grey", (8, 8, 1), 10

    def sample(self, samples: Sequence[SampleId]) -> Any:
        return np.zeros((len(samples), 8, 8, 1), np.uint8)


def test_progress_estimates_generation_time_between_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    run = write_run(tmp_path / "a", [], rounds=10, clients=2, policy="uniform", total=400, finished=False)
    config, out, now = run.config(), io.StringIO(), [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    images = GenerationProgress(config)
    assert (images.total, images.left()) == (400, 400)
    assert GenerationProgress(config.with_changes(shared_images="by-class")).total == 200

    def lines_at(second: float, *, client: int = 0, of_each_class: int = 0) -> list[str]:
        if of_each_class:
            wanted, about = [of_each_class] * 10, describe_generator(config)
            ImageCache().ensure(Grey(), seed=config.seed, client=client, wanted=wanted, about=about)
        out.seek(0), out.truncate()
        now[0] = second
        shown.update()
        return out.getvalue().splitlines()

    with RoundProgress(run, 10, 0, Console(file=out, width=200), images) as shown:
        assert lines_at(100) == [] and lines_at(130) == []  # start-up does not count for the rate
        assert lines_at(135, of_each_class=10) == []  # checked every ten seconds
        assert lines_at(150) == ["  100 of 400 images generated, about 60 s left"]  # 100 in 20 s
        assert lines_at(170) == []  # training: nothing new
        run.append_round({"round": 1, "accuracy": 0.5, "generated": 100, "failures": []})
        assert len(lines_at(171)) == 1 and lines_at(180) == []  # a round has just ended
        assert lines_at(190) == []  # the rate is measured again
        assert lines_at(210, client=1, of_each_class=20) == ["  300 of 400 images generated, about 10 s left"]
        assert lines_at(220, of_each_class=20) == ["  400 of 400 images generated"]


def test_generation_in_chunks_keeps_images_and_prints_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]

    class Counting:
        batch_size = 2

        def sample(self, samples: Sequence[SampleId]) -> Any:
            clock[0] += 16
            return np.array([s.index for s in samples])

    monkeypatch.setattr(images_command, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    samples = [SampleId(0, 0, 0, index) for index in range(21)]
    chunks: Any = list(images_command.sample_in_chunks(Counting(), samples))  # type: ignore[arg-type]
    assert [len(chunk) for chunk in chunks] == [2] * 10 + [1] and np.concatenate(chunks).tolist() == list(range(21))
    expected = ["21 images, 2 at a time", "2 of 21 images, about 3 min left", "4 of 21 images, about 2 min left"]
    assert capsys.readouterr().err.splitlines()[:3] == expected  # 19 × 8 s, 17 × 8 s


def test_fast_generator_gets_four_batches_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    class Quick:
        batch_size = 2

        def sample(self, samples: Sequence[SampleId]) -> Any:
            return np.array([s.index for s in samples])

    for wanted, sizes in ((21, [2, 8, 8, 3]), (2, [2]), (1, [1])):
        samples = [SampleId(0, 0, 0, index) for index in range(wanted)]
        chunks: Any = list(images_command.sample_in_chunks(Quick(), samples))  # type: ignore[arg-type]
        assert [len(chunk) for chunk in chunks] == sizes and np.concatenate(chunks).tolist() == list(range(wanted))
    assert capsys.readouterr().err.splitlines() == ["21 images, 2 at a time"]
