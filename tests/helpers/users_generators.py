"""Generators as a user writes them, right and wrong, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedeas_flwr.data.datasets import Images
from fedeas_flwr.generators.interface import SampleId

not_callable = 3


class Stripes:
    """Rows whose brightness depends on the sample alone."""

    fingerprint = "stripes-1"

    def __init__(self, classes: Sequence[str], image_shape: tuple[int, int, int]) -> None:
        self.num_classes, self.image_shape = len(classes), image_shape

    def sample(self, samples: Sequence[SampleId]) -> Images:
        rows = [np.random.default_rng(tuple(sample)).integers(256, size=self.image_shape) for sample in samples]
        return np.array(rows, dtype=np.uint8)


class Small(Stripes):
    """Images that do not fit the digits."""

    def __init__(self) -> None:
        super().__init__(["a", "b"], (4, 4, 1))


class Floats(Stripes):
    """Images of another type."""

    def sample(self, samples: Sequence[SampleId]) -> Images:
        return super().sample(samples) / 255  # type: ignore[return-value]


class TooFew(Stripes):
    """Returns one image fewer than requested."""

    def sample(self, samples: Sequence[SampleId]) -> Images:
        return super().sample(samples)[1:]


class Unseeded(Stripes):
    """Draws other images at every call."""

    def sample(self, samples: Sequence[SampleId]) -> Images:
        return np.random.default_rng().integers(256, size=(len(samples), *self.image_shape), dtype=np.uint8)


class Rounded(Stripes):
    """Images whose last bits differ between calls, as those of a network on a GPU may."""

    def sample(self, samples: Sequence[SampleId]) -> Images:
        return super().sample(samples) ^ np.random.default_rng().integers(2, size=self.image_shape, dtype=np.uint8)


class Broken(Stripes):
    """Fails at the first image."""

    def sample(self, samples: Sequence[SampleId]) -> Images:
        raise RuntimeError("no memory")


def unnamed(classes: Sequence[str], image_shape: tuple[int, int, int]) -> Stripes:
    """Return a generator whose images cannot be told from others'."""
    found = Stripes(classes, image_shape)
    found.fingerprint = ""
    return found


def nothing() -> object:
    return object()


class NeedsFolder(Stripes):
    def __init__(self, folder: str, classes: Sequence[str], image_shape: tuple[int, int, int]) -> None:
        super().__init__(classes, image_shape)


def raising() -> None:
    raise OSError("the model is gone")
