"""The engines of a process, lent to its clients: as many as train at the same time, kept between clients and rounds.

The first engine is the one the GPU serves first, then the second, and so on. Clients come largest first, so the largest
trains almost as fast as if it were alone while the others fill what it leaves free, and does not end the round alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedeas_flwr.config import RunConfig
from fedeas_flwr.training import build_engine
from fedeas_flwr.training.engine import Engine
from fedeas_flwr.training.objective import Objective


class EnginePool:
    """Engines of one run-config; with another one they are built anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._config: RunConfig | None = None
        self._free: dict[int, Engine] = {}
        self._count = 0

    @contextmanager
    def lent(self, config: RunConfig, device: str, objective: Objective) -> Iterator[Engine]:
        """The first engine that nobody has just now."""
        with self._lock:
            if self._config != config:
                self._config, self._free, self._count = config, {}, 0
            free = self._free
            rank = min(free, default=self._count)
            engine = free.pop(rank, None)
            self._count = max(self._count, rank + 1)
        engine = engine or build_engine(config, device, objective, rank)
        try:
            yield engine
        finally:
            with self._lock:
                free[rank] = engine
