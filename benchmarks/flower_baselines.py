"""CIFAR-10 networks of two of Flower's baselines, for the run-configs in results/flower-baselines.

Both are the small CNN of Li et al. (2022, "Federated Learning on Non-IID Data Silos"): two 5×5 convolutions of 6 and 16
channels, each with ReLU and 2×2 max-pooling, and hidden layers of 120 and 84. MOON's has a projection head before the
last layer. Runs normalise images by this project's constants; the networks convert them to what the baselines train on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fedeas_flwr.data.sources import built_in
from fedeas_flwr.training.models import ImageShape


class BaselineCNN(nn.Module):
    """The CNN for 32×32 RGB images, with input normalised by `mean` and `std` and layers after the hidden ones."""

    def __init__(
        self, num_classes: int, mean: Sequence[float], std: Sequence[float], head: Sequence[nn.Module], width: int
    ) -> None:
        super().__init__()
        run = built_in("cifar10")
        scale, shift = torch.tensor(run.std) / torch.tensor(std), torch.tensor(run.mean) - torch.tensor(mean)
        # Not persistent: constants are neither sent nor averaged.
        self.scale = nn.Buffer(scale.view(-1, 1, 1), persistent=False)
        self.shift = nn.Buffer((shift / torch.tensor(std)).view(-1, 1, 1), persistent=False)
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
            *head,
        )
        self.fc = nn.Linear(width, num_classes)

    def convert(self, images: torch.Tensor) -> torch.Tensor:
        """Return a run's normalised images ``[N, 3, 32, 32]``, normalised as in the baseline."""
        return images * self.scale + self.shift

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of a run's normalised images."""
        logits: torch.Tensor = self.fc(self.features(self.convert(images)))
        return logits


def niid_bench(num_classes: int, image_shape: ImageShape) -> nn.Module:
    """Return the network of the baseline niid_bench, whose pixels are from 0 to 1."""
    return BaselineCNN(num_classes, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), [], 84)


def moon(num_classes: int, image_shape: ImageShape) -> nn.Module:
    """Return the network of the baseline moon, with its projection head of 84 and 256 features."""
    mean, std = (0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616)
    return BaselineCNN(num_classes, mean, std, [nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, 256)], 256)
