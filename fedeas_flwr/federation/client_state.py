"""A client's state between rounds, one version per round: on disk, or in memory until the next checkpoint.

The server sends a client the last round whose reply it used, and the client starts from that version. So a lost reply,
or a server that died before its checkpoint, changes nothing.

state-000012.json         the plan and the label counts it is based on, after round 12
state-000012.safetensors  arrays that the algorithm keeps on the client (SCAFFOLD's c_i, MOON's last model), if any

On the inline GPU grid, server and clients are one process, and models never leave the GPU. There the versions stay in
memory too, and are written just before the server's checkpoint: after a crash it requests none from between two
checkpoints. Of the written versions only a limited number of bytes stays in memory; clients that trained longest ago
read theirs from disk again.
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
from fedeas_flwr.common.npy import to_numpy


@dataclass(frozen=True)
class ClientState:
    """A client's state after a round."""

    generate: tuple[int, ...] | None = None
    """Number of images to generate per class, or ``None`` before the plan. A plan may be all zero."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's arrays."""
    generator: str = ""
    """Fingerprint of the generator of its images; images of another generator are not added to them."""
    counts: tuple[int, ...] | None = None
    """The label counts of the plan. Like the whole state, they never leave the client."""


@dataclass
class _Versions:
    states: dict[int, ClientState] = field(default_factory=dict)
    """Round → state."""
    needed: set[int] = field(default_factory=set)
    """Rounds that the server may still request; some may be on disk, from before a resume."""
    written: set[int] = field(default_factory=set)
    """Rounds that this process wrote. Other files may be of a run that was killed before its checkpoint."""


_kept: dict[Path, _Versions] = {}
"""Client's folder → the versions in memory, of clients in this process."""
_kept_lock = threading.Lock()


class ClientStore:
    """Stores the versions of one client's state.

    Parameters
    ----------
    folder
        The folder of this client in this run.
    in_memory
        Keep new versions in memory until `write_kept_states`.
    """

    def __init__(self, folder: Path, in_memory: bool = False) -> None:
        self.folder, self._in_memory = folder, in_memory

    def load(self, accepted_round: int) -> ClientState:
        """Return the state after ``accepted_round``; a new one for round 0."""
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
        """Keep this round's version, and drop those that the server can no longer request.

        It can request the last round it accepted and, after a crash, that of its checkpoint. Versions of later rounds
        are kept: this reply may be late, and the server may have continued without it.
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
        atomic_write(path, text.encode())  # last: this file marks the version as complete

    def drop_all_but(self, rounds: Collection[int]) -> None:
        """Delete from disk all versions of other rounds before the last of ``rounds``."""
        names = {self._path(number).stem for number in rounds}
        for path in self.folder.glob("state-*"):
            if path.stem not in names and path.stem < max(names):
                path.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self.folder / f"state-{round_number:06d}.json"


def write_kept_states(max_bytes: int = 4 << 30) -> None:
    """Write every version that is only in memory, and delete from disk those that can no longer be requested.

    At most ``max_bytes`` of the arrays, which are all on disk then, stay in memory.
    """
    with _kept_lock:
        for folder, versions in _kept.items():
            store = ClientStore(folder)
            for number, state in versions.states.items():
                if number not in versions.written:
                    store.write(number, state)
            versions.written = set(versions.states)
            store.drop_all_but(versions.needed)
        _evict_oldest(max_bytes)


def _evict_oldest(max_bytes: int) -> None:
    """Free the arrays of the clients that trained longest ago; all versions are on disk."""
    free = max_bytes
    for versions in sorted(_kept.values(), key=lambda versions: -max(versions.states, default=0)):
        free -= sum(array.nbytes for state in versions.states.values() for array in state.memory.values())
        if free < 0:
            versions.states.clear()


def forget_kept_states() -> None:
    """Free the states in memory, at the end of a run."""
    with _kept_lock:
        _kept.clear()
