"""Generators: anything that turns a sample's identity into an image.

A new generator is one file. It needs no base class, only the three attributes and the method below::

    class GreyGenerator:
        fingerprint = "grey-1"  # change it whenever the pixels would change: the cache trusts it
        image_shape = (8, 8, 1)
        num_classes = 10

        def sample(self, samples):
            images = [np.full(self.image_shape, 25 * s.label, dtype=np.uint8) for s in samples]
            return np.stack(images)

The one rule: a sample's pixels depend on its `SampleId` and the fingerprint only, not on the order of a request, on the
other samples in it or on earlier requests. A larger budget then extends a smaller one's images, policies share the
images they have in common, and a lost file is generated again with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.data.datasets import Images

if TYPE_CHECKING:  # the library works without pydantic
    from fedeas_flwr.config import RunConfig


class SampleId(NamedTuple):
    """Which image: the `index`-th of class `label` for client `client` in an experiment seeded with `seed`."""

    seed: int
    client: int
    label: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here


class Generator(Protocol):
    """Interface of a generator."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the pixels: weights, settings, sampler, precision, seeding."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape ``(H, W, C)`` of the images."""

    @property
    def num_classes(self) -> int:
        """Number of classes; labels are 0 to ``num_classes - 1``."""

    def sample(self, samples: Sequence[SampleId]) -> Images:
        """Return the images of some identities, uint8 ``[len(samples), H, W, C]``, in the order of ``samples``."""


def check_attributes(generator: object, found: str) -> None:
    """Raise `ConfigError`, which names an object as ``found``, if it lacks an attribute of `Generator`."""
    missing = [name for name in ("fingerprint", "image_shape", "num_classes", "sample") if not hasattr(generator, name)]
    if missing:
        raise ConfigError(f"generator: {found} without {', '.join(missing)}; give an object such as open_generator's")


def check_variety(images: Images, samples: Sequence[SampleId], name: object) -> None:
    """Raise ValueError if a model generated the same image for different samples, or one image of a single colour.

    A model that starts from noise does so only if it is broken. Two or more samples are compared with each other, not
    with earlier ones; a single sample must have two different pixels. Banks and custom generators may repeat images.
    """
    if not len(images) or (images != images[0]).any():
        return
    if len(set(samples)) > 1 or (images[0] == images[0, 0, 0]).all():
        raise ValueError(f"generator: {name}: the generated images are all the same; is the model trained?")


def batch_size(generator: Generator) -> int:
    """Return how many images `generator` makes at once, by default 64.

    A generator that must measure it first, such as one on a GPU, has the method ``find_batch_size``.
    """
    find = getattr(generator, "find_batch_size", None)
    return int(find() if find else getattr(generator, "batch_size", 0) or 64)


def images_per_class(generator: Generator) -> list[int] | None:
    """Return the number of images per class if `generator` has a fixed stock, such as a bank; else None."""
    return getattr(generator, "images_of_class", None)


class LazyGenerator:
    """A generator of known fingerprint that is opened only when an image must be generated.

    ValueError is raised if the opened generator has another fingerprint, since a client's images have one source.
    """

    def __init__(
        self,
        fingerprint: str,
        num_classes: int,
        image_shape: tuple[int, int, int],
        open_generator: Callable[[], Generator],
    ) -> None:
        self.fingerprint, self.num_classes, self.image_shape = fingerprint, num_classes, image_shape
        self._open = open_generator

    def sample(self, samples: Sequence[SampleId]) -> Images:
        """Open the generator and generate images; see `Generator.sample`."""
        return self._generator.sample(samples)

    def find_batch_size(self) -> int:
        """Open the generator and return its batch size; see `batch_size`."""
        return batch_size(self._generator)

    @cached_property
    def _generator(self) -> Generator:
        generator = self._open()
        if generator.fingerprint != self.fingerprint:
            raise ValueError(
                f"generator: not the one that made this client's images (fingerprint {generator.fingerprint[:12]}, was "
                f"{self.fingerprint[:12]}); restore the old one, or start a new run"
            )
        return generator


def describe_generator(config: RunConfig) -> dict[str, Any]:
    """Return the run-config's keys that describe the origin of its images."""
    keys, parts = ("generator", "dataset", "sampler", "sampler-steps"), ("guidance", "generation-")
    return {k: v for k, v in config.to_user_dict().items() if k in keys or k.startswith(parts)}
