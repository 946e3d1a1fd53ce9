"""NumPy's file format, read with suspicion: no pickles, and no room made for what a file only claims to hold."""

from __future__ import annotations

import io
import math
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from pickle import PickleBuffer
from typing import IO, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.text import one_line

_parsing = threading.Lock()
"""NumPy parses a file's header as Python, and Python 3.11 counts the depth of that wrongly when two threads do it."""

_ALWAYS_ALLOWED = 2**26
_MAX_RATIO = 100
"""Images and indices shrink to a tenth at best; what a zip shrinks a thousandfold is a bomb."""


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, whether in Fortran's order, and dtype; Python objects, which only a pickle holds, are refused."""
    with _parsing:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(file)
        except Exception as error:  # NumPy lets Python's tokenizer and parser raise whatever they like
            raise ValueError(one_line(error)) from None
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    return shape, fortran_order, dtype


class OutOfBandBytes(bytes):
    """Bytes that pickle may leave out of its stream, as it does with NumPy's arrays.

    Ray pickles every message. Plain bytes are copied into the stream and out of it again, each time under the
    interpreter's lock; these go into shared memory with one copy and are mapped there by whoever receives them, as a
    `memoryview` not to be written to. A pickle without buffers beside it, and everything but a pickle, sees bytes.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        if protocol.__index__() < 5:
            return bytes, (bytes(self),)
        return memoryview, (PickleBuffer(self),)  # a type of Python's own: the receiver imports nothing for it

    def __copy__(self) -> OutOfBandBytes:
        return self

    def __deepcopy__(self, memo: object) -> OutOfBandBytes:
        return self


def array_bytes(array: NDArray[Any]) -> OutOfBandBytes:
    """An array as `numpy.save` would write it.

    Its data are copied twice, since a subclass of bytes can only be made from bytes; what that costs is a few per cent
    of what Ray's pickling of plain bytes does. An array that `read_array` made of such bytes gives them back as they
    are: a model that was averaged is sent without being copied again.
    """
    header = _header(array.dtype.str, array.shape)
    held = getattr(array.base, "base", None)  # an array in a shape is a view of the vector, and that one of the bytes
    # `read_array` makes the vector of all that follows the header: an array that the header is of is all of it.
    if isinstance(held, OutOfBandBytes) and array.flags.c_contiguous and held[: len(header)] == header:
        return held
    array = np.ascontiguousarray(array).reshape(array.shape)  # the former makes a vector of a single number
    return OutOfBandBytes(b"".join((header, array.reshape(-1).view(np.uint8).data)))


@lru_cache(maxsize=4096)
def _header(kind: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


def read_array(content: bytes | memoryview) -> NDArray[Any]:
    """Read an array whose bytes are all there, and no more than that: a view of them, not to be written to.

    Bytes that came out of band lie in memory of Ray's, which stays taken as long as there is a view of them.

    Raises
    ------
    ValueError
        If the bytes are not those of one array.
    """
    # The length of a header of version 1.0 follows six bytes of magic and two of version.
    start = 10 + int.from_bytes(content[8:10], "little")
    shape, dtype = _parsed(bytes(content[:start]))  # a copy: what is remembered must not hold on to all of them
    wanted, there = math.prod(shape) * dtype.itemsize, len(content) - start
    if wanted != there:
        raise ValueError(f"{dtype}{list(shape)} needs {wanted} bytes, but {there} are there")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


@lru_cache(maxsize=4096)
def _parsed(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The same few headers come in every message of a run, and parsing one takes longer than a small array does."""
    if header[6:8] != b"\x01\x00":
        raise ValueError("it is not in version 1.0 of NumPy's format")
    shape, fortran_order, dtype = _read_header(io.BytesIO(header))
    if fortran_order:
        raise ValueError("its elements are not in the order of C")
    return shape, dtype


def archive_keys(path: Path) -> set[str]:
    """The names of an ``.npz`` file's arrays.

    Raises
    ------
    ValueError
        If it is no such file.
    """
    with _damage_as_value_error(), zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".npy") for name in archive.namelist()}


def read_headers(path: Path, keys: Sequence[str]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and dtype of arrays of an ``.npz`` file, without reading them; raises as `read_archive` does."""
    found = {}
    with _damage_as_value_error(), zipfile.ZipFile(path) as archive:
        for key in keys:
            with archive.open(f"{key}.npy") as member:
                shape, _, dtype = _read_header(member)
            found[key] = shape, dtype
    return found


def read_archive(path: Path, keys: Sequence[str], most_bytes: int | None = None) -> dict[str, NDArray[Any]]:
    """Read arrays of an ``.npz`` file.

    Parameters
    ----------
    path, keys
        Which arrays of which file.
    most_bytes
        What they may be together, below what is allowed for the file's own size.

    Raises
    ------
    ValueError
        If it is damaged, lacks a key, holds pickles, or would unpack to far more than images ever do.
    """
    claimed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in read_headers(path, keys).values())
    with _damage_as_value_error():
        most = max(_ALWAYS_ALLOWED, _MAX_RATIO * path.stat().st_size)
        most = most if most_bytes is None else min(most, most_bytes)
        if claimed > most:
            raise ValueError(f"it would unpack to {claimed:,} bytes, and {most:,} are allowed")
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in keys}


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(one_line(error) or type(error).__name__) from None
