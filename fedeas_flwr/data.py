"""The datasets, as memory-mapped arrays that all processes of a machine share.

`open_dataset` writes a dataset once as plain ``.npy`` files into the user's cache and maps them ever after: a hundred
client processes then cost the memory of one. Images are uint8 ``[N, H, W, C]``, labels int64 ``[N]``.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fedeas_flwr import own_data
from fedeas_flwr.npy import read_header
from fedeas_flwr.partition import stratified_split
from fedeas_flwr.paths import atomic_folder, cache_root

Arrays = dict[str, NDArray[Any]]

# Part of the cache folder's name: raise it when what is written below changes.
_FORMAT = "1"
OWN = "own:"
"""What the name of a dataset of the user's own begins with; its path follows."""
_KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a dataset before its images are there."""

    name: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    num_test: int
    mirrored_keeps_class: bool
    """Whether an image and its mirror image are of one class: a car is, a mirrored digit is another sign or none."""


@dataclass(frozen=True)
class Dataset:
    """A dataset's images and labels, mapped from disk and read-only.

    Attributes
    ----------
    name
        ``digits``, ``cifar10``, ``cifar100`` or ``own:PATH``.
    classes
        One name for each label.
    mean, std
        Of each channel of the train images, on the scale 0 to 1.
    x_train, x_test
        uint8 ``[N, H, W, C]``.
    y_train, y_test
        int64 ``[N]``.
    """

    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    x_train: NDArray[np.uint8]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.uint8]
    y_test: NDArray[np.int64]


_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_INFO = {
    info.name: info
    for info in (
        # Mean and deviation of the 1,438 train images.
        DatasetInfo("digits", tuple("0123456789"), (8, 8, 1), (0.3058,), (0.3764,), 1438, 359, False),
        DatasetInfo(
            "cifar10",
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            (32, 32, 3),
            (0.4914, 0.4822, 0.4465),
            (0.2023, 0.1994, 0.2010),
            50_000,
            10_000,
            True,
        ),
        DatasetInfo(
            "cifar100",
            tuple(_CIFAR100_CLASSES.split()),
            (32, 32, 3),
            (0.5071, 0.4865, 0.4409),
            (0.2009, 0.1984, 0.2023),
            50_000,
            10_000,
            True,
        ),
    )
}
_TORCHVISION_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def dataset_info(name: str) -> DatasetInfo:
    """Return a dataset's class names, image shape and constants, of built-in ones without reading them.

    Parameters
    ----------
    name
        ``digits``, ``cifar10``, ``cifar100`` or ``own:PATH``.

    Returns
    -------
    DatasetInfo
    """
    if name.startswith(OWN):
        return _open_own(name)[0]
    if name not in _INFO:
        raise ValueError(f"dataset: {name!r} is not known; use one of {', '.join(sorted(_INFO))} or {OWN}PATH")
    return _INFO[name]


def short_name(name: str) -> str:
    """What a dataset is called where there is no room for a path."""
    return Path(name.removeprefix(OWN)).stem if name.startswith(OWN) else name


def open_dataset(name: str, data_dir: str = "") -> Dataset:
    """Open a dataset; the first time, write it to the user's cache.

    Parameters
    ----------
    name
        ``digits`` (comes with scikit-learn), ``cifar10``, ``cifar100``, or ``own:PATH`` (see `own_data.read_dataset`).
    data_dir
        Where CIFAR is looked for: ``NAME.npz`` with ``x_train``, ``y_train``, ``x_test``, ``y_test``, or the folder
        that torchvision unpacks. With neither, torchvision downloads it there, unless ``FEDEAS_OFFLINE`` is set.
        Empty means ``datasets`` in the user's cache.

    Returns
    -------
    Dataset
    """
    if name.startswith(OWN):
        return _open_own(name)[1]
    info, source = dataset_info(name), find_source(name, data_dir)
    origin = source.origin
    digest = hashlib.sha256("\0".join((_FORMAT, name, origin)).encode()).hexdigest()[:16]
    folder = cache_root() / "data" / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        try:
            arrays = _open_folder(info, folder)
        except (OSError, ValueError):  # not there yet, or damaged: both are mended by writing it
            arrays = source.read()
            _check(info, arrays, origin)
            with atomic_folder(folder) as temporary:
                for key in _KEYS:
                    dtype = np.uint8 if key.startswith("x") else np.int64
                    np.save(temporary / f"{key}.npy", arrays[key].astype(dtype, copy=False), allow_pickle=False)
            arrays = _open_folder(info, folder)
    return Dataset(name, info.classes, info.mean, info.std, **arrays)


@lru_cache(maxsize=2)
def _open_own(name: str) -> tuple[DatasetInfo, Dataset]:
    """Open a dataset of the user's own, once in the life of a process; the first time, write it to the cache."""
    where = name.removeprefix(OWN)
    try:
        folder = cache_root() / "data" / f"own-{_FORMAT}-{own_data.fingerprint(where)}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "about.json").is_file():
                _write_own(name, folder)
            info = _own_info(name, folder)
            try:
                arrays = _open_folder(info, folder)
            except (OSError, ValueError):  # damaged
                _write_own(name, folder)
                arrays = _open_folder(info, folder)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"dataset: {error}") from None
    return info, Dataset(name, info.classes, info.mean, info.std, **arrays)


def _write_own(name: str, folder: Path) -> None:
    arrays, classes = own_data.read_dataset(name.removeprefix(OWN))
    # A channel that never changes would have no deviation to divide by.
    pixels = arrays["x_train"].reshape(-1, arrays["x_train"].shape[3])
    mean, std = pixels.mean(axis=0) / 255, np.maximum(pixels.std(axis=0) / 255, 1e-3)
    about = {"classes": classes, "mean": mean.tolist(), "std": std.tolist(), "shape": arrays["x_train"].shape[1:]}
    about |= {"train": len(arrays["y_train"]), "test": len(arrays["y_test"])}
    with atomic_folder(folder) as temporary:
        for key in _KEYS:
            dtype = np.uint8 if key.startswith("x") else np.int64
            np.save(temporary / f"{key}.npy", arrays[key].astype(dtype, copy=False), allow_pickle=False)
        (temporary / "about.json").write_text(json.dumps(about), encoding="utf-8")


def _own_info(name: str, folder: Path) -> DatasetInfo:
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    height, width, channels = about["shape"]
    constants = tuple(about["mean"]), tuple(about["std"])
    sizes = about["train"], about["test"]
    # Whether a mirrored image keeps its class cannot be known: letters do not, so none is mirrored.
    return DatasetInfo(name, tuple(about["classes"]), (height, width, channels), *constants, *sizes, False)


def _open_folder(info: DatasetInfo, folder: Path) -> Arrays:
    # mmap_mode also makes NumPy refuse a file that is shorter than its header says.
    arrays: Arrays = {key: np.load(folder / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in _KEYS}
    _check(info, arrays, str(folder))
    if any(arrays[key].dtype != np.int64 for key in ("y_train", "y_test")):
        raise ValueError(f"{folder}: labels are not int64")
    return arrays


def _expected_shape(info: DatasetInfo, key: str) -> tuple[int, ...]:
    count = info.num_train if key.endswith("train") else info.num_test
    return (count, *info.image_shape) if key.startswith("x") else (count,)


def _check_kind(info: DatasetInfo, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], origin: str) -> None:
    images = key.startswith("x")
    right_dtype = dtype == np.uint8 if images else dtype.kind in "iu"
    if shape != _expected_shape(info, key) or not right_dtype:
        wanted = f"{'uint8' if images else 'integer'} {list(_expected_shape(info, key))}"
        raise ValueError(f"dataset {info.name}: {key} of {origin} is {dtype} {list(shape)}; it must be {wanted}")


def _check(info: DatasetInfo, arrays: Arrays, origin: str) -> None:
    for key in _KEYS:
        _check_kind(info, key, arrays[key].shape, arrays[key].dtype, origin)
    for key in ("y_train", "y_test"):
        low, high = int(arrays[key].min()), int(arrays[key].max())
        if low < 0 or high >= len(info.classes):
            allowed = f"0 to {len(info.classes) - 1}"
            raise ValueError(f"dataset {info.name}: {key} of {origin} has labels {low} to {high}; allowed is {allowed}")


@dataclass(frozen=True)
class Source:
    """Where a dataset is read from."""

    origin: str
    """What identifies its content."""
    read: Callable[[], Arrays]
    where: Path | None = None
    """The file or folder; None for digits, which is in a package."""
    downloads: bool = False
    """Whether it is not there yet."""


def find_source(name: str, data_dir: str = "") -> Source:
    """Say where a dataset would be read from, without reading or downloading it.

    Parameters
    ----------
    name, data_dir
        As of `open_dataset`.

    Returns
    -------
    Source
    """
    if name == "digits":
        return Source("scikit-learn", _read_digits)
    if name.startswith(OWN):
        where = Path(name.removeprefix(OWN)).expanduser()
        return Source(own_data.fingerprint(where), lambda: own_data.read_dataset(where)[0], where)
    info, folder = dataset_info(name), Path(data_dir).expanduser() if data_dir else cache_root() / "datasets"
    npz, unpacked = folder / f"{name}.npz", folder / _TORCHVISION_FOLDERS[name]
    if npz.is_file():
        # Hashing 180 MB at every start would cost more than reading them: the time of change stands for it.
        stat = npz.stat()
        origin = f"{npz.resolve()} ({stat.st_size} bytes, {stat.st_mtime_ns})"
        return Source(origin, lambda: _read_npz(info, npz), npz)
    # torchvision checks md5 sums, so that its files are the same wherever they lie.
    if unpacked.is_dir():
        return Source("torchvision", lambda: _read_torchvision(info, folder, download=False), unpacked)
    if not os.environ.get("FEDEAS_OFFLINE"):
        return Source("torchvision", lambda: _read_torchvision(info, folder, download=True), unpacked, downloads=True)
    raise FileNotFoundError(_three_ways(info, folder, "FEDEAS_OFFLINE is set"))


def _three_ways(info: DatasetInfo, data_dir: Path, why: str) -> str:
    return (
        f"dataset {info.name} was not found ({why}): put {info.name}.npz in {data_dir}, or torchvision's folder "
        f"{_TORCHVISION_FOLDERS[info.name]} there, or unset FEDEAS_OFFLINE on a machine with a network to download it"
    )


def _read_digits() -> Arrays:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    train, test = stratified_split(labels, test_fraction=0.2, seed=0)
    return {"x_train": images[train], "y_train": labels[train], "x_test": images[test], "y_test": labels[test]}


def check_npz(name: str, path: Path) -> None:
    """See from its headers alone that a file holds the dataset."""
    info = dataset_info(name)
    with _damage_in_one_line(info, path), zipfile.ZipFile(path) as archive:
        kinds = {key: _read_header(archive, key) for key in _KEYS}
    for key, (shape, dtype) in kinds.items():
        _check_kind(info, key, shape, dtype, str(path))


def _read_npz(info: DatasetInfo, path: Path) -> Arrays:
    check_npz(info.name, path)  # first: a small file may claim to unpack to any size
    with _damage_in_one_line(info, path), np.load(path, allow_pickle=False) as arrays:
        return {key: arrays[key] for key in _KEYS}


def _read_header(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(f"{key}.npy") as member:
        return read_header(member)


@contextmanager
def _damage_in_one_line(info: DatasetInfo, path: Path) -> Iterator[None]:
    try:
        yield
    except KeyError:
        raise ValueError(f"dataset {info.name}: {path} lacks one of the keys {', '.join(_KEYS)}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"dataset {info.name}: {path} is damaged ({_one_line(error)}); copy it again") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _read_torchvision(info: DatasetInfo, data_dir: Path, download: bool) -> Arrays:
    from torchvision import datasets  # slow to import

    kind = datasets.CIFAR10 if info.name == "cifar10" else datasets.CIFAR100
    try:
        train = kind(str(data_dir), train=True, download=download)
        test = kind(str(data_dir), train=False, download=False)
    except (OSError, RuntimeError) as error:
        why = "the download failed" if download else "torchvision's folder is incomplete or damaged"
        raise FileNotFoundError(_three_ways(info, data_dir, f"{why}: {_one_line(error)}")) from error
    return {
        "x_train": train.data,
        "y_train": np.asarray(train.targets, dtype=np.int64),
        "x_test": test.data,
        "y_test": np.asarray(test.targets, dtype=np.int64),
    }
