"""Compute Γ̂: how much the directions of the clients' updates in a round differ (the paper's supplement, A)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.common.cores import chunks, map_ordered, threads_for
from fedeas_flwr.common.npy import Arrays, is_tensor

_BLOCK = 2**15
"""Number of elements per client in one block. In float64, the blocks of ten clients fit into the CPU's cache."""
_BLOCKS_PER_TASK = 4
"""Number of blocks that a thread multiplies in one task. Their products are kept until they are added in order."""
_MAX_BUFFER_BYTES = 2**27
"""Maximum bytes of all threads' blocks together. One thread needs 3 MB with ten clients and 262 MB with a thousand.
If one thread needs more than the maximum, only one runs."""
_MAX_TENSOR_ELEMENTS = 2**25
"""Maximum number of elements, over all clients, that are multiplied at once on a device: 256 MB in float64."""


def gradient_dissimilarity(start: Arrays, ends: Sequence[Arrays], weights: Sequence[float]) -> float:
    """Return Γ̂ = Σ_k w_k ‖Δ̂_k − Σ_j w_j Δ̂_j‖², with Δ̂_k = Δ_k/‖Δ_k‖, Δ_k = θ − θ_k and w_k = N_k/Σ_j N_j.

    Expanded, this is Σ_k w_k ‖Δ̂_k‖² − Σ_ij w_i w_j ⟨Δ̂_i, Δ̂_j⟩, the paper's 1 − ‖mean‖². This form needs only the inner
    products ⟨Δ_i, Δ_j⟩. The products are summed in float64, because Γ̂ may be as small as 1e-6. A client with Δ_k = 0
    has no direction, so its Δ̂_k is zero. ``start`` is θ, the global model, ``ends`` are the clients' θ_k, and
    ``weights`` their numbers of real samples N_k.
    """
    gram = (_products_of_tensors if any(map(is_tensor, start.values())) else _products)(start, ends)
    norms = np.sqrt(np.diag(gram))
    share = np.where(norms > 0, np.asarray(weights, dtype=np.float64) / float(sum(weights)), 0.0)
    scaled = share / np.where(norms > 0, norms, 1.0)
    return max(0.0, float(share.sum() - scaled @ gram @ scaled))


def _products(start: Arrays, ends: Sequence[Arrays]) -> NDArray[np.float64]:
    """Return ⟨Δ_i, Δ_j⟩ of NumPy arrays, computed in blocks, so that no whole model is converted to float64.

    Threads multiply blocks in parallel, but the products are added in the order of the blocks, so the sum does not
    depend on the number of threads.
    """
    models = [{key: state[key].reshape(-1) for key in start} for state in (start, *ends)]
    threads = min(
        threads_for(start, len(models), while_clients_train=True),
        max(1, _MAX_BUFFER_BYTES // (len(models) * _BLOCK * 8)),
    )
    buffers = [np.empty(len(models) * _BLOCK) for _ in range(threads)]

    def multiply(blocks: Sequence[tuple[str, int]]) -> list[NDArray[np.float64]]:
        buffer, found = buffers.pop(), []
        for key, first in blocks:
            base, *rows = (model[key][first : first + _BLOCK] for model in models)
            # The rows must be contiguous: else `dot` copies them and misses that both factors are the same matrix.
            block, deltas = buffer[: base.size], buffer[base.size : len(models) * base.size].reshape(len(ends), -1)
            block[:] = base
            for row, into in zip(rows, deltas, strict=True):
                np.subtract(block, row, out=into)
            # Not `deltas @ deltas.T`, which gives the same bits but does not release the GIL.
            found.append(np.dot(deltas, deltas.T))
        buffers.append(buffer)
        return found

    products = np.zeros((len(ends), len(ends)))
    for found in map_ordered(multiply, chunks(start, _BLOCK, _BLOCKS_PER_TASK * _BLOCK, _BLOCKS_PER_TASK), threads):
        for product in found:
            products += product
    return products


def _products_of_tensors(start: Arrays, ends: Sequence[Arrays]) -> NDArray[np.float64]:
    """Return ⟨Δ_i, Δ_j⟩ of tensors, computed on their device, many arrays at once to save kernel launches."""
    import torch  # already imported if models are tensors

    products: Any = 0.0
    for keys in _key_groups(start, len(ends)):
        base, *rows = (torch.cat([state[key].reshape(-1) for key in keys]).double() for state in (start, *ends))
        deltas = torch.stack([base - row for row in rows])
        products = products + deltas @ deltas.T
    return np.asarray(products.cpu(), dtype=np.float64)


def _key_groups(start: Arrays, clients: int) -> Iterator[list[str]]:
    """Yield the model's keys in groups within `_MAX_TENSOR_ELEMENTS`; a key above it is a group of its own."""
    keys: list[str] = []
    size = 0
    for key, array in start.items():
        count = clients * int(np.prod(array.shape, dtype=np.int64))
        if keys and size + count > _MAX_TENSOR_ELEMENTS:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += count
    yield keys
