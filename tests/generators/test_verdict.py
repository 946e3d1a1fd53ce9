"""The verdict on a trained generator: its rule, where it is stored, and that a run with a bad generator warns."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runners import run_in_process

from fedeas_flwr.config import parse_config
from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.data.node import SIMULATED, read_node
from fedeas_flwr.doctor.inputs import check_generator
from fedeas_flwr.generators.client_images import local_images
from fedeas_flwr.generators.diffusion.model_folder import VERDICT, read_warning
from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator
from fedeas_flwr.generators.learn import verdict as verdict_module
from fedeas_flwr.generators.learn.trainer import TrainingState
from fedeas_flwr.generators.learn.verdict import judge, loss_fraction
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import is_run

ROOT = Path(__file__).parents[2]
STOPPED = (
    "noisy images after 1 step: no classifier checked its images, for lack of real ones (359 held out); "
    "they are 1.6 times as rough as real ones; the loss is 100 % of its start"
)


@pytest.mark.parametrize(
    ("real", "recognised", "loss", "expected"),
    [
        (0.99, 0.95, 0.28, "no fault found"),
        (0.99, 0.64, 0.45, "undertrained"),
        (0.99, 0.33, 0.30, "unrecognisable images"),
        (0.70, 0.41, 0.30, "no fault found"),  # half of the way from chance, 0.1, to 0.7 is 0.4
        (0.70, 0.39, 0.30, "unrecognisable images"),
        (0.35, 0.10, 0.30, "no fault found"),  # not a classifier to trust
        (0.81, 0.70, 0.30, "noisy images"),  # noise of the right mean colour
    ],
)
def test_verdict_by_loss_and_agreement(
    monkeypatch: pytest.MonkeyPatch, real: float, recognised: float, loss: float, expected: str
) -> None:
    """Agreement of real images is the mean over classes: one frequent class must not make a classifier good."""
    digits = open_dataset("digits")

    def agreement(classifier: object, images: Any, labels: Any) -> tuple[float, list[float | None]]:
        return (0.0, [real, real, None]) if len(labels) == len(digits.y_test) else (recognised, [])

    monkeypatch.setattr(verdict_module, "small_classifier", lambda dataset, device: None)
    monkeypatch.setattr(verdict_module, "agreement", agreement)
    state = TrainingState(38, 1.0, [(1, 2.0), (38, 2 * loss)])
    trainer: Any = SimpleNamespace(state=state, device=torch.device("cpu"))
    noise = np.random.default_rng(0).choice([0, 255], (10, 8, 8, 1)).astype(np.uint8)
    found = judge(trainer, digits, noise if expected == "noisy images" else digits.x_test[:10], np.arange(10))
    assert found.text.startswith(f"{expected} after 38 steps: ") and found.warns == (expected != "no fault found")
    assert found.text.endswith(f"; the loss is {100 * loss:.0f} % of its start")
    assert found.agreement == (recognised if real > 0.4 else None)


def test_loss_fraction_is_that_of_the_last_tenth() -> None:
    curve = [(step, 1.0 if step < 92 else 0.25) for step in range(1, 101)]
    assert loss_fraction(TrainingState(100, 1.0, curve)) == pytest.approx(0.325)
    assert loss_fraction(TrainingState(5, 1.0, [])) is None
    assert loss_fraction(TrainingState(100, 1.0, curve, start="`other`")) is None


@pytest.fixture
def noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Return a generator trained for one step, and what the command printed."""
    monkeypatch.setattr(verdict_module, "_MIN_HELD_OUT", 1000)  # the digits' classifier takes seconds
    args = ("--dataset", "digits", "--out", "noise", "--steps", "1", "--device", "cpu", "--seed", "3")
    done = run_in_process("train-generator", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / "noise", done.stdout.splitlines()


def test_training_ends_with_verdict_and_next_command(noise: tuple[Path, list[str]]) -> None:
    folder, printed = noise
    again = f"fedeas train-generator --dataset digits --out {folder} --seed 3 --device cpu --resume --steps=250"
    lines = [f"generator: {folder}", f"verdict: {STOPPED}", f"look at: {folder / 'samples.png'}", f"next: {again}"]
    assert printed[-4:] == lines


def test_verdict_does_not_change_the_fingerprint(noise: tuple[Path, list[str]]) -> None:
    """Cached images and the records of runs name a generator by it."""
    folder, _ = noise
    path = folder / "unet" / "config.json"
    with_verdict, content = DiffusionGenerator(folder, num_classes=10).fingerprint, json.loads(path.read_text())
    assert read_warning(folder) == content.pop(VERDICT)["text"] == STOPPED
    path.write_text(json.dumps(content))
    assert DiffusionGenerator(folder, num_classes=10).fingerprint == with_verdict
    for other in ({}, {VERDICT: 3}, {VERDICT: {"warns": False, "text": "no fault"}}):
        path.write_text(json.dumps(content | other))
        assert read_warning(folder) == "", "a generator without a verdict, or without a fault, must not warn"


def test_run_with_bad_generator_warns_everywhere(noise: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, _ = noise
    warning = f"generator noise: {STOPPED}; do not rely on a gain from its images"
    keys = ("conf/quickstart.toml", "clients=4", "rounds=1", "beta=2", "model=users_models:tiny", "backend=inline")
    for policy in ("none", "fedeas"):
        more = (f"policy={policy}", f"generator={folder}", "sampler-steps=1", f"run-dir={tmp_path}/r/{policy}")
        done = run_in_process("run", *keys, *more, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert (f"warning: {warning}" in done.stdout.splitlines()) == (policy == "fedeas")
    run = RunDirectory(tmp_path / "r" / "fedeas")
    assert run.generator_warning() == warning and RunDirectory(tmp_path / "r" / "none").generator_warning() == ""
    assert f"WARNING {warning}" in (run.path / "flower.log").read_text()
    (finding,) = check_generator(run.config())
    assert (finding.state, finding.text) == ("note", warning)
    RunDirectory.start(run.config().with_changes(resume=True), run.environment())
    assert run.generator_warning() == warning and is_run(run.path), "a resumed run must keep the warning"
    printed = run_in_process("report", f"{tmp_path}/r", "--out", str(tmp_path / "out")).stdout
    assert f"Images of FedEAS: {warning}" in printed.splitlines()
    assert f"Images of FedEAS: {warning}." in (tmp_path / "out" / "report.md").read_text()


def test_node_logs_the_warning_once(noise: tuple[Path, list[str]], caplog: pytest.LogCaptureFixture) -> None:
    """The server does not see a SuperNode's generator."""
    config = parse_config({"clients": 4, "generator": str(noise[0]), "sampler-steps": 1})
    plan, data = (1,) + (0,) * 9, federated_data(config, 4)
    place: dict[str, Any] = {"partition-id": 0, "num-partitions": 4}
    local_images(config, data, read_node(place | {SIMULATED: True}), plan, (), "", "", "cpu")
    first = local_images(config, data, read_node(place), plan, (), "", "", "cpu")
    local_images(config, data, read_node(place), plan, (), "", first.generator, "cpu")
    assert [record.getMessage() for record in caplog.records if "rely" in record.getMessage()] == [
        f"client 0: generator noise: {STOPPED}; do not rely on a gain from its images"
    ]
