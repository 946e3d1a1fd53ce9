"""Random streams, each derived from what it is for, never saved or shared.

A stream depends on the run's seed, its purpose and the numbers that name its use (round, client), so the same draw
comes out whatever the backend, the number of actors, the order of arrival, or where a run was interrupted.
"""

from __future__ import annotations

import hashlib

import numpy as np


def stream(seed: int, purpose: str, *names: int) -> np.random.Generator:
    """Return the generator of one purpose, for instance ``stream(seed, "batches", round, client)``."""
    tag = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, tag, *names])))
