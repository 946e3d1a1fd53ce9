"""Convert tensors to NumPy arrays, and read NumPy's files safely: no pickles, no memory for merely claimed sizes."""

from __future__ import annotations

import hashlib
import io
import math
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.files import refuse_special
from fedeas_flwr.common.text import one_line

Arrays = dict[str, Any]
"""Name → NumPy array, or a tensor if a model is passed by reference within the process."""

_parsing = threading.Lock()
"""NumPy parses a file's header as Python, and Python 3.11 miscounts the nesting depth if two threads parse at once."""

_MAX_HEADER_BYTES = 2**14
"""Maximum bytes of a file's header; NumPy reads all that a header claims to have, and then refuses 10,000 and more."""
_ALWAYS_ALLOWED = 2**26
_MAX_RATIO = 100
"""Maximum compression ratio of a file: images and indices compress to a tenth at best, a zip bomb a thousandfold."""


def is_tensor(array: Any) -> bool:
    """Return whether an array is a torch tensor; this module does not import torch."""
    return hasattr(array, "cpu")


def to_numpy(arrays: Mapping[str, Any]) -> Arrays:
    """Return contiguous NumPy arrays, copied from the GPU where needed."""
    return {k: np.asarray(v.cpu().numpy() if is_tensor(v) else v, order="C") for k, v in arrays.items()}


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether in Fortran order, and dtype; raise `ValueError` for Python objects, which need a pickle."""
    start = io.BytesIO(file.read(_MAX_HEADER_BYTES))
    with _parsing:
        try:
            version = np.lib.format.read_magic(start)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(start)
        except Exception as error:  # Python's tokenizer and parser raise many kinds of errors here
            raise ValueError(one_line(error)) from None
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    return shape, fortran_order, dtype


def array_bytes(array: NDArray[Any]) -> bytes:
    """Return an array as `numpy.save` would write it."""
    array = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray turns a scalar into a vector
    return b"".join((_header(array.dtype.str, array.shape), array.reshape(-1).view(np.uint8).data))


@lru_cache(maxsize=4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def read_array(content: bytes | memoryview) -> NDArray[Any]:
    """Return an array as a read-only view of bytes; raise `ValueError` unless they hold exactly one array."""
    # The length of a header of version 1.0 follows six bytes of magic and two of version.
    start = 10 + int.from_bytes(content[8:10], "little")
    shape, dtype = _parsed(bytes(content[:start]))  # a copy: the cache must not keep all bytes alive
    needed, given = math.prod(shape) * dtype.itemsize, len(content) - start
    if needed != given:
        raise ValueError(f"{dtype}{list(shape)} needs {needed} bytes, but there are {given}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


@lru_cache(maxsize=4096)
def _parsed(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of a header.

    Cached: messages of a run repeat the same few headers, and parsing one takes longer than reading a small array.
    """
    if header[6:8] != b"\x01\x00":
        raise ValueError("it is not in version 1.0 of NumPy's format")
    shape, fortran_order, dtype = _read_header(io.BytesIO(header))
    if fortran_order:
        raise ValueError("its elements are not in C order")
    return shape, dtype


def archive_keys(path: Path) -> set[str]:
    """Return the names of the arrays in an ``.npz`` file; raise `ValueError` if it is none."""
    with _damage_as_value_error(), _open_archive(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def read_headers(path: Path, keys: Sequence[str]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return shape and dtype of arrays in an ``.npz`` file without reading them; raise as `read_archive` does."""
    found = {}
    with _damage_as_value_error(), _open_archive(path) as archive:
        for key in keys:
            with archive.open(f"{key}.npy") as member:
                shape, _, dtype = _read_header(member)
            found[key] = shape, dtype
    return found


def read_archive(path: Path, keys: Sequence[str], most_bytes: int | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays ``keys`` of an ``.npz`` file.

    Raise `ValueError` if it is damaged, lacks a key, holds pickles, or would unpack to more than ``most_bytes`` or to
    far more bytes than images do.
    """
    claimed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in read_headers(path, keys).values())
    with _damage_as_value_error():
        most = max(_ALWAYS_ALLOWED, _MAX_RATIO * path.stat().st_size)
        most = most if most_bytes is None else min(most, most_bytes)
        if claimed > most:
            raise ValueError(f"it would unpack to {claimed:,} bytes, but at most {most:,} are allowed")
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in keys}


def _open_archive(path: Path) -> zipfile.ZipFile:
    refuse_special(path)
    return zipfile.ZipFile(path)


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(one_line(error) or type(error).__name__) from None


def arrays_digest(arrays: Arrays) -> str:
    """Return a digest of names, dtypes, shapes and elements, whatever the order of the arrays."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name}\0{array.dtype.str}{array.shape}\0".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
