"""Measure how a round's time, memory and traffic grow with the number of clients and of parameters.

    python benchmarks/growth.py --out results/growth/cpu.json [--ray]
    python benchmarks/growth.py --device cuda --out results/growth/h200.json

Ten clients train in a round. K is 10, 100 and 1,000 with the smallest model; the parameters are 0.05, 1 and 11 million
at K = 100 (benchmarks/wide_models.py: almost no arithmetic, so that the cost of moving arrays is visible). Every row is
a `fedeas run` in its own process, observed from outside every 0.03 s:

own memory      resident memory of the process without what it shares or maps from files (GPU memory excluded)
mapped          the rest of its resident memory: libraries and the pages of the dataset that were read, which all
                processes share and the system can reclaim
growth          slope of a line fitted to own memory by round, over the second half of the longest runs
MB a round      size of the arrays as Flower encodes them, to the clients of a round and back
outside         seconds of a round outside training and waiting for an evaluation; training shrinks as K grows, since
                each client has less data

The images are random, with the sizes of CIFAR-10 (50,000 of 32×32×3, enough for 1,000 clients); their content does not
matter here. --ray adds K = 1,000 under Ray, with memory summed over all processes. --small: digits, seconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tomli_w
from run_records import let_children_import_models, markdown, round_seconds, seconds_to_discover, write_record

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.records import to_record
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.models import split_state

A_ROUND = 10
MODELS = ("fifty_thousand", "one_million", "eleven_million")
COMMON: dict[str, Any] = {"policy": "none", "alpha": 0.5, "local-epochs": 1, "batch-size": 50, "learning-rate": 0.01}
MEGABYTE = 2**20


class Memory:
    """Memory of a process and its descendants over their lifetime, in bytes."""

    def __init__(self, process: psutil.Process) -> None:
        # Processes are never removed: Ray's helpers outlive the processes that started them.
        self._family = {process}
        self.own: dict[int, int] = {}
        """Number of finished rounds → maximum of own memory until the next round's end."""
        self.mapped = self.resident = self.processes = 0

    def note(self, finished_rounds: int) -> None:
        """Measure all processes now; one that has ended counts as 0."""
        found = []
        for member in list(self._family):
            with suppress(psutil.Error):
                found.append(member.memory_info())
                self._family.update(member.children(recursive=True))
        own, mapped = sum(each.rss - each.shared for each in found), sum(each.shared for each in found)
        self.own[finished_rounds] = max(self.own.get(finished_rounds, 0), own)
        self.mapped, self.resident = max(self.mapped, mapped), max(self.resident, own + mapped)
        self.processes = max(self.processes, len(found))

    def growth(self) -> float:
        """Return the growth in bytes per round, fitted to the second half of the rounds; the first half is warm-up."""
        rounds = sorted(self.own)[len(self.own) // 2 :]
        return float(np.polyfit(rounds, [self.own[number] for number in rounds], 1)[0])


def write_random_images(folder: Path) -> None:
    """Write random images with the sizes and the balanced classes of CIFAR-10."""
    info, rng = dataset_info("cifar10"), np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", info.num_train), ("test", info.num_test)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, *info.image_shape), dtype=np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % len(info.classes)
    np.savez(folder / "cifar10.npz", **arrays)


def watched_run(config: RunConfig, folder: Path) -> tuple[RunDirectory, Memory]:
    """Run `fedeas run` in its own process; return its run directory and memory."""
    federated_data(config, config.clients)  # fills the caches, so that all rows start equal
    conf, run = folder / "run.toml", RunDirectory(Path(config.run_dir))
    conf.write_text(tomli_w.dumps(config.to_user_dict()))
    with (folder / "output.txt").open("w+b") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", "from fedeas_flwr.commands.app import main; main()", "run", str(conf)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            memory = Memory(psutil.Process(child.pid))
            while child.poll() is None:
                memory.note(len(run.rounds()))
                time.sleep(0.03)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
        if child.returncode != 0:
            output.seek(0)
            sys.exit(f"the run of {config.clients} clients failed: {output.read().decode()[-2000:]}")
    return run, memory


def measured(config: RunConfig, growth: str, folder: Path) -> dict[str, Any]:
    """Return one row of the table."""
    folder.mkdir()
    run, memory = watched_run(config.with_changes(run_dir=str(folder / "run")), folder)
    memory.own.pop(config.rounds, None)  # after the last round the process is exiting
    state, records, walls = split_state(build_network(config)), run.rounds()[1:], round_seconds(run)
    encoded = sum(len(array.data) for part in state for array in to_record(part).values())
    phases = [record["seconds"] for record in records]
    busy = [(s["training"] + s["generating"]) / config.actors + s["end_wait"] for s in phases]
    return {
        "growth_of": growth,
        "backend": config.backend,
        "clients": config.clients,
        "clients_a_round": config.num_sampled(config.clients),
        "parameters": sum(array.size for part in state for array in part.values()),
        "rounds": config.rounds,
        "steps_a_round": round(statistics.mean(record["steps"] for record in records)),
        "seconds_a_round": round(statistics.median(walls), 4),
        "seconds_outside": round(statistics.median(w - b for w, b in zip(walls, busy, strict=True)), 4),
        "seconds_to_discover": round(seconds_to_discover(run), 3),
        "bytes_a_round": 2 * config.num_sampled(config.clients) * encoded,
        "processes": memory.processes,
        "resident_peak_mb": round(memory.resident / MEGABYTE, 1),
        "own_peak_mb": round(max(memory.own.values()) / MEGABYTE, 1),
        "mapped_peak_mb": round(memory.mapped / MEGABYTE, 1),
        "growth_kb_a_round": round(memory.growth() / 1024, 1),
        "own_mb_by_round": [round(memory.own[number] / MEGABYTE, 1) for number in sorted(memory.own)],
    }


def settings(options: argparse.Namespace, folder: Path) -> list[tuple[str, RunConfig]]:
    """Return the rows to measure: what grows, and the run-config."""
    dataset = {"dataset": "digits"} if options.small else {"dataset": "cifar10", "data-dir": str(folder)}
    actors = 10 if options.device == "cuda" else 1  # as many as the inline grid chooses
    base = {**COMMON, **dataset, "device": options.device, "backend": "inline", "actors": actors}

    def config(clients: int, model: str, rounds: int, **changes: Any) -> RunConfig:
        share, name = min(1.0, A_ROUND / clients), f"wide_models:{model}"
        keys = {"clients": clients, "participation": share, "model": name, "rounds": rounds}
        return parse_config({**base, **keys, **changes})

    clients, usual, rounds, longest = ([20], 20, 5, 6) if options.small else ([10, 100, 1000], 100, 10, 150)
    models = MODELS[1:2] if options.small else MODELS
    lines = [("clients", config(k, MODELS[0], longest if k == clients[-1] else rounds)) for k in clients]
    lines += [("parameters", config(usual, model, rounds)) for model in models]
    if options.ray:
        lines.append(("clients", config(clients[-1], MODELS[0], longest, backend="ray")))
    return lines


def table(rows: Sequence[dict[str, Any]], seconds: bool = True) -> str:
    """Return the table that is printed; the docs show it without seconds. Only the longest runs have a slope."""
    head = ["growth of", "K", "M parameters", "backend", *(["s a round", "s outside"] if seconds else [])]
    head += ["outside / first", "MB a round", "resident MB", "own MB", "own growth KB a round"]
    cells, longest = [], max(row["rounds"] for row in rows)
    for row in rows:
        first = next(r for r in rows if r["growth_of"] == row["growth_of"])
        times = [f"{row['seconds_a_round']:.3f}", f"{row['seconds_outside']:.3f}"] if seconds else []
        cells.append(
            [
                row["growth_of"],
                f"{row['clients']:,}",
                f"{row['parameters'] / 1e6:.2f}",
                row["backend"],
                *times,
                f"{row['seconds_outside'] / first['seconds_outside']:.2f}",
                f"{row['bytes_a_round'] / 1e6:.1f}",
                f"{row['resident_peak_mb']:.0f}",
                f"{row['own_peak_mb']:.0f}",
                f"{row['growth_kb_a_round']:.0f}" if row["rounds"] == longest else "–",
            ]
        )
    return markdown(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ray", action="store_true", help="also measure the largest K under Ray")
    parser.add_argument("--small", action="store_true", help="a run of seconds, to try the script")
    options = parser.parse_args()
    let_children_import_models()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fedeas-growth-") as temporary:
        folder = Path(temporary)
        if not options.small:
            write_random_images(folder)
        dataset = "digits" if options.small else "noise like CIFAR-10"
        for number, (growth, config) in enumerate(settings(options, folder)):
            print(f"{growth}: {config.clients} clients, {config.model}, {config.backend}", flush=True)
            rows.append(measured(config, growth, folder / str(number)))
            # After every row, so that the script can be stopped without losing finished rows.
            write_record(options.out, options.device, {**COMMON, "dataset": dataset}, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
