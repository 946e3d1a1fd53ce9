"""Images as the generator makes them, none picked: the supplement's C."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.cache import ImageCache
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.generators import open_for_run
from fedeas_flwr.training import pick_device

EACH = 10


def sample_sheet(config: RunConfig) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """Give the first images of each class that a run's client 0 has, [classes, EACH, H, W, channels], and the names.

    They come from the cache that runs share, and are made where they are not there yet.
    """
    names = dataset_info(config.dataset).classes
    generator = open_for_run(config, pick_device(config.device))
    images, _, _ = ImageCache().ensure(generator, seed=config.seed, client=0, wanted=[EACH] * len(names))
    return images.reshape(len(names), EACH, *images.shape[1:]), names
