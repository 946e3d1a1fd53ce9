"""NumPy's file format, read with suspicion: no pickles, and no room made for what a file only claims to hold."""

from __future__ import annotations

import io
import math
import threading
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_parsing = threading.Lock()
"""NumPy parses a file's header as Python, and Python 3.11 counts the depth of that wrongly when two threads do it."""

_ALWAYS_ALLOWED = 2**26
_LARGEST_RATIO = 100
"""Images and indices shrink to a tenth at best; what a zip shrinks a thousandfold is a bomb."""


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read what an array is from the beginning of its file; the file then stands at the data.

    Returns
    -------
    shape, dtype

    Raises
    ------
    ValueError
        If it is no header, or one of Python objects, which only a pickle can hold.
    """
    with _parsing:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except Exception as error:  # NumPy lets Python's tokenizer and parser raise whatever they like
            raise ValueError(" ".join(str(error).split())[:200]) from None
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    return shape, dtype


def read_array(content: bytes) -> NDArray[Any]:
    """Read an array whose bytes are all there, and no more than that.

    Raises
    ------
    ValueError
        If the bytes are not those of one array.
    """
    file = io.BytesIO(content)
    shape, dtype = read_header(file)
    wanted, there = math.prod(shape) * dtype.itemsize, len(content) - file.tell()
    if wanted != there:
        raise ValueError(f"{dtype}{list(shape)} needs {wanted} bytes, but {there} are there")
    file.seek(0)
    with _parsing:
        array: NDArray[Any] = np.load(file, allow_pickle=False)
    return array


def read_archive(path: Path, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of an ``.npz`` file.

    Raises
    ------
    ValueError
        If it is damaged, lacks a key, holds pickles, or would unpack to far more than images ever do.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = 0
            for key in keys:
                with archive.open(f"{key}.npy") as member:
                    shape, dtype = read_header(member)
                claimed += math.prod(shape) * dtype.itemsize
        most = max(_ALWAYS_ALLOWED, _LARGEST_RATIO * path.stat().st_size)
        if claimed > most:
            raise ValueError(f"it would unpack to {claimed:,} bytes, and {most:,} are allowed for its size")
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in keys}
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise ValueError(" ".join(str(error).split())[:200] or type(error).__name__) from None
