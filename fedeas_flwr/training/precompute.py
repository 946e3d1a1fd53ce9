"""What an objective knows of every sample before the first step (`Objective.precompute`): when, and where it lies."""

from __future__ import annotations

import torch

from fedeas_flwr.training.augmentation import VIEWS
from fedeas_flwr.training.objective import Inputs, Objective, Tensors


def needs_precompute(objective: Objective, inputs: Inputs) -> bool:
    """Whether an engine computes something before the steps: not if random views make the images new in each."""
    return type(objective).precompute is not Objective.precompute and VIEWS not in inputs.tables


class PrecomputedRows:
    """Buffers that stay where they are, for what a pass over all samples in chunks of a batch finds.

    They are a whole number of chunks long, so that the last one's padding has rows of its own, which nobody reads.

    Parameters
    ----------
    samples
        For how many there is room, one at least.
    batch_size
        Of a chunk.
    device
        Where.

    Attributes
    ----------
    table
        int64 ``[chunks, batch size]``: which samples a chunk is of, in order, the very last one again as padding.
    """

    def __init__(self, samples: int, batch_size: int, device: str) -> None:
        rows = -(-samples // batch_size) * batch_size
        self.table = torch.arange(rows, device=device).clamp_(max=samples - 1).view(-1, batch_size)
        self._buffers: dict[str, torch.Tensor] = {}

    def chunks(self, samples: int) -> int:
        """How many chunks so many samples are."""
        return -(-samples // self.table.shape[1])

    def put(self, chunk: torch.Tensor, found: Tensors) -> None:
        """Keep what was found of a chunk, whose number is on the device.

        The first time says what there is to keep. On a GPU that is a capture's warm-up: what a graph allocates itself
        is the graph's alone.
        """
        for name, rows in found.items():
            if name not in self._buffers:
                self._buffers[name] = rows.new_zeros((len(self.table), *rows.shape))
            self._buffers[name].index_copy_(0, chunk, rows[None])

    def of(self, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of a batch's samples, given by their indices."""
        return {name: buffer.flatten(0, 1).index_select(0, samples) for name, buffer in self._buffers.items()}
