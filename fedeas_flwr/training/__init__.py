"""The client's engine: the run's network, training it on images, and testing it."""

from __future__ import annotations

import torch

from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.models import build_model
from fedeas_flwr.training.eager import Recipe, TrainResult, train
from fedeas_flwr.training.evaluation import Evaluation, evaluate
from fedeas_flwr.training.images import Normaliser

__all__ = ["Evaluation", "Normaliser", "Recipe", "TrainResult", "evaluate", "network", "pick_device", "train"]


def network(config: RunConfig) -> torch.nn.Module:
    """Build the run's network with the weights a run starts from."""
    info = dataset_info(config.dataset)
    return build_model(
        config.model, len(info.classes), info.image_shape, stem=config.stem, weights=config.weights, seed=config.seed
    )


def pick_device(wanted: str) -> str:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device that is there, and make CPU results repeatable.

    One torch thread a client: with more, sums are split differently and the last bits depend on the machine's load.
    """
    torch.set_num_threads(1)
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = 'cuda', but torch finds no CUDA device: use 'auto' or 'cpu'")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return "cuda"
