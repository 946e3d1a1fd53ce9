"""A client's images, real and synthetic; on a GPU they stay between its rounds, as long as there is room for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.federated import FederatedData, Images, Labels
from fedeas_flwr.data.node import Node
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.classifier import ensure_filtered, independent_classifier
from fedeas_flwr.generators.fill import repeated
from fedeas_flwr.generators.interface import Generator, LazyGenerator, describe_generator
from fedeas_flwr.generators.ray_service import ServiceGenerator
from fedeas_flwr.generators.service import own_generator
from fedeas_flwr.planning.run_plan import requested_images

_ROOM = 4
"""A part of the GPU's memory that is left free, 1/4. All processes on a GPU see the same, so that ten of them that each
meet all clients in the end do not keep ten copies of a dataset that is too large for that."""


@dataclass(frozen=True)
class LocalImages:
    """What a client trains on: its real images, then the added ones, on the device."""

    images: torch.Tensor
    labels: torch.Tensor
    made: int = 0
    """Images sampled just now."""
    rejected: int = 0
    """Images that were left out."""
    generator: str = ""
    """Fingerprint of the generator that made the added ones."""


class ImagesOnGpu:
    """Images of the clients of one run that were seen so far; those of a run before are let go."""

    def __init__(self) -> None:
        self._source: tuple[RunConfig, FederatedData] | None = None
        self._kept: dict[tuple[int, tuple[int, ...]], LocalImages] = {}
        self._lock = threading.Lock()  # clients of one process train in threads

    def find(
        self, config: RunConfig, data: FederatedData, client: int, generate: tuple[int, ...]
    ) -> LocalImages | None:
        """Return a client's images under a plan, or None if they are not on the GPU."""
        with self._lock:
            return self._kept.get((client, generate)) if (config, data) == self._source else None

    def keep(
        self, config: RunConfig, data: FederatedData, client: int, generate: tuple[int, ...], found: LocalImages
    ) -> None:
        """Keep a client's images if at least a quarter of the GPU's memory is free."""
        with self._lock:
            if (config, data) != self._source:
                self._source = config, data
                self._kept.clear()
            free, total = torch.cuda.mem_get_info()
            if free * _ROOM > total:
                self._kept[client, generate] = found


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
    """Return a client's images and labels, those of its plan generated if they are not there yet.

    Parameters
    ----------
    config, data, node
        The run's, and the client's place in them.
    generate
        The plan: how many images of each class.
    copies
        How many of its own images of each class are repeated; empty: none.
    service
        Address of the generator that all clients share; empty: the client opens its own.
    known
        Fingerprint of the generator that made the client's images before; empty: there are none yet.
    device
        Where they are wanted.
    """
    client = node.client
    found = _on_gpu.find(config, data, client, generate)
    if found is not None:
        return found
    images, labels = data.train(node.part)
    made, rejected, generator = 0, 0, known
    if sum(generate):
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
    """The generator to ask: the federation's shared one, or this client's own.

    A client that has its images knows the generator by its fingerprint, and the model stays on disk: on a SuperNode
    every message is a new process, and each would load diffusers and the model to read images that are in the cache.
    """

    def open_it() -> Generator:
        return ServiceGenerator(service, config.dataset) if service else own_generator(config, device)

    return LazyGenerator(known, config.dataset, open_it) if known else open_it()


def _synthetic(
    config: RunConfig, client: int, wanted: tuple[int, ...], device: str, generator: Generator
) -> tuple[Images, Labels, int, int]:
    """This client's synthetic images and labels, how many were made just now, and how many were left out."""
    cache, least, asked = ImageCache(), config.min_class_agreement, requested_images(config, np.array(wanted))
    ask: dict[str, Any] = {
        "seed": config.seed,
        "client": client if config.shared_images == "no" else 0,
        "wanted": asked.tolist(),
        "about": describe_generator(config),
    }
    if least == 0:
        images, labels, made = cache.ensure(generator, **ask)
        rejected = 0
    else:
        judge = independent_classifier(config.dataset, config.data_dir, device)
        images, labels, made, rejected = ensure_filtered(cache, generator, judge, least, **ask)
    used = np.concatenate([np.arange(end - n, end) for n, end in zip(wanted, asked.cumsum(), strict=True)])
    return images[used], labels[used], made, rejected
