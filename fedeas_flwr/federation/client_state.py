"""What a client keeps between rounds, versioned by round: on disk, or in memory up to the next checkpoint.

The server tells a client the last round in which it used that client's reply, and the client starts from that version.
A reply that was lost, or a server that died before its checkpoint, then changes nothing: the client simply starts from
the version the server knows.

state-000012.json         the plan and what it was made for, after round 12
state-000012.safetensors  what the algorithm's part on the client keeps (SCAFFOLD's c_i, MOON's last model), if anything

On the inline GPU grid, server and clients are one process and models never leave the GPU. There versions stay in memory
too, and are written when the server is about to write its checkpoint: after a crash it asks for none that came between.
Of those that are written, only so many bytes stay in memory: whoever has not trained for longest reads from disk again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.runs.checkpoints import to_numpy


@dataclass(frozen=True)
class ClientState:
    """A client's memory."""

    generate: tuple[int, ...] | None = None
    """Images of each class, or ``None`` before the plan. A plan of nothing is a plan: it is not made again."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Arrays of the algorithm's own."""
    generator: str = ""
    """Fingerprint of what made its images: another generator's must not join them."""
    counts: tuple[int, ...] | None = None
    """The label counts that the plan was made for. Like all of this they stay with the client."""


@dataclass
class _Versions:
    states: dict[int, ClientState] = field(default_factory=dict)
    """Round → state."""
    needed: set[int] = field(default_factory=set)
    """Rounds the server may still ask for; some of them may be on disk, from before a resume."""
    written: set[int] = field(default_factory=set)
    """Rounds whose version this process wrote. One on disk may be of a run that was killed before its checkpoint."""


_kept: dict[Path, _Versions] = {}
"""By folder, of clients that live in this process."""
_kept_lock = threading.Lock()


class ClientStore:
    """The versions of one client's state, in ``folder``.

    Parameters
    ----------
    folder
        Of this client in this run.
    in_memory
        Keep new versions in this process until `write_kept_states`.
    """

    def __init__(self, folder: Path, in_memory: bool = False) -> None:
        self.folder, self._in_memory = folder, in_memory

    def load(self, accepted_round: int) -> ClientState:
        """The state after ``accepted_round``; a fresh one for round 0."""
        if accepted_round == 0:
            return ClientState()
        with _kept_lock:
            kept = _kept.get(self.folder, _Versions()).states.get(accepted_round)
        if kept is not None:
            return kept
        path = self._path(accepted_round)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            generate, arrays = found["generate"], path.with_suffix(".safetensors")
            memory = load(arrays.read_bytes()) if found["memory"] else {}
            counts = found.get("counts")
            return ClientState(
                None if generate is None else tuple(map(int, generate)),
                memory,
                str(found.get("generator", "")),
                None if counts is None else tuple(map(int, counts)),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise RuntimeError(f"client state {path} of round {accepted_round} cannot be read: {error}") from None

    def save(self, this_round: int, state: ClientState, still_needed: Sequence[int]) -> None:
        """Keep this round's version, and drop those the server can no longer ask for.

        It can ask for the round it accepted last, and, should it die, for the one its checkpoint knows. Versions of
        later rounds stay: this one may have been late, and the server gone on without it.
        """
        rounds = {this_round, *still_needed}
        if self._in_memory:
            with _kept_lock:
                versions = _kept.setdefault(self.folder, _Versions())
                versions.states[this_round], versions.needed = state, rounds
                for old in versions.states.keys() - rounds:
                    del versions.states[old]
            return
        self.write(this_round, state)
        self.drop_all_but(rounds)

    def write(self, this_round: int, state: ClientState) -> None:
        """Write a version to disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path, memory = self._path(this_round), to_numpy(state.memory)
        if memory:
            atomic_write(path.with_suffix(".safetensors"), save(memory))
        facts = {"generate": state.generate, "generator": state.generator, "counts": state.counts}
        text = json.dumps({**facts, "memory": bool(memory)})
        atomic_write(path, text.encode())  # last: a version is there when this file is

    def drop_all_but(self, rounds: Collection[int]) -> None:
        """Remove the versions on disk of all other rounds before the last of these."""
        names = {self._path(number).stem for number in rounds}
        for path in self.folder.glob("state-*"):
            if path.stem not in names and path.stem < max(names):
                path.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self.folder / f"state-{round_number:06d}.json"


def write_kept_states(most_bytes: int = 4 << 30) -> None:
    """Write every version that is in memory alone, and drop from disk what can no longer be asked for.

    Of arrays that are on disk then, no more than ``most_bytes`` stay in memory.
    """
    with _kept_lock:
        for folder, versions in _kept.items():
            store = ClientStore(folder)
            for number, state in versions.states.items():
                if number not in versions.written:
                    store.write(number, state)
            versions.written = set(versions.states)
            store.drop_all_but(versions.needed)
        _evict_oldest_until(most_bytes)


def _evict_oldest_until(most: int) -> None:
    """Let the arrays of clients go that trained longest ago; all versions are on disk."""
    room = most
    for versions in sorted(_kept.values(), key=lambda versions: -max(versions.states, default=0)):
        room -= sum(array.nbytes for state in versions.states.values() for array in state.memory.values())
        if room < 0:
            versions.states.clear()


def forget_kept_states() -> None:
    """Free the memory, at the end of a run."""
    with _kept_lock:
        _kept.clear()
