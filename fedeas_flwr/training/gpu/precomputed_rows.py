"""Buffers for the values that `Objective.precompute` returns, which captured steps read."""

from __future__ import annotations

import torch

from fedeas_flwr.training.objective import Tensors


class PrecomputedRows:
    """Buffers with fixed addresses for values per sample, computed in chunks of one batch.

    A buffer holds a whole number of chunks, for at least one sample. The last chunk may end with padding rows, which
    are never read. ``table`` has the sample indices of each chunk, int64 ``[chunks, batch size]``, in order, padded
    with the last index.
    """

    def __init__(self, samples: int, batch_size: int, device: str) -> None:
        rows = -(-samples // batch_size) * batch_size
        self.table = torch.arange(rows, device=device).clamp_(max=samples - 1).view(-1, batch_size)
        self._buffers: dict[str, torch.Tensor] = {}

    def chunks(self, samples: int) -> int:
        """Return the number of chunks for ``samples`` samples."""
        return -(-samples // self.table.shape[1])

    def put(self, chunk: torch.Tensor, found: Tensors) -> None:
        """Store the values of one chunk; ``chunk`` is its number, as a tensor on the device.

        The first call allocates the buffers. On a GPU, the first call is in the warm-up before a capture, since memory
        allocated during a capture belongs to the graph.
        """
        for name, rows in found.items():
            if name not in self._buffers:
                self._buffers[name] = rows.new_zeros((len(self.table), *rows.shape))
            self._buffers[name].index_copy_(0, chunk, rows[None])

    def of(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rows of the samples with these indices."""
        return {name: buffer.flatten(0, 1).index_select(0, samples) for name, buffer in self._buffers.items()}
