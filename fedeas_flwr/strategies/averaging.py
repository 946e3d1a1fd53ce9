"""States whose arrays are NumPy's or tensors on a GPU: their weighted mean, and one made to be like another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedeas_flwr.runs import Arrays


def weighted_average(states: Sequence[Arrays], weights: Sequence[float]) -> Arrays:
    """Average states by weights, in the order given; whole-number arrays (counters) stay whole.

    Sums run in the arrays' own precision and in place: float32 weights need no float64 copies of a model.
    """
    total = float(sum(weights))
    averaged: Arrays = {}
    for key, first in states[0].items():
        parts = [state[key] for state in states]
        if not _is_float(first):
            parts = [_as_double(part) for part in parts]
        mean = parts[0] * (weights[0] / total)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            mean += part * (weight / total)
        averaged[key] = mean if _is_float(first) else _rounded(mean, first)
    return averaged


def like_model(arrays: Arrays, model: Arrays) -> Arrays:
    """Arrays in the kind, place and order of the model's.

    A strategy may compute in float64, or in NumPy on a model of tensors, and a file gives its arrays in another order.
    """

    def restored(array: Any, like: Any) -> Any:
        if hasattr(like, "cpu"):
            return array.to(like) if hasattr(array, "cpu") else like.new_tensor(array)
        return np.asarray(array, dtype=like.dtype)

    return {key: restored(arrays[key], like) for key, like in model.items()}


def _is_float(array: Any) -> bool:
    return bool(array.dtype.is_floating_point) if hasattr(array, "cpu") else array.dtype.kind == "f"


def _as_double(array: Any) -> Any:
    return array.double() if hasattr(array, "cpu") else np.asarray(array, dtype=np.float64)


def _rounded(mean: Any, like: Any) -> Any:
    return mean.round().to(like.dtype) if hasattr(like, "cpu") else np.asarray(np.rint(mean), dtype=like.dtype)
