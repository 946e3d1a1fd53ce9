"""The networks of the jobs; torchvision's ResNet-18 is the only one from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

ImageShape = Sequence[int]


def two_convolutions(num_classes: int, image_shape: ImageShape, dropout: bool = True) -> nn.Module:
    """Return the CNN of pfl-research's CIFAR-10 benchmark: two convolutions, a hidden layer, dropout, Glorot start."""
    height, width, channels = image_shape
    network = nn.Sequential(
        *(nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25 if dropout else 0.0), nn.Flatten()),
        *(nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128), nn.ReLU()),
        *(nn.Dropout(0.5 if dropout else 0.0), nn.Linear(128, num_classes)),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return network


def without_dropout(num_classes: int, image_shape: ImageShape) -> nn.Module:
    """Return `two_convolutions` with dropout off."""
    return two_convolutions(num_classes, image_shape, dropout=False)


def tiny_batchnorm(num_classes: int, image_shape: ImageShape) -> nn.Module:
    """Return a network of seconds on a CPU that has BatchNorm, as ResNet-18 does."""
    height, width, channels = image_shape
    return nn.Sequential(
        *(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(8 * (height // 2) * (width // 2), num_classes),
    )


def build(model: str, num_classes: int, image_shape: ImageShape) -> nn.Module:
    """Return the network that a run-config names: ``resnet18`` or ``module:function`` of this file."""
    if model == "resnet18":
        from torchvision.models import resnet18

        network: nn.Module = resnet18(num_classes=num_classes)
        return network
    functions = {each.__name__: each for each in (two_convolutions, without_dropout, tiny_batchnorm)}
    return functions[model.rpartition(":")[2]](num_classes, image_shape)
