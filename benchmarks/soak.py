"""Run hundreds of rounds, and check whether anything grows or is left behind.

    python benchmarks/soak.py inline --out results/soak/inline.json     500 rounds, 50 digits clients, in one process
    python benchmarks/soak.py ray --out results/soak/ray.json           50 rounds under Ray

The script measures the memory of the launcher (inline, this is the server), of the ServerApp and of the client
processes twice a second, and fits a slope over the second half of the rounds, after one-time allocations. Afterwards no
process, port, file in /dev/shm or folder in the temporary folder may be left that was not there before. The config is
the cheapest that does everything a run does: generation, a stateful strategy, a checkpoint every round.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.launch.run import launch
from fedeas_flwr.runs.directory import RunDirectory

RECIPE: dict[str, Any] = {
    "clients": 50,
    "alpha": 1.0,
    "participation": 0.1,
    "local-epochs": 1,
    "strategy": "scaffold",
    "policy": "fedeas",
    "beta": 3.0,
}
ROUNDS = {"inline": 500, "ray": 50}


class Watch:
    """Record the memory of this process and its descendants by role, and the open files and threads of this one."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._stop = run, threading.Event()
        self._offset = 0
        self.samples: dict[str, list[tuple[float, float]]] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        done = 0
        while not self._stop.wait(0.5):
            new, self._offset = self._run.rounds_from(self._offset)
            done = new[-1]["round"] if new else done
            for role, amount in self._look().items():
                self.samples.setdefault(role, []).append((done, amount))

    def _look(self) -> dict[str, float]:
        this = psutil.Process()
        found: dict[str, float] = {
            "launcher MB": this.memory_info().rss / 1e6,
            "launcher files": this.num_fds(),
            "launcher threads": this.num_threads(),
        }
        for process in this.children(recursive=True):
            try:
                words = " ".join(process.cmdline())
                role = _role(words)
                if role:
                    # Only the largest client process: which client it serves changes with every message.
                    found[role] = max(found.get(role, 0.0), process.memory_info().rss / 1e6)
            except psutil.Error:
                continue
        return found


def _role(words: str) -> str:
    if "ray::ClientAppActor" in words:
        return "client process MB"
    if "ray::GeneratorService" in words:
        return "generator MB"
    return "server MB" if "flwr-simulation" in words else ""


def slope(samples: list[tuple[float, float]], rounds: int) -> dict[str, float]:
    """Return the slope of a line fitted to the second half of the rounds, and the values at its ends."""
    late = np.array([(done, amount) for done, amount in samples if done >= rounds / 2])
    if len(late) < 3 or np.ptp(late[:, 0]) == 0:
        return {"at_end": samples[-1][1], "samples": len(late)}
    per_round = float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
    return {
        "at_half": round(float(late[0, 1]), 2),
        "at_end": round(float(late[-1, 1]), 2),
        "per_round": round(per_round, 5),
        "samples": len(late),
    }


def left_behind() -> dict[str, set[str]]:
    """Return what a run must not leave behind: child processes, their ports, shared memory, temporary folders."""
    processes, ports = set[str](), set[str]()
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.add(f"{process.pid} {process.name()}")
                ports |= {f"{s.laddr.port}" for s in process.net_connections() if s.status == psutil.CONN_LISTEN}
        except psutil.Error:
            continue
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    folders = {path.name for path in Path(tempfile.gettempdir()).glob("fe-*")}
    return {"processes": processes, "ports": ports, "shared memory": shared, "temporary folders": folders}


def soak(config: RunConfig) -> dict[str, Any]:
    """Run and return the record: what grew, and what was left behind."""
    before, run = left_behind(), RunDirectory(Path(config.run_dir))
    began = time.perf_counter()
    with Watch(run) as watch:
        finished = launch(config, Console(file=io.StringIO()))
    seconds = time.perf_counter() - began
    time.sleep(2)  # shutting down may take a moment
    left = {kind: sorted(found - before[kind]) for kind, found in left_behind().items()}
    files = [path for path in run.path.rglob("*") if path.is_file()]
    return {
        "backend": config.backend,
        "rounds": len(finished.rounds()),
        "failures": sum(len(record["failures"]) for record in finished.rounds()),
        "final_accuracy": finished.rounds()[-1]["accuracy"],
        "seconds": round(seconds, 1),
        "recipe": {key: config.to_user_dict()[key] for key in RECIPE},
        "second_half": {role: slope(found, config.rounds) for role, found in sorted(watch.samples.items())},
        "run_directory": {"files": len(files), "bytes": sum(path.stat().st_size for path in files)},
        "left_behind": left,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    """Parse the options, run the soak, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=sorted(ROUNDS))
    parser.add_argument("--rounds", type=int, default=0, help="default: 500 inline, 50 under Ray")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = given.rounds or ROUNDS[given.backend]
        keys = {"backend": given.backend, "rounds": rounds, "run-dir": f"{folder}/run"}
        config = prepare(parse_config({**RECIPE, **keys}), Console(stderr=True))
        record = soak(config)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
