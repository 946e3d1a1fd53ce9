"""Γ̂: how far apart the directions lie in which a round's clients moved the model (the paper's supplement, A)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fedeas_flwr.runs import Arrays, plain

_AT_ONCE = 2**25
"""Numbers in float64 that are looked at together: 256 MB, whatever the model and the number of clients."""


def gradient_dissimilarity(start: Arrays, ends: Sequence[Arrays], weights: Sequence[float]) -> float:
    """Γ̂ = Σ_k w_k ‖Δ̂_k − Σ_j w_j Δ̂_j‖², with Δ̂_k = Δ_k/‖Δ_k‖, Δ_k = θ − θ_k and w_k = N_k/Σ_j N_j.

    Multiplied out it needs only the inner products ⟨Δ_i, Δ_j⟩: Σ_k w_k ‖Δ̂_k‖² − Σ_ij w_i w_j ⟨Δ̂_i, Δ̂_j⟩, which is the
    paper's 1 − ‖mean‖². They are summed in float64, since Γ̂ may be as small as 1e-6. A client that did not move has no
    direction: its Δ̂ is zero.

    Parameters
    ----------
    start
        θ: the model that was sent, arrays or tensors.
    ends
        θ_k: what each client made of it.
    weights
        N_k: each client's real samples.
    """
    products: Any = 0.0
    for keys in _in_parts(start, len(ends)):
        base = _flat(start, keys)
        moved = _stacked([base - _flat(end, keys) for end in ends])
        products = products + moved @ moved.T
    gram = plain({"products": products})["products"]
    norms = np.sqrt(np.diag(gram))
    share = np.where(norms > 0, np.asarray(weights, dtype=np.float64) / float(sum(weights)), 0.0)
    scaled = share / np.where(norms > 0, norms, 1.0)
    return max(0.0, float(share.sum() - scaled @ gram @ scaled))


def _in_parts(start: Arrays, clients: int) -> Iterator[list[str]]:
    """The model's keys, a few at a time, so that memory stays bounded."""
    keys: list[str] = []
    size = 0
    for key, array in start.items():
        count = clients * int(np.prod(array.shape, dtype=np.int64))
        if keys and size + count > _AT_ONCE:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += count
    yield keys


def _flat(state: Arrays, keys: Sequence[str]) -> Any:
    parts = [state[key].reshape(-1) for key in keys]
    if not hasattr(parts[0], "cpu"):
        return np.concatenate(parts).astype(np.float64, copy=False)
    import torch  # only where models are tensors already

    return torch.cat(parts).double()


def _stacked(rows: Sequence[Any]) -> Any:
    if not hasattr(rows[0], "cpu"):
        return np.stack(rows)
    import torch

    return torch.stack(list(rows))
