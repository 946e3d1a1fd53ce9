"""Build the network and the engine of a run, and share engines among the clients of a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial

import torch

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.common.rate_schedule import CONSTANT
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.training.augmentation import VIEWS, draw_views
from fedeas_flwr.training.engine import LEARNING_RATE, Engine, LocalTrainingConfig
from fedeas_flwr.training.losses import loss_constants
from fedeas_flwr.training.models import Normaliser, build_model
from fedeas_flwr.training.objective import Inputs, Objective
from fedeas_flwr.training.oom_fallback import (
    Differentiate,
    FallbackLevel,
    OomFallbackEngine,
    full_batch_gradient,
    low_memory_modes,
)


def build_network(config: RunConfig) -> torch.nn.Module:
    """Build the run's network with its initial weights, or copy the last one built.

    A run builds about a dozen: one per engine, for evaluation and for the first round. Drawing or reading ResNet-18's
    weights takes twenty times as long as copying them.
    """
    info, own = dataset_info(config.dataset), ":" in config.model
    build = build_model if own else _build_cached
    keys = {"stem": config.stem, "weights": config.weights}
    network = build(config.model, len(info.classes), info.image_shape, seed=config.seed, **keys)
    return network if own else deepcopy(network)  # a user's model may not support deepcopy


_build_cached = lru_cache(maxsize=1)(build_model)


def local_training_config(config: RunConfig) -> LocalTrainingConfig:
    """Return the settings of a client's local training."""
    return LocalTrainingConfig(
        config.local_epochs,
        config.batch_size,
        config.learning_rate,
        config.momentum,
        config.weight_decay,
        config.min_batch,
    )


def common_inputs(config: RunConfig, classes: int, labels: torch.Tensor, round_number: int, client: int) -> Inputs:
    """Return the inputs that a client's steps need under any algorithm: the loss's constants, the learning rate of the
    round if there is a schedule, and the random views.

    Views come from a separate stream, so that they do not change the batches.
    """
    constants = loss_constants(config.loss, labels, classes, config.logit_adjustment_tau)
    if config.learning_rate_schedule != CONSTANT:
        rate = torch.tensor(config.learning_rate_in(round_number), device=labels.device)
        constants = {**constants, LEARNING_RATE: rate}
    if config.views == "none":
        return Inputs(constants)
    rng, steps = stream(config.seed, "views", round_number, client), local_training_config(config).steps(len(labels))
    views = draw_views(dataset_info(config.dataset), steps, config.batch_size, rng)
    return Inputs(constants, {VIEWS: views.to(labels.device)})


def check_engine(config: RunConfig, device: str) -> None:
    """Raise ConfigError if the device cannot run the engine: ``graphed`` replays CUDA graphs."""
    if config.engine == "graphed" and device == "cpu":
        raise ConfigError(
            "engine = 'graphed': must be auto or eager where clients train on the CPU; graphed needs a GPU"
        )


def build_engine(config: RunConfig, device: str, objective: Objective, rank: int = 0, most_samples: int = 0) -> Engine:
    """Build the engine the run-config names; ``auto`` is graphed on a GPU and eager elsewhere.

    If a process has several engines, the GPU serves those of lower rank first. A step that cannot be captured in a
    graph is tried with PyTorch's layers in place of the fused ones, and then runs eagerly, with a warning. If memory
    runs out, the engine falls back to one that needs less (oom_fallback.py).
    """
    from fedeas_flwr.training.eager import EagerEngine

    check_engine(config, device)
    info = dataset_info(config.dataset)
    normalise, training = Normaliser(info.mean, info.std, device), local_training_config(config)

    def graphed(fused: bool = True) -> Engine:
        from fedeas_flwr.training.gpu.graphed import GraphedEngine

        return GraphedEngine(
            build_network(config),
            training,
            normalise,
            config.precision,
            objective=objective,
            rank=rank,
            fused=fused,
            most_samples=most_samples,
        )

    def eager(differentiate: Differentiate, samples_at_once: int) -> Engine:
        precision = config.precision if device == "cuda" else "fp32"  # CPUs emulate bf16, slowly
        return EagerEngine(
            build_network(config), training, normalise, device, objective, differentiate, precision, samples_at_once
        )

    eager_level = ("eagerly", partial(eager, full_batch_gradient, config.batch_size))
    use_graphs = config.engine != "eager" and device != "cpu"

    def fallbacks(out_of_memory: bool) -> list[FallbackLevel]:
        height, width, channels = info.image_shape
        modes = low_memory_modes(build_network(config), torch.zeros(2, channels, height, width), config.batch_size)
        low_memory = [(name, partial(eager, differentiate, samples)) for name, differentiate, samples in modes]
        unfused = ("in CUDA graphs with PyTorch's layers", partial(graphed, fused=False))
        faster = [eager_level] if out_of_memory else [unfused, eager_level]
        return [*(faster if use_graphs else []), *low_memory]

    return OomFallbackEngine(("in CUDA graphs", graphed) if use_graphs else eager_level, fallbacks)


class EnginePool:
    """Engines of one run-config, shared by the clients of a process; another run-config discards them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._config: RunConfig | None = None
        self._free: dict[int, Engine] = {}
        self._count = 0

    @contextmanager
    def borrow(self, config: RunConfig, device: str, objective: Objective, most_samples: int = 0) -> Iterator[Engine]:
        """Yield the free engine of lowest rank, or a new one, with room for ``most_samples``, if none is free."""
        with self._lock:
            if self._config != config:
                self._config, self._free, self._count = config, {}, 0
            free = self._free
            rank = min(free, default=self._count)
            engine = free.pop(rank, None)
            self._count = max(self._count, rank + 1)
        engine = engine or build_engine(config, device, objective, rank, most_samples)
        try:
            yield engine
        finally:
            with self._lock:
                free[rank] = engine
