"""A custom dataset (`own:PATH` or `hf:PATH`): a train and a test split read from a folder or file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.files import expanded
from fedeas_flwr.common.text import counted
from fedeas_flwr.data import hf_dataset
from fedeas_flwr.data.own_images import (
    OwnImages,
    _class_folders,
    _is_image,
    _log_once,
    _not_images,
    _npz_keys,
    check_arrays,
    check_classes,
    check_labels,
    class_names,
    read_arrays,
    read_images,
    with_channels,
)
from fedeas_flwr.partition import stratified_split

_VERSION = "3"
"""Part of the fingerprint: raise it when the same files give other arrays, or are cached in another format."""
_TEST_FRACTION = 0.2


def read_dataset(where: str | Path) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    """Return a custom dataset's ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and the names of its classes.

    It is a folder with ``train`` and ``test``, each with one subfolder per class; an ``.npz`` file with these arrays;
    one set as for `read_images`; or ``hf:PATH``, see `hf_dataset`. Of one set, a fixed fifth of every class, rounded to
    the nearest image, is held out for testing; a class of one or two images has no test image.
    """
    if hf_dataset.is_hf(where):
        first, second = hf_dataset.read_splits(where)
        return (_hold_out(Path(where), first) if second is None else _arrays(first, second)), first.classes
    path = expanded(where)
    if path.is_dir() and (path / "train").is_dir() and (path / "test").is_dir():
        train = read_images(path / "train")
        height, width, channels = train.images.shape[1:]
        test = read_images(path / "test", classes=train.classes, size=(height, width), channels=channels)
        return _arrays(train, test), train.classes
    if path.suffix == ".npz" and path.is_file() and "x_train" in _npz_keys(path):
        return _read_split_npz(path)
    _reject_partial_split(path)
    found = read_images(path)
    return _hold_out(path, found), found.classes


def _hold_out(path: Path, found: OwnImages) -> dict[str, NDArray[Any]]:
    """Return one set's arrays, with a fifth of every class as the test split."""
    kept, held_out = stratified_split(found.labels, test_fraction=_TEST_FRACTION, seed=0)
    if not len(held_out):
        raise ValueError(
            f"{path} has {counted(len(found.labels), 'image')}, too few to hold out a fifth of every class for testing"
        )
    untested = np.setdiff1d(found.labels, found.labels[held_out])
    if len(untested):
        these = f"{counted(len(untested), 'class', 'classes')} of fewer than 3 images"
        example = repr(found.classes[untested[0]])
        _log_once(f"{path}: {these} have no test images, such as {example}; all are used for training")
    parts = [OwnImages(found.images[part], found.labels[part], found.classes) for part in (kept, held_out)]
    return _arrays(*parts)


def _reject_partial_split(path: Path) -> None:
    """Raise ValueError for a folder with ``train`` and no ``test``, or the reverse, unless that is a class name."""
    for part, lacking in (("train", "test"), ("test", "train")):
        folder = path / part
        if folder.is_dir() and _class_folders(folder) and not any(map(_is_image, folder.iterdir())):
            instead = f", or give {folder}, of which a fifth is held out for testing" if part == "train" else ""
            raise ValueError(f"{path} has {part}/ but no {lacking}/: add it{instead}")


def _arrays(train: OwnImages, test: OwnImages) -> dict[str, NDArray[Any]]:
    return {"x_train": train.images, "y_train": train.labels, "x_test": test.images, "y_test": test.labels}


def _read_split_npz(path: Path) -> tuple[dict[str, NDArray[Any]], tuple[str, ...]]:
    arrays = read_arrays(path, ("x_train", "y_train", "x_test", "y_test"), optional=("classes",))
    for part in ("train", "test"):
        arrays[f"x_{part}"] = with_channels(arrays[f"x_{part}"])
        check_arrays(path, f"x_{part}", arrays[f"x_{part}"], f"y_{part}", arrays[f"y_{part}"])
    names = class_names(
        path, arrays.pop("classes", None), int(max(arrays["y_train"].max(), arrays["y_test"].max())) + 1
    )
    check_classes(path, names)
    for part in ("train", "test"):
        check_labels(path, f"y_{part}", arrays[f"y_{part}"], names)
    if arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        raise ValueError(f"{path}: images of x_train and x_test differ in size")
    return arrays, names


def fingerprint(where: str | Path) -> str:
    """Return a hash of the names, sizes and modification times of the files at a path; no file is read.

    Clients compute it twice per round; 20,000 files take about 0.15 s on a slow core. Links are followed.
    """
    if hf_dataset.is_hf(where):
        return hf_dataset.fingerprint(where)
    path = Path(os.path.realpath(expanded(where)))  # Path.resolve raises on circular links
    if not path.exists():
        raise _not_images(path, where)
    files = [(file.path, file.stat()) for file in _image_files(path)] if path.is_dir() else [(str(path), path.stat())]
    facts = sorted((file, stat.st_size, stat.st_mtime_ns) for file, stat in files)
    return hashlib.sha256(repr((_VERSION, str(path), facts)).encode()).hexdigest()[:16]


def _image_files(folder: str | Path, depth: int = 0) -> Iterator[os.DirEntry[str]]:
    """Yield the image files of a folder's subfolders and, for train/ and test/, of theirs; links are followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if depth < 2 and entry.is_dir():
                yield from _image_files(entry.path, depth + 1)
            elif depth and _is_image(entry):
                yield entry
