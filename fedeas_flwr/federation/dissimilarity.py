"""Γ̂: how far apart the directions lie in which a round's clients moved the model (the paper's supplement, A)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.cores import chunks, map_ordered, threads_for
from fedeas_flwr.runs.checkpoints import Arrays, to_numpy

_BLOCK = 2**15
"""Elements of each client's array that are looked at together: with ten clients the cache holds them in float64."""
_PIECE = 4
"""Blocks that a thread works on at a time; each one's products wait to be added up in their turn."""
_ROOM = 2**27
"""Bytes that all threads' blocks may take together: with ten clients a thread's are 3 MB, with a thousand 262."""
_AT_ONCE = 2**25
"""The same on a GPU, of all clients' tensors: 256 MB, whatever the model and the number of clients."""


def gradient_dissimilarity(start: Arrays, ends: Sequence[Arrays], weights: Sequence[float]) -> float:
    """Γ̂ = Σ_k w_k ‖Δ̂_k − Σ_j w_j Δ̂_j‖², with Δ̂_k = Δ_k/‖Δ_k‖, Δ_k = θ − θ_k and w_k = N_k/Σ_j N_j.

    Multiplied out it needs only the inner products ⟨Δ_i, Δ_j⟩: Σ_k w_k ‖Δ̂_k‖² − Σ_ij w_i w_j ⟨Δ̂_i, Δ̂_j⟩, which is
    the paper's 1 − ‖mean‖². They are summed in float64, since Γ̂ may be as small as 1e-6. A client that did not move
    has no direction: its Δ̂ is zero.

    Parameters
    ----------
    start
        θ: the model that was sent, arrays or tensors.
    ends
        θ_k: what each client made of it.
    weights
        N_k: each client's real samples.
    """
    tensors = any(hasattr(array, "cpu") for array in start.values())
    gram = _products_of_tensors(start, ends) if tensors else _products(start, ends)
    norms = np.sqrt(np.diag(gram))
    share = np.where(norms > 0, np.asarray(weights, dtype=np.float64) / float(sum(weights)), 0.0)
    scaled = share / np.where(norms > 0, norms, 1.0)
    return max(0.0, float(share.sum() - scaled @ gram @ scaled))


def _products(start: Arrays, ends: Sequence[Arrays]) -> NDArray[np.float64]:
    """⟨Δ_i, Δ_j⟩ of NumPy arrays, block by block: no model is ever there in float64.

    Several blocks at once, but their products are added up in the order of the blocks, however many threads there are.
    """
    models = [{key: state[key].reshape(-1) for key in start} for state in (start, *ends)]
    threads = min(
        threads_for(start, len(models), while_clients_train=True), max(1, _ROOM // (len(models) * _BLOCK * 8))
    )
    rooms = [np.empty(len(models) * _BLOCK) for _ in range(threads)]

    def multiplied(blocks: Sequence[tuple[str, int]]) -> list[NDArray[np.float64]]:
        room, found = rooms.pop(), []
        for key, first in blocks:
            base, *rows = (model[key][first : first + _BLOCK] for model in models)
            # No gaps between the rows: `dot` would copy them, and no longer see that both factors are the same.
            block, moved = room[: base.size], room[base.size : len(models) * base.size].reshape(len(ends), -1)
            block[:] = base
            for row, into in zip(rows, moved, strict=True):
                np.subtract(block, row, out=into)
            # Not `moved @ moved.T`, which gives the same bits but keeps the interpreter all the while.
            found.append(np.dot(moved, moved.T))
        rooms.append(room)
        return found

    products = np.zeros((len(ends), len(ends)))
    for found in map_ordered(multiplied, chunks(start, _BLOCK, _PIECE * _BLOCK, _PIECE), threads):
        for product in found:
            products += product
    return products


def _products_of_tensors(start: Arrays, ends: Sequence[Arrays]) -> NDArray[np.float64]:
    """The same where the tensors lie, many at once: on a GPU each block would be launches of its own."""
    import torch  # only where models are tensors already

    products: Any = 0.0
    for keys in _in_parts(start, len(ends)):
        base, *rows = (torch.cat([state[key].reshape(-1) for key in keys]).double() for state in (start, *ends))
        moved = torch.stack([base - row for row in rows])
        products = products + moved @ moved.T
    found: NDArray[np.float64] = to_numpy({"products": products})["products"]
    return found


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
