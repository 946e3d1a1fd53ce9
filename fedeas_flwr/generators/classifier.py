"""Classifiers of generated images: the independent classifier, or the model of a finished run.

The independent classifier is trained on the dataset's official train images, without any generator or federation. It
is for experiments only: no client could train it on its own data, and under protocol ``paper`` it has seen clients'
test images. The model of a run needs no pooled images.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch.nn import functional as F

from fedeas_flwr.common.devices import one_thread
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.files import atomic_path, cache_root
from fedeas_flwr.common.text import counted, show_seconds
from fedeas_flwr.data.datasets import Dataset, Images, Labels, dataset_info, open_dataset
from fedeas_flwr.data.sources import DatasetInfo, find_source, is_own
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.engine import copy_state
from fedeas_flwr.training.models import Normaliser, build_model

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

# Part of the file's name: raise it when anything in `_train` changes.
_VERSION = "1"
_BATCH = 128
_LINE_EVERY = 10.0
_EPOCHS = {"small-cnn": 30, "resnet18": 15}
_MAX_RAW = 20
_MAX_PIXELS = {"cpu": 5_000_000, "cuda": 60_000_000}


class Classifier:
    """A classifier of generated images, trained on real ones; the last layer of ``model`` is ``fc``."""

    def __init__(
        self, dataset: Dataset | DatasetInfo, model: torch.nn.Module, device: str, test_accuracy: float = math.nan
    ) -> None:
        self.test_accuracy = test_accuracy
        self._model, self._device = model.to(device).eval(), device
        self._normalise = Normaliser(dataset.mean, dataset.std, device)

    @torch.no_grad()
    def predict(self, images: Images) -> tuple[Floats, Floats]:
        """Return the class probabilities ``[N, C]`` and the features before the last layer ``[N, D]``.

        Batches are padded to one size, so that the result for an image does not depend on its batch.
        """
        seen: list[torch.Tensor] = []
        head: Any = self._model.fc
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        probabilities, features = [], []
        try:
            with one_thread(torch.device(self._device)):
                for start in range(0, len(images), _BATCH):
                    batch = images[start : start + _BATCH]
                    padded = np.concatenate([batch, np.repeat(batch[-1:], _BATCH - len(batch), axis=0)])
                    logits = self._model(self.network_input(padded))
                    probabilities.append(logits.softmax(dim=1)[: len(batch)].cpu().numpy())
                    features.append(seen.pop()[: len(batch)].cpu().numpy())
        finally:
            hook.remove()
        if not len(images):
            return np.zeros((0, head.out_features), np.float32), np.zeros((0, head.in_features), np.float32)
        return np.concatenate(probabilities), np.concatenate(features)

    def network_input(self, images: Images) -> torch.Tensor:
        """Return stored images as normalised input of the network."""
        return self._normalise(torch.tensor(images, device=self._device))


def independent_classifier(dataset_name: str, data_dir: str = "", device: str = "cpu") -> Classifier:
    """Return the dataset's classifier, trained on first use and stored in the user's cache.

    It is a resnet18 for CIFAR (minutes on a GPU) and a small-cnn for other datasets (digits: seconds on a CPU).
    """
    return _independent_classifier(dataset_name, data_dir, find_source(dataset_name, data_dir).origin, device)


@lru_cache(maxsize=1)
def _independent_classifier(dataset_name: str, data_dir: str, origin: str, device: str) -> Classifier:
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    dataset = open_dataset(dataset_name, data_dir)
    name = "resnet18" if dataset_name.startswith("cifar") else "small-cnn"
    called = f"own-{origin}" if is_own(dataset_name) else dataset_name
    shape = dataset.x_train.shape[1:]
    model = build_model(name, len(dataset.classes), (shape[0], shape[1], shape[2]), stem="3x3", seed=7919)
    path = cache_root() / "classifiers" / f"{called}-{name}-{_VERSION}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    classifier = Classifier(dataset, model, device)
    with FileLock(f"{path}.lock"):
        try:
            model.load_state_dict(load_file(path))
        except (FileNotFoundError, SafetensorError):  # missing or damaged
            _train(classifier, dataset, _EPOCHS[name])
            with atomic_path(path) as temporary:
                save_file(model.state_dict(), temporary)
    classifier.test_accuracy = agreement(classifier, np.asarray(dataset.x_test), np.asarray(dataset.y_test))[0]
    return classifier


def classifier_of_run(run: RunDirectory, dataset_name: str, device: str = "cpu") -> Classifier:
    """Return the model of a finished run on the same dataset; its test accuracy is the run's last one.

    Custom datasets may be elsewhere than those of the run, but must have its classes.
    """
    config = run.config()
    if config.task != "classifier":
        raise ConfigError(f"{run.path} has task = {config.task!r}; give a run that trained a classifier")
    if config.dataset != dataset_name and not (is_own(config.dataset) and is_own(dataset_name)):
        raise ConfigError(f"{run.path} has dataset = {config.dataset!r}; give a run on {dataset_name!r}")
    info = dataset_info(dataset_name)
    run.check_classes(dataset_name, info.classes)
    # A custom network may have no layer `fc`; its features are then not needed.
    named = OrderedDict(network=trained_network(run), fc=torch.nn.Identity())
    return Classifier(info, torch.nn.Sequential(named), device, float(run.summary()["final"]))


def trained_network(run: RunDirectory) -> torch.nn.Module:
    """Return the network of a finished run that trained a classifier."""
    config, arrays = run.config(), run.load_model()
    model = build_network(config)
    try:
        copy_state(model, arrays, {})
    except ValueError as error:
        reason = str(error).removeprefix("state: ")
        raise RunError(f"{run.path / 'model.safetensors'} does not hold model '{config.model}': {reason}") from None
    return model


def small_classifier(dataset: Dataset, device: str = "cpu") -> Classifier:
    """Train a small-cnn on at most `_MAX_PIXELS` of the train images, in minutes at most; store and test nothing."""
    shape = dataset.x_train.shape[1:]
    number = max(_BATCH, _MAX_PIXELS["cpu" if device == "cpu" else "cuda"] // (shape[0] * shape[1]))
    chosen = np.random.default_rng(7919).permutation(len(dataset.y_train))[:number]
    part = replace(dataset, x_train=dataset.x_train[chosen], y_train=dataset.y_train[chosen])
    model = build_model("small-cnn", len(dataset.classes), (shape[0], shape[1], shape[2]), seed=7919)
    classifier = Classifier(part, model, device)
    _train(classifier, part, _EPOCHS["small-cnn"])
    return classifier


def _train(classifier: Classifier, dataset: Dataset, epochs: int) -> None:
    model, random = classifier._model.train(), np.random.default_rng(7919)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    batch = min(_BATCH, len(dataset.y_train))
    steps = epochs * (len(dataset.y_train) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    flip = dataset_info(dataset.name).mirrored_keeps_class
    logger.info("training a classifier of %s: %d steps", dataset.name, steps)
    began = shown = time.monotonic()
    for epoch in range(epochs):
        order = random.permutation(len(dataset.y_train))[: steps // epochs * batch].reshape(-1, batch)
        for number, chosen in enumerate(order, start=1):
            pixels = classifier.network_input(dataset.x_train[chosen])
            if flip and random.random() < 0.5:
                pixels = pixels.flip(-1)
            targets = torch.tensor(dataset.y_train[chosen], device=pixels.device)
            loss = F.cross_entropy(model(pixels), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if (now := time.monotonic()) - shown > _LINE_EVERY:
                done, shown = epoch * len(order) + number, now
                left = show_seconds((steps - done) * (now - began) / done)
                logger.info("classifier: step %d of %d, about %s left", done, steps, left)
    model.eval()


def agreement(classifier: Classifier, images: Images, labels: Labels) -> tuple[float, list[float | None]]:
    """Return the fraction of images classified as their label: overall, and per class (None: no image)."""
    probabilities, _ = classifier.predict(images)
    right = probabilities.argmax(axis=1) == labels
    by_class = [right[labels == c] for c in range(probabilities.shape[1])]
    return float(right.mean()) if len(right) else 0.0, [float(r.mean()) if len(r) else None for r in by_class]


# ---------------------------------------------------------------------------------- class-agreement filter


def ensure_filtered(
    ensure: Callable[..., tuple[Images, Labels, int]],
    wanted: Sequence[int],
    classifier: Classifier,
    min_probability: float,
) -> tuple[Images, Labels, int, int]:
    """Return images as `ImageCache.ensure` does, replacing those that the classifier rejects by later ones.

    ``ensure`` is that method with all arguments but ``wanted``, the number of images per class. An image is rejected
    if its class has less than ``min_probability``. The cache keeps all images, so that runs with another threshold, or
    without one, share them. The last two values are the number of images generated in this call, rejected ones
    included, and the number of images rejected, whose generation counts as well.
    """
    raw, made = [int(n) for n in wanted], 0
    while True:
        images, labels, new = ensure(wanted=raw)
        made += new
        probabilities, _ = classifier.predict(images)
        good = probabilities[np.arange(len(labels)), labels] >= min_probability
        lacking = [n - int(good[labels == c].sum()) for c, n in enumerate(wanted)]
        if not any(n > 0 for n in lacking):
            break
        raw = [have + max(0, more) for have, more in zip(raw, lacking, strict=True)]
        for label, (have, n) in enumerate(zip(raw, wanted, strict=True)):
            if have > _MAX_RAW * n + _MAX_RAW:
                # Logged on the client only: the error is sent to the server, which must not learn label counts.
                made_of_class = counted(have - lacking[label], "image")
                logger.error("%s of class %d gave only %d accepted ones", made_of_class, label, n - lacking[label])
                raise ValueError(
                    f"min-class-agreement = {min_probability:g}: the classifier accepts too few images of a class, "
                    "which the client's own log names; lower it or use a better generator"
                )
    return images[good], labels[good], made, int((~good).sum())
