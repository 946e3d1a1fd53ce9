"""The names of Flower's records, and arrays in them.

Arrays are there as bytes, or handed over within one process; they are read only if they are those wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fedeas_flwr.common.npy import array_bytes, read_array
from fedeas_flwr.runs.checkpoints import Arrays, is_tensor, to_numpy

ARRAYS, BUFFERS, EXTRA, CONFIG, METRICS = "arrays", "buffers", "extra", "config", "metrics"
WEIGHT, LOSS = "num-examples", "loss"
_ENCODING = "numpy.ndarray"  # Flower's name for NumPy's file format
_HEADER_BYTES = 1024  # of NumPy's format before the data; 128 are usual


class ArrayMismatchError(ValueError):
    """Arrays that are not those wanted; the text is one line."""


class InProcessRecord(ArrayRecord):
    """Arrays handed over within one process, without bytes: the one exception to messages, for the inline grid.

    To Flower it is an empty record. What it holds must not be changed by either side.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__["live"] = dict(arrays)


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Build a new record: one that was sent must never be changed in place. Tensors are handed over as they are."""
    if any(map(is_tensor, arrays.values())):
        return InProcessRecord(arrays)
    return ArrayRecord({key: _encoded(np.asarray(value)) for key, value in arrays.items()})


def _encoded(array: Any) -> Array:
    return Array(dtype=str(array.dtype), shape=array.shape, stype=_ENCODING, data=array_bytes(array))


def to_arrays(record: ArrayRecord) -> Arrays:
    """Read a record: NumPy arrays, not to be written to, or the tensors of a live one."""
    if isinstance(record, InProcessRecord):
        return dict(record.__dict__["live"])
    return {key: read_array(value.data) for key, value in record.items()}


def encoded(record: ArrayRecord) -> ArrayRecord:
    """The record as Flower knows it, which may be copied, kept and sent on.

    Tensors that were handed over become NumPy arrays, and data that came out of band (common/npy.py) become bytes:
    Flower makes an Array of nothing else, and neither pickle nor protobuf takes a view.
    """
    if isinstance(record, InProcessRecord):
        return to_record(to_numpy(to_arrays(record)))
    if all(isinstance(array.data, bytes) for array in record.values()):
        return record
    return ArrayRecord({key: _with_bytes(array) for key, array in record.items()})


def _with_bytes(array: Array) -> Array:
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=bytes(array.data))


def to_in_process(record: ArrayRecord, like: ArrayRecord) -> ArrayRecord:
    """The way back: tensors beside those of ``like``, if it is live."""
    if not isinstance(like, InProcessRecord):
        return record
    tensors = to_arrays(like)
    return InProcessRecord({key: tensors[key].new_tensor(array) for key, array in to_arrays(record).items()})


def read_validated(record: ArrayRecord, expected: Arrays) -> Arrays:
    """Read a record whose names, kinds and shapes must be those of ``expected``, and whose values must be finite.

    Raises
    ------
    ArrayMismatchError
        By name, before the bytes are decoded where they need not be.
    """
    if isinstance(record, InProcessRecord):
        return _check_in_process(to_arrays(record), expected)
    _check_names(record, expected)
    arrays: Arrays = {}
    for key, like in expected.items():
        _check_kind(key, record[key], like)  # as declared, before the bytes are decoded
        array = _decoded(key, record[key], like)
        if not np.isfinite(array).all():
            raise ArrayMismatchError(f"array {key} holds NaN or infinity")
        arrays[key] = array
    return arrays


def _check_names(found: Iterable[str], expected: Arrays) -> None:
    names = list(found)
    if names != list(expected):
        odd = sorted(set(names) ^ set(expected)) or ["the order"]
        raise ArrayMismatchError(f"arrays differ from those wanted: {odd[0]}")


def _check_kind(key: str, found: Any, like: Any) -> None:
    if str(found.dtype) != str(like.dtype) or tuple(found.shape) != tuple(like.shape):
        got, want = (f"{array.dtype}{list(array.shape)}" for array in (found, like))
        raise ArrayMismatchError(f"array {key} is {got}, wanted {want}")


def _decoded(key: str, sent: Array, like: Any) -> Any:
    """Read an array's bytes, after a look at how many they are and at what they say of themselves.

    A few bytes may claim to be an array of terabytes, and NumPy makes room for it before it counts them.
    """
    most = like.nbytes + _HEADER_BYTES
    if not _is_of_bytes(sent.data):
        raise ArrayMismatchError(f"array {key} has data of type {type(sent.data).__name__}, wanted bytes")
    if len(sent.data) > most:
        raise ArrayMismatchError(f"array {key} has {len(sent.data)} bytes, wanted {most} at most")
    try:
        if sent.stype != _ENCODING:
            raise ValueError(f"its encoding is '{sent.stype[:50]}', wanted {_ENCODING}")
        array = read_array(sent.data)
    except ValueError as error:
        raise ArrayMismatchError(f"array {key} cannot be decoded: {error}") from None
    if array.dtype != like.dtype or array.shape != like.shape:
        raise ArrayMismatchError(f"array {key} decodes to {array.dtype}{list(array.shape)}")
    return array


def _is_of_bytes(data: Any) -> bool:
    """Whether they are bytes, or the view of bytes that comes out of band; its length must be what it is read as."""
    if isinstance(data, memoryview):
        return data.format == "B" and data.ndim == 1 and data.c_contiguous and data.readonly
    return isinstance(data, bytes)


def _check_in_process(arrays: Arrays, expected: Arrays) -> Arrays:
    """The same checks on tensors, with one look at the GPU for all of them."""
    import torch  # where tensors are handed over it is there already

    _check_names(arrays, expected)
    for key, like in expected.items():
        _check_kind(key, arrays[key], like)
    floats = [array for array in arrays.values() if array.is_floating_point() and array.numel()]
    # A maximum norm is NaN or infinite where an element is, and all of them are a launch or two.
    if floats and not bool(torch.stack(torch._foreach_norm(floats, float("inf"))).isfinite().all()):
        raise ArrayMismatchError("the arrays hold NaN or infinity")
    return arrays
