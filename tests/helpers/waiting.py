"""Wait for events of other processes and threads, however long they take on a busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LONG = 300.0
"""Seconds after which a wait fails; far more than any event takes."""

HOLDING = '''
"""On the PYTHONPATH of a run: after HELD_AFTER rounds, no other starts while the file HELD_BY exists."""
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


def wait_until(true: Callable[[], object], what: str, seconds: float = LONG) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"timed out after {seconds:g} s waiting until {what}"
        time.sleep(0.01)


class PausedRun:
    """Pauses runs of other processes after some rounds until `release`, so that a signal never comes too late.

    Parameters
    ----------
    folder
        Folder of the file that pauses the runs.
    rounds
        Number of rounds before the pause.

    Attributes
    ----------
    environment
        Environment variables to start the runs with.
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
