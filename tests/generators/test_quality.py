"""The quality report: distances by hand, its classifiers, and the choice of guidance and steps."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from runners import finish, quick, run_in_process, small

from fedeas_flwr.commands.images import _print_comparison
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.generators import classifier as classifier_module
from fedeas_flwr.generators.classifier import agreement, classifier_of_run, independent_classifier
from fedeas_flwr.generators.quality import (
    frechet_distance,
    inception_distances,
    kernel_distance,
    nearest_images,
    quality_report,
)
from fedeas_flwr.launch.progress import showing_log
from fedeas_flwr.runs.directory import RunDirectory


def test_frechet_distance_of_gaussians_by_hand() -> None:
    # Points at ±1 of each axis: mean 0, covariance 2/3 of the identity.
    points = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert frechet_distance(points, points) == pytest.approx(0, abs=1e-7)
    assert frechet_distance(points, points + np.array([3, 4])) == pytest.approx(25)
    # Twice the standard deviation: (2 − 1)² · 2/3 for each of two axes.
    assert frechet_distance(points, 2 * points) == pytest.approx(4 / 3)


def test_kernel_distance_is_unbiased_and_detects_a_shift() -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 400, 8))
    assert abs(kernel_distance(a, b)) < 0.05
    assert kernel_distance(a, b + 1) > 1


def test_nearest_distance_by_hand() -> None:
    train = np.zeros((3, 2, 2, 1), np.uint8)
    train[1], train[2] = 100, 255
    images = np.array([[[[100], [100]], [[100], [100]]], [[[255], [255]], [[255], [0]]]], np.uint8)
    assert nearest_images(images, train)[1].tolist() == [0.0, 1.0]


def test_classifier_is_accurate_and_independent_of_batch() -> None:
    digits, classifier = open_dataset("digits"), independent_classifier("digits")
    images, labels = np.asarray(digits.x_test), np.asarray(digits.y_test)
    assert classifier.test_accuracy > 0.96
    overall, by_class = agreement(classifier, images, labels)
    assert overall == classifier.test_accuracy and len(by_class) == 10 and min(by_class) > 0.8  # type: ignore[type-var]
    probabilities, features = classifier.predict(images)
    alone = [classifier.predict(images[i : i + 1]) for i in (0, 130, 358)]
    assert all(np.array_equal(p[0], probabilities[i]) for i, (p, _) in zip((0, 130, 358), alone, strict=True))
    assert features.shape == (359, 512)
    assert classifier.predict(images[:0])[0].shape == (0, 10)


def test_classifier_training_logs_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(classifier_module, "_LINE_EVERY", 0.0)
    digits = open_dataset("digits")
    chosen = np.isin(digits.y_train, [0, 1]).nonzero()[0][:40]
    np.savez(tmp_path / "few.npz", x=digits.x_train[chosen], y=digits.y_train[chosen])
    said, logger = io.StringIO(), logging.getLogger("fedeas_flwr")
    before = logger.handlers[:], logger.level, logger.propagate
    with showing_log(Console(file=said, width=200)):
        independent_classifier(f"own:{tmp_path / 'few.npz'}")
    lines = said.getvalue().splitlines()
    assert lines[0].endswith(": 30 steps") and len(lines) == 31
    assert lines[15].startswith("classifier: step 15 of 30, about ") and lines[15].endswith(" left")
    assert (logger.handlers, logger.level, logger.propagate) == before


def test_classifier_trains_on_few_custom_images(tmp_path: Path) -> None:
    digits = open_dataset("digits")
    chosen = np.isin(digits.y_train, [0, 1]).nonzero()[0][:40]
    np.savez(tmp_path / "few.npz", x=digits.x_train[chosen], y=digits.y_train[chosen])
    assert independent_classifier(f"own:{tmp_path / 'few.npz'}").test_accuracy > 0.9


def test_a_damaged_classifier_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(classifier_module._EPOCHS, "small-cnn", 1)
    digits = open_dataset("digits")
    np.savez(tmp_path / "few.npz", x=digits.x_train[:100], y=digits.y_train[:100])
    first = independent_classifier(f"own:{tmp_path / 'few.npz'}").predict(digits.x_test)[0]
    (path,) = tmp_path.glob("cache/classifiers/*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    classifier_module._independent_classifier.cache_clear()
    again = independent_classifier(f"own:{tmp_path / 'few.npz'}").predict(digits.x_test)[0]
    assert np.array_equal(first, again) and path.read_bytes() == whole


def test_quality_report_separates_real_images_copies_and_noise() -> None:
    digits, classifier = open_dataset("digits"), independent_classifier("digits")
    test, labels = np.asarray(digits.x_test), np.asarray(digits.y_test)
    real = quality_report(digits, classifier, test, labels)
    assert real["class_agreement"] > 0.96
    assert real["classifier_frechet_distance"] == real["classifier_frechet_distance_of_test_images"]
    assert real["near_copies"] == real["near_copies_expected"] < 0.02
    copies = quality_report(digits, classifier, np.asarray(digits.x_train)[:300], np.asarray(digits.y_train)[:300])
    assert copies["near_copies"] == 1 and copies["exact_copies"] == 300
    noise = np.random.default_rng(0).integers(0, 256, test.shape, np.uint8)
    bad = quality_report(digits, classifier, noise, labels)
    assert bad["class_agreement"] < 0.3 and bad["near_copies"] == 0
    assert bad["classifier_frechet_distance"] > 3 * real["classifier_frechet_distance"]
    assert bad["classifier_kernel_distance"] > 0.1 > real["classifier_kernel_distance"]
    json.dumps(bad)


def test_inception_distances_need_their_weights(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics", reason="an extra: pip install 'fedeas-flwr[quality]'")
    images = np.zeros((4, 8, 8, 1), np.uint8)
    with pytest.raises(FileNotFoundError, match=r"--inception: there is no file /nowhere"):
        inception_distances(images, images, Path("/nowhere"))


def test_fid_and_kid_with_random_inception_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "an extra: pip install 'fedeas-flwr[quality]'"
    pytest.importorskip("torchmetrics", reason=reason)
    inception = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3", reason=reason)
    extractor = inception.FeatureExtractorInceptionV3
    with monkeypatch.context() as patch:  # its constructor requires weights: load none, then save its own
        patch.setattr(torch, "load", lambda *_, **__: {})
        patch.setattr(extractor, "load_state_dict", lambda *_, **__: None)
        torch.save(extractor("made", ["2048"], "nowhere").state_dict(), tmp_path / "weights.pth")
    random = np.random.default_rng(0)
    train, other = (random.integers(0, 256, (number, 8, 8, 1), np.uint8) for number in (6, 8))
    found = inception_distances(train, other, tmp_path / "weights.pth")
    assert set(found) == {"fid", "kid"} and all(np.isfinite(list(found.values())))


# -------------------------------------------------------------------------------- the model of a run as classifier


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Return a finished run without synthetic images."""
    return finish(small(tmp_path_factory.mktemp("classifier") / "r", policy="none", alpha=10.0))


def test_report_with_the_model_of_a_run_opens_no_real_images(
    run: RunDirectory, digits_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedeas_flwr.data.datasets._open_folder", lambda *_: pytest.fail("opened real images"))
    words = ("generate", "--per-class", "2", "--sampler-steps", "2", "--out", str(tmp_path / "a"), "--report")
    done = run_in_process(*words, "--classifier", str(run.path), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a" / "report.json").read_text())
    assert found["classifier"] == "r" and found["classifier_evaluation"] == "central"
    assert found["classifier_test_accuracy"] == run.summary()["final"]
    assert len(found["class_agreement_by_class"]) == 10 and not any("distance" in key for key in found)
    assert "no real image was compared: distances and copies are not measured" in done.stdout


def test_classifier_of_run_has_the_accuracy_of_the_run(run: RunDirectory) -> None:
    digits, classifier = open_dataset("digits"), classifier_of_run(run, "digits")
    assert agreement(classifier, np.asarray(digits.x_test), np.asarray(digits.y_test))[0] == run.summary()["final"]


def test_classifier_of_run_may_be_a_custom_network(tmp_path: Path) -> None:
    classifier = classifier_of_run(finish(quick(tmp_path / "r", policy="none", rounds=1)), "digits")
    assert agreement(classifier, np.zeros((3, 8, 8, 1), np.uint8), np.arange(3))[1][3:] == [None] * 7


def test_classifier_of_run_must_fit_the_images(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has dataset = 'digits'; give a run on 'cifar10'"):
        classifier_of_run(run, "cifar10")
    with pytest.raises(RunError, match="no-run"):
        classifier_of_run(RunDirectory(tmp_path / "no-run"), "digits")
    table = {"local-steps": 1, "batch-size": 4}
    config = small(tmp_path / "g", task="generator", policy="none", rounds=1, generator_training=table)
    with pytest.raises(ConfigError, match=r"has task = 'generator'; give a run that trained a classifier"):
        classifier_of_run(finish(config), "digits")
    digits = open_dataset("digits")
    np.savez(tmp_path / "two.npz", x=digits.x_train[:40], y=digits.y_train[:40] % 2)
    own = f"own:{tmp_path / 'two.npz'}"
    other = finish(quick(tmp_path / "own", policy="none", rounds=1, dataset=own, clients=1))
    np.savez(tmp_path / "three.npz", x=digits.x_train[:60], y=digits.y_train[:60] % 3)
    with pytest.raises(RunError, match="its class 2 is '2', but missing in the run"):
        classifier_of_run(other, f"own:{tmp_path / 'three.npz'}")


# -------------------------------------------------------------------------------- several guidances and steps


def test_several_guidances_and_steps_are_compared(run: RunDirectory, digits_generator: Path, tmp_path: Path) -> None:
    words = ("generate", "--per-class", "2", "--device", "cpu", "--guidance", "1,2", "--sampler-steps", "1,2")
    done = run_in_process(*words, "--out", str(tmp_path), "--report", "--classifier", str(run.path))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g1-n1", "g1-n2", "g2-n1", "g2-n2"]
    found = json.loads((tmp_path / "g2-n1" / "report.json").read_text())
    assert (found["guidance"], found["sampler-steps"]) == (2.0, 1)
    marked = [line.split() for line in done.stdout.splitlines() if line.endswith("best")]
    assert len(marked) == 1 and f"best: guidance={marked[0][0]} sampler-steps={marked[0][1]} (weakest" in done.stdout
    done = run_in_process(*words, "--out", str(tmp_path))
    assert done.returncode == 2 and "several values need --report" in done.stderr


def test_best_setting_by_distance_else_the_weakest_guidance(capsys: pytest.CaptureFixture[str]) -> None:
    def row(guidance: float, steps: int, agreement: float, **more: float) -> dict[str, float]:
        facts = {"guidance": guidance, "sampler-steps": steps, "seconds": 1.0, "samples": 100}
        return facts | {"class_agreement": agreement, **more}

    _print_comparison([row(1, 20, 0.8), row(2, 20, 0.89), row(2, 10, 0.88), row(3, 20, 0.9)])  # standard error 0.03
    assert "best: guidance=2 sampler-steps=10 (weakest" in capsys.readouterr().out
    distances = [row(1, 20, 0.8, classifier_frechet_distance=5.0), row(3, 20, 0.9, classifier_frechet_distance=9.0)]
    _print_comparison(distances)
    assert "best: guidance=1 sampler-steps=20 (lowest distance)" in capsys.readouterr().out
