"""The library's door: one client's real images in, real and added images out, no federation needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from fedeas_flwr.generators.cache import ImageCache, check_wanted, sample_checked
from fedeas_flwr.generators.interface import Generator, SampleId


def fill(
    images: NDArray[np.uint8],
    labels: npt.ArrayLike,
    generate_per_class: Sequence[int],
    generator: Generator,
    *,
    seed: int = 0,
    client: int = 0,
    cache: ImageCache | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Append synthetic images to real ones.

    Parameters
    ----------
    images
        The real images, uint8 ``[N, H, W, C]``.
    labels
        Their labels, whole numbers ``[N]`` from 0 to the generator's number of classes less one.
    generate_per_class
        How many images to add to each class, for instance an allocation of this client.
    generator
        Makes them; its image shape must be that of `images`.
    seed, client
        Part of each synthetic image's identity: the same two give the same images.
    cache
        Where to keep them for next time; without one they are made anew.

    Returns
    -------
    images : array
        uint8 ``[N + sum(generate_per_class), H, W, C]``: the real ones as given, then the synthetic by class.
    labels : array
        int64, in the same order.
    """
    real = np.asarray(images)
    if real.dtype != np.uint8 or real.shape[1:] != tuple(generator.image_shape) or real.ndim != 4:
        wanted = f"uint8 [N, {', '.join(map(str, generator.image_shape))}]"
        raise ValueError(f"images: {real.dtype} {list(real.shape)} does not fit the generator; give {wanted}")
    real_labels = _checked_labels(labels, len(real), generator.num_classes)
    counts = check_wanted(generate_per_class, generator, "generate_per_class")
    if cache is not None:
        made, made_labels, _ = cache.ensure(generator, seed=seed, client=client, wanted=counts)
    else:
        ids = [SampleId(seed, client, label, index) for label, count in enumerate(counts) for index in range(count)]
        made_labels = np.array([sample.label for sample in ids], dtype=np.int64)
        made = sample_checked(generator, ids) if ids else np.zeros((0, *generator.image_shape), dtype=np.uint8)
    return np.concatenate([real, made]), np.concatenate([real_labels, made_labels])


def _checked_labels(labels: npt.ArrayLike, number: int, classes: int) -> NDArray[np.int64]:
    given = np.asarray(labels)
    if given.shape != (number,):
        raise ValueError(f"labels: shape {list(given.shape)} does not fit; give one for each of {number}")
    wrong = given[(given < 0) | (given >= classes)] if given.dtype.kind in "iu" else given
    if wrong.size:
        found = wrong[0] if given.dtype.kind in "iu" else given.dtype
        raise ValueError(f"labels: {found} is not allowed; give whole numbers from 0 to {classes - 1}")
    return given.astype(np.int64)


def repeated(
    labels: NDArray[np.int64], repeat_per_class: Sequence[int], draws: np.random.Generator
) -> NDArray[np.int64]:
    """Choose the images to repeat, evenly: within a class, their numbers of copies differ by one at most.

    Parameters
    ----------
    labels
        The real images' labels, ``[N]``.
    repeat_per_class
        How many copies to add to each class, for instance `allocation.oversample` of this client.
    draws
        Decides which images get the one copy more where they cannot all have the same number.

    Returns
    -------
    array
        Indices into the images, int64 ``[sum(repeat_per_class)]``, by class.
    """
    chosen = [np.zeros(0, dtype=np.int64)]
    for label, copies in enumerate(repeat_per_class):
        own = np.flatnonzero(np.asarray(labels) == label)
        if copies and not len(own):
            raise ValueError(f"repeat_per_class[{label}]={copies}: there is no image of that class to repeat")
        if copies:
            chosen.append(np.resize(draws.permutation(own), copies))  # one order, over and over
    return np.concatenate(chosen)
