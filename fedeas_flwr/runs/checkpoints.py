"""The server's state after a round, and its safetensors files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedeas_flwr.common.checked import read_checked, write_checked
from fedeas_flwr.common.npy import Arrays


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
    average: Arrays = field(default_factory=dict)
    """Moving average of the trainable arrays over the rounds; empty unless a generator is trained."""

    def result(self) -> tuple[Arrays, Arrays]:
        """Return the trainable arrays and buffers that are evaluated and saved: the average's, if there is one."""
        return (self.average, {}) if self.average else (self.trainable, self.buffers)


def write_checkpoint(path: Path, checkpoint: Checkpoint, run: str) -> None:
    """Write a checkpoint of the run with identity ``run``; a reader sees the old file or the new one, never a part."""
    parts = {"trainable": checkpoint.trainable, "buffers": checkpoint.buffers, "strategy": checkpoint.strategy.arrays}
    parts["average"] = checkpoint.average
    state = {
        "round": checkpoint.round,
        "accepted": checkpoint.accepted,
        "generated": checkpoint.generated,
        "shares": checkpoint.shares,
        "strategy": checkpoint.strategy.numbers,
    }
    arrays = {f"{part}/{key}": value for part, found in parts.items() for key, value in found.items()}
    write_checked(path, state, arrays, run)


def read_checkpoint(path: Path, run: str) -> Checkpoint:
    """Return the checkpoint in a file; raise `ValueError` if it is damaged, edited, or not of the run ``run``."""
    state, arrays = read_checked(path, run)
    try:
        return Checkpoint(
            round=int(state["round"]),
            trainable=_under("trainable/", arrays),
            buffers=_under("buffers/", arrays),
            accepted={int(k): int(v) for k, v in state["accepted"].items()},
            generated={int(k): int(v) for k, v in state["generated"].items()},
            shares={int(k): (int(b), int(e), float(level)) for k, (b, e, level) in state["shares"].items()},
            strategy=StrategyState(_under("strategy/", arrays), dict(state["strategy"])),
            average=_under("average/", arrays),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it holds no server state ({type(error).__name__}: {error})"
        raise ValueError(f"{path} cannot be read: {reason}") from None


def _under(prefix: str, arrays: Arrays) -> Arrays:
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
