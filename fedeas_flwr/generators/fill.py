"""Fill one client's dataset with synthetic or repeated images, without a federation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedeas_flwr.data.datasets import Images, Labels
from fedeas_flwr.generators.cache import ImageCache, check_owner, check_wanted, sample_checked
from fedeas_flwr.generators.interface import Generator, SampleId, check_attributes


def fill(
    images: Images,
    labels: npt.ArrayLike,
    generate_per_class: Sequence[int],
    generator: Generator,
    *,
    seed: int = 0,
    client: int = 0,
    cache: ImageCache | None = None,
) -> tuple[Images, Labels]:
    """Append synthetic images to real ones.

    Parameters
    ----------
    images
        The real images, uint8 ``[N, H, W, C]``.
    labels
        Labels of the images, ``[N]``, whole numbers from 0 to the generator's number of classes less one.
    generate_per_class
        Number of images to add per class, for instance this client's row of an allocation.
    generator
        Generates them; its image shape must be that of `images`.
    seed, client
        Part of each synthetic image's identity: the same two give the same images.
    cache
        Cache of the generated images; None: they are generated on every call.

    Returns
    -------
    images : array
        uint8 ``[N + sum(generate_per_class), H, W, C]``: the real ones as given, then the synthetic by class.
    labels : array
        int64, in the same order.
    """
    check_attributes(generator, repr(generator))
    check_owner(seed, client)
    if not isinstance(cache, ImageCache | None):
        raise ValueError(f"cache={cache!r}: must be an ImageCache")
    real = np.asarray(images)
    if real.dtype != np.uint8 or real.shape[1:] != tuple(generator.image_shape) or real.ndim != 4:
        wanted = f"uint8 [N, {', '.join(map(str, generator.image_shape))}]"
        raise ValueError(f"images: {real.dtype} {list(real.shape)} does not fit the generator; give {wanted}")
    real_labels = checked_labels(labels, len(real), generator.num_classes)
    counts = check_wanted(generate_per_class, generator, "generate_per_class")
    if cache is not None:
        made, made_labels, _ = cache.ensure(generator, seed=seed, client=client, wanted=counts)
    else:
        ids = [SampleId(seed, client, label, index) for label, count in enumerate(counts) for index in range(count)]
        made_labels = np.array([sample.label for sample in ids], dtype=np.int64)
        made = sample_checked(generator, ids) if ids else np.zeros((0, *generator.image_shape), dtype=np.uint8)
    return np.concatenate([real, made]), np.concatenate([real_labels, made_labels])


def checked_labels(labels: npt.ArrayLike, number: int, classes: int) -> Labels:
    """Return labels as int64; raise ValueError unless they are ``number`` integers from 0 to ``classes - 1``."""
    given = np.asarray(labels)
    if given.shape != (number,):
        raise ValueError(f"labels: shape {list(given.shape)} does not fit; give one for each of {number}")
    wrong = given[(given < 0) | (given >= classes)] if given.dtype.kind in "iu" else given
    if wrong.size:
        found = wrong[0] if given.dtype.kind in "iu" else given.dtype
        raise ValueError(f"labels: {found} is not allowed; give whole numbers from 0 to {classes - 1}")
    return given.astype(np.int64)


def repeated(labels: Labels, repeat_per_class: Sequence[int], draws: np.random.Generator) -> Labels:
    """Return the indices of the images to repeat, by class; within a class, numbers of copies differ by at most one.

    ``draws`` chooses the images with one copy more.
    """
    chosen = [np.zeros(0, dtype=np.int64)]
    for label, copies in enumerate(repeat_per_class):
        own = np.flatnonzero(np.asarray(labels) == label)
        if copies and not len(own):
            raise ValueError(f"repeat_per_class[{label}]={copies}: there is no image of that class to repeat")
        if copies:
            chosen.append(np.resize(draws.permutation(own), copies))  # one order, repeated
    return np.concatenate(chosen)
