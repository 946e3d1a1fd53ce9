"""Average model states of NumPy arrays or tensors, and cast one state like another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedeas_flwr.common.cores import chunks, map_ordered, threads_for
from fedeas_flwr.common.npy import Arrays, is_tensor

_BLOCK = 2**17
"""Number of elements summed at once. The sum and one product of this size fit a core's own cache, and a loop over them
takes long enough that threads seldom wait for the interpreter lock, which they need between loops."""
_TINY_ARRAYS = 64
"""Number of arrays per task of a thread if they are far smaller than a block."""


def weighted_average(states: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Return the weighted mean of states, summed in the order given; integer arrays (counters) are rounded.

    Sums use the arrays' own dtype and run in place: float32 weights need no float64 copies of a model.
    """
    total = float(sum(weights))
    shares = [weight / total for weight in weights]
    if any(map(is_tensor, states[0].values())):
        return _average_tensors(states, shares)
    parts: dict[str, list[NDArray[Any]]] = {}
    averaged: Arrays = {}
    for key, first in states[0].items():
        whole = first.dtype.kind != "f"
        rows = [np.asarray(state[key], dtype=np.float64) if whole else state[key] for state in states]
        parts[key], averaged[key] = [row.reshape(-1) for row in rows], np.empty(first.shape, rows[0].dtype)
    _average_arrays(averaged, parts, shares)
    for key, first in states[0].items():
        if first.dtype.kind != "f":
            averaged[key] = np.asarray(np.rint(averaged[key]), dtype=first.dtype)
    return averaged


def _average_arrays(means: Arrays, parts: Mapping[str, Sequence[NDArray[Any]]], shares: Sequence[float]) -> None:
    """Write the sums of parts times shares into ``means``, block by block in several threads.

    Blocks share no element, and each element is summed over the clients in their order: neither the thread nor the
    block size changes a bit.
    """

    def add_up(blocks: Sequence[tuple[str, int]]) -> None:
        for key, start in blocks:
            rows = [row[start : start + _BLOCK] for row in parts[key]]
            block = means[key].reshape(-1)[start : start + _BLOCK]
            product = np.empty(block.size, block.dtype)
            np.multiply(rows[0], shares[0], out=block)
            for row, share in zip(rows[1:], shares[1:], strict=True):
                np.multiply(row, share, out=product)
                block += product

    for _ in map_ordered(add_up, chunks(means, _BLOCK, _BLOCK, _TINY_ARRAYS), threads_for(means, len(shares))):
        pass


def _average_tensors(states: Sequence[Arrays], shares: Sequence[float]) -> Arrays:
    """Return the same sums for tensors, with one call per state: on a GPU every call is a kernel launch."""
    first = states[0]
    floats = [key for key, tensor in first.items() if tensor.dtype.is_floating_point]
    counters = [key for key in first if key not in set(floats)]
    averaged: Arrays = {}
    if floats:
        means = torch._foreach_mul([first[key] for key in floats], shares[0])
        for state, share in zip(states[1:], shares[1:], strict=True):
            torch._foreach_add_(means, torch._foreach_mul([state[key] for key in floats], share))
        averaged = dict(zip(floats, means, strict=True))
    if counters:
        rows = [torch.cat([state[key].reshape(-1).double() for key in counters]) for state in states]
        mean = rows[0] * shares[0]
        for row, share in zip(rows[1:], shares[1:], strict=True):
            mean += row * share
        parts = torch.split(mean.round(), [first[key].numel() for key in counters])
        averaged |= {k: p.to(first[k].dtype).reshape(first[k].shape) for k, p in zip(counters, parts, strict=True)}
    return {key: averaged[key] for key in first}


def cast_like(arrays: Arrays, model: Arrays) -> Arrays:
    """Return arrays with the model's dtypes and order, on its device.

    A strategy may compute in float64, or in NumPy for a model of tensors, and a file stores arrays in another order.
    """

    def restored(array: Any, like: Any) -> Any:
        if is_tensor(like):
            return array.to(like) if is_tensor(array) else like.new_tensor(array)
        return np.asarray(array, dtype=like.dtype)

    return {key: restored(arrays[key], like) for key, like in model.items()}
