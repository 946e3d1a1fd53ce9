"""A generator of a user's own package: ``generator = "package.module:name"``.

The name is that of a function or class. It is called with those of ``classes`` (their names), ``image_shape`` and
``device`` that are among its parameters, and returns a generator (interface.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import accepted_arguments, call_with, import_object
from fedeas_flwr.generators.cache import sample_checked
from fedeas_flwr.generators.interface import Generator, SampleId, check_attributes

_MAX_DIFFERENCE = 4.0
"""Maximum mean difference of pixels, on the scale 0 to 255, between two calls for the same images."""


def open_own(path: str, *, classes: Sequence[str], image_shape: tuple[int, int, int], device: str) -> Generator:
    """Return the generator at an import path.

    Raise `ConfigError` if it cannot be opened, lacks an attribute, or is for another number of classes or image shape.
    """
    build = import_object(path, "generator")
    if not callable(build):
        raise ConfigError(f"generator: {path!r} is of type {type(build).__name__}: must be a function or class")
    offered = {"classes": classes, "image_shape": image_shape, "device": device}
    taken = accepted_arguments(build)
    arguments = {key: value for key, value in offered.items() if taken is None or key in taken}
    generator: Generator = call_with(build, path, "generator", arguments, None)
    check_attributes(generator, f"{path!r} returned {type(generator).__name__}")
    if not isinstance(generator.fingerprint, str) or not generator.fingerprint:
        raise ConfigError(f"generator: {path!r} has fingerprint {generator.fingerprint!r}: must be a text")
    found, needed = (generator.num_classes, tuple(generator.image_shape)), (len(classes), tuple(image_shape))
    if found != needed:
        raise ConfigError(
            f"generator: {path!r} makes {found[0]} classes of images {list(found[1])}, but the dataset has {needed[0]} "
            f"classes of images {list(needed[1])}"
        )
    return generator


def check_own(path: str, generator: Generator) -> None:
    """Raise `ConfigError` if a generator of a user's own cannot generate two images, or makes others the second time.

    Small differences are allowed: a network on a GPU may round differently.
    """
    samples = [SampleId(0, 0, 0, index) for index in range(2)]
    once, again = (call_with(lambda: sample_checked(generator, samples), path, "generator", {}) for _ in range(2))
    if np.abs(once.astype(float) - again).mean() > _MAX_DIFFERENCE:
        raise ConfigError(
            f"generator: {path!r} returned other images when asked for the same again: they must depend on the samples "
            "only, whose numbers can seed a random generator"
        )
