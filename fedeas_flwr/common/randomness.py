"""Random numbers: streams derived from a run's seed, and the secret noise of differential privacy.

A stream depends on the run's seed, its purpose and the indices of its use (round, client), so its numbers are equal for
every backend, number of actors, order of arrival and point of interruption. Streams are never saved or shared.

The noise must not depend on the run's seed, which every client has in its run-config and every record shows: anyone
could subtract it. It is derived from a secret key in the run directory, the round and the replies that it protects:

- The same replies get the same noise. A round that is repeated after a crash, when its model may have been sent
  already, then gives the same model and discloses nothing more. Fresh noise would disclose the same sum twice, and the
  mean of two noisy sums has less noise than either.
- Other replies (from a GPU with other last digits, or of changed data) get other noise. The same noise would cancel in
  the difference of the two models, which would disclose the difference of the sums. They count as another release.
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
    """The secret noise of a run, and the releases that it was used for.

    The file at ``path``, readable by its owner only, has the key, its digest and one line per release. It is created if
    missing; without a path nothing is stored. A key that a user wrote gets its digest here. If the file is damaged or
    not a noise key, ValueError is raised, in one line.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        try:
            text = path.read_text(encoding="utf-8") if path and path.exists() else secrets.token_hex(_KEY_BYTES)
            first, *lines = text.split("\n")
            key, *digest = first.split(" ")
            self._key = bytes.fromhex(key)
            if len(self._key) != _KEY_BYTES or digest not in ([], [_key_digest(self._key)]):
                raise ValueError
            self._releases = {(int(line.split()[0]), line) for line in lines if line}
        except (ValueError, IndexError):
            raise ValueError(f"{path} is not the key of a run's noise") from None
        if path is not None and not digest:
            with atomic_path(path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text("\n".join([f"{key} {_key_digest(self._key)}", *lines]), encoding="utf-8")

    def draws(self, round_number: int, replies: Iterable[bytes]) -> np.random.Generator:
        """Return the generator of the noise on a round's aggregate, and record its release first.

        It is Philox, not the Mersenne Twister of NumPy's global functions: a weight that no client changes, such as
        that of a pixel which is black in all images, discloses its noise, and a few hundred outputs of the Twister
        determine all others.
        """
        bound = hmac.new(self._key, b"%d " % round_number, "sha256")
        for part in replies:
            bound.update(part)
        key, name = bound.digest()[:16], bound.digest()[16:].hex()
        self._note((round_number, f"{round_number} {name}"))
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))

    def releases(self, rounds: int) -> int:
        """Return the number of releases in the first ``rounds`` rounds."""
        return sum(number <= rounds for number, _ in self._releases)

    def _note(self, release: tuple[int, str]) -> None:
        if release in self._releases:
            return
        self._releases.add(release)
        if self._path is not None:
            with errors_naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(f"\n{release[1]}")  # newline first: a line that a crash cut short stays separate
                file.flush()
                os.fsync(file.fileno())


def _key_digest(key: bytes) -> str:
    return hashlib.sha256(b"noise-key" + key).hexdigest()[:16]


def stream(seed: int, purpose: str, *names: int) -> np.random.Generator:
    """Return the random generator of one purpose, for example ``stream(seed, "batches", round, client)``."""
    tag = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, tag, *names])))


def torch_seed(seed: int, *numbers: int) -> int:
    """Return a seed for a generator of torch, derived from a run's seed and the indices of its use."""
    return int(np.random.SeedSequence(seed, spawn_key=numbers).generate_state(1, np.uint64)[0] >> 1)
