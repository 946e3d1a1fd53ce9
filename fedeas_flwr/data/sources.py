"""Sources of datasets: constants of the built-in ones, where each is found on disk, and how it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.files import cache_root, expanded
from fedeas_flwr.common.hf_spec import HF, HfSpec
from fedeas_flwr.common.npy import read_archive, read_headers
from fedeas_flwr.common.text import one_line
from fedeas_flwr.data import own_dataset
from fedeas_flwr.data.own_images import with_channels
from fedeas_flwr.partition import stratified_split

Arrays = dict[str, NDArray[Any]]

OWN = "own:"
"""Prefix of a custom dataset's name; its path follows. A Hugging Face dataset, `HF`, is custom data too."""
KEYS = ("x_train", "y_train", "x_test", "y_test")


def is_own(dataset: str) -> bool:
    """Return whether a dataset's name is that of custom data."""
    return dataset.startswith((OWN, HF))


@dataclass(frozen=True)
class DatasetInfo:
    """Class names, sizes and constants of a dataset."""

    name: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    num_test: int
    mirrored_keeps_class: bool
    """Whether a mirrored image keeps its class: a car does, a digit does not."""


_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
_FASHION_MNIST = "t-shirt trouser pullover dress coat sandal shirt sneaker bag ankle_boot"


def _cifar(name: str, classes: str, mean: tuple[float, ...], std: tuple[float, ...]) -> DatasetInfo:
    return DatasetInfo(name, tuple(classes.split()), (32, 32, 3), mean, std, 50_000, 10_000, True)


BUILT_IN = {
    info.name: info
    for info in (
        # Mean and standard deviation of the 1,438 train images.
        DatasetInfo("digits", tuple("0123456789"), (8, 8, 1), (0.3058,), (0.3764,), 1438, 359, False),
        _cifar("cifar10", _CIFAR10, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010)),
        _cifar("cifar100", _CIFAR100, mean=(0.5071, 0.4865, 0.4409), std=(0.2009, 0.1984, 0.2023)),
        # Not mirrored: all shoes point in one direction.
        DatasetInfo(
            "fashion-mnist", tuple(_FASHION_MNIST.split()), (28, 28, 1), (0.2860,), (0.3530,), 60_000, 10_000, False
        ),
    )
}
_TORCHVISION_FOLDERS = {
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "fashion-mnist": "FashionMNIST",
}


def built_in(name: str) -> DatasetInfo:
    """Return the constants of a built-in dataset, or raise ValueError if there is none of that name."""
    if name not in BUILT_IN:
        raise ValueError(
            f"dataset: {name!r} is not known; use one of {', '.join(sorted(BUILT_IN))}, {OWN}PATH or {HF}PATH"
        )
    return BUILT_IN[name]


@dataclass(frozen=True)
class Source:
    """Location of a dataset's files."""

    origin: str
    """Identifier of the content; it changes when the files do."""
    read: Callable[[], Arrays]
    where: Path | None = None
    """File or folder; None for digits, which comes with scikit-learn."""
    downloads: bool = False
    """Whether it must be downloaded first."""


def find_source(name: str, data_dir: str = "") -> Source:
    """Return where `open_dataset` would read a dataset from; nothing is read or downloaded."""
    if name == "digits":
        return Source("scikit-learn", _read_digits)
    if is_own(name):
        where = name.removeprefix(OWN)
        content = own_dataset.fingerprint(where)
        return Source(content, lambda: own_dataset.read_dataset(where)[0], HfSpec.parse(where).path)
    info = built_in(name)
    folder = expanded(data_dir, "data-dir") if data_dir else cache_root() / "datasets"
    if data_dir and not folder.is_dir():
        raise FileNotFoundError(f"data-dir = {data_dir!r}: no such folder")
    npz, unpacked = folder / f"{name}.npz", folder / _TORCHVISION_FOLDERS[name]
    if npz.is_file():
        # Hashing 180 MB at every start would take longer than reading them, so the modification time identifies it.
        return Source(_stamped(npz), lambda: _read_npz(info, npz), npz)
    # torchvision checks CIFAR's MD5 sums, so these files have the same content in every folder. Those of Fashion-MNIST
    # it checks only after a download.
    if unpacked.is_dir():
        images = unpacked / "raw" / "train-images-idx3-ubyte"
        origin = _stamped(images) if images.is_file() else "torchvision"
        return Source(origin, lambda: _read_torchvision(info, folder, download=False), unpacked)
    if not os.environ.get("FEDEAS_OFFLINE"):
        return Source("torchvision", lambda: _read_torchvision(info, folder, download=True), unpacked, downloads=True)
    raise FileNotFoundError(_three_ways(info, folder, "FEDEAS_OFFLINE is set"))


def _stamped(path: Path) -> str:
    stat = path.stat()
    return f"{_resolved(path, stat.st_ino)} ({stat.st_size} bytes, {stat.st_mtime_ns})"


@lru_cache
def _resolved(path: Path, inode: int) -> Path:
    """Return the path without links; every message of a client asks for it."""
    return path.resolve()


def _three_ways(info: DatasetInfo, data_dir: Path, why: str) -> str:
    return (
        f"dataset {info.name} was not found ({why}): put {info.name}.npz in {data_dir}, or torchvision's folder "
        f"{_TORCHVISION_FOLDERS[info.name]} there, or download it, with a network and without FEDEAS_OFFLINE"
    )


def _read_digits() -> Arrays:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    train, test = stratified_split(labels, test_fraction=0.2, seed=0)
    return {"x_train": images[train], "y_train": labels[train], "x_test": images[test], "y_test": labels[test]}


def _check_array(info: DatasetInfo, key: str, shape: tuple[int, ...], dtype: np.dtype[Any], origin: str) -> None:
    images, count = key.startswith("x"), info.num_train if key.endswith("train") else info.num_test
    needed = (count, *info.image_shape) if images else (count,)
    right_dtype = dtype == np.uint8 if images else dtype.kind in "iu"
    if shape != needed or not right_dtype:
        expected = f"{'uint8' if images else 'integer'} {list(needed)}"
        raise ValueError(f"dataset {info.name}: {key} of {origin} is {dtype} {list(shape)}; it must be {expected}")


def check_arrays(info: DatasetInfo, arrays: Arrays, origin: str) -> None:
    """Raise ValueError unless the arrays have the dataset's dtypes, shapes and labels."""
    for key in KEYS:
        _check_array(info, key, arrays[key].shape, arrays[key].dtype, origin)
    for key in ("y_train", "y_test"):
        low, high = int(arrays[key].min()), int(arrays[key].max())
        if low < 0 or high >= len(info.classes):
            allowed = f"0 to {len(info.classes) - 1}"
            raise ValueError(f"dataset {info.name}: {key} of {origin} has labels {low} to {high}; must be {allowed}")


def check_npz(name: str, path: Path) -> None:
    """Raise ValueError unless a file's headers are those of the dataset; no image is read."""
    info = built_in(name)
    with _errors_naming(info, path):
        headers = read_headers(path, KEYS)
    for key, (shape, dtype) in headers.items():
        _check_array(info, key, shape, dtype, str(path))


def _read_npz(info: DatasetInfo, path: Path) -> Arrays:
    check_npz(info.name, path)  # first, so that no more than the dataset is unpacked
    with _errors_naming(info, path):
        return read_archive(path, KEYS)


@contextmanager
def _errors_naming(info: DatasetInfo, path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        needed = f"it must be a complete .npz file with {', '.join(KEYS)}"
        raise ValueError(f"dataset {info.name}: {path} cannot be used ({one_line(error)}); {needed}") from None


def _read_torchvision(info: DatasetInfo, data_dir: Path, download: bool) -> Arrays:
    from torchvision import datasets  # slow to import

    classes = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "fashion-mnist": datasets.FashionMNIST}
    dataset = classes[info.name]
    try:
        train = dataset(str(data_dir), train=True, download=download)
        test = dataset(str(data_dir), train=False, download=False)
    except (AssertionError, LookupError, OSError, RuntimeError, ValueError) as error:
        why = "the download failed" if download else "torchvision's folder is incomplete or damaged"
        raise FileNotFoundError(_three_ways(info, data_dir, f"{why}: {one_line(error)}")) from error
    return {
        "x_train": with_channels(np.asarray(train.data)),
        "y_train": np.asarray(train.targets, dtype=np.int64),
        "x_test": with_channels(np.asarray(test.data)),
        "y_test": np.asarray(test.targets, dtype=np.int64),
    }
