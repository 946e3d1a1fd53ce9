"""Random numbers: streams derived from a run's seed, and the secret noise of differential privacy.

A stream depends on the run's seed, its purpose and the numbers that name its use (round, client), so the same numbers
come out whatever the backend, the number of actors, the order of arrival, or where a run was interrupted. Streams are
never saved or shared.

The noise cannot come from the run's seed, which every client has in its run-config and every record shows: anybody
could take it off again. It comes from a secret of the run's own that stays in the run directory, bound to the round
and to the replies that it hides:

- The same replies get the same noise. A round that is done again after a crash, when its model may have gone out
  already, then ends in that very model and tells nothing more. Fresh noise would make it a second look at one sum, and
  the mean of two looks has less noise than either.
- Other replies (a GPU's, with other last digits, or of data that changed) get other noise. The same would cancel out
  of the two models' difference, which then showed that of the sums as it is. They are one release more, and counted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedeas_flwr.common.files import atomic_path, errors_naming

_KEY_BYTES = 32


class Noise:
    """A run's secret, and which models its noise was drawn for.

    Parameters
    ----------
    path
        The file that keeps both, for its owner alone: the key, then a line a release. It is made if it is not there;
        without a path all is forgotten with this object.

    Raises
    ------
    ValueError
        If the file is damaged or something else, in one line.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        if path is not None and not path.exists():
            with atomic_path(path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(secrets.token_hex(_KEY_BYTES), encoding="utf-8")
        try:
            text = secrets.token_hex(_KEY_BYTES) if path is None else path.read_text(encoding="utf-8")
            key, *lines = text.split("\n")
            self._key = bytes.fromhex(key)
            self._releases = {(int(line.split()[0]), line) for line in lines if line}
        except (ValueError, IndexError):
            self._key = b""
        if len(self._key) != _KEY_BYTES:
            raise ValueError(f"{path} is not the key of a run's noise")

    def draws(self, round_number: int, replies: Iterable[bytes]) -> np.random.Generator:
        """The noise for what a round's replies become, noted as a release before anybody can have seen one.

        It is Philox's and not the Mersenne Twister's, which NumPy's global functions draw from: a weight that no client
        moves, such as that of a pixel which is black in all images, shows its noise, and some hundreds of the Twister's
        draws give away all others.
        """
        bound = hmac.new(self._key, b"%d " % round_number, "sha256")
        for part in replies:
            bound.update(part)
        key, name = bound.digest()[:16], bound.digest()[16:].hex()
        self._note((round_number, f"{round_number} {name}"))
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))

    def releases(self, rounds: int) -> int:
        """How many different models of the first so many rounds noise was drawn for."""
        return sum(number <= rounds for number, _ in self._releases)

    def _note(self, release: tuple[int, str]) -> None:
        if release in self._releases:
            return
        self._releases.add(release)
        if self._path is not None:
            with errors_naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(f"\n{release[1]}")  # the break first: a line that a crash cut short stays one of its own
                file.flush()
                os.fsync(file.fileno())


def stream(seed: int, purpose: str, *names: int) -> np.random.Generator:
    """Return the generator of one purpose, for instance ``stream(seed, "batches", round, client)``."""
    tag = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, tag, *names])))
