"""Names of the records in a message, and conversion between arrays and records.

A record holds arrays as bytes or, within one process, by reference. `read_validated` reads only expected arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedeas_flwr.common.errors import MessageError
from fedeas_flwr.common.npy import Arrays, array_bytes, is_tensor, read_array, to_numpy

ARRAYS, BUFFERS, EXTRA, CONFIG, METRICS = "arrays", "buffers", "extra", "config", "metrics"
WEIGHT, LOSS = "num-examples", "loss"
_ENCODING = "numpy.ndarray"  # Flower's name for NumPy's file format
_HEADER_BYTES = 1024  # maximum header of NumPy's format; 128 are usual
_MAX_GROWTH = 1e6
"""Maximum norm of a reply's arrays, as a multiple of the norm of the model's; a model's norm below 1 counts as 1."""
_MAX_NORM = 1.7e38
"""Maximum norm of a reply's arrays: half of float32's largest value, so that no average of replies overflows."""
_MAX_WHOLE = 2**53
"""Maximum absolute value of whole numbers, such as counters: averages are computed in float64."""


class InProcessRecord(ArrayRecord):
    """Arrays passed by reference within one process, for the inline grid only.

    To Flower it is an empty record. Neither side may change the arrays.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        self.__dict__["live"] = dict(arrays)


class NumpyArray(Array):
    """An array of Flower's that is encoded only if Flower asks for its bytes.

    Ray pickles every message, and transfers a NumPy array out of band: it is copied once, into shared memory, where the
    receiver maps it as a read-only view. In one process the receiver gets a view of the sender's array.
    """

    __qualname__ = "Array"  # which Flower writes in front of the bytes

    def __init__(self, array: NDArray[Any]) -> None:
        view = array.view()
        view.flags.writeable = False
        self.__dict__.update(dtype=str(array.dtype), shape=array.shape, stype=_ENCODING, array=view)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The array in NumPy's file format."""
        return array_bytes(self.__dict__["array"])

    def numpy(self) -> NDArray[Any]:
        """Return a copy, which may be changed."""
        return self.__dict__["array"].copy()  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return _numpy_array, (self.__dict__["array"],)


def _numpy_array(array: NDArray[Any]) -> NumpyArray:
    return NumpyArray(array)  # pickle does not find the class by its name


def to_record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return a new record of arrays, which must never be changed from now on; tensors are passed by reference."""
    if any(map(is_tensor, arrays.values())):
        return InProcessRecord(arrays)
    record = ArrayRecord()
    for key, value in arrays.items():  # the constructor would replace each array by a copy of its own class
        record[key] = NumpyArray(np.asarray(value, order="C"))
    return record


def to_arrays(record: ArrayRecord) -> Arrays:
    """Return a record's arrays: read-only NumPy arrays, or the tensors of an in-process record."""
    if isinstance(record, InProcessRecord):
        return dict(record.__dict__["live"])
    return {key: _read(value) for key, value in record.items()}


def _read(array: Array) -> NDArray[Any]:
    found: NDArray[Any] = array.__dict__["array"] if isinstance(array, NumpyArray) else read_array(array.data)
    return found


def encoded(record: ArrayRecord) -> ArrayRecord:
    """Return the record with NumPy arrays in place of tensors: it can be copied, stored and sent."""
    return to_record(to_numpy(to_arrays(record))) if isinstance(record, InProcessRecord) else record


def to_in_process(record: ArrayRecord, like: ArrayRecord) -> ArrayRecord:
    """Undo `encoded`: return tensors on the devices of those of ``like`` if that is an in-process record."""
    if not isinstance(like, InProcessRecord):
        return record
    tensors = to_arrays(like)
    return InProcessRecord({key: tensors[key].new_tensor(array) for key, array in to_arrays(record).items()})


def read_validated(record: ArrayRecord, expected: Arrays) -> Arrays:
    """Return a record's arrays, whose names, dtypes and shapes must be those of ``expected``, and values finite.

    They are tensors on the devices of those of ``expected`` if these are tensors.

    The norm of all floating-point arrays together must be at most 1e6 times that of ``expected``, or 1e6 if that is
    below 1, as of a model or a control variate of zeros; whole numbers must be within ±2**53. Otherwise raise
    `MessageError`, before decoding where the declared dtype or shape is wrong.
    """
    if isinstance(record, InProcessRecord):
        return _check_in_process(to_arrays(record), expected)
    _check_names(record, expected)
    arrays: Arrays = {}
    for key, like in expected.items():
        _check_dtype_and_shape(key, record[key], like)  # as declared, before the bytes are decoded
        arrays[key] = _decoded(key, record[key], like)
    if any(map(is_tensor, expected.values())):
        return _check_in_process({key: like.new_tensor(arrays[key]) for key, like in expected.items()}, expected)
    _check_norm(math.sqrt(sum(_sum_of_squares(key, array) for key, array in arrays.items())), expected)
    return arrays


def _sum_of_squares(key: str, array: NDArray[Any]) -> float:
    """Return an array's sum of squares, 0 for whole numbers; raise for NaN, infinity and too large whole numbers."""
    if array.dtype.kind in "iu" and array.size:
        _check_whole(f"array {key} holds", int(array.min()), int(array.max()))
    if array.dtype.kind != "f":
        return 0.0
    flat = array.reshape(-1)
    # One pass in the array's own dtype, infinite or NaN if an element is, or if it overflows. Unlike `np.dot`, einsum
    # starts no threads of its own.
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.einsum("i,i->", flat, flat))
    if math.isfinite(squares):
        return squares
    if not np.isfinite(flat).all():
        raise MessageError(f"array {key} holds NaN or infinity")
    return float(np.square(flat, dtype=np.float64).sum())


def _check_whole(holds: str, *numbers: int) -> None:
    for number in numbers:
        if abs(number) > _MAX_WHOLE:
            raise MessageError(f"{holds} {number}, wanted -2**53 to 2**53")


def _check_norm(norm: float, expected: Arrays) -> None:
    if norm <= _MAX_GROWTH:  # almost always, and the model's own norm need not be computed
        return
    own = math.sqrt(sum(_sum_of_squares(key, array) for key, array in to_numpy(expected).items()))
    limit = min(_MAX_GROWTH * max(own, 1.0), _MAX_NORM)
    if norm > limit:
        raise MessageError(f"the norm is {norm:.3g}, wanted {limit:.3g} at most; the model's is {own:.3g}")


def _check_names(found: Iterable[str], expected: Arrays) -> None:
    names = list(found)
    if names != list(expected):
        odd = sorted(set(names) ^ set(expected)) or ["the order"]
        raise MessageError(f"arrays differ from those wanted: {odd[0]}")


def _check_dtype_and_shape(key: str, found: Any, like: Any) -> None:
    if _dtype(found) != _dtype(like) or tuple(found.shape) != tuple(like.shape):
        got, want = (f"{array.dtype}{list(array.shape)}" for array in (found, like))
        raise MessageError(f"array {key} is {got}, wanted {want}")


def _decoded(key: str, sent: Array, like: Any) -> Any:
    """Return the NumPy array of a reply's array, decoded after checking its size and encoding.

    A few bytes may declare an array of terabytes, which NumPy would allocate before reading the data.
    """
    if not isinstance(sent, NumpyArray):
        most = like.nbytes + _HEADER_BYTES
        if not isinstance(sent.data, bytes):
            raise MessageError(f"array {key} has data of type {type(sent.data).__name__}, wanted bytes")
        if len(sent.data) > most:
            raise MessageError(f"array {key} has {len(sent.data)} bytes, wanted {most} at most")
        if sent.stype != _ENCODING:
            encoding = f"its encoding is '{sent.stype[:50]}', wanted {_ENCODING}"
            raise MessageError(f"array {key} cannot be decoded: {encoding}")
    try:
        array = _read(sent)
    except ValueError as error:
        raise MessageError(f"array {key} cannot be decoded: {error}") from None
    if str(array.dtype) != _dtype(like) or array.shape != tuple(like.shape):
        raise MessageError(f"array {key} decodes to {array.dtype}{list(array.shape)}")
    return array


def _dtype(array: Any) -> str:
    """Return the name of the dtype of a NumPy array, a tensor or a Flower array."""
    return str(array.dtype).removeprefix("torch.")


def _check_in_process(arrays: Arrays, expected: Arrays) -> Arrays:
    """Check tensors as `read_validated` checks arrays, with one or two GPU synchronisations; return them."""
    import torch  # loaded already if there are tensors

    _check_names(arrays, expected)
    for key, like in expected.items():
        _check_dtype_and_shape(key, arrays[key], like)
    whole = [array.reshape(-1) for array in arrays.values() if array.dtype == torch.int64 and array.numel()]
    if whole:
        _check_whole("the arrays hold", *torch.stack(torch.cat(whole).aminmax()).tolist())
    floats = [array for array in arrays.values() if array.is_floating_point() and array.numel()]
    if not floats:
        return arrays
    # A norm is NaN or infinite if an element is, and all norms take one or two kernel launches.
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(floats)), dtype=torch.float64))
    if not math.isfinite(norm):
        if not all(bool(array.isfinite().all()) for array in floats):
            raise MessageError("the arrays hold NaN or infinity")
        norm = math.hypot(*(float(torch.linalg.vector_norm(array, dtype=torch.float64)) for array in floats))
    _check_norm(norm, expected)
    return arrays
