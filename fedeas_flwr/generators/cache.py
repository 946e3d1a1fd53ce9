"""A content-addressed, resumable cache of generated images with checksums.

Layout, under the root::

    <sha256 of generator, image shape and seed>/manifest.json
    <sha256 of generator, image shape and seed>/client-00003/class-007/000000-000050.npy

The manifest describes the folder; its modification time is the time of the folder's last use. A shard holds the images
of an index range, as a NumPy file followed by the 32 bytes of its SHA-256. A request for 50 images and then for 80
generates 30 more; a request for fewer reads a prefix. A shard whose checksum is wrong is renamed to ``*.corrupt`` and
its images are generated again, with the same bytes if the generator is deterministic. Images are generated and written
a few batches at a time, so that a crash loses little.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedeas_flwr.common.files import atomic_write, cache_root, remove_unfinished
from fedeas_flwr.common.npy import read_array
from fedeas_flwr.data.datasets import Images, Labels
from fedeas_flwr.generators.interface import Generator, SampleId, batch_size
from fedeas_flwr.runs.files import GENERATOR

MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 2**20
_DIGEST_BYTES = 32
_BATCHES_PER_CHUNK = 4


class ImageCache:
    """Generated images on disk, shared by runs, policies and processes; by default ``images`` in the user's cache."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root) if root is not None else cache_root() / "images"

    def ensure(
        self,
        generator: Generator,
        *,
        seed: int,
        client: int,
        wanted: Sequence[int],
        about: Mapping[str, Any] | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[Images, Labels, int]:
        """Return a client's synthetic images, generating those that are missing.

        A lock per client keeps two processes from generating the same images.

        Parameters
        ----------
        generator
            Called with the missing images, in chunks of full batches; each chunk is written before the next.
        seed
            Of the experiment.
        client
            The client's number.
        wanted
            Number of images per class.
        about
            Description of the generator for the manifest.
        report
            If images are missing, called with 0 and their number, and with the number done after each chunk.

        Returns
        -------
        images : array
            uint8 ``[sum(wanted), H, W, C]``: class 0 first, by index within a class.
        labels : array
            int64 ``[sum(wanted)]``.
        generated : int
            Number of images generated in this call.
        """
        check_owner(seed, client)
        counts = check_wanted(wanted, generator)
        labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        images = np.zeros((len(labels), *generator.image_shape), dtype=np.uint8)
        if not len(labels):
            return images, labels, 0
        folder = _client_folder(self.root / self.key(generator, seed), client)
        _reject_links(folder.parent, folder, Path(f"{folder}.lock"), *folder.glob("class-*"))
        folder.mkdir(parents=True, exist_ok=True)
        _note_use(folder.parent, generator, seed, about or {})
        starts = np.cumsum(counts) - counts  # position in `images` of each class's first sample
        with FileLock(f"{folder}.lock"):
            remove_unfinished(folder)
            missing: list[int] = []
            for label, count in enumerate(counts):
                part = images[starts[label] : starts[label] + count]
                there = _read_shards(_class_folder(folder, label), part)
                missing += (starts[label] + np.flatnonzero(~there)).tolist()
            if not missing:
                return images, labels, 0
            ids = [SampleId(seed, client, label, index) for label, n in enumerate(counts) for index in range(n)]
            step = _BATCHES_PER_CHUNK * batch_size(generator)  # may load the generator
            report(0, len(missing))
            for first in range(0, len(missing), step):
                chunk = missing[first : first + step]
                images[chunk] = sample_checked(generator, [ids[i] for i in chunk])
                _write_shards(folder, chunk, ids, images)
                report(first + len(chunk), len(missing))
        return images, labels, len(missing)

    def missing(self, generator: Generator, *, seed: int, client: int, wanted: Sequence[int]) -> int:
        """Return how many of a client's images `ensure` would generate, judged by the names of the shards."""
        return self.missing_in(self.root / self.key(generator, seed), client, check_wanted(wanted, generator))

    def missing_in(self, folder: Path, client: int, wanted: Sequence[int]) -> int:
        """Return the number of missing images in a folder from `find`; no generator is needed."""
        lacking = 0
        for label, count in enumerate(wanted):
            there = np.zeros(count, dtype=bool)
            for _, start, stop in shards(_class_folder(_client_folder(folder, client), label)):
                there[start:stop] = True
            lacking += int((~there).sum())
        return lacking

    def find(self, about: Mapping[str, Any], seed: int) -> Path | None:
        """Return the folder of images with a manifest, of several the one used last; no generator is needed.

        ``about`` is as given to `ensure`; of paths, only the last part is compared.
        """
        wanted = {key: _last_part(value) for key, value in {**about, "seed": seed}.items()}
        fitting = []
        for path in self.root.glob(f"*/{MANIFEST}"):
            try:
                facts, used = read_manifest(path), path.stat().st_mtime
            except OSError:
                continue
            if all(key in facts and _last_part(facts[key]) == value for key, value in wanted.items()):
                fitting.append((used, path.parent))
        return max(fitting)[1] if fitting else None

    def peek(self, folder: Path, label: int, count: int) -> Images:
        """Return up to ``count`` cached images of a class, in the order of clients."""
        found: list[Images] = []
        for client in sorted(folder.glob("client-*")):
            for path, _, _ in shards(_class_folder(client, label)):
                images = read_shard(path)
                if images is not None:
                    found.append(images)
                if sum(map(len, found)) >= count:
                    return np.concatenate(found)[:count]
        return np.concatenate(found) if found else np.zeros((0, 0, 0, 1), np.uint8)

    def key(self, generator: Generator, seed: int) -> str:
        """Return the name of the folder of this generator's images with a seed."""
        identity = json.dumps([generator.fingerprint, list(generator.image_shape), int(seed)])
        return hashlib.sha256(identity.encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a folder's manifest, empty if it is no regular file, too large or no JSON object."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_MANIFEST_BYTES:
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _last_part(value: Any) -> Any:
    """Return the last part of a path; for a generator that a run trained, the name of its run directory too."""
    if not isinstance(value, str):
        return value
    path = Path(value)
    return str(Path(path.parent.name, path.name)) if path.name == GENERATOR else path.name


def _reject_links(*paths: Path) -> None:
    """Raise ValueError for a link, which could lead out of a cache that others can write to."""
    for path in paths:
        if path.is_symlink():
            raise ValueError(f"cache: {path} is a link, and links are not followed; remove it")


def _note_use(folder: Path, generator: Generator, seed: int, about: Mapping[str, Any]) -> None:
    path = folder / MANIFEST
    with suppress(FileNotFoundError):
        os.utime(path, follow_symlinks=False)
        if about.keys() <= read_manifest(path).keys():  # not to be completed
            return
    known = about or {"generator": type(generator).__name__}
    facts = {**known, "seed": seed, "image-shape": generator.image_shape, "fingerprint": generator.fingerprint}
    atomic_write(path, (json.dumps(facts, indent=1) + "\n").encode())


def check_wanted(wanted: Sequence[int], generator: Generator, name: str = "wanted") -> list[int]:
    """Return ``wanted``, the argument ``name``, as one whole number per class of the generator, or raise ValueError."""
    given = np.asarray(wanted)
    whole = given.shape == (generator.num_classes,) and given.dtype.kind in "iuf" and bool((given % 1 == 0).all())
    if not whole or (given < 0).any():
        raise ValueError(
            f"{name}: {given.tolist()} is not allowed; give {generator.num_classes} whole numbers, none negative"
        )
    return [int(n) for n in given]


def check_owner(seed: int, client: int) -> None:
    """Raise ValueError unless both are integers of at least 0."""
    for name, value in (("seed", seed), ("client", client)):
        if not isinstance(value, int | np.integer) or value < 0:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 0")


def sample_checked(generator: Generator, samples: Sequence[SampleId]) -> Images:
    """Generate images ``[len(samples), H, W, C]``; raise ValueError if a custom generator returns anything else."""
    images = generator.sample(samples)
    expected = (len(samples), *generator.image_shape)
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != expected:
        found = f"{images.dtype} {list(images.shape)}" if isinstance(images, np.ndarray) else type(images).__name__
        raise ValueError(f"generator: sample() returned {found}; it must return uint8 {list(expected)}")
    return images


def _client_folder(folder: Path, client: int) -> Path:
    return folder / f"client-{client:05d}"


def _class_folder(folder: Path, label: int) -> Path:
    return folder / f"class-{label:03d}"


def _read_shards(folder: Path, into: Images) -> NDArray[np.bool_]:
    """Fill `into` with the first images of a class; return a mask of those that were in the cache."""
    there = np.zeros(len(into), dtype=bool)
    for path, start, stop in shards(folder):
        if start >= len(into):
            continue
        images = read_shard(path)
        if images is None or images.shape != (stop - start, *into.shape[1:]):
            os.replace(path, f"{path}.corrupt")
            continue
        stop = min(stop, len(into))
        into[start:stop] = images[: stop - start]
        there[start:stop] = True
    return there


def shards(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield the shards of a class, each with the range of its images."""
    for path in sorted(folder.glob("*-*.npy")):
        first, _, end = path.stem.partition("-")
        if first.isdecimal() and end.isdecimal():
            yield path, int(first), int(end)


def read_shard(path: Path) -> Images | None:
    """Return a shard's images, or None if it is damaged, no regular file, or just removed."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link may lead out of the cache, and a pipe may never end
            return None
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    payload, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    try:
        images = read_array(payload)
    except ValueError:
        return None
    first, _, end = path.stem.partition("-")
    right = images.dtype == np.uint8 and images.ndim == 4
    return images if right and len(images) == int(end) - int(first) else None


def _write_shards(folder: Path, missing: Sequence[int], ids: Sequence[SampleId], images: Images) -> None:
    """Write the images at positions `missing`, one shard per contiguous range of a class."""
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
