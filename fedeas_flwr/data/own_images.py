"""Read labelled images from an ``.npz`` file, or from a folder with one subfolder per class.

Custom datasets (``dataset = "own:PATH"``), image banks and the nodes of a deployment are read here. Nothing is
unpickled, and sizes are checked from file headers before pixels are read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from os import DirEntry
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.files import expanded, refuse_special
from fedeas_flwr.common.npy import archive_keys, read_archive
from fedeas_flwr.common.text import MAX_LINE, counted, one_line

if TYPE_CHECKING:  # slow to import
    from PIL import Image


logger = logging.getLogger(__name__)

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff")
_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF")
"""Formats of Pillow that are read, whatever the suffix: for others, such as EPS, Pillow may start programs."""
MAX_BYTES = 8 << 30
"""Maximum bytes of all pixels together: a small file may claim to unpack to any size."""
MAX_CLASSES = 10_000
_GREY_OF_16_BITS = ("I;16", "I;16B", "I;16L")
_GREY = ("1", "L", "LA", *_GREY_OF_16_BITS)
_MODES_OF_ANY_RANGE = ("I", "F")
"""Modes of Pillow: 16-bit grey, grey, and modes without a fixed value range."""
_ORIENTATION = 0x0112
_FIRST_SWAPPED = 5
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    _FIRST_SWAPPED: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""EXIF orientation tag, its first value with swapped height and width, and Pillow's name of each inverse."""


class OwnImages(NamedTuple):
    """Images, their labels and the names of the classes."""

    images: NDArray[np.uint8]
    """uint8 ``[N, H, W, C]``, C = 1 or 3."""
    labels: NDArray[np.int64]
    """int64 ``[N]``, from 0 to the number of classes - 1."""
    classes: tuple[str, ...]


def read_images(
    where: str | Path,
    *,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
) -> OwnImages:
    """Read labelled images; FileNotFoundError and ValueError name the path and what was expected there, in one line.

    They are in a folder with one subfolder of image files (`SUFFIXES`) per class; or in an ``.npz`` file with ``x``
    (uint8 ``[N, H, W, C]`` or ``[N, H, W]``), ``y`` (labels ``[N]``) and, if classes have names, ``classes`` (strings).

    ``classes`` are the names of the classes in the order of their labels, if given by the dataset. Subfolders, and the
    ``classes`` of an ``.npz`` file, then name a class by its name or its number (by number only if no name is a
    number). Otherwise the subfolders are the classes, sorted by name, or numerically if all names are whole numbers.

    With ``size``, ``(H, W)``, files of another size are resampled with anti-aliasing, and arrays must have this size;
    without it all images must have the same size. ``channels`` converts files to grey (1) or RGB (3), and arrays must
    have this many; by default it is 1 if all files are grey (a ``.webp`` file never is), else 3. Of 16 bits per channel
    the upper 8 are used.
    """
    path = expanded(where)
    if path.is_dir():
        return _read_folder(path, classes, size, channels)
    if path.suffix == ".npz" and path.is_file():
        return _read_npz(path, classes, size, channels)
    raise _not_images(path, where)


# ---------------------------------------------------------------------------------------------------------- folders


def _read_folder(
    path: Path, classes: Sequence[str] | None, size: tuple[int, int] | None, channels: int | None
) -> OwnImages:
    inside = _class_folders(path)
    names = tuple(classes) if classes is not None else tuple(folder.name for folder in inside)
    numbers = _numbers_of(path, "subfolder", [folder.name for folder in inside], names)
    files = [(file, numbers[folder.name]) for folder in inside for file in sorted(folder.iterdir()) if _is_image(file)]
    there = {file.parent for file, _ in files}
    if not files:
        called = f" named {names[0]!r} … or 0 …" if classes else ""
        raise ValueError(
            f"{path} has no images; must have one subfolder per class{called}, with {', '.join(SUFFIXES)} files"
        )
    if classes is None and (empty := [folder for folder in inside if folder not in there]):
        raise ValueError(f"{empty[0]} has no images; every subfolder of {path} is a class: add images, or remove it")
    check_classes(path, names)
    _log_skipped(path, {file for file, _ in files})
    images = decode_images(path, [file for file, _ in files], size, channels)
    return OwnImages(images, np.array([label for _, label in files], np.int64), names)


class ImageFile(Protocol):
    """An image file, or what can be opened like one; its text names it in errors."""

    @property
    def name(self) -> str:
        """Return a short name."""

    def open(self, mode: Literal["rb"]) -> BinaryIO:
        """Open its content."""


def decode_images(
    path: Path, files: Sequence[ImageFile], size: tuple[int, int] | None, channels: int | None
) -> NDArray[np.uint8]:
    """Return the files' pixels, ``[N, H, W, C]``; see `read_images` for size and channels."""
    size, channels = _size_and_channels(path, files, size, channels)
    _check_bytes(path, len(files), *size, channels)
    images = np.empty((len(files), *size, channels), np.uint8)
    for position, file in enumerate(files):
        images[position] = _read_file(file, size, channels)
    return images


def _numbers_of(path: Path, what: str, called: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Map class names and, unless one is a number, class numbers to labels; raise if one of ``called`` is unknown."""
    numbers = {name: label for label, name in enumerate(names)}
    if not any(map(str.isdecimal, names)):
        numbers |= {str(label): label for label in range(len(names))}
    if unknown := [name for name in called if name not in numbers]:
        raise ValueError(f"{path} has a {what} {unknown[0]!r}; the dataset's classes are {few_names(names)}")
    return numbers


def _class_folders(path: Path) -> list[Path]:
    """Return the subfolders sorted by name, or numerically (2 before 10) if all names are whole numbers."""
    inside = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    if all(folder.name.isdecimal() for folder in inside):
        return sorted(inside, key=lambda folder: (int(folder.name), folder.name))
    return sorted(inside)


def _is_image(file: Path | DirEntry[str]) -> bool:
    return file.name.lower().endswith(SUFFIXES) and not file.name.startswith(".")


def _log_skipped(path: Path, read: Collection[Path]) -> None:
    """Log the number of ignored files and one example; hidden files are not counted."""
    others = (file.relative_to(path) for file in path.rglob("*") if file not in read and file.is_file())
    if skipped := sorted(file for file in others if not any(part.startswith(".") for part in file.parts)):
        these = f"{counted(len(skipped), 'file')} ignored, such as {skipped[0]}"
        _log_once(f"{path}: {these}; only {', '.join(SUFFIXES)} files directly in a class's folder are read")


@cache
def _log_once(text: str) -> None:
    logger.warning(one_line(text, MAX_LINE))


def _size_and_channels(
    path: Path, files: Sequence[ImageFile], size: tuple[int, int] | None, channels: int | None
) -> tuple[tuple[int, int], int]:
    """Return the size and channels that all images are converted to, from the files' headers."""
    if size is not None and channels is not None:
        return size, channels
    headers = [_read_header(file) for file in files]
    sizes = {found: file for (found, _), file in zip(headers, files, strict=True)}
    if size is None and len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        how = (
            "resize them to one size first" if isinstance(first, Path) else f"add size={one[0]}x{one[1]} after the path"
        )
        raise ValueError(
            f"images in {path} differ ({first.name} is {one[1]}×{one[0]}, {second.name} {other[1]}×{other[0]}): "
            f"{how} (see docs/your-own-data-and-generator.md)"
        )
    grey = all(mode in _GREY for _, mode in headers)
    return size or next(iter(sizes)), channels or (1 if grey else 3)


def _read_header(file: ImageFile) -> tuple[tuple[int, int], str]:
    with _opened(file) as image:
        swapped = _orientation(image) >= _FIRST_SWAPPED
        return (image.width, image.height) if swapped else (image.height, image.width), image.mode


@contextmanager
def _opened(file: ImageFile) -> Iterator[Image.Image]:
    """Open an image; raise an error of reading it in the block as a `ValueError` that names the file."""
    from PIL import Image

    try:
        if isinstance(file, Path):
            refuse_special(file)
        # Opened by name, an uncompressed TIFF is memory-mapped by Pillow, wrongly if it is rotated.
        with file.open("rb") as content, Image.open(content, formats=_FORMATS) as image:
            yield image
    # PIL's "cannot identify" is an OSError, a broken PNG a SyntaxError, what it cannot convert a ValueError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        why = re.sub(r" <_io\.\w+ .*?>", "", one_line(error))  # Pillow names the open file as an object
        raise ValueError(f"{file} is not an image that can be read ({why})") from None


def _orientation(image: Image.Image) -> int:
    """Return an image's EXIF orientation, 1 (upright) if the header has none."""
    from PIL import Image

    if image.format == "TIFF":  # Pillow applies it itself, and reports the size after it
        return 1
    try:
        found = Image.Image.getexif(image).get(_ORIENTATION)  # a PNG's own method would decode the pixels first
    except Exception:  # Pillow raises many types for damaged EXIF, and the pixels may be intact
        return 1
    return found if isinstance(found, int) and found in _TURNS else 1


def _read_file(file: ImageFile, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    from PIL import Image

    with _opened(file) as image:
        if image.mode in _MODES_OF_ANY_RANGE:
            raise ValueError(f"Pillow's mode {image.mode} has no fixed range: save the image with 8 or 16 bits")
        pixels: Image.Image = image
        if image.mode in _GREY_OF_16_BITS:  # the upper 8 bits, as Pillow does for RGB; `convert` clips at 255
            pixels = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if turn := _TURNS.get(_orientation(image)):
            pixels = pixels.transpose(Image.Transpose[turn])
        pixels = pixels.convert("L" if channels == 1 else "RGB")
    if pixels.size != (size[1], size[0]):
        pixels = pixels.resize((size[1], size[0]), Image.Resampling.LANCZOS)
    return np.asarray(pixels, dtype=np.uint8).reshape(*size, channels)


# -------------------------------------------------------------------------------------------------------- npz files


def _read_npz(
    path: Path, classes: Sequence[str] | None, size: tuple[int, int] | None, channels: int | None
) -> OwnImages:
    arrays = read_arrays(path, ("x", "y"), optional=("classes",))
    images, labels = with_channels(arrays["x"]), arrays["y"]
    check_arrays(path, "x", images, "y", labels)
    expected = (*(size or images.shape[1:3]), channels or images.shape[3])
    if images.shape[1:] != expected:
        must = ", ".join(map(str, expected))
        raise ValueError(f"{path} holds x uint8 {list(images.shape)}; x must be uint8 [N, {must}]")
    return OwnImages(images, *match_classes(path, "y", labels, arrays.get("classes"), classes))


def match_classes(
    path: Path, y: str, labels: NDArray[Any], called: NDArray[Any] | None, classes: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return labels ``y`` and the names of their classes: ``classes``, or without these the file's own, ``called``."""
    if classes is None:
        names = class_names(path, called, int(labels.max()) + 1)
    else:
        names = tuple(classes)
        if called is not None:
            labels = _renumber_labels(path, labels, class_names(path, called, 0), names)
    check_classes(path, names)
    check_labels(path, y, labels, names)
    return labels.astype(np.int64), names


def _renumber_labels(
    path: Path, labels: NDArray[Any], called: Sequence[str], names: Sequence[str]
) -> NDArray[np.int64]:
    """Translate the labels of a file that names its classes to those of ``names``, whose order may differ."""
    numbers = _numbers_of(path, "class", called, names)
    if len({numbers[name] for name in called}) < max(1, len(called)):
        raise ValueError(
            f"{path} holds classes = {few_names(called) or 'none'}; each must be present once, by name or number"
        )
    check_labels(path, "y", labels, called)
    return np.take(np.array([numbers[name] for name in called], np.int64), labels)


def read_arrays(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Read arrays of an ``.npz`` file; raise ValueError for pickles and for more than `MAX_BYTES` unpacked."""
    present = _npz_keys(path)
    try:
        if not present.issuperset(needed):
            has = few_names(sorted(present)) or "nothing"
            raise ValueError(f"must be an .npz file with {' and '.join(needed)}; it has {has}")
        return read_archive(path, [*needed, *(key for key in optional if key in present)], MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {one_line(error)}") from None


def _npz_keys(path: Path) -> set[str]:
    try:
        return archive_keys(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {one_line(error)}") from None


def with_channels(images: NDArray[Any]) -> NDArray[Any]:
    """Return images with a channel axis, added to grey images without one."""
    return images[..., None] if images.ndim == 3 else images


def check_arrays(path: Path, x: str, images: NDArray[Any], y: str, labels: NDArray[Any]) -> None:
    """Raise ValueError unless the arrays are images with one label each."""
    found, labelled = f"{x} {images.dtype} {list(images.shape)}", f"{y} {labels.dtype} {list(labels.shape)}"
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
        raise ValueError(f"{path} holds {found}; {x} must be uint8 [N, H, W, 1 or 3]")
    if not images.size:
        raise ValueError(f"{path} holds {found}, which has no images")
    if labels.shape != images.shape[:1]:
        must = f"{y} must be {list(images.shape[:1])}, one label per image"
        raise ValueError(f"{path} holds {found}, {labelled}; {must}")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{path} holds {labelled}; {y} must be whole numbers from 0, such as int64")
    if labels.min() < 0:
        raise ValueError(f"{path}: in {y} a label is {labels.min()}; must be whole numbers from 0")


def check_labels(path: Path, y: str, labels: NDArray[Any], names: Sequence[str]) -> None:
    if (label := labels.max()) >= len(names):
        raise ValueError(f"{path}: in {y} a label is {label}; must be 0 to {len(names) - 1} ({len(names)} classes)")


def class_names(path: Path, stored: NDArray[Any] | None, number: int) -> tuple[str, ...]:
    """Return the class names stored in a file, or the class numbers if it has none."""
    if stored is None:
        _check_number(path, number)  # first: a wrong label could make millions of names
        return tuple(str(label) for label in range(number))
    if stored.ndim != 1 or stored.dtype.kind != "U":
        raise ValueError(f"{path}: classes is {stored.dtype} {list(stored.shape)}; it must be a list of strings")
    return tuple(map(str, stored))


# ------------------------------------------------------------------------------------------------------------ checks


def _check_number(path: Path, number: int) -> None:
    if not 2 <= number <= MAX_CLASSES:
        raise ValueError(f"{path} has {counted(number, 'class', 'classes')}; must have 2 to {MAX_CLASSES:,}")


def check_classes(path: Path, names: Sequence[str]) -> None:
    _check_number(path, len(names))
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two classes have the same name in {few_names(names)}")


def _check_bytes(path: Path, number: int, height: int, width: int, channels: int) -> None:
    if (claimed := number * height * width * channels) > MAX_BYTES:
        raise ValueError(
            f"{path}: {number:,} images of {height}×{width} are {claimed:,} bytes; must be at most {MAX_BYTES:,}"
        )


def few_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])}, … ({len(names)})"


def _not_images(path: Path, where: str | Path) -> FileNotFoundError:
    expected = "a folder with one subfolder per class, or an .npz file"
    return FileNotFoundError(f"{str(where)!r} {'is not' if path.exists() else 'is not there; must be'} {expected}")
