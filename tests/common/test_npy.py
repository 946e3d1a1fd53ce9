"""NumPy's format without copies: equal bytes, equal arrays, and anything else is rejected."""

from __future__ import annotations

import gc
import io
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedeas_flwr.common.npy import archive_keys, array_bytes, read_archive, read_array, read_headers

ARRAYS: dict[str, NDArray[Any]] = {
    "floats": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4),
    "halves": np.arange(5, dtype=np.float16),
    "wholes": np.arange(-3, 3, dtype=np.int64),
    "bytes": np.arange(256, dtype=np.uint8).reshape(16, 16),
    "truths": np.array([[True], [False]]),
    "words": np.array(["cat", "Hund"]),
    "other end first": np.arange(4, dtype=">f8"),
    "one number": np.array(7, np.int64),
    "nothing": np.zeros((0,), np.float32),
    "nothing of a shape": np.zeros((3, 0, 2), np.float32),
    "one of each axis": np.ones((1, 1, 1), np.float64),
}


def saved(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ARRAYS)
def test_array_bytes_equal_those_of_numpy(name: str) -> None:
    array = ARRAYS[name]
    assert array_bytes(array) == saved(array)
    read = read_array(array_bytes(array))
    assert (read.dtype, read.shape) == (array.dtype, array.shape)
    assert np.array_equal(read, array)


@pytest.mark.parametrize("kind", ["transposed", "every second", "backwards"])
def test_array_bytes_of_views_are_in_c_order(kind: str) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    view = {"transposed": whole.T, "every second": whole[:, ::2], "backwards": whole[::-1]}[kind]
    assert array_bytes(view) == saved(view.copy(order="C"))
    assert np.array_equal(read_array(array_bytes(view)), view)


def test_read_array_returns_a_read_only_view() -> None:
    content = array_bytes(np.arange(6, dtype=np.int32))
    read = read_array(content)
    assert np.shares_memory(read, np.frombuffer(content, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_header_cache_does_not_keep_the_array_alive() -> None:
    class Memory(bytearray):
        """Bytes that can be weakly referenced."""

    memory = Memory(array_bytes(np.arange(9173, dtype=np.float64)))  # a shape that no other test uses
    gone = weakref.ref(memory)
    read_array(memoryview(memory).toreadonly())
    del memory
    gc.collect()
    assert gone() is None


def written(version: tuple[int, int], array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version, allow_pickle=True)
    return buffer.getvalue()


WHOLE = np.arange(6, dtype=np.float32).reshape(2, 3)
REFUSED: dict[str, tuple[bytes, str]] = {
    "version 2": (written((2, 0), WHOLE), "version 1.0"),
    "version 3": (written((3, 0), WHOLE), "version 1.0"),
    "the order of Fortran": (saved(np.asfortranarray(WHOLE)), "not in C order"),
    "Python objects": (written((1, 0), np.array([None])), "Python objects"),
    "a byte too few": (saved(WHOLE)[:-1], r"float32\[2, 3\] needs 24 bytes, but there are 23"),
    "a byte too many": (saved(WHOLE) + b"!", "needs 24 bytes, but there are 25"),
    "half a header": (saved(WHOLE)[:40], "."),
    "no header": (b"\x93NUMPY\x01\x00", "."),
    "nothing": (b"", "version 1.0"),
    "a header longer than all": (b"\x93NUMPY\x01\x00" + struct.pack("<H", 65535) + b"{", "."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_read_array_rejects_invalid_bytes(name: str) -> None:
    content, reason = REFUSED[name]
    for _ in range(2):  # the header cache must not accept the second one
        for arrived in (content, memoryview(content)):
            with pytest.raises(ValueError, match=reason):
                read_array(arrived)


def test_read_archive_returns_requested_arrays_within_limits(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=WHOLE, y=np.arange(2))
    assert archive_keys(tmp_path / "a.npz") == {"x", "y"}
    assert read_headers(tmp_path / "a.npz", ("x",)) == {"x": ((2, 3), np.dtype(np.float32))}
    found = read_archive(tmp_path / "a.npz", ("x",), most_bytes=24)
    assert list(found) == ["x"] and np.array_equal(found["x"], WHOLE)
    with pytest.raises(ValueError, match="would unpack to 24 bytes, but at most 23 are allowed"):
        read_archive(tmp_path / "a.npz", ("x",), most_bytes=23)
    with pytest.raises(ValueError, match=r"it lacks .*z\.npy"):
        read_archive(tmp_path / "a.npz", ("x", "z"))
    (tmp_path / "b.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="not a zip file"):
        archive_keys(tmp_path / "b.npz")
