"""A client's evaluations of the global model under an adaptive policy, one file for each: they never leave the client.

scores-000006.safetensors  before round 6: the client's plan by then, the scores of its classes (`policies.Progress`),
                           and what the model predicted for which of its images
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedeas_flwr.allocation import FloatArray, IntArray
from fedeas_flwr.common.checked import read_checked, write_checked
from fedeas_flwr.policies.interface import Progress


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A client's evaluation of the model that a round starts from."""

    round: int
    progress: Progress
    generated: tuple[int, ...]
    """Number of synthetic images of each class that were evaluated, after the client's real images."""
    predictions: IntArray
    """Predicted class of each image, [N]."""

    def changes(self, predictions: IntArray, generated: tuple[int, ...]) -> FloatArray:
        """Return 1 for images whose prediction differs from a later one, 0 for others, NaN where there is no earlier.

        ``generated`` are the synthetic images of the later evaluation; if there are others, only real ones compare.
        """
        real, before = len(predictions) - sum(generated), len(self.predictions) - sum(self.generated)
        known = (len(predictions) if generated == self.generated else real) if real == before else 0
        found = np.full(len(predictions), np.nan)
        found[:known] = predictions[:known] != self.predictions[:known]
        return found


class ClassScores:
    """The evaluations of a client in a run, in its folder; every digest covers ``owner``, the run and the client."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder, self._owner = folder, owner

    def write(self, found: Evaluated) -> None:
        """Write an evaluation; one of the same round is replaced."""
        progress = found.progress
        facts = {"bought": progress.bought, "generated": found.generated}
        arrays = {"planned": progress.planned, "scores": progress.scores, "predictions": found.predictions}
        write_checked(self._path(found.round), facts, arrays, f"{self._owner}/{found.round}")

    def latest(self, round_number: int) -> Evaluated | None:
        """Return the last evaluation until a round, None if there is none; raise `ValueError` if it is damaged."""
        numbers = [int(path.stem.removeprefix("scores-")) for path in self._folder.glob("scores-*.safetensors")]
        number = max((number for number in numbers if number <= round_number), default=0)
        if not number:
            return None
        facts, arrays = read_checked(self._path(number), f"{self._owner}/{number}")
        progress = Progress(facts["bought"], arrays["planned"], arrays["scores"])
        return Evaluated(number, progress, tuple(facts["generated"]), arrays["predictions"])

    def _path(self, round_number: int) -> Path:
        return self._folder / f"scores-{round_number:06d}.safetensors"
