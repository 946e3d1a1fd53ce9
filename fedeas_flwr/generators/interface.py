"""Generators: anything that turns a sample's identity into an image.

A new kind of generator is one file. It needs no base class, only the three attributes and the method below::

    class GreyGenerator:
        fingerprint = "grey-1"  # change it whenever the pixels would change: the cache trusts it
        image_shape = (8, 8, 1)
        num_classes = 10

        def sample(self, samples):
            images = [np.full(self.image_shape, 25 * s.label, dtype=np.uint8) for s in samples]
            return np.stack(images)

The one rule is that a sample's pixels depend on its `SampleId` and the fingerprint, and on nothing else: not on the
order of the request, on its neighbours or on what was asked before. Then a larger budget extends a smaller one's
images, policies share what they have in common, and a lost file is made again alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.data.datasets import dataset_info

if TYPE_CHECKING:  # the library's door does without pydantic
    from fedeas_flwr.config import RunConfig


class SampleId(NamedTuple):
    """Which image: the `index`-th of class `label` for client `client` in an experiment seeded with `seed`."""

    seed: int
    client: int
    label: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class Generator(Protocol):
    """What the rest of the project knows of a generator."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the pixels: weights, settings, sampler, precision, seeding."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(H, W, C)`` of the images."""
        ...

    @property
    def num_classes(self) -> int:
        """Labels run from 0 to ``num_classes - 1``."""
        ...

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Make the images asked for.

        Parameters
        ----------
        samples
            Their identities, in any order.

        Returns
        -------
        array
            uint8 ``[len(samples), H, W, C]``, in the order asked.
        """
        ...


def batch_size(generator: Generator) -> int:
    """Return how many images `generator` makes at once; one that does not say is taken to make 64.

    A generator that measures first, as one on a GPU does, has a method for it.
    """
    find = getattr(generator, "find_batch_size", None)
    return int(find() if find else getattr(generator, "batch_size", 0) or 64)


def images_per_class(generator: Generator) -> list[int] | None:
    """Return how many images of each class `generator` has, if it hands out what is there; None: it makes them."""
    return getattr(generator, "images_of_class", None)


class LazyGenerator:
    """A generator known by its fingerprint, opened only if an image must be made after all.

    Parameters
    ----------
    fingerprint
        As the generator gave it when it was open.
    dataset_name
        Whose classes and image shape are meant.
    open_generator
        Opens it; another one than remembered is refused, since a client's images come from one source.
    """

    def __init__(self, fingerprint: str, dataset_name: str, open_generator: Callable[[], Generator]) -> None:
        info = dataset_info(dataset_name)
        self.fingerprint, self._open = fingerprint, open_generator
        self.image_shape, self.num_classes = info.image_shape, len(info.classes)

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Open the generator and make images; see `Generator.sample`."""
        return self._generator.sample(samples)

    def find_batch_size(self) -> int:
        """Open the generator and ask it; see `batch_size`."""
        return batch_size(self._generator)

    @cached_property
    def _generator(self) -> Generator:
        generator = self._open()
        if generator.fingerprint != self.fingerprint:
            raise ValueError(
                f"generator: not the one that made this client's images (fingerprint {generator.fingerprint[:12]}, was "
                f"{self.fingerprint[:12]}); put the old one back, or start a new run"
            )
        return generator


def describe_generator(config: RunConfig) -> dict[str, Any]:
    """Return the run-config's keys that a person reads to know where an image comes from."""
    keys = ("generator", "dataset", "sampler", "sampler-steps", "guidance", "guidance-rescale")
    return {k: v for k, v in config.to_user_dict().items() if k in keys or k.startswith("generation-")}
