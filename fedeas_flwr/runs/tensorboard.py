"""Write a run's rounds for TensorBoard (`tensorboard = true`, the extra ``tensorboard``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError


def check_installed() -> None:
    """Raise `ConfigError` if the package tensorboard is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError("tensorboard = true: needs the package tensorboard, pip install 'fedeas-flwr[tensorboard]'")


@contextmanager
def event_log(folder: Path, done: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that writes a round's record; every number in it becomes a curve.

    Parameters
    ----------
    folder
        The folder that TensorBoard reads.
    done
        Number of rounds already recorded; what an interrupted run wrote after them is hidden.
    """
    check_installed()
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder), purge_step=done + 1)  # type: ignore[no-untyped-call, unused-ignore]

    def write(record: Mapping[str, Any]) -> None:
        for name, value in curves(record):
            writer.add_scalar(name, value, record["round"])
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


def curves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by name: ``seconds/clients``, ``per_class_accuracy/3``; lists are skipped."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from curves(value, f"{name}/")
        elif key == "per_class_accuracy":
            yield from curves({str(label): accuracy for label, accuracy in enumerate(value)}, f"{name}/")
        elif isinstance(value, (int, float)) and key not in ("round", "worst_client"):
            yield name, float(value)
