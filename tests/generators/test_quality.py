"""The quality report: distances by hand, and the independent classifier."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.generators import classifier as classifier_module
from fedeas_flwr.generators.classifier import agreement, independent_classifier
from fedeas_flwr.generators.quality import (
    frechet_distance,
    inception_distances,
    kernel_distance,
    nearest_distance,
    quality_report,
)
from fedeas_flwr.launch.progress import showing_log


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
    assert nearest_distance(images, train).tolist() == [0.0, 1.0]


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
    train, other = random.integers(0, 256, (2, 6, 8, 8, 1), np.uint8)
    found = inception_distances(train, other, tmp_path / "weights.pth")
    assert set(found) == {"fid", "kid"} and all(np.isfinite(list(found.values())))
