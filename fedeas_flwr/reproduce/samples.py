"""Images as the generator makes them, none picked: the supplement's C."""

from __future__ import annotations

from matplotlib.figure import Figure

from fedeas_flwr.cache import ImageCache
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.devices import pick_device
from fedeas_flwr.generators.opening import open_for_run
from fedeas_flwr.report.samples import draw_rows

EACH = 10


def draw_samples(config: RunConfig) -> Figure:
    """Draw the first images of each class that a run's client 0 has.

    They come from the cache that runs share, and are made where they are not there yet.
    """
    names = dataset_info(config.dataset).classes
    generator = open_for_run(config, pick_device(config.device))
    images, _, _ = ImageCache().ensure(generator, seed=config.seed, client=0, wanted=[EACH] * len(names))
    rows = images.reshape(len(names), EACH, *images.shape[1:])
    return draw_rows(list(zip(names, rows, strict=True)), EACH)
