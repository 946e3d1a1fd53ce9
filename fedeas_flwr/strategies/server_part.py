"""What a strategy may be, beside what Flower asks of one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from flwr.app import ArrayRecord

from fedeas_flwr.array_records import to_arrays
from fedeas_flwr.checkpoints import Arrays, StrategyState, plain


@runtime_checkable
class Stateful(Protocol):
    """A strategy that remembers something between rounds: what `state` gives, `load_state` takes back on resume."""

    def state(self) -> StrategyState:
        """All that changes from round to round, the model itself left out."""
        ...

    def load_state(self, state: StrategyState) -> None:
        """Go on from there."""
        ...


@runtime_checkable
class SendsExtra(Protocol):
    """A strategy whose two parts exchange arrays beside the model, in a record of their own (`array_records.EXTRA`).

    They are of the model's own kind: NumPy arrays, or tensors where models are handed over within the process.
    """

    def extra(self) -> Arrays:
        """What goes to every client of the round; asked after `configure_train`."""
        ...

    def extra_wanted(self) -> Arrays:
        """Arrays with the names, kinds and shapes that a reply must bring; empty if it brings none."""
        ...


def beside(model: ArrayRecord, arrays: Arrays) -> Arrays:
    """The arrays as extra ones must be: tensors where the model's lie if it is handed over, else NumPy's."""
    first = next(iter(to_arrays(model).values()), None)
    if first is None or not hasattr(first, "cpu"):
        return plain(arrays)
    import torch  # only where models are tensors already

    return {key: torch.as_tensor(array, device=first.device) for key, array in arrays.items()}
