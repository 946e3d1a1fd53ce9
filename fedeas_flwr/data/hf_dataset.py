"""Read a Hugging Face dataset (`dataset = "hf:PATH"`): saved by `save_to_disk`, an image folder, or parquet files.

Images are decoded as those of custom folders are (`own_images`), not by the package datasets, and are stored in the
same arrays. Needs the package datasets: ``pip install "fedeas-flwr[datasets]"``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from logging import CRITICAL
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.files import expanded, refuse_special
from fedeas_flwr.common.hf_spec import HF, HfSpec
from fedeas_flwr.common.import_path import check_installed
from fedeas_flwr.common.text import one_line
from fedeas_flwr.data.own_images import OwnImages, decode_images, few_names, match_classes

LABEL_NAMES = ("label", "labels", "fine_label", "target", "class", "y")


def is_hf(where: str | Path) -> bool:
    """Return whether a location is ``hf:PATH``, or a folder saved by `save_to_disk`."""
    if str(where).startswith(HF):
        return True
    path = str(expanded(where))  # os.path is three times as fast as Path, and every message asks
    return any(os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json"))


def read_splits(where: str | Path) -> tuple[OwnImages, OwnImages | None]:
    """Return the train and the test split; the latter is None if the dataset has one split only."""
    spec = HfSpec.parse(str(where))
    with _opened(spec) as splits:
        train_name, test_name = spec.options.get("train", "train"), spec.options.get("test", "test")
        if len(splits) == 1 and not {"train", "test"} & spec.options.keys():
            return _read(spec, next(iter(splits.values())), None, spec.size, None), None
        for name in (train_name, test_name):
            _check_split(spec, name, splits)
        train = _read(spec, splits[train_name], None, spec.size, None)
        height, width, channels = train.images.shape[1:]
        return train, _read(spec, splits[test_name], train.classes, (height, width), channels)


def read_set(where: str | Path, classes: Sequence[str], size: tuple[int, int], channels: int) -> OwnImages:
    """Return a node's images, converted to the run's classes, size and channels: its only split, or ``train``."""
    spec = HfSpec.parse(str(where))
    with _opened(spec) as splits:
        name = spec.options.get("train") or (next(iter(splits)) if len(splits) == 1 else "train")
        _check_split(spec, name, splits)
        return _read(spec, splits[name], classes, size, channels)


def fingerprint(where: str | Path) -> str:
    """Return a hash of the name and of the names, sizes and modification times of the files; no file is read."""
    spec = HfSpec.parse(str(where))
    if not spec.path.exists():
        if not spec.may_be_on_hub:
            raise _not_there(spec)
        return hashlib.sha256(repr((spec.where, spec.written)).encode()).hexdigest()[:16]
    path = Path(os.path.realpath(spec.path))
    inside = (Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names)
    stats = [(str(file), file.stat()) for file in (inside if path.is_dir() else [path])]
    facts = sorted((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
    return hashlib.sha256(repr((str(path), spec.written, facts)).encode()).hexdigest()[:16]


def _not_there(spec: HfSpec) -> FileNotFoundError:
    kinds = "a folder saved by datasets, an image folder, parquet, or USER/NAME on the Hub"
    return FileNotFoundError(f"{HF}{spec.where} is not there; must be {kinds}")


@contextmanager
def _opened(spec: HfSpec) -> Iterator[Mapping[str, Any]]:
    """Yield the dataset's splits by name; a dataset without splits is called ``all``."""
    check_installed("datasets", "datasets", HF + spec.where)
    if not spec.path.exists() and (not spec.may_be_on_hub or os.environ.get("FEDEAS_OFFLINE")):
        raise _not_there(spec)
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(CRITICAL)  # its errors are raised too
    with TemporaryDirectory(prefix="fedeas-") as temporary:  # the images are stored in our cache
        path = spec.path
        try:
            if not path.exists():
                found = datasets.load_dataset(spec.where)
            elif path.is_file():
                found = datasets.load_dataset("parquet", data_files=str(path), cache_dir=temporary)
            elif is_hf(path):
                found = datasets.load_from_disk(str(path))
            else:
                found = datasets.load_dataset(str(path.absolute()), cache_dir=temporary)
        except IndexError:  # datasets 4.8 reads no table without rows
            raise ValueError(f"{path} has no images, or has a split without any") from None
        except Exception as error:  # Arrow's errors, those of datasets and of the Hub have no common type
            raise ValueError(f"{path} cannot be read by the package datasets ({one_line(error)})") from None
        yield found if isinstance(found, datasets.DatasetDict) else {"all": found}


def _check_split(spec: HfSpec, name: str, splits: Mapping[str, Any]) -> None:
    if name not in splits:
        has = few_names([*splits])
        raise ValueError(f"{spec.where} has no split {name!r}; it has {has}: add train=NAME test=NAME after the path")


class _StoredImage(NamedTuple):
    """One image of a dataset, which is read when it is opened."""

    rows: Any
    column: str
    row: int
    where: str

    @property
    def name(self) -> str:
        return f"row {self.row}"

    def __str__(self) -> str:
        return f"{self.where}: row {self.row}"

    def open(self, mode: str = "rb") -> BinaryIO:
        stored = self.rows[self.row][self.column]
        if not stored or (stored["bytes"] is None and not stored["path"]):
            raise ValueError("it is empty")
        if stored["bytes"] is not None:
            return BytesIO(stored["bytes"])
        refuse_special(file := Path(stored["path"]))
        return file.open("rb")


def _read(
    spec: HfSpec, rows: Any, classes: Sequence[str] | None, size: tuple[int, int] | None, channels: int | None
) -> OwnImages:
    import datasets

    path = Path(spec.where)
    if not len(rows):
        raise ValueError(f"{path} has no images")
    image = _image_column(spec, rows.features)
    labels, names = match_classes(path, "the labels", *_labels(spec, rows, image), classes)
    try:
        rows = rows.select_columns(image).cast_column(image, datasets.Image(decode=False))
    except Exception:  # Arrow's errors and TypeError
        raise ValueError(f"{path}: column {image!r} has {rows.features[image]}, not images") from None
    stored = [_StoredImage(rows, image, row, spec.where) for row in range(len(rows))]
    return OwnImages(decode_images(path, stored, size, channels), labels, names)


def _image_column(spec: HfSpec, features: Mapping[str, Any]) -> str:
    from datasets import Image, Value

    def holds_images(feature: Any) -> bool:
        stored_bytes = isinstance(feature, dict) and feature.keys() == {"bytes", "path"}
        return isinstance(feature, Image) or feature == Value("binary") or stored_bytes

    return _column(spec, "image", features, [name for name, feature in features.items() if holds_images(feature)])


def _column(spec: HfSpec, what: str, features: Mapping[str, Any], found: Sequence[str]) -> str:
    """Return the column that the user names, or the only one found."""
    given = spec.options.get(what)
    if given in features:
        return str(given)
    if given or len(found) != 1:
        why = f"no column {given!r}" if given else f"{len(found) or 'no'} columns that may hold the {what}s"
        raise ValueError(f"{spec.where} has {why}; it has {few_names([*features])}: add {what}=COLUMN after the path")
    return found[0]


def _labels(spec: HfSpec, rows: Any, image: str) -> tuple[NDArray[np.int64], NDArray[np.str_] | None]:
    """Return the labels, and the names of the classes unless they are numbers."""
    from datasets import ClassLabel

    features = rows.features
    found = [name for name, feature in features.items() if isinstance(feature, ClassLabel)]
    found = found or [name for name in features if name in LABEL_NAMES and name != image]
    column = _column(spec, "label", features, found)
    values = rows.select_columns(column).with_format(None)[:][column]
    if None in values:
        raise ValueError(f"{spec.where}: row {values.index(None)} has no label in column {column!r}")
    if all(isinstance(value, str) for value in values):
        names = sorted(set(values), key=(lambda name: (int(name), name)) if all(map(str.isdecimal, values)) else None)
        numbers = {name: label for label, name in enumerate(names)}
        return np.array([numbers[value] for value in values], np.int64), np.array(names, str)
    if not all(type(value) is int for value in values):
        raise ValueError(f"{spec.where}: column {column!r} has {features[column]}; labels must be names or integers")
    if min(values) < 0:
        raise ValueError(f"{spec.where}: column {column!r} has a label {min(values)}; must be whole numbers from 0")
    named = isinstance(features[column], ClassLabel)
    return np.array(values, np.int64), np.array(features[column].names, str) if named else None
