"""Datasets as memory-mapped arrays that all processes of a machine share.

`open_dataset` writes a dataset once as ``.npy`` files into the user's cache and memory-maps them from then on: a
hundred client processes use the memory of one. Images are uint8 ``[N, H, W, C]``, labels int64 ``[N]``.

about.json in the same folder has the files' digests. A file whose size, time or inode changed since it was last
compared with its digest is compared again when it is opened, and a damaged dataset is read from its source again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedeas_flwr.common.checked import seal, unseal
from fedeas_flwr.common.files import atomic_folder, atomic_write, cache_root, refuse_special, sha256_of
from fedeas_flwr.common.hf_spec import HfSpec
from fedeas_flwr.data import own_dataset
from fedeas_flwr.data.sources import KEYS, OWN, Arrays, DatasetInfo, built_in, check_arrays, find_source, is_own

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Part of the names of built-in datasets' folders in the cache: raise it when their content changes.
_FORMAT = "1"
_ROWS_AT_ONCE = 2**20
"""Number of pixels whose statistics are computed at once, in 8 bytes per channel."""


@dataclass(frozen=True)
class Dataset:
    """Images and labels of a dataset, memory-mapped and read-only.

    Images are uint8 ``[N, H, W, C]``, labels int64 ``[N]``. ``mean`` and ``std`` are those of each channel of the train
    images, on the scale 0 to 1.
    """

    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    x_train: Images
    y_train: Labels
    x_test: Images
    y_test: Labels


def dataset_info(name: str) -> DatasetInfo:
    """Return a dataset's class names, image shape and constants; built-in datasets are not read."""
    return _open_own(name)[0] if is_own(name) else built_in(name)


def readable_info(name: str) -> DatasetInfo | None:
    """Return `dataset_info`, or ``None`` if the dataset cannot be read, as on another machine than the run's."""
    with suppress(OSError, ValueError):
        return dataset_info(name)
    return None


def short_name(name: str) -> str:
    """Return a dataset's name without its folder, for titles and labels."""
    return Path(HfSpec.parse(name.removeprefix(OWN)).where).stem if is_own(name) else name


def open_dataset(name: str, data_dir: str = "") -> Dataset:
    """Open a dataset; the first time, write it to the user's cache.

    It is ``digits`` (comes with scikit-learn), ``cifar10``, ``cifar100``, ``fashion-mnist``, or ``own:PATH`` or
    ``hf:PATH`` (see `own_dataset.read_dataset`). ``data_dir``, by default ``datasets`` in the user's cache, is the
    folder of CIFAR or Fashion-MNIST: it has ``NAME.npz`` with ``x_train``, ``y_train``, ``x_test``, ``y_test``, or the
    folder that torchvision unpacks. If both are missing, torchvision downloads the dataset to it, unless
    ``FEDEAS_OFFLINE`` is set.
    """
    if is_own(name):
        return _open_own(name)[1]
    info, source = built_in(name), find_source(name, data_dir)
    digest = hashlib.sha256("\0".join((_FORMAT, name, source.origin)).encode()).hexdigest()[:16]
    folder = cache_root() / "data" / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        try:
            arrays = _open_folder(info, folder)
        except Exception:  # missing or damaged: write it
            arrays = source.read()
            check_arrays(info, arrays, source.origin)
            _write_folder(folder, arrays, {})
            arrays = _open_folder(info, folder)
    return Dataset(name, info.classes, info.mean, info.std, **arrays)


def _open_own(name: str) -> tuple[DatasetInfo, Dataset]:
    """Open a custom dataset; read it again if its files have changed."""
    where = name.removeprefix(OWN)
    if not where:  # Path("") would be the current folder
        raise ValueError("dataset = 'own:': must be own:PATH with a folder or an .npz file")
    root = cache_root()  # its error is not the dataset's
    try:
        return _open_own_cached(name, root / "data" / f"own-{own_dataset.fingerprint(where)}")
    except (FileNotFoundError, ValueError) as error:
        if getattr(error, "filename", None):  # an OSError, which names its file, perhaps one in the cache
            raise
        raise type(error)(f"dataset: {error}") from None


def hash_own_images(name: str) -> str:
    """Return a hash of a custom dataset's images and labels, which its path and its files' times do not change."""
    array: Any = _open_own(name)[1].x_train  # np.memmap
    files = _read_about(Path(array.filename).parent)["files"]
    return hashlib.sha256("".join(files[key]["sha256"] for key in KEYS).encode()).hexdigest()[:16]


@lru_cache(maxsize=2)
def _open_own_cached(name: str, folder: Path) -> tuple[DatasetInfo, Dataset]:
    """Open one version of a custom dataset from its folder in the user's cache; write the folder if necessary."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        try:
            info, arrays = _open_own_folder(name, folder)
        except Exception:  # missing or damaged: write it
            _write_own(name, folder)
            info, arrays = _open_own_folder(name, folder)
    return info, Dataset(name, info.classes, info.mean, info.std, **arrays)


def _write_own(name: str, folder: Path) -> None:
    arrays, classes = own_dataset.read_dataset(name.removeprefix(OWN))
    pixels = arrays["x_train"].reshape(-1, arrays["x_train"].shape[3])
    mean, std = (found / 255 for found in _mean_and_std(pixels))
    std = np.maximum(std, 1e-3)  # a constant channel must not lead to a division by zero
    about = {"classes": classes, "mean": mean.tolist(), "std": std.tolist(), "shape": arrays["x_train"].shape[1:]}
    about |= {"train": len(arrays["y_train"]), "test": len(arrays["y_test"])}
    _write_folder(folder, arrays, about)


def _mean_and_std(pixels: Images) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of each channel, ``[pixels, channels]``, from the counts of the 256 values."""
    counts = np.zeros((256, pixels.shape[1]))
    for first in range(0, len(pixels), _ROWS_AT_ONCE):  # bincount copies its input
        part = pixels[first : first + _ROWS_AT_ONCE].T
        counts += np.stack([np.bincount(channel, minlength=256) for channel in part], axis=1)
    values = np.arange(256)[:, None]
    mean = (counts * values).sum(axis=0) / len(pixels)
    return mean, np.sqrt((counts * (values - mean) ** 2).sum(axis=0) / len(pixels))


def _open_own_folder(name: str, folder: Path) -> tuple[DatasetInfo, Arrays]:
    about = _read_about(folder)
    height, width, channels = about["shape"]
    info = DatasetInfo(
        name,
        classes=tuple(about["classes"]),
        image_shape=(height, width, channels),
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        num_train=about["train"],
        num_test=about["test"],
        mirrored_keeps_class=False,  # unknown, so no image is mirrored
    )
    return info, _open_folder(info, folder)


def _write_folder(folder: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Write the arrays and about.json as a folder, completely or not at all."""
    with atomic_folder(folder) as temporary:
        for key in KEYS:
            dtype = np.uint8 if key.startswith("x") else np.int64
            try:
                np.save(temporary / f"{key}.npy", arrays[key].astype(dtype, copy=False), allow_pickle=False)
            except OSError as error:
                if error.errno is None:  # NumPy's own error: fewer bytes were written than requested
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
        files = {key: {"sha256": sha256_of(temporary / f"{key}.npy")} for key in KEYS}
        _write_about(temporary, folder.name, {**about, "files": files})


def _write_about(folder: Path, owner: str, about: Mapping[str, Any]) -> None:
    """Write about.json with the files' sizes, times and inodes as they are now."""
    files = {key: {**about["files"][key], **_stamp(folder / f"{key}.npy")} for key in KEYS}
    atomic_write(folder / "about.json", json.dumps(seal({**about, "files": files}, owner)).encode())


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / "about.json"
    refuse_special(path)
    return unseal(json.loads(path.read_text(encoding="utf-8")), folder.name)


def _stamp(path: Path) -> dict[str, int]:
    found = path.stat()
    return {"size": found.st_size, "time": found.st_mtime_ns, "inode": found.st_ino}


def verify_datasets() -> tuple[int, list[Path]]:
    """Read all datasets in the cache; return their number and the files that differ from their digests."""
    folders = [path.parent for path in sorted((cache_root() / "data").glob("*/about.json"))]
    return len(folders), [path for folder in folders for path in _damaged_files(folder)]


def _damaged_files(folder: Path) -> list[Path]:
    try:
        files = _read_about(folder)["files"]
    except ValueError:
        return [folder / "about.json"]
    paths = {key: folder / f"{key}.npy" for key in KEYS}
    return [path for key, path in paths.items() if not path.is_file() or sha256_of(path) != files[key]["sha256"]]


def _check_digests(folder: Path) -> None:
    """Compare the arrays with their digests if a file changed since; raise ValueError if one differs."""
    about = _read_about(folder)
    if all(_stamp(folder / f"{key}.npy").items() <= about["files"][key].items() for key in KEYS):
        return
    if damaged := _damaged_files(folder):
        raise ValueError(f"{damaged[0]} is damaged")
    with suppress(OSError):  # a cache that others own is compared again next time
        _write_about(folder, folder.name, about)


def _open_folder(info: DatasetInfo, folder: Path) -> Arrays:
    for key in KEYS:
        refuse_special(folder / f"{key}.npy")
    _check_digests(folder)
    # With mmap_mode, NumPy also rejects a file that is shorter than its header says.
    arrays: Arrays = {key: np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in KEYS}
    check_arrays(info, arrays, str(folder))
    return arrays
