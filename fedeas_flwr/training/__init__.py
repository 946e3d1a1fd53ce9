"""The client's engine: the run's network, training it on images, and testing it."""

from __future__ import annotations

import logging
import os

import torch

from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.models import build_model
from fedeas_flwr.training.engine import Engine, Recipe, State, TrainResult, copy_state
from fedeas_flwr.training.evaluation import Evaluation, evaluate
from fedeas_flwr.training.images import Normaliser
from fedeas_flwr.training.objective import Objective

__all__ = [
    "Engine",
    "Evaluation",
    "Normaliser",
    "Objective",
    "Recipe",
    "State",
    "TrainResult",
    "build_engine",
    "copy_state",
    "evaluate",
    "network",
    "pick_device",
    "recipe",
]

logger = logging.getLogger(__name__)


def network(config: RunConfig) -> torch.nn.Module:
    """Build the run's network with the weights a run starts from."""
    info = dataset_info(config.dataset)
    return build_model(
        config.model, len(info.classes), info.image_shape, stem=config.stem, weights=config.weights, seed=config.seed
    )


def recipe(config: RunConfig) -> Recipe:
    """How the run's clients train in a round."""
    return Recipe(config.local_epochs, config.batch_size, config.learning_rate, config.momentum, config.weight_decay)


def build_engine(config: RunConfig, device: str, objective: Objective) -> Engine:
    """Build the engine the run-config names; ``auto`` is graphed on a GPU and eager elsewhere.

    An objective that cannot be captured in a graph is trained eagerly, and that is said.
    """
    info = dataset_info(config.dataset)
    normalise = Normaliser(info.mean, info.std, device)
    if device == "cuda" and config.engine != "eager" and not objective.graphable:
        logger.warning("strategy = '%s' cannot be captured in CUDA graphs and trains eagerly", config.strategy)
    if config.engine == "eager" or device == "cpu" or not objective.graphable:
        from fedeas_flwr.training.eager import EagerEngine

        return EagerEngine(network(config), recipe(config), normalise, device, objective)
    from fedeas_flwr.training.graphed import GraphedEngine

    return GraphedEngine(network(config), recipe(config), normalise, config.precision, objective=objective)


def pick_device(wanted: str, precision: str = "tf32") -> str:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device that is there, and set how it computes.

    One torch thread a client: with more, sums are split differently and the last bits depend on the machine's load.
    """
    torch.set_num_threads(1)
    # How many streams may run side by side: 8 unless told so before CUDA starts, and ten clients have one each.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = 'cuda', but torch finds no CUDA device: use 'auto' or 'cpu'")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    return "cuda"
