"""Measure the framework's overhead: rounds under Flower compared with a bare loop over the same clients, in one run.

    python benchmarks/framework.py --out results/framework/cpu.json [--ray]
    python benchmarks/framework.py --device cuda --out results/framework/h200.json [--ray] \\
        --config conf/cifar10-k100.toml --set data-dir=data --set precision=bf16

(1) bare: the same engine on the same clients' images and batches, a weighted average, an evaluation; no messages, no
checks of replies, no records, no checkpoints. (2) inline: `fedeas run` with backend = "inline". (3) with --ray:
backend = "ray". On a CPU one client trains at a time in all three. They must end with the same weights bit for bit, or
the script stops: only then is the difference in time the framework's. On a GPU ten clients train in parallel, on ten
streams or, under Ray, as ten processes that share the GPU by MPS; the record has the largest difference of a weight.

The tax is the fraction of a round outside training and evaluation, measured in two ways: `by difference` is
1 − bare / round; `by phases`, if one client trains at a time, is 1 − (training + waiting for the end of the previous
round) / all phases that a round waits for, from rounds.jsonl, where training is the time that clients report. The bare
loop evaluates after each round, but a run evaluates in the background of the next round, which lowers the difference.
`CPU / bare` compares CPU time: other load on the machine affects it less, but it excludes waiting for the disk, and
Ray's is in other processes. In all three ways, checks, records and a checkpoint every round count as the framework's.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from run_records import let_children_import_models, markdown, round_seconds, write_record

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.npy import Arrays, to_numpy
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import read_config
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.launch.mps import shared_gpu
from fedeas_flwr.launch.run import launch
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import portable_config
from fedeas_flwr.runs.metrics import WALL_CLOCK
from fedeas_flwr.strategies.averaging import weighted_average
from fedeas_flwr.strategies.registry import client_part
from fedeas_flwr.training.build import build_engine, build_network
from fedeas_flwr.training.engine import Engine
from fedeas_flwr.training.evaluation import central_test
from fedeas_flwr.training.models import split_state

# A bare loop does not measure Γ̂, so it is off here; benchmarks/strategies.py measures its cost.
ALWAYS: dict[str, Any] = {"policy": "none", "gamma-hat": "off"}
ON_DIGITS: dict[str, Any] = {"clients": 10, "participation": 1.0, "alpha": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "small-cnn": {**ON_DIGITS, "model": "small-cnn", "local-epochs": 3, "batch-size": 32},
    "11 M parameters": {**ON_DIGITS, "model": "wide_models:eleven_million", "local-epochs": 1, "batch-size": 2048},
}
SMALL = {"small-cnn": {**MODELS["small-cnn"], "clients": 3, "local-epochs": 1}}


class BareLoop:
    """Federated averaging, written without a framework."""

    def __init__(self, config: RunConfig, workers: int) -> None:
        self.config, self.device = config, configure_torch(config.device, config.precision)
        self.data = federated_data(config, config.clients)
        self.test = central_test(config, self.device)
        self._own = threading.local()
        self._workers = workers
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self) -> tuple[list[float], list[float], Arrays]:
        """Return the seconds of every round, their CPU seconds, and the final weights."""
        model: tuple[Arrays, ...] = split_state(build_network(self.config))
        seconds, cpu = [], []
        if self.device != "cpu":  # clients of the inline grid receive tensors too
            model = tuple({k: torch.from_numpy(v).to(self.device) for k, v in part.items()} for part in model)
        with ThreadPoolExecutor(self._workers) as pool:
            for number in range(1, self.config.rounds + 1):
                began, cpu_began = time.perf_counter(), time.process_time()
                chosen = self._sample(number)

                def train(client: int, number: int = number, model: tuple[Arrays, ...] = model) -> Any:
                    return self._train(number, client, *model)

                # As the inline grid does: one client at a time in this thread, several in worker threads.
                ends = list(map(train, chosen) if self._workers == 1 else pool.map(train, chosen))
                examples = [len(self.data.partition.train[client]) for client in chosen]
                model = tuple(weighted_average(part, examples) for part in zip(*ends, strict=True))
                self.test(*model)
                seconds.append(time.perf_counter() - began)
                cpu.append(time.process_time() - cpu_began)
        return seconds, cpu, to_numpy({**model[0], **model[1]})

    def _sample(self, number: int) -> list[int]:
        """Return the clients that `TrainingRounds.sample` chooses."""
        count = self.config.num_sampled(self.config.clients)
        chosen = stream(self.config.seed, "sample", number).choice(self.config.clients, count, replace=False)
        return [int(client) for client in sorted(chosen)]

    def _train(self, number: int, client: int, trainable: Arrays, buffers: Arrays) -> tuple[Arrays, Arrays]:
        images, labels = self._images(client)
        batches = stream(self.config.seed, "batches", number, client)
        _, *trained = self._engine().train(trainable, buffers, images, labels, batches)
        first, second = (to_numpy(part) if self.device == "cpu" else dict(part) for part in trained)
        return first, second

    def _images(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a client's images and labels: read each time on a CPU, kept on a GPU, as the ClientApp does."""
        if client in self._kept:
            return self._kept[client]
        images, labels = (torch.from_numpy(array).to(self.device) for array in self.data.train(client))
        if self.device != "cpu":
            self._kept[client] = images, labels
        return images, labels

    def _engine(self) -> Engine:
        if not hasattr(self._own, "engine"):
            self._own.engine = build_engine(self.config, self.device, client_part(self.config).objective)
        engine: Engine = self._own.engine
        return engine


class CpuClock(logging.Filter):
    """Record this process's CPU time whenever Flower logs the end of a round."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("[round "):
            self.ends.append(time.process_time())
        return True


def flower_run(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Run under Flower; return each round's seconds, CPU seconds (if inline) and tax, and the final weights."""
    clock, log = CpuClock(), logging.getLogger("flwr")
    log.addFilter(clock)
    try:
        run = launch(config.with_changes(run_dir=str(folder)), Console(file=io.StringIO()))
    finally:
        log.removeFilter(clock)
    taxes = [tax_by_phases(record["seconds"]) for record in run.rounds()[1:]]
    cpu = [end - begin for begin, end in pairwise(clock.ends)]
    return {"seconds": round_seconds(run), "cpu": cpu, "taxes": taxes, "weights": RunDirectory(folder).load_model()}


def tax_by_phases(seconds: Mapping[str, float]) -> float:
    """Return the fraction of a round outside training, generation and waiting for an evaluation."""
    busy = seconds["training"] + seconds["generating"] + seconds["end_wait"]
    return 1 - busy / sum(seconds[phase] for phase in WALL_CLOCK)


def check_same(bare: Arrays, flower: Arrays, what: str) -> None:
    """Exit with an error if the weights differ."""
    wrong = [key for key in bare if key not in flower or not np.array_equal(bare[key], flower[key])]
    if wrong or bare.keys() != flower.keys():
        sys.exit(f"{what}: the bare loop and Flower end with different weights ({', '.join(wrong) or 'names'})")


def compare(name: str, keys: dict[str, Any], options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return one model's rows: bare, inline and, if asked, Ray; they alternate, so that other load affects all."""
    workers = 10 if options.device == "cuda" else 1
    values = {**keys, **ALWAYS, "device": options.device, "rounds": options.rounds, "backend": "inline"}
    config = parse_config({**values, "actors": workers})
    loop, timed = BareLoop(config, workers), [Turns("bare")]
    backends = {"inline": config}
    if options.ray:
        backends["ray"] = config.with_changes(backend="ray")
    timed += [Turns(backend) for backend in backends]
    for turn in range(options.repeats):
        taken, cpu, weights = loop.run()
        timed[0].seconds.append(taken[1:])  # a run's log does not have the start of its first round
        timed[0].cpu.append(cpu[1:])
        for ways, (backend, its) in zip(timed[1:], backends.items(), strict=True):
            if backend == "ray" and turn > 0:  # only once, because Ray starts slowly
                continue
            found = flower_run(its, folder / f"{name.replace(' ', '-')}-{backend}-{turn}")
            ways.seconds.append(found["seconds"])
            if workers == 1:  # with several clients, waiting for the largest would count as tax
                ways.taxes += found["taxes"]
            if found["cpu"]:
                ways.cpu.append(found["cpu"])
            if options.device == "cpu":
                check_same(weights, found["weights"], f"{name}, {backend}")
            ways.apart.append(max(float(np.abs(weights[k] - found["weights"][k]).max()) for k in weights))
    parameters = sum(array.size for array in weights.values())
    return [{"model": name, "parameters": parameters, **ways.line(timed[0])} for ways in timed]


@dataclass
class Turns:
    """Measurements of one way to run, by repetition: seconds and CPU seconds per round, the tax by phases, and the
    largest difference of a final weight from the bare loop's."""

    way: str
    seconds: list[list[float]] = field(default_factory=list)
    taxes: list[float] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)

    def line(self, bare: Turns) -> dict[str, Any]:
        """Return a row of the table; each median round is compared with the bare loop's of the same repetition."""
        ratios, cpu = by_turn(self.seconds, bare.seconds), by_turn(self.cpu, bare.cpu)
        rounds = [second for turn in self.seconds for second in turn]
        over_bare = statistics.median(ratios)
        return {
            "way": self.way,
            "rounds": len(rounds),
            "seconds_a_round": round(statistics.median(rounds), 4),
            "over_bare": round(over_bare, 3),
            "over_bare_by_turn": [round(ratio, 3) for ratio in ratios],
            "cpu_over_bare": round(statistics.median(cpu), 3) if cpu else None,
            "tax_by_difference": round(1 - 1 / over_bare, 4),
            "tax_by_phases": round(statistics.median(self.taxes), 4) if self.taxes else None,
            "weights_apart": max(self.apart, default=None),
        }


def by_turn(mine: Sequence[Sequence[float]], bare: Sequence[Sequence[float]]) -> list[float]:
    """Return the ratio of median rounds to the bare loop's, by repetition; Ray has fewer repetitions."""
    return [statistics.median(m) / statistics.median(b) for m, b in zip(mine, bare, strict=False)]


def table(rows: Sequence[dict[str, Any]], seconds: bool = True) -> str:
    """Return the table that is printed; the docs show it without seconds."""
    head = ["model", "way", *(["s a round"] if seconds else [])]
    head += ["round / bare", "CPU / bare", "tax by difference %", "tax by phases %"]
    cells = []
    for row in rows:
        taxes = [row["tax_by_difference"] if row["way"] != "bare" else None, row["tax_by_phases"]]
        cells.append(
            [
                row["model"],
                row["way"],
                *([f"{row['seconds_a_round']:.3f}"] if seconds else []),
                f"{row['over_bare']:.2f}",
                f"{row['cpu_over_bare']:.2f}" if row["cpu_over_bare"] else "–",
                *(f"{100 * tax:.0f}" if tax is not None else "–" for tax in taxes),
            ]
        )
    return markdown(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ray", action="store_true", help="also measure Flower's Ray simulation")
    parser.add_argument("--rounds", type=int, default=6, help="rounds per run; the first is not timed")
    parser.add_argument("--repeats", type=int, default=5, help="runs of bare and inline, alternating")
    parser.add_argument("--config", type=Path, help="run-config to measure instead of two models on digits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of --config")
    parser.add_argument("--small", action="store_true", help="a run of seconds, to try the script")
    options = parser.parse_args()
    if options.small:
        options.rounds, options.repeats = 3, 1
    if options.config:
        config = read_config(options.config, options.set)
        models, recorded = {options.config.stem: config.to_user_dict()}, {options.config.stem: portable_config(config)}
    else:
        models = recorded = SMALL if options.small else MODELS
    let_children_import_models()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        # A short path, because it holds sockets. The bare loop uses MPS too, or it would take turns with the others.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fe-")))
        if options.device == "cuda":
            os.environ.update(stack.enter_context(shared_gpu(folder, os.environ, 1)))
        for name, keys in models.items():
            rows += compare(name, keys, options, folder)
    setting = {**ALWAYS, "models": recorded, "rounds": options.rounds, "repeats": options.repeats}
    write_record(options.out, options.device, setting, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
