"""A content-addressed store of generated images that grows, resumes and mends itself.

Layout, under the root::

    <sha256 of generator, image shape and seed>/client-00003/class-007/000000-000050.npy

A shard holds the images of an index range, as a NumPy file followed by the 32 bytes of its SHA-256. Asking for 50
images and then for 80 makes 30 more; asking for fewer reads a prefix. A shard that does not check is set aside as
``*.corrupt`` and its images are made again, which gives the same bytes as long as the generator keeps its promise.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedeas_flwr.generators import Generator, SampleId
from fedeas_flwr.paths import atomic_write, cache_root

_DIGEST_BYTES = 32

Images = NDArray[np.uint8]


class ImageCache:
    """Generated images on disk, shared by runs, policies and processes.

    Parameters
    ----------
    root
        The folder to keep them in; by default ``images`` in the user's cache.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root) if root is not None else cache_root() / "images"

    def ensure(
        self, generator: Generator, *, seed: int, client: int, wanted: Sequence[int]
    ) -> tuple[Images, NDArray[np.int64], int]:
        """Return a client's synthetic images, generating those that are not there yet.

        Two processes that ask for the same client wait for each other, so nothing is made twice.

        Parameters
        ----------
        generator
            Called at most once, with all that is missing, so that its batches are full.
        seed
            Of the experiment.
        client
            The client's number.
        wanted
            How many images of each class.

        Returns
        -------
        images : array
            uint8 ``[sum(wanted), H, W, C]``: class 0 first, by index within a class.
        labels : array
            int64 ``[sum(wanted)]``.
        generated : int
            How many of them were sampled in this call.
        """
        counts = check_wanted(wanted, generator)
        labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        images = np.zeros((len(labels), *generator.image_shape), dtype=np.uint8)
        if not len(labels):
            return images, labels, 0
        folder = self._client_folder(generator, seed, client)
        folder.mkdir(parents=True, exist_ok=True)
        # Positions in `images` of each class's first sample.
        starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
        with FileLock(f"{folder}.lock"):
            missing: list[int] = []
            ids = [SampleId(seed, client, label, index) for label, n in enumerate(counts) for index in range(n)]
            for label, count in enumerate(counts):
                part = images[starts[label] : starts[label] + count]
                there = _read_shards(_class_folder(folder, label), part)
                missing += (starts[label] + np.flatnonzero(~there)).tolist()
            if missing:
                images[missing] = sample_checked(generator, [ids[i] for i in missing])
                _write_shards(folder, missing, ids, images)
        return images, labels, len(missing)

    def _client_folder(self, generator: Generator, seed: int, client: int) -> Path:
        identity = json.dumps([generator.fingerprint, list(generator.image_shape), int(seed)])
        return self.root / hashlib.sha256(identity.encode()).hexdigest() / f"client-{client:05d}"


def check_wanted(wanted: Sequence[int], generator: Generator) -> list[int]:
    """Return `wanted` as integers, one for each class of the generator, or refuse it.

    Parameters
    ----------
    wanted
        How many images of each class.
    generator
        Whose classes are meant.

    Returns
    -------
    list of int
    """
    counts = [int(n) for n in wanted]
    if len(counts) != generator.num_classes or any(n < 0 or n != w for n, w in zip(counts, wanted, strict=True)):
        raise ValueError(
            f"wanted: {list(wanted)} is not allowed; give {generator.num_classes} whole numbers, none negative"
        )
    return counts


def sample_checked(generator: Generator, samples: Sequence[SampleId]) -> Images:
    """Sample and refuse anything but uint8 images of the promised shape and number.

    Parameters
    ----------
    generator
        Any generator, a user's own too.
    samples
        What to ask it for.

    Returns
    -------
    array
        uint8 ``[len(samples), H, W, C]``.
    """
    images = generator.sample(samples)
    expected = (len(samples), *generator.image_shape)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != expected:
        found = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        name = type(generator).__name__
        raise ValueError(f"generator: {name}.sample returned {found}; it must return uint8 {list(expected)}")
    return images


def _class_folder(folder: Path, label: int) -> Path:
    return folder / f"class-{label:03d}"


def _read_shards(folder: Path, into: Images) -> NDArray[np.bool_]:
    """Fill `into` with the first images of a class; return which of them were there."""
    there = np.zeros(len(into), dtype=bool)
    for path in sorted(folder.glob("*-*.npy")):
        first, _, end = path.stem.partition("-")
        if not (first.isdecimal() and end.isdecimal()):
            continue
        start, stop = int(first), int(end)
        if start >= len(into):
            continue
        images = _read_shard(path, (stop - start, *into.shape[1:]))
        if images is None:
            os.replace(path, f"{path}.corrupt")
            continue
        stop = min(stop, len(into))
        into[start:stop] = images[: stop - start]
        there[start:stop] = True
    return there


def _read_shard(path: Path, shape: tuple[int, ...]) -> Images | None:
    content = path.read_bytes()
    payload, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    try:
        images = np.load(io.BytesIO(payload), allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return None
    right = isinstance(images, np.ndarray) and images.shape == shape and images.dtype == np.uint8
    return images if right else None


def _write_shards(folder: Path, missing: Sequence[int], ids: Sequence[SampleId], images: Images) -> None:
    """Write the images at positions `missing`, one shard for each unbroken range of a class."""
    # Along a run of neighbours, position minus rank is constant.
    runs = itertools.groupby(enumerate(missing), key=lambda pair: (ids[pair[1]].label, pair[1] - pair[0]))
    for (label, _), run in runs:
        positions = [position for _, position in run]
        first, end = ids[positions[0]].index, ids[positions[-1]].index + 1
        buffer = io.BytesIO()
        np.save(buffer, images[positions], allow_pickle=False)
        payload = buffer.getvalue()
        path = _class_folder(folder, label) / f"{first:06d}-{end:06d}.npy"
        atomic_write(path, payload + hashlib.sha256(payload).digest())
