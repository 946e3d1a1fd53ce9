"""Waiting for what other processes and threads do: for the event itself, however long a busy machine takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LONG = 300.0
"""Seconds after which a test is taken to wait in vain; far more than anything takes."""

HOLDING = '''
"""On the PYTHONPATH of a run: after some rounds no other is begun while a file is there."""
import importlib.abc, importlib.machinery, os, sys, time

def hold(module):
    train_round = module.TrainingRounds.train_round
    def held(self, state):
        while state.round >= int(os.environ["HELD_AFTER"]) and os.path.exists(os.environ["HELD_BY"]):
            time.sleep(0.01)
        return train_round(self, state)
    module.TrainingRounds.train_round = held

class Holder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "fedeas_flwr.federation.training_round":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            hold(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Holder())
'''


def wait_until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < deadline, f"waited {LONG:g} s in vain until {what}"
        time.sleep(0.01)


class PausedRun:
    """Runs of other processes that go so far and no further until they are let go: a signal never comes too late.

    Parameters
    ----------
    folder
        For the file that holds them.
    rounds
        How many they do before.

    Attributes
    ----------
    environment
        What they must be started with.
    """

    def __init__(self, folder: Path, rounds: int) -> None:
        self._file, code = folder / "held", folder / "holding"
        code.mkdir(parents=True)
        (code / "sitecustomize.py").write_text(HOLDING)
        self._file.touch()
        path = os.pathsep.join([str(code), str(Path(__file__).parents[2])])
        how = {"PYTHONPATH": path, "HELD_AFTER": str(rounds), "HELD_BY": str(self._file)}
        self.environment = {**os.environ, **how}

    def release(self) -> None:
        self._file.unlink()
