"""Clients' images that stay on the GPU between their rounds, as long as there is room for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from fedeas_flwr.config import RunConfig

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
        self._config: RunConfig | None = None
        self._kept: dict[tuple[int, tuple[int, ...]], LocalImages] = {}
        self._lock = threading.Lock()  # clients of one process train in threads

    def find(self, config: RunConfig, client: int, generate: tuple[int, ...]) -> LocalImages | None:
        """A client's images under a plan, if they are there."""
        with self._lock:
            return self._kept.get((client, generate)) if config == self._config else None

    def keep(self, config: RunConfig, client: int, generate: tuple[int, ...], found: LocalImages) -> None:
        """Keep a client's images, if there is room."""
        with self._lock:
            if config != self._config:
                self._config = config
                self._kept.clear()
            free, total = torch.cuda.mem_get_info()
            if free * _ROOM > total:
                self._kept[client, generate] = found
