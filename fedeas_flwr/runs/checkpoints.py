"""The server's state after a round, and its safetensors files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.npy import Arrays, to_numpy


@dataclass(frozen=True)
class StrategyState:
    """State that a strategy keeps between rounds in addition to the model: momentum, moments, a clipping norm."""

    arrays: Arrays = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """The complete state of the server after a round."""

    round: int
    trainable: Arrays
    buffers: Arrays
    accepted: dict[int, int] = field(default_factory=dict)
    """Client → the last round whose reply the server used."""
    generated: dict[int, int] = field(default_factory=dict)
    """Client → number of images in its cache, as last reported."""
    shares: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """Client → its share of a matched budget (`policies.Share`), computed once per run."""
    strategy: StrategyState = field(default_factory=StrategyState)
    run: str = ""
    """Identity of the run (`RunDirectory.identity`); empty in checkpoints of older versions."""


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as one file; a reader sees the old file or the new one, never a part."""
    parts = {"trainable": checkpoint.trainable, "buffers": checkpoint.buffers, "strategy": checkpoint.strategy.arrays}
    state = {
        "round": checkpoint.round,
        "accepted": checkpoint.accepted,
        "generated": checkpoint.generated,
        "shares": checkpoint.shares,
        "strategy": checkpoint.strategy.numbers,
        "run": checkpoint.run,
    }
    arrays = {f"{part}/{key}": value for part, found in parts.items() for key, value in found.items()}
    write_arrays(path, arrays, {"state": json.dumps(state)})


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a file.

    Raises
    ------
    ValueError
        If the file is damaged or not a checkpoint, in one line.
    """
    arrays, metadata = read_arrays(path)
    try:
        state = json.loads(metadata["state"])
        return Checkpoint(
            round=int(state["round"]),
            trainable=_under("trainable/", arrays),
            buffers=_under("buffers/", arrays),
            accepted={int(k): int(v) for k, v in state["accepted"].items()},
            generated={int(k): int(v) for k, v in state["generated"].items()},
            shares={int(k): (int(b), int(e), float(level)) for k, (b, e, level) in state.get("shares", {}).items()},
            strategy=StrategyState(_under("strategy/", arrays), dict(state.get("strategy", {}))),
            run=str(state.get("run", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"it holds no server state ({type(error).__name__}: {error})"
        raise ValueError(f"{path} cannot be read: {reason}") from None


def write_arrays(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> None:
    """Write arrays as one safetensors file, completely or not at all."""
    atomic_write(path, save(to_numpy(arrays), metadata=metadata))


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Return the NumPy arrays in a file, and its metadata.

    Raises
    ------
    ValueError
        If the file is damaged or not a checkpoint, in one line.
    """
    try:
        with safe_open(path, framework="np") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, TypeError) as error:  # TypeError: a dtype that NumPy does not have
        raise ValueError(f"{path} cannot be read: {error}") from None


def _under(prefix: str, arrays: Arrays) -> Arrays:
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
