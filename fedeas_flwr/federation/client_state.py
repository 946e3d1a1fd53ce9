"""A client's state between rounds, one version per round: on disk, or in memory until the next checkpoint.

The server sends a client the last round whose reply it used, and the client starts from that version. So a lost reply,
or a server that died before its checkpoint, changes nothing.

state-000012.safetensors  after round 12: the plan, the label counts it is based on, and the arrays that the algorithm
                          keeps on the client (SCAFFOLD's c_i, MOON's last model); with a digest (common/checked.py)

On the inline GPU grid, server and clients are one process, and models never leave the GPU. There the versions stay in
memory too. Those of a round with a checkpoint are written just before the checkpoint, while the next round trains:
after a crash the server requests none from between two checkpoints. Of the written versions only a limited number of
bytes stays in memory; clients that trained longest ago read theirs from disk again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedeas_flwr.common.checked import read_checked, write_checked
from fedeas_flwr.common.cores import map_ordered


@dataclass(frozen=True)
class ClientState:
    """A client's state after a round."""

    generate: tuple[int, ...] = ()
    """Number of images to generate per class; empty before the plan. A plan may be all zero."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """The algorithm's arrays."""
    generator: str = ""
    """Fingerprint of the generator of its images; images of another generator are not added to them."""
    counts: tuple[int, ...] = ()
    """The label counts of the plan. Like the whole state, they never leave the client."""
    not_made: int = 0
    """Number of images of the policy's plan that ``generate`` lacks because of the node's limit."""
    part: int = 0
    """First round of the part of the plan that ``generate`` belongs to, one of `Policy.parts`; 0 before the plan."""


@dataclass
class _Versions:
    owner: str
    states: dict[int, ClientState] = field(default_factory=dict)
    """Round → state."""
    needed: set[int] = field(default_factory=set)
    """Rounds that the server may still request; some may be on disk, from before a resume."""
    written: set[int] = field(default_factory=set)
    """Rounds that this process wrote. Other files may be of a run that was killed before its checkpoint."""

    @property
    def changed(self) -> bool:
        """Whether a version is only in memory."""
        return not self.written.issuperset(self.states)


_kept: dict[Path, _Versions] = {}
"""Client's folder → the versions in memory, of clients in this process."""
_kept_lock = threading.Lock()
_WRITERS = 8
"""Threads that write client states; they mostly wait for the disk."""


class ClientStore:
    """Stores the versions of one client's state in a folder.

    Every file's digest covers ``owner``, the run and the client. With ``in_memory``, new versions stay in memory until
    `kept_states_writer`.
    """

    def __init__(self, folder: Path, owner: str = "", in_memory: bool = False) -> None:
        self.folder, self._owner, self._in_memory = folder, owner, in_memory

    def load(self, accepted_round: int) -> ClientState:
        """Return the state after ``accepted_round``; a new one for round 0."""
        if accepted_round == 0:
            return ClientState()
        with _kept_lock:
            versions = _kept.get(self.folder)
            if versions is not None and accepted_round in versions.states:
                return versions.states[accepted_round]
        path = self._path(accepted_round)
        try:
            found, memory = read_checked(path, self._of_round(accepted_round))
            generate, counts = tuple(found["generate"]), tuple(found["counts"])
            return ClientState(generate, memory, found["generator"], counts, found["not_made"], found["part"])
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"client state of round {accepted_round}: {error}") from None

    def save(self, this_round: int, state: ClientState, still_needed: Sequence[int]) -> None:
        """Keep this round's version, and drop those that the server can no longer request.

        ``still_needed`` are the last round it accepted, that of its last checkpoint, for which it asks after a crash,
        and that of the checkpoint before, if the last one is damaged. Versions of later rounds are kept: this reply may
        be late, and the server may have continued without it.
        """
        rounds = {this_round, *still_needed}
        if self._in_memory:
            with _kept_lock:
                versions = _kept.setdefault(self.folder, _Versions(self._owner))
                versions.states[this_round], versions.needed = state, rounds
                # The version of the checkpoint before the last is on disk; after a resume it is read from there.
                for old in versions.states.keys() - {this_round, *still_needed[:2]}:
                    del versions.states[old]
            return
        self.write(this_round, state)
        self.drop_all_but(rounds)

    def write(self, this_round: int, state: ClientState) -> None:
        """Write a version to disk."""
        facts = {name: value for name, value in vars(state).items() if name != "memory"}
        write_checked(self._path(this_round), facts, dict(state.memory), self._of_round(this_round))

    def drop_all_but(self, rounds: Collection[int]) -> None:
        """Delete from disk all versions of other rounds before the last of ``rounds``."""
        names = {self._path(number).stem for number in rounds}
        for path in self.folder.glob("state-*"):
            if path.stem not in names and path.stem < max(names):
                path.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self.folder / f"state-{round_number:06d}.safetensors"

    def _of_round(self, round_number: int) -> str:
        return f"{self._owner}/{round_number}"


def kept_states_writer(max_bytes: int = 4 << 30) -> Callable[[], None]:
    """Return a function that writes the versions that are only in memory now, while clients may save later ones.

    It also deletes from disk the versions that can no longer be requested. At most ``max_bytes`` of the arrays that are
    on disk then stay in memory.
    """
    with _kept_lock:
        # Only those of clients that trained since the last call: over a run, almost all clients of a large federation
        # have versions.
        taken = [(folder, kept, dict(kept.states), kept.needed) for folder, kept in _kept.items() if kept.changed]

    def write() -> None:
        # In threads: each file is written through to the disk.
        for _ in map_ordered(lambda each: _write_versions(*each), taken, min(_WRITERS, max(1, len(taken)))):
            pass
        with _kept_lock:
            _evict_oldest(max_bytes)

    return write


def _write_versions(folder: Path, kept: _Versions, states: Mapping[int, ClientState], needed: Collection[int]) -> None:
    """Write those of a client's ``states`` that are only in memory, and delete those that are not ``needed``."""
    store = ClientStore(folder, kept.owner)
    for number in states.keys() - kept.written:
        store.write(number, states[number])
    store.drop_all_but(needed)
    with _kept_lock:
        kept.written = (kept.written | states.keys()) & kept.states.keys()


def _evict_oldest(max_bytes: int) -> None:
    """Free the arrays of the clients that trained longest ago and have all their versions on disk."""
    free = max_bytes
    for versions in sorted(_kept.values(), key=lambda versions: -max(versions.states, default=0)):
        free -= sum(array.nbytes for state in versions.states.values() for array in state.memory.values())
        if free < 0 and not versions.changed:
            versions.states.clear()


def forget_kept_states() -> None:
    """Free the states in memory, at the end of a run."""
    with _kept_lock:
        _kept.clear()
