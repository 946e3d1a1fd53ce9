"""Are the samples what was asked for, like the real images, and not copies of them?

Everything here is measured with a classifier trained on the dataset's official train images, independent of the
generator and of the federation. It is a tool of the laboratory: no client could train it from its own data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch.nn import functional as F

from fedeas_flwr.cache import ImageCache
from fedeas_flwr.data import Dataset, open_dataset
from fedeas_flwr.generators import Generator
from fedeas_flwr.models import build_model
from fedeas_flwr.paths import atomic_path, cache_root

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Floats = NDArray[np.float32]

# Part of the file's name: raise it when anything in `_train` changes.
_VERSION = "1"
_BATCH = 128
_EPOCHS = {"small-cnn": 30, "resnet18": 15}
_NEAR_COPY_PERCENTILE = 1.0
_MOST_RAW = 20


class Classifier:
    """A network trained on real images, the judge of generated ones.

    Parameters
    ----------
    dataset
        Whose train images it learned.
    model
        With a last layer ``fc``.
    device
        Where it runs.
    test_accuracy
        On the dataset's test images.
    """

    def __init__(self, dataset: Dataset, model: torch.nn.Module, device: str, test_accuracy: float) -> None:
        self.test_accuracy = test_accuracy
        self._model, self._device = model.to(device).eval(), device
        self._mean = torch.tensor(dataset.mean, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(dataset.std, device=device).view(1, -1, 1, 1)

    @torch.no_grad()
    def judge(self, images: Images) -> tuple[Floats, Floats]:
        """Return the class probabilities ``[N, C]`` and the features before the last layer ``[N, D]``.

        Batches are padded to one size, so that an image is judged alike in any company.
        """
        seen: list[torch.Tensor] = []
        head: Any = self._model.fc
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        probabilities, features = [], []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for start in range(0, len(images), _BATCH):
                batch = images[start : start + _BATCH]
                padded = np.concatenate([batch, np.repeat(batch[-1:], _BATCH - len(batch), axis=0)])
                logits = self._model(self._normalise(padded))
                probabilities.append(logits.softmax(dim=1)[: len(batch)].cpu().numpy())
                features.append(seen.pop()[: len(batch)].cpu().numpy())
        finally:
            torch.set_num_threads(threads)
            hook.remove()
        if not len(images):
            return np.zeros((0, head.out_features), np.float32), np.zeros((0, head.in_features), np.float32)
        return np.concatenate(probabilities), np.concatenate(features)

    def _normalise(self, images: Images) -> torch.Tensor:
        pixels = torch.tensor(images, device=self._device).permute(0, 3, 1, 2)
        return (pixels.float() / 255 - self._mean) / self._std


@lru_cache(maxsize=1)
def independent_classifier(dataset_name: str, data_dir: str = "", device: str = "cpu") -> Classifier:
    """Return the dataset's classifier, trained on first use and kept in the user's cache.

    Parameters
    ----------
    dataset_name
        ``digits`` (small-cnn, seconds on a CPU), ``cifar10`` or ``cifar100`` (resnet18, minutes on a GPU).
    data_dir
        Where the dataset is looked for.
    device
        Where to train and judge.

    Returns
    -------
    Classifier
    """
    from safetensors.torch import load_file, save_file

    dataset = open_dataset(dataset_name, data_dir)
    name = "small-cnn" if dataset_name == "digits" else "resnet18"
    shape = dataset.x_train.shape[1:]
    model = build_model(name, len(dataset.classes), (shape[0], shape[1], shape[2]), stem="3x3", seed=7919)
    path = cache_root() / "classifiers" / f"{dataset_name}-{name}-{_VERSION}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _train(Classifier(dataset, model, device, 0.0), dataset, _EPOCHS[name])
            with atomic_path(path) as temporary:
                save_file(model.cpu().state_dict(), temporary)
    model.load_state_dict(load_file(path))
    classifier = Classifier(dataset, model, device, 0.0)
    classifier.test_accuracy = agreement(classifier, np.asarray(dataset.x_test), np.asarray(dataset.y_test))[0]
    return classifier


def _train(classifier: Classifier, dataset: Dataset, epochs: int) -> None:
    model, random = classifier._model.train(), np.random.default_rng(7919)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    steps = epochs * (len(dataset.y_train) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    flip = dataset.name != "digits"  # a mirrored digit is another or none
    for _ in range(epochs):
        order = random.permutation(len(dataset.y_train))[: steps // epochs * _BATCH].reshape(-1, _BATCH)
        for chosen in order:
            pixels = classifier._normalise(dataset.x_train[chosen])
            if flip and random.random() < 0.5:
                pixels = pixels.flip(-1)
            targets = torch.tensor(dataset.y_train[chosen], device=pixels.device)
            loss = F.cross_entropy(model(pixels), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()


def agreement(classifier: Classifier, images: Images, labels: Labels) -> tuple[float, list[float | None]]:
    """Return the fraction of images recognised as what they should be: overall, and of each class (None: no image)."""
    probabilities, _ = classifier.judge(images)
    right = probabilities.argmax(axis=1) == labels
    by_class = [right[labels == c] for c in range(probabilities.shape[1])]
    return float(right.mean()) if len(right) else 0.0, [float(r.mean()) if len(r) else None for r in by_class]


# --------------------------------------------------------------------------------------------- the gate


def ensure_recognised(
    cache: ImageCache,
    generator: Generator,
    classifier: Classifier,
    least: float,
    *,
    seed: int,
    client: int,
    wanted: Sequence[int],
    about: dict[str, Any] | None = None,
) -> tuple[Images, Labels, int, int]:
    """Like `ImageCache.ensure`, but leave out images the classifier doubts and take later ones in their place.

    The cache holds all of them, so that another threshold or none shares what was made.

    Parameters
    ----------
    cache, generator, seed, client, wanted, about
        As for `ImageCache.ensure`.
    classifier
        The judge.
    least
        Probability it must give an image's class.

    Returns
    -------
    images, labels : array
        Exactly `wanted` of each class, by index.
    made : int
        Images sampled in this call, rejects among them.
    rejected : int
        Images left out: they were paid for as well.
    """
    raw, made = [int(n) for n in wanted], 0
    while True:
        images, labels, new = cache.ensure(generator, seed=seed, client=client, wanted=raw, about=about)
        made += new
        probabilities, _ = classifier.judge(images)
        good = probabilities[np.arange(len(labels)), labels] >= least
        lacking = [n - int(good[labels == c].sum()) for c, n in enumerate(wanted)]
        if not any(n > 0 for n in lacking):
            break
        raw = [have + max(0, more) for have, more in zip(raw, lacking, strict=True)]
        for label, (have, n) in enumerate(zip(raw, wanted, strict=True)):
            if have > _MOST_RAW * n + _MOST_RAW:
                raise ValueError(
                    f"min-class-agreement = {least:g}: {have - lacking[label]} images of class {label} gave only "
                    f"{n - lacking[label]} that the classifier recognises; lower it or use a better generator"
                )
    return images[good], labels[good], made, int((~good).sum())


# ------------------------------------------------------------------------------------------- the report


def quality_report(
    dataset: Dataset, classifier: Classifier, images: Images, labels: Labels, inception: Path | None = None
) -> dict[str, Any]:
    """Measure samples against the dataset.

    Parameters
    ----------
    dataset
        Its train images are what samples should resemble; its test images are the yardstick.
    classifier
        The judge.
    images, labels
        The samples and what was asked for.
    inception
        Weights of torch-fidelity's Inception network; with them FID and KID proper are measured too.

    Returns
    -------
    dict
        Plain values, ready for JSON.
    """
    train, test = np.asarray(dataset.x_train), np.asarray(dataset.x_test)
    overall, by_class = agreement(classifier, images, labels)
    features = [classifier.judge(part)[1] for part in (train, images, test)]
    real, ours, held_out = (part.astype(np.float64) for part in features)
    sample_distance, test_distance = nearest_distance(images, train), nearest_distance(test, train)
    threshold = float(np.percentile(test_distance, _NEAR_COPY_PERCENTILE))
    report: dict[str, Any] = {
        "samples": len(labels),
        "classifier_test_accuracy": classifier.test_accuracy,
        "class_agreement": overall,
        "class_agreement_by_class": by_class,
        # Not FID and KID: the features are our own classifier's, comparable only with one another.
        "classifier_frechet_distance": frechet_distance(real, ours),
        "classifier_frechet_distance_of_test_images": frechet_distance(real, held_out),
        "classifier_kernel_distance": kernel_distance(real, ours),
        "classifier_kernel_distance_of_test_images": kernel_distance(real, held_out),
        "nearest_train_image_median": float(np.median(sample_distance)),
        "nearest_train_image_median_of_test_images": float(np.median(test_distance)),
        "near_copies": float((sample_distance < threshold).mean()),
        "near_copies_expected": float((test_distance < threshold).mean()),
        "exact_copies": int((sample_distance == 0).sum()),
    }
    return report | (inception_distances(train, images, inception) if inception else {})


def frechet_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the Fréchet distance of two sets of features seen as Gaussians (Heusel et al., 2017)."""
    mean = a.mean(axis=0) - b.mean(axis=0)
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    # tr √(ΣaΣb): the product's eigenvalues are those of a positive semi-definite matrix, but for rounding.
    root = np.sqrt(np.clip(np.linalg.eigvals(first @ second).real, 0, None)).sum()
    return float(mean @ mean + np.trace(first) + np.trace(second) - 2 * root)


def kernel_distance(a: NDArray[np.float64], b: NDArray[np.float64], most: int = 2000) -> float:
    """Return the unbiased squared MMD under (x·y / D + 1)³ (Bińkowski et al., 2018), of up to `most` of each."""
    random = np.random.default_rng(0)
    a, b = (x[random.permutation(len(x))[:most]] for x in (a, b))

    def kernel(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        cubed: NDArray[np.float64] = (x @ y.T / x.shape[1] + 1) ** 3
        return cubed

    within = [(k.sum() - np.trace(k)) / (len(k) * (len(k) - 1)) for k in (kernel(a, a), kernel(b, b))]
    return float(within[0] + within[1] - 2 * kernel(a, b).mean())


def nearest_distance(images: Images, train: Images) -> NDArray[np.float64]:
    """Return each image's Euclidean distance to the nearest train image, on the scale 0 to 1 a pixel."""
    flat = train.reshape(len(train), -1).astype(np.float32)
    squares = (flat**2).sum(axis=1)
    nearest = np.empty(len(images), dtype=np.int64)
    for start in range(0, len(images), 256):
        part = images[start : start + 256].reshape(-1, flat.shape[1]).astype(np.float32)
        nearest[start : start + 256] = (squares - 2 * part @ flat.T).argmin(axis=1)
    # The expansion above cancels near zero: the distance proper is taken from the pixels.
    gaps = (images.reshape(len(images), -1).astype(np.float64) - flat[nearest]) / 255
    return np.asarray(np.sqrt((gaps**2).sum(axis=1)))


def inception_distances(train: Images, images: Images, weights: Path) -> dict[str, float]:
    """Return FID and KID by torchmetrics on Inception features, up to 10,000 train images against the samples."""
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
    kid = KernelInceptionDistance(network, subset_size=min(1000, len(images)))
    chosen = np.random.default_rng(0).permutation(len(train))[:10_000]
    for part, is_real in ((train[np.sort(chosen)], True), (images, False)):
        for start in range(0, len(part), 64):
            pixels = torch.tensor(part[start : start + 64]).permute(0, 3, 1, 2)
            pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels
            fid.update(pixels, real=is_real)
            kid.update(pixels, real=is_real)
    return {"fid": float(fid.compute()), "kid": float(kid.compute()[0])}


def content_name(images: Images) -> str:
    """Return a short hash of images, to tell one report's samples from another's."""
    return hashlib.sha256(np.ascontiguousarray(images)).hexdigest()[:16]
