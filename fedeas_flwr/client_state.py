"""What a client keeps between rounds, on disk and versioned by round.

The server tells a client the last round in which it used that client's reply, and the client starts from that version.
A reply that was lost, or a server that died before its checkpoint, then changes nothing: the client simply starts from
the version the server knows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedeas_flwr.paths import atomic_write


@dataclass(frozen=True)
class ClientState:
    """A client's memory: what it planned, and how many steps its accepted rounds took."""

    generate: tuple[int, ...] | None = None
    """Images of each class, or ``None`` before the plan. A plan of nothing is a plan: it is not made again."""
    steps: int = 0


class ClientStore:
    """The versions of one client's state, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, accepted_round: int) -> ClientState:
        """The state after ``accepted_round``; a fresh one for round 0."""
        if accepted_round == 0:
            return ClientState()
        path = self._path(accepted_round)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            generate = found["generate"]
            return ClientState(None if generate is None else tuple(map(int, generate)), int(found["steps"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"client state {path} of round {accepted_round} cannot be read: {error}") from None

    def save(self, this_round: int, state: ClientState, still_needed: Sequence[int]) -> None:
        """Write this round's version, and drop those the server can no longer ask for.

        It can ask for the round it accepted last, and, should it die, for the one its checkpoint knows.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self._path(this_round), json.dumps(asdict(state)).encode())
        kept = {self._path(number) for number in (this_round, *still_needed)}
        for path in self.folder.glob("state-*.json"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self.folder / f"state-{round_number:06d}.json"
