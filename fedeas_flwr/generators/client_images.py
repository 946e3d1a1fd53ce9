"""Return a client's real and synthetic images, and keep them on the GPU between rounds while memory permits."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fedeas_flwr.common.progress import log_progress
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import Images, Labels, dataset_info
from fedeas_flwr.data.federated import FederatedData
from fedeas_flwr.data.node import Node
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.classifier import ensure_filtered, independent_classifier
from fedeas_flwr.generators.fill import repeated
from fedeas_flwr.generators.interface import Generator, LazyGenerator, describe_generator
from fedeas_flwr.generators.opening import generator_warning
from fedeas_flwr.generators.ray_service import ServiceGenerator
from fedeas_flwr.generators.service import own_generator
from fedeas_flwr.planning.run_plan import requested_images

logger = logging.getLogger(__name__)

_FREE_DIVISOR = 4
"""Images are kept while more than 1/4 of the GPU's memory is free. All processes on a GPU see the same free memory, so
the limit applies to the copies in all of them together."""


@dataclass(frozen=True)
class LocalImages:
    """Training images of a client on the device: the real ones, then the added ones."""

    images: torch.Tensor
    labels: torch.Tensor
    made: int = 0
    """Number of images generated in this call."""
    rejected: int = 0
    """Number of images that the class-agreement filter rejected."""
    generator: str = ""
    """Fingerprint of the generator of the added images."""


class ImagesOnGpu:
    """Keeps the images of one run's clients on the GPU. Images of an earlier run or plan are released."""

    def __init__(self) -> None:
        self._source: tuple[RunConfig, FederatedData] | None = None
        self._kept: dict[int, tuple[tuple[int, ...], LocalImages]] = {}
        self._lock = threading.Lock()  # clients of a process train in threads

    def find(
        self, config: RunConfig, data: FederatedData, client: int, generate: tuple[int, ...]
    ) -> LocalImages | None:
        """Return a client's images under a plan, or None if they are not on the GPU."""
        with self._lock:
            if (config, data) != self._source:
                return None
            plan, found = self._kept.get(client, ((), None))
            return found if plan == generate else None

    def keep(
        self, config: RunConfig, data: FederatedData, client: int, generate: tuple[int, ...], found: LocalImages
    ) -> None:
        """Keep a client's images if more than a quarter of the GPU's memory is free."""
        with self._lock:
            if (config, data) != self._source:
                self._source = config, data
                self._kept.clear()
            self._kept.pop(client, None)
            free, total = torch.cuda.mem_get_info()
            if free * _FREE_DIVISOR > total:
                self._kept[client] = generate, found


_on_gpu = ImagesOnGpu()


def local_images(
    config: RunConfig,
    data: FederatedData,
    node: Node,
    generate: tuple[int, ...],
    copies: tuple[int, ...],
    service: str,
    known: str,
    device: str,
) -> LocalImages:
    """Return a client's images and labels on the device; generate the planned images that are not in the cache.

    ``generate`` and ``copies`` are the numbers of images per class to generate and to repeat; empty copies: none.
    ``service`` is the address of the generator that all clients share; empty: the client opens its own. ``known`` is
    the fingerprint of the generator of the client's earlier images; empty: there are none.
    """
    client = node.client
    found = _on_gpu.find(config, data, client, generate)
    if found is not None:
        return found
    images, labels = data.train(node.part)
    made, rejected, generator = 0, 0, known
    if sum(generate):
        if not (node.simulated or known) and (warning := generator_warning(config)):
            logger.warning("client %d: %s", client, warning)
        source = _source(config, device, service, known)
        more, more_labels, made, rejected = _synthetic(config, client, generate, device, source)
        images, labels = np.concatenate([images, more]), np.concatenate([labels, more_labels])
        generator = source.fingerprint
    if copies:
        chosen = repeated(labels, copies, stream(config.seed, "oversample", client))
        images, labels = np.concatenate([images, images[chosen]]), np.concatenate([labels, labels[chosen]])
    tensors = torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)
    if device != "cpu":
        _on_gpu.keep(config, data, client, generate, LocalImages(*tensors, rejected=rejected, generator=generator))
    return LocalImages(*tensors, made, rejected, generator)


def _source(config: RunConfig, device: str, service: str, known: str) -> Generator:
    """Return the generator that all clients share, or this client's own.

    If ``known`` is given, the client already has images, and the generator is opened only if one is missing. This saves
    time on a SuperNode, where every message starts a new process: to read images from the cache, that process need not
    load diffusers and the model.
    """

    def open_source() -> Generator:
        return ServiceGenerator(service, config.dataset) if service else own_generator(config, device)

    if not known:
        return open_source()
    info = dataset_info(config.dataset)
    return LazyGenerator(known, len(info.classes), info.image_shape, open_source)


def _synthetic(
    config: RunConfig, client: int, wanted: tuple[int, ...], device: str, generator: Generator
) -> tuple[Images, Labels, int, int]:
    """Return the client's synthetic images, their labels, and the numbers of newly generated and rejected images."""
    requested = requested_images(config, np.array(wanted))
    ensure = partial(
        ImageCache().ensure,
        generator,
        seed=config.seed,
        client=client if config.shared_images == "no" else 0,
        about=describe_generator(config),
        report=log_progress(logger, f"client {client}: images generated"),
    )
    if config.min_class_agreement == 0:
        images, labels, made = ensure(wanted=requested.tolist())
        rejected = 0
    else:
        classifier = independent_classifier(config.dataset, config.data_dir, device)
        images, labels, made, rejected = ensure_filtered(
            ensure, requested.tolist(), classifier, config.min_class_agreement
        )
    used = np.concatenate([np.arange(end - n, end) for n, end in zip(wanted, requested.cumsum(), strict=True)])
    return images[used], labels[used], made, rejected
