"""Custom networks, named in run configs by import path."""

import os
import signal

import torch
from torch import nn
from torch.nn import functional


def with_batchnorm(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    height, width, channels = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * height * width, num_classes),
    )


class Tiny(nn.Module):
    """A convolution and a last layer named fc, like small-cnn, at a quarter of its cost."""

    def __init__(self, num_classes: int, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        height, width, channels = image_shape
        self.features = nn.Sequential(nn.Conv2d(channels, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.fc = nn.Linear(4 * (height // 2) * (width // 2), num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.features(images))
        return logits


def tiny(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return Tiny(num_classes, image_shape)


class WithFeatures(nn.Module):
    """BatchNorm and a last layer named fc, as strategies that use features need it."""

    def __init__(self, num_classes: int, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(image_shape[2], 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.fc = nn.Linear(24, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.body(images))
        return logits


def with_features(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return WithFeatures(num_classes, image_shape)


def with_batch_statistics(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """Like `with_features`, but features depend on the other images of the batch, also in evaluation mode."""
    model = WithFeatures(num_classes, image_shape)
    model.body[1] = nn.BatchNorm2d(6, track_running_stats=False)
    return model


def with_group_norm(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """Like `with_features`, with normalisation per image."""
    model = WithFeatures(num_classes, image_shape)
    model.body[1] = nn.Sequential(nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True))
    return model


def with_dropout(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    height, width, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(channels * height * width, num_classes))


class WithFunctions(nn.Module):
    """Like `with_dropout`, with functional dropout instead of a layer."""

    def __init__(self, num_classes: int, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        height, width, channels = image_shape
        self.first, self.fc = nn.Linear(channels * height * width, 200), nn.Linear(200, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = functional.dropout(functional.relu(self.first(images.flatten(1))), 0.3, self.training)
        logits: torch.Tensor = self.fc(features)
        return logits


def with_functional_dropout(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return WithFunctions(num_classes, image_shape)


class Unlucky(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ArithmeticError("out of\nluck")
        return self.linear(images.flatten(1))


def that_raises(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return Unlucky(num_classes)


class Deadly(nn.Module):
    """Kills the process that trains it if KILLS_ITS_PROCESS is set, like a driver bug or the kernel's OOM killer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and os.environ.get("KILLS_ITS_PROCESS"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(images.flatten(1))


def that_may_kill(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    return Deadly(num_classes)
