"""A run refuses every file of its own in which a bit changed; a damaged checkpoint costs only some rounds."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runners import finish, quick, run_in_process, weights

from fedeas_flwr.common.files import cache_root
from fedeas_flwr.data.datasets import open_dataset, verify_datasets
from fedeas_flwr.runs.directory import RunDirectory

KEYS = {"policy": "none", "strategy": "scaffold", "participation": 1.0, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of four rounds with checkpoints of rounds 2 and 4, and the weights of an undisturbed run of six."""
    folder = tmp_path_factory.mktemp("damaged")
    run = finish(quick(folder / "run", rounds=4, **KEYS))
    return run.path, weights(finish(quick(folder / "whole", rounds=6, **KEYS)))


@pytest.fixture
def run(interrupted: tuple[Path, str], tmp_path: Path) -> RunDirectory:
    """A copy of the interrupted run at a path of its own."""
    shutil.copytree(interrupted[0], tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def flip_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["checkpoint.safetensors", "clients/1/state-000004.safetensors", "config.json", "identity"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_refused_or_changes_nothing(
    run: RunDirectory, interrupted: tuple[Path, str], name: str, seed: int
) -> None:
    flip_bit(run.path / name, random.Random(seed))
    done = run_in_process("resume", str(run.path), "rounds=6")
    if done.returncode == 0:  # the bit was in white space, or in the number of rounds done
        assert weights(run) == interrupted[1]
    else:
        assert "Traceback" not in done.stderr and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "key, value", [("seed", 2), ("learning-rate", 0.5), ("strategy", "fedavg")], ids=lambda value: str(value)
)
def test_an_edited_config_is_refused(run: RunDirectory, key: str, value: Any) -> None:
    found = json.loads((run.path / "config.json").read_text())
    found["config"][key] = value
    (run.path / "config.json").write_text(json.dumps(found))
    done = run_in_process("resume", str(run.path), "rounds=6")
    assert done.returncode == 2 and "config.json cannot be used: its content does not match its digest" in done.stderr


def test_a_config_without_a_digest_is_read_but_not_resumed(run: RunDirectory) -> None:
    found = json.loads((run.path / "config.json").read_text())
    del found["digest"]
    (run.path / "config.json").write_text(json.dumps(found))
    assert run.config().rounds == 4
    done = run_in_process("resume", str(run.path), "rounds=6")
    assert done.returncode == 2 and "it has no digest" in done.stderr


def test_an_edited_round_is_refused(run: RunDirectory) -> None:
    path = run.path / "rounds.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"steps": ', '"steps": 1')
    path.write_text("\n".join(lines) + "\n")
    done = run_in_process("resume", str(run.path), "rounds=6")
    assert done.returncode == 2 and "fix line 2 (its content does not match its digest" in done.stderr


def test_a_damaged_checkpoint_leaves_the_one_before_it(run: RunDirectory, interrupted: tuple[Path, str]) -> None:
    flip_bit(run.path / "checkpoint.safetensors", random.Random(0))
    refused = run_in_process("resume", str(run.path), "rounds=6")
    assert refused.returncode == 2
    assert refused.stderr.endswith(f"`fedeas resume {run.path} --previous` continues from the one before it, round 2\n")
    assert run_in_process("resume", str(run.path), "rounds=6", "--previous").returncode == 0
    assert weights(run) == interrupted[1]
    assert [record["round"] for record in run.rounds()] == [1, 2, 3, 4, 5, 6]


def test_without_an_earlier_checkpoint_a_damaged_one_ends_the_run(run: RunDirectory) -> None:
    for name in ("checkpoint.safetensors", "checkpoint-previous.safetensors"):
        flip_bit(run.path / name, random.Random(0))
    refused = run_in_process("resume", str(run.path), "rounds=6")
    assert refused.returncode == 2 and refused.stderr.endswith("; start a new run\n")
    assert run_in_process("resume", str(run.path), "rounds=6", "--previous").returncode == 2


# -------------------------------------------------------------------------------------------- datasets


def first_array() -> Path:
    open_dataset("digits")
    (path,) = (cache_root() / "data").glob("digits-*/x_train.npy")
    return path


def damage_pixels(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def edit_about(path: Path) -> None:
    about = path.with_name("about.json")
    about.write_text(about.read_text().replace('"sha256": "', '"sha256": "0', 1))


@pytest.mark.parametrize("damage", [damage_pixels, edit_about, Path.unlink])
def test_a_damaged_dataset_is_read_from_its_source_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    path = first_array()
    whole = path.read_bytes()
    assert verify_datasets() == (1, [])
    damage(path)
    checked = run_in_process("cache", "verify")
    assert checked.returncode == 1 and "0 shards and 1 dataset checked, 1 damaged" in checked.stdout
    open_dataset("digits")
    assert path.read_bytes() == whole and verify_datasets() == (1, [])


def test_an_unchanged_dataset_is_not_read_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    path, read = first_array(), []
    monkeypatch.setattr("fedeas_flwr.data.datasets.sha256_of", lambda path: read.append(path))
    open_dataset("digits")
    assert not read
    path.touch()
    monkeypatch.undo()
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    open_dataset("digits")  # compares it, and notes its new time
    monkeypatch.setattr("fedeas_flwr.data.datasets.sha256_of", lambda path: read.append(path))
    open_dataset("digits")
    assert not read
