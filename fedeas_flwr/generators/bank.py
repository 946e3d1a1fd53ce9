"""Image banks: existing images used as a generator.

A bank is a folder with one subfolder of image files per class, named by the class or its number, or an ``.npz`` file
with ``x`` (uint8 ``[N, H, W, C]``) and ``y`` (labels), or a folder with such a file `IMAGES`, as `fedeas generate`
writes; see data/own_images.py.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.files import expanded
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.common.text import MAX_LINE, counted, one_line
from fedeas_flwr.data.own_images import read_images
from fedeas_flwr.generators.interface import SampleId

logger = logging.getLogger(__name__)

IMAGES = "images.npz"


def bank_path(where: str | Path) -> Path:
    """Return the folder of class folders or the file that a bank's images are in."""
    path = expanded(where, "generator")
    return path / IMAGES if (path / IMAGES).is_file() else path


def check_bank_size(
    spec: str,
    available: Sequence[int],
    planned: NDArray[np.int64],
    classes: Sequence[str],
    request: str = "a client needs",
) -> None:
    """Raise ValueError if a bank has fewer images of a class than a client needs: a client gets no image twice.

    ``available`` is the number of images in the bank per class, ``planned`` the number that each client needs,
    ``[clients, classes]``. ``request`` starts the message's clause on the needed number.
    """
    needed = planned.max(axis=0, initial=0)
    lacking = needed - np.asarray(available)
    too_few, worst = int((lacking > 0).sum()), int(lacking.argmax())
    if too_few:
        more = f"; {too_few} classes have too few" if too_few > 1 else ""
        raise ValueError(
            f"generator: {spec} has {counted(available[worst], 'image')} of class {classes[worst]!r}, but {request} "
            f"{needed[worst]} different ones{more}"
        )


class BankGenerator:
    """Gives each client the bank's images of a class in its own random order, each at most once.

    Two clients may get the same image. Files of another size than ``image_shape`` are resampled with anti-aliasing;
    arrays must have this shape.
    """

    def __init__(self, where: str | Path, *, classes: Sequence[str], image_shape: tuple[int, int, int]) -> None:
        self.path = bank_path(where)
        self.image_shape, self.num_classes, self._classes = image_shape, len(classes), tuple(classes)
        if not str(where) or not self.path.exists():
            raise FileNotFoundError(
                f"generator: there is no bank {str(where)!r}; must be bank:DIR, a folder with one subfolder per class, "
                "or bank:FILE.npz with x and y"
            )
        self._images = self._read()
        digest = hashlib.sha256(repr(("bank-1", image_shape, [len(images) for images in self._images])).encode())
        for images in self._images:
            digest.update(images.tobytes())
        self.fingerprint = digest.hexdigest()

    @property
    def images_of_class(self) -> list[int]:
        """Number of images in the bank per class."""
        return [len(images) for images in self._images]

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Return images of the bank; an identity always gives the same image. See `Generator.sample`."""
        order = lru_cache(maxsize=None)(self._order)
        images = np.empty((len(samples), *self.image_shape), dtype=np.uint8)
        for position, sample in enumerate(samples):
            images[position] = self._pick(sample, order(sample.seed, sample.client, sample.label))
        return images

    def _order(self, seed: int, client: int, label: int) -> NDArray[np.int64]:
        return stream(seed, "bank", client, label).permutation(len(self._images[label]))

    def _pick(self, sample: SampleId, order: NDArray[np.int64]) -> NDArray[np.uint8]:
        if sample.index >= len(order):
            # Logged on the client only: the error is sent to the server, which must not learn label counts.
            found = f"{counted(len(order), 'image')} of class {self._classes[sample.label]!r}"
            needed = f"client {sample.client} needs at least {sample.index + 1}"
            logger.error(one_line(f"bank {self.path} has {found}; {needed}", MAX_LINE))
            raise ValueError(
                f"generator: bank {self.path} has too few images of a class for client {sample.client}, whose own log "
                "names the class"
            )
        image: NDArray[np.uint8] = self._images[sample.label][order[sample.index]]
        return image

    def _read(self) -> list[NDArray[np.uint8]]:
        height, width, channels = self.image_shape
        try:
            found = read_images(self.path, classes=self._classes, size=(height, width), channels=channels)
        except ValueError as error:
            raise ValueError(f"generator: bank {error}") from None
        return [found.images[found.labels == label] for label in range(self.num_classes)]
