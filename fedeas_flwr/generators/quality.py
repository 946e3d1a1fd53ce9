"""Quality report of generated images: class agreement, distance to real images, and copies of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedeas_flwr.data.datasets import Dataset, Images, Labels
from fedeas_flwr.generators.classifier import Classifier, agreement

_NEAR_COPY_PERCENTILE = 1.0
"""A sample is a near copy if its distance to the nearest train image is below this percentile of the test images'."""
_MAX_COMPARED = 2000
"""Maximum number of images per set in the kernel distance."""


def quality_report(
    dataset: Dataset, classifier: Classifier, images: Images, labels: Labels, inception: Path | None = None
) -> dict[str, Any]:
    """Compare samples with the dataset's train images, and for reference its test images; return plain values.

    With ``inception``, the weights of torch-fidelity's Inception network, FID and KID are measured too.
    """
    train, test = np.asarray(dataset.x_train), np.asarray(dataset.x_test)
    features = [classifier.predict(part)[1] for part in (train, images, test)]
    real, generated, held_out = (part.astype(np.float64) for part in features)
    sample_distance, test_distance = nearest_images(images, train)[1], nearest_images(test, train)[1]
    threshold = float(np.percentile(test_distance, _NEAR_COPY_PERCENTILE))
    report: dict[str, Any] = {
        **agreement_report(classifier, images, labels),
        # Not FID and KID: the features are those of our classifier, so only values of this classifier can be compared.
        "classifier_frechet_distance": frechet_distance(real, generated),
        "classifier_frechet_distance_of_test_images": frechet_distance(real, held_out),
        "classifier_kernel_distance": kernel_distance(real, generated),
        "classifier_kernel_distance_of_test_images": kernel_distance(real, held_out),
        "nearest_train_image_median": float(np.median(sample_distance)),
        "nearest_train_image_median_of_test_images": float(np.median(test_distance)),
        "near_copies": float((sample_distance < threshold).mean()),
        "near_copies_expected": float((test_distance < threshold).mean()),
        "exact_copies": int((sample_distance == 0).sum()),
    }
    return report | (inception_distances(train, images, inception) if inception else {})


def agreement_report(classifier: Classifier, images: Images, labels: Labels) -> dict[str, Any]:
    """Return the part of the quality report that needs no real images, as plain values."""
    overall, by_class = agreement(classifier, images, labels)
    return {
        "samples": len(labels),
        "classifier_test_accuracy": classifier.test_accuracy,
        "class_agreement": overall,
        "class_agreement_by_class": by_class,
    }


def frechet_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the Fréchet distance of Gaussians fitted to two sets of features (Heusel et al., 2017)."""
    difference = a.mean(axis=0) - b.mean(axis=0)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # tr √(ΣaΣb) from the eigenvalues of ΣaΣb, which are real and not negative except for rounding.
    root = np.sqrt(np.clip(np.linalg.eigvals(cov_a @ cov_b).real, 0, None)).sum()
    return float(difference @ difference + np.trace(cov_a) + np.trace(cov_b) - 2 * root)


def kernel_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the unbiased squared MMD under (x·y / D + 1)³ (Bińkowski et al., 2018), on random subsets."""
    random = np.random.default_rng(0)
    a, b = (x[random.permutation(len(x))[:_MAX_COMPARED]] for x in (a, b))

    def kernel(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        cubed: NDArray[np.float64] = (x @ y.T / x.shape[1] + 1) ** 3
        return cubed

    within = [(k.sum() - np.trace(k)) / (len(k) * (len(k) - 1)) for k in (kernel(a, a), kernel(b, b))]
    return float(within[0] + within[1] - 2 * kernel(a, b).mean())


def nearest_images(images: Images, train: Images) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the position of each image's nearest train image, and the Euclidean distance, with pixels from 0 to 1."""
    flat = train.reshape(len(train), -1).astype(np.float32)
    squares = (flat**2).sum(axis=1)
    nearest = np.empty(len(images), dtype=np.int64)
    for start in range(0, len(images), 256):
        part = images[start : start + 256].reshape(-1, flat.shape[1]).astype(np.float32)
        nearest[start : start + 256] = (squares - 2 * part @ flat.T).argmin(axis=1)
    # Near 0 the rounding of this expansion exceeds the distance, so compute the distance from the pixels.
    gaps = (images.reshape(len(images), -1).astype(np.float64) - flat[nearest]) / 255
    return nearest, np.sqrt((gaps**2).sum(axis=1))


def inception_distances(train: Images, images: Images, weights: Path) -> dict[str, float]:
    """Return torchmetrics' FID and KID of the samples vs at most 10,000 train images."""
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance, NoTrainInceptionV3
        from torchmetrics.image.kid import KernelInceptionDistance
    except ImportError:
        raise ValueError("--inception needs torchmetrics; pip install 'fedeas-flwr[quality]'") from None
    if not weights.is_file():
        raise FileNotFoundError(f"--inception: there is no file {weights}")
    try:
        network = NoTrainInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=str(weights))
    except ModuleNotFoundError:
        raise ValueError("--inception needs torch-fidelity; pip install 'fedeas-flwr[quality]'") from None
    fid = FrechetInceptionDistance(network, reset_real_features=False)
    kid = KernelInceptionDistance(network, subset_size=min(1000, len(images), len(train)))
    chosen = np.random.default_rng(0).permutation(len(train))[:10_000]
    for part, is_real in ((train[np.sort(chosen)], True), (images, False)):
        for start in range(0, len(part), 64):
            pixels = torch.tensor(part[start : start + 64]).permute(0, 3, 1, 2)
            pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
            fid.update(pixels, real=is_real)
            kid.update(pixels, real=is_real)
    return {"fid": float(fid.compute()), "kid": float(kid.compute()[0])}
