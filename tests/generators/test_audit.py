"""The audit for memorisation: its statistics, its attacks, a model that it must flag, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runners import finish, quick, run_in_process, small

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.data.datasets import Dataset, open_dataset
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.generators.audit import membership
from fedeas_flwr.generators.audit.federated import training_config, training_images
from fedeas_flwr.generators.audit.membership import _predict, membership_errors
from fedeas_flwr.generators.audit.neighbours import (
    LabelledImages,
    Neighbours,
    find_neighbours,
    match_classes,
    member_preference,
)
from fedeas_flwr.generators.audit.statistics import auc, joint_confidence, true_positives, wilson
from fedeas_flwr.generators.learn.federated import split_held_out
from fedeas_flwr.generators.learn.presets import DIGITS
from fedeas_flwr.generators.learn.run import save_model
from fedeas_flwr.generators.learn.trainer import Trainer
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return open_dataset("digits")


# -------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("value", "number", "low", "high"), [(0.8, 10, 0.4902, 0.9433), (0.0, 10, 0.0, 0.2775), (0.5, 100, 0.4038, 0.5962)]
)
def test_wilson_interval_has_published_values(value: float, number: int, low: float, high: float) -> None:
    assert wilson(value, number) == pytest.approx((value, low, high), abs=5e-5)


def test_auc_counts_ties_half() -> None:
    assert auc(np.array([1.0, 2, 3]), np.array([2.0, 3, 4])).value == pytest.approx(7 / 9)
    assert auc(np.array([1.0, 1]), np.array([1.0, 1])).value == 0.5
    assert auc(np.array([0.0]), np.array([1.0])).value == 1


def test_auc_interval_is_the_mann_whitney_test_at_one_half() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        members, non_members = random.standard_normal(12) - 0.8, random.standard_normal(12)
        found = auc(members, non_members)
        z = (found.value - 0.5) / sqrt(25 / (12 * 12 * 12))
        assert (found.low > 0.5) == (z > 1.959964)
        opposite = auc(non_members, members)
        assert (1 - opposite.value, 1 - opposite.high, 1 - opposite.low) == pytest.approx(found)


def test_auc_interval_covers_the_true_value() -> None:
    random = np.random.default_rng(0)
    found = [auc(random.standard_normal(40) - 1, random.standard_normal(40)) for _ in range(500)]
    assert 0.93 < np.mean([each.low <= 0.7602 <= each.high for each in found]) < 0.98  # Φ(1 / √2)


def test_auc_interval_of_separated_images_has_a_width() -> None:
    """DeLong's would be 1 to 1, also for two images each, which chance separates once in six times."""
    assert auc(np.arange(2.0), np.arange(2.0) + 5).low < 0.5 < auc(np.arange(20.0), np.arange(20.0) + 50).low < 1


def test_true_positive_rate_allows_one_percent_false_positives() -> None:
    non_members = np.arange(200.0)  # two may be below the threshold, which is 2
    members = np.array([0.5, 1.5, 1.9, 2.0, 300, 300, 300, 300])
    found = true_positives(members, non_members, np.random.default_rng(0))
    assert found["value"] == 3 / 8 and found["expected"] == 3 / 201
    assert 0 <= found["low"] < 3 / 8 < found["high"] <= 1
    separated = true_positives(np.arange(9.0), non_members + 9, np.random.default_rng(0))
    assert separated["value"] == 1 and separated["low"] == wilson(1.0, 9).low


def test_true_positive_p_value_equals_enumeration() -> None:
    """No false positive is allowed among five non-members: the members found are those before the first one."""
    orders = list(combinations(range(10), 5))
    for members in ([0, 1, 2, 7, 8], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4]):
        others = np.setdiff1d(np.arange(10), members).astype(float)
        found = true_positives(np.array(members, dtype=float), others, np.random.default_rng(0))
        first = min(others)
        as_many = [min(set(range(10)) - set(order)) >= first for order in orders]
        assert found["value"] == first / 5 and found["p"] == pytest.approx(np.mean(as_many))


def test_joint_confidence_is_bonferronis() -> None:
    assert joint_confidence(1) == 0.95 and joint_confidence(5) == pytest.approx(0.99)


# -------------------------------------------------------------------------------------------- neighbours


def test_match_classes_takes_as_many_of_both() -> None:
    members, others = np.array([0, 0, 0, 1, 2, 2]), np.array([2, 0, 2, 2, 3, 0])
    mine, theirs = match_classes(members, others, np.random.default_rng(0))
    assert sorted(members[mine]) == sorted(others[theirs]) == [0, 0, 2, 2]
    assert len(set(mine)) == len(set(theirs)) == 4


def test_neighbours_are_of_the_same_class_and_perhaps_mirrored() -> None:
    def images(*rows: list[int]) -> Any:
        return np.array(rows, dtype=np.uint8).reshape(-1, 1, 3, 1)

    samples = LabelledImages(images([0, 0, 255]), np.array([1]))
    members = LabelledImages(images([0, 0, 255], [0, 255, 255], [255, 0, 0]), np.array([0, 1, 1]))
    non_members = LabelledImages(images([0, 0, 0]), np.array([1]))
    plain = find_neighbours(samples, members, non_members)
    assert plain.positions.tolist() == [[1], [0]] and plain.distances.tolist() == [[1], [1]]
    assert member_preference(plain, samples.labels, members.labels).value == 0.5, "a tie counts half"
    mirrored = find_neighbours(samples, members, non_members, mirrored=True)
    assert mirrored.positions.tolist() == [[2], [0]] and mirrored.distances.tolist() == [[0], [1]]


def test_preference_of_one_image_for_all_samples_is_no_evidence() -> None:
    """One image that is nearest to all samples decides once; a hundred different ones decide a hundred times."""
    labels, distances = np.zeros(100, dtype=np.int64), np.array([[1.0] * 100, [2.0] * 100])
    members = np.zeros(100, dtype=np.int64)
    same = Neighbours(np.zeros((2, 100), dtype=np.int64), distances)
    found = member_preference(same, labels, members)
    assert found == pytest.approx(wilson(1.0, 1.0)) and found.low < 0.5
    different = Neighbours(np.tile(np.arange(100), (2, 1)), distances)
    assert member_preference(different, labels, members) == wilson(1.0, 100)


def test_preference_rarely_detects_where_nothing_is_memorised(digits: Dataset) -> None:
    """Samples mix images that are on neither side. Wilson's interval for the number of samples detects three of 40."""
    detected = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        order = random.permutation(len(digits.y_train))
        sources, rest = order[:400], order[400:]
        labels = np.repeat(np.arange(10), 30)
        pairs = np.array([random.choice(sources[digits.y_train[sources] == label], 2) for label in labels])
        samples = LabelledImages(digits.x_train[pairs].mean(axis=1).astype(np.uint8), labels)
        mine, others = match_classes(digits.y_train[rest[:700]], digits.y_train[rest[700:]], random)
        sides = [LabelledImages(digits.x_train[r], digits.y_train[r]) for r in (rest[:700][mine], rest[700:][others])]
        found = find_neighbours(samples, *sides)
        detected += member_preference(found, labels, sides[0].labels).low > 0.5
    assert detected <= 1  # expected: 2.5 %


def test_estimates_do_not_depend_on_the_order(digits: Dataset) -> None:
    samples = LabelledImages(digits.x_test[:60], digits.y_test[:60])
    sides = [LabelledImages(digits.x_train[part], digits.y_train[part]) for part in (slice(300), slice(300, 600))]
    found = find_neighbours(samples, *sides)
    order, turned = np.random.default_rng(0).permutation(60), np.arange(300)[::-1]
    again = find_neighbours(samples.at(order), *(side.at(turned) for side in sides))
    assert np.array_equal(again.distances, found.distances[:, order])
    assert np.array_equal(turned[again.positions], found.positions[:, order])
    labels = samples.labels, sides[0].labels
    assert member_preference(again, labels[0][order], labels[1][turned]) == member_preference(found, *labels)


# -------------------------------------------------------------------------------------------- membership inference


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_noise_is_recovered_from_every_prediction_type(prediction: str) -> None:
    clean, noise, alpha = torch.rand(2, 1, 4, 4), torch.randn(2, 1, 4, 4), 0.7
    noisy = sqrt(alpha) * clean + sqrt(1 - alpha) * noise
    outputs = {"epsilon": noise, "v_prediction": sqrt(alpha) * noise - sqrt(1 - alpha) * clean, "sample": clean}

    def unet(*args: Any, **more: Any) -> tuple[torch.Tensor]:
        return (outputs[prediction],)

    found = _predict(unet, {"prediction_type": prediction}, alpha, noisy, 3, torch.zeros(2))
    assert torch.allclose(found, noise, atol=1e-5)


def test_membership_errors_depend_on_image_and_seed_only(
    digits_generator: Path, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_BATCHES", {"cpu": 8})
    images, labels, order = digits.x_train[:10], digits.y_train[:10], np.arange(10)[::-1]
    found = membership_errors(digits_generator, images, labels, 10)
    again = membership_errors(digits_generator, images[order], labels[order], 10)
    for name in found:
        assert again[name] == pytest.approx(found[name][order], rel=1e-4)
    few = membership_errors(digits_generator, images[:3], labels[:3], 10, seed=1)
    assert few["pia t=200"] == pytest.approx(found["pia t=200"][:3], rel=1e-4), "PIA has no random numbers"
    assert (few["loss t=200"] != found["loss t=200"][:3]).all()


# -------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory, digits: Dataset) -> Path:
    """Return a folder with members.npz and others.npz, one image of each class."""
    folder = tmp_path_factory.mktemp("audit")
    for name, x, y in (("members", digits.x_train, digits.y_train), ("others", digits.x_test, digits.y_test)):
        rows = np.concatenate([np.flatnonzero(y == label)[:1] for label in range(10)])
        np.savez(folder / f"{name}.npz", x=x[rows], y=y[rows])
    return folder


def audit(generator: object, out: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    done = run_in_process("audit", str(generator), "--out", str(out), "--device", "cpu", *words)
    assert done.returncode < 2 and "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads((out / "audit.json").read_text()), done.stdout


@pytest.mark.slow
def test_audit_flags_an_overfitted_model_only(
    sides: Path, digits_generator: Path, digits: Dataset, tmp_path: Path
) -> None:
    """The positive control: the built-in model, trained further on ten images."""
    with np.load(sides / "members.npz") as members:
        few = replace(digits, x_train=members["x"], y_train=members["y"])
    trainer = Trainer(replace(DIGITS, batch=10, cpu_threads=1), few, start=digits_generator)
    trainer.run(steps=60)
    save_model(tmp_path / "control", trainer, few)
    words = ("--members", str(sides / "members.npz"), "--non-members", str(sides / "others.npz"), "--samples", "60")
    code, control, printed = audit(tmp_path / "control", tmp_path / "out", *words, "sampler-steps=10")
    tests = control["tests"]
    assert code == 1 and control["detected"] and all(test["detected"] for test in tests.values())
    assert tests["loss_auc"]["value"] > 0.9 and tests["pia_auc"]["value"] > 0.9
    assert "memorisation: detected (nearest image is a member; loss, AUC; PIA, AUC;" in printed
    assert (tmp_path / "out" / "neighbours.png").stat().st_size > 10_000
    code, builtin, printed = audit("builtin", tmp_path / "out", *words, "sampler-steps=10")
    assert code == 0 and not builtin["detected"]
    for name in ("nearest", "loss_auc", "pia_auc"):
        assert builtin["tests"][name]["value"] < tests[name]["value"] - 0.2
    assert "memorisation: not detected\nMemorisation that is not detected may still be there" in printed
    assert "private" not in printed


def test_audit_of_a_bank_compares_images_only_and_repeats(sides: Path, tmp_path: Path) -> None:
    """A bank of members: every sample is a copy."""
    words = ("--members", str(sides / "members.npz"), "--samples", "1000")
    code, found, printed = audit(f"bank:{sides / 'members.npz'}", tmp_path / "a", *words)
    assert code == 1 and list(found["tests"]) == ["nearest"] and found["tests"]["nearest"]["value"] == 1
    assert found["samples"] == 10 and found["members"] == {"from": "members.npz", "images": 10}
    assert "no membership inference: it needs a diffusion model" in printed.splitlines()
    audit(f"bank:{sides / 'members.npz'}", tmp_path / "b", *words)
    for name in ("audit.json", "neighbours.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_audit_with_a_config_has_a_row_per_client(digits: Dataset, tmp_path: Path) -> None:
    conf = tmp_path / "conf.toml"
    conf.write_text("clients = 3\nalpha = 0.5\n")
    code, found, _ = audit("users_generators:Stripes", tmp_path / "out", str(conf), "clients=4", "--samples", "50")
    assert code == 0 and [row["name"] for row in found["classes"]] == list("0123456789")
    assert [row["name"] for row in found["clients"]] == list("0123")
    assert all(0 < row["compared"] <= len(digits.y_test) for row in found["clients"])


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a federated training in which one of four clients trains per round, for two rounds."""
    table = {"local-steps": 1, "batch-size": 4, "held-out": 0.25}
    keys: dict[str, Any] = {"task": "generator", "policy": "none", "generator_training": table, "alpha": 0.5}
    return finish(small(tmp_path_factory.mktemp("training") / "r", rounds=2, participation=0.25, **keys))


def test_training_images_are_those_of_clients_that_trained(training: RunDirectory, digits: Dataset) -> None:
    config = training_config(training)
    found = training_images(training, config)
    trained = {client for record in training.rounds() for client in record["clients"]}
    assert 0 < len(trained) < 4 and {k for k, rows in enumerate(found.clients) if len(rows)} == trained
    data = federated_data(config, 4)
    for client in trained:
        own, held_out = split_held_out(config, client, len(data.train_labels(client)))
        images, labels = data.train(client)
        mine = found.members.at(found.clients[client])
        assert np.array_equal(mine.images, images[own]) and np.array_equal(mine.labels, labels[own])
        assert len(held_out) == round(len(labels) / 4)
    assert sum(map(len, found.clients)) == len(found.members.labels)
    assert found.non_members_are == "held-out images"
    assert len(found.non_members.labels) == sum(round(len(rows) / 4) for rows in data.partition.train)
    table = config.generator_training.model_copy(update={"held_out": 0.0})
    everything = training_images(training, config.model_copy(update={"generator_training": table}))
    assert everything.non_members_are == "test set" and np.array_equal(everything.non_members.images, digits.x_test)
    table = table.model_copy(update={"small_clients": "skip", "batch_size": 10_000})
    with pytest.raises(ConfigError, match="no client has trained"):
        training_images(training, config.model_copy(update={"generator_training": table}))


@pytest.mark.slow
def test_audit_with_a_run_has_a_row_per_client_that_trained(training: RunDirectory, tmp_path: Path) -> None:
    words = ("--run", str(training.path), "--samples", "20", "sampler-steps=1")
    code, found, printed = audit(training.path / "generator", tmp_path / "out", *words)
    trained = sorted({client for record in training.rounds() for client in record["clients"]})
    assert code == 0 and [row["name"] for row in found["clients"]] == [str(client) for client in trained]
    assert found["members"]["from"] == "images of the clients" and found["non_members"]["from"] == "held-out images"
    assert {"nearest", "loss_auc", "pia_auc"} <= set(found["clients"][0]["tests"])
    assert "(held-out images)" in printed


def test_audit_rejects_a_run_that_does_not_fit(training: RunDirectory, tmp_path: Path) -> None:
    out, words = ("--out", str(tmp_path / "out")), ("audit", "builtin", "--run")
    done = run_in_process(*words, str(tmp_path / "nowhere"), *out)
    assert done.returncode and done.stderr.count("\n") == 1 and "nowhere" in done.stderr
    done = run_in_process(*words, str(training.path), "conf/quickstart.toml", *out, cwd=ROOT)
    assert (done.returncode, "--run determines the images" in done.stderr) == (2, True)
    done = run_in_process(*words, str(training.path), "--dataset", "digits", *out)
    assert (done.returncode, "--dataset: remove the option" in done.stderr) == (2, True)
    classifier = finish(quick(tmp_path / "r", policy="none", rounds=1))
    done = run_in_process(*words, str(classifier.path), *out)
    assert (done.returncode, "give the run that trained the generator" in done.stderr) == (2, True)


def test_audit_rejects_sides_and_generators_of_other_classes(sides: Path, tmp_path: Path) -> None:
    for label in (0, 1):
        np.savez(tmp_path / f"{label}.npz", x=np.zeros((2, 8, 8, 1), np.uint8), y=np.array([label] * 2))
    zeros, ones, out = str(tmp_path / "0.npz"), str(tmp_path / "1.npz"), ("--out", str(tmp_path / "out"))
    done = run_in_process("audit", "builtin", *out, "--members", zeros, "--non-members", ones)
    assert (done.returncode, "have no class in common" in done.stderr) == (2, True)
    done = run_in_process("audit", f"bank:{ones}", *out, "--members", zeros)
    assert (done.returncode, "has no image of a class" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("builtin", "--members", "nowhere.npz"), "--members: "),
        (("builtin", "--samples", "9"), "--samples 9: must be at least 10"),
        (("builtin", "conf/quickstart.toml", "protocol=paper"), "protocol = 'paper': "),
        (("builtin", "conf/quickstart.toml", "--dataset", "digits"), "--dataset: remove the option"),
        (("builtin", "guidanc=2"), "guidanc"),
        (("nowhere",), "generator: there is no "),
        (("builtin", "--dataset", "mnist"), "mnist"),
    ],
)
def test_audit_rejects_bad_input_in_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run_in_process("audit", *words, "--out", str(tmp_path / "out"), "--device", "cpu", cwd=ROOT)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1
