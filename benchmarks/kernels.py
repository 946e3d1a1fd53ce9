"""Measure what a whole run loses without each of the GPU's custom kernels, then without the least valuable together.

    python benchmarks/kernels.py steps --out results/kernels/steps-h200.json
    python benchmarks/kernels.py kernels --out results/kernels/kernels-h200.json --set data-dir=data …
    python benchmarks/kernels.py slower --out results/kernels/slower-h200.json --set data-dir=data …
    python benchmarks/kernels.py generation --out results/kernels/generation-h200.json --set generator=FOLDER …

Runs are FedAvg on CIFAR-10 with 100 clients (conf/cifar10-k100.toml), without images or, for generation, with FedEAS,
where no run finds images in its cache. Each run is a process of its own, alone on the GPU; the next one only imports
meanwhile. They alternate (each once, then each again), because the speed of a machine drifts. `start` is from a run's
launch to the end of its first round, and includes the engines, the capture of graphs and, for generation, the first
images; it is the fastest of the repetitions, since the first of all compiles. `round` is the mean of the rounds from
--first on: earlier ones may capture again, for larger clients. A whole run is start + 199 × round. The loss is relative
to the run with every kernel in the same repetition; the table has the median of the repetitions and their range.

steps: seconds of training alone, four clients at once, without each kernel, then several dropped together, the least
valuable first, up to a loss of 5 %: more precise than whole runs, of which training is the larger part.
kernels: whole runs without each kernel, then several dropped together, the least valuable first, up to a loss of 5 %.
slower: no graphs, the eager engine, and torch.compile. Its graphs belong to one thread, so one client trains at a time,
next to a run with every kernel that does the same. Few rounds, and one repetition.
generation: a whole run with and without the kernels of the UNet, then images per second of the sampler alone for each.
The loss is here that of the rounds after the first, in which clients get their images; later rounds make none.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from run_records import markdown, round_seconds, write_record
from switches import GENERATION, SWITCHES, TRAINING, without

from fedeas_flwr import client_app, server_app  # noqa: F401  a run's imports, before it is asked for
from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.files import cache_root
from fedeas_flwr.config_files import read_config
from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.launch.run import launch
from fedeas_flwr.training.engine import LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser, build_model

CONF = Path(__file__).resolve().parents[1] / "conf" / "cifar10-k100.toml"
KEYS = ["precision=bf16", "backend=inline", "actors=10", "checkpoint-every=200"]
ROUNDS = 200
ALLOWED = 0.05
EVERY = "every kernel"
KERNELS = [name for name in TRAINING if name not in ("triton", "launcher", "graphs")]
"""What may be dropped: the launcher is no kernel, and the other two are sets."""


@dataclass
class Variant:
    """A run with some kernels off: what was measured, by repetition."""

    name: str
    off: Sequence[str] = ()
    keys: Sequence[str] = ()
    starts: list[float] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    generating: list[float] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def whole(self, turn: int, first: int, last: int) -> float:
        """Return the seconds of 200 rounds, from those of rounds ``first`` to ``last``."""
        return min(self.starts) + (ROUNDS - 1) * statistics.mean(self.seconds[turn][first - 2 : last - 1])


def child() -> None:
    """Wait for a request, run it, and print what was measured."""
    print("ready", flush=True)
    asked = json.loads(sys.stdin.readline())
    os.environ["FEDEAS_CACHE"] = asked["cache"]
    with without(asked["off"]):
        began = time.time()
        run = launch(read_config(CONF, asked["words"]), Console(file=io.StringIO()))
        whole = time.time() - began
    seconds, log = round_seconds(run), (run.path / "flower.log").read_text(encoding="utf-8")
    records = run.rounds()
    found = {
        "start": whole - sum(seconds),
        "seconds": seconds,
        "generating": sum(one["seconds"].get("generating", 0.0) for one in records),
        "made": sum(one["made"] for one in records),
        "failures": sum(len(one["failures"]) for one in records),
        "accuracy": records[-1]["accuracy"],
        "notes": [line[24:] for line in log.splitlines() if "from here on" in line or "not fused" in line],
    }
    print(json.dumps(found), flush=True)


def measure(variants: Sequence[Variant], options: argparse.Namespace) -> None:
    """Run the variants one after the other and store what was measured; the next process imports while one runs."""
    first, *others = variants
    processes = [_start()]
    for number, variant in enumerate([first, *others]):
        processes += [_start()] if number < len(others) else []
        with tempfile.TemporaryDirectory(prefix="fe-") as folder:
            policy = ["policy=none"] if options.what != "generation" else []
            length = [f"rounds={options.rounds}", f"run-dir={folder}/run"]
            words = [*KEYS, *policy, *options.set, *variant.keys, *length]
            asked = {"off": list(variant.off), "words": words, "cache": str(_cache_without_images(Path(folder)))}
            said = _answer(processes[number], asked, options.timeout)
        print(f"{variant.name}: {said}", flush=True)
        if not said:
            variant.notes.append("failed, or took too long")
            continue
        found = json.loads(said)
        variant.notes += found["notes"]
        variant.starts.append(found["start"])
        variant.seconds.append(found["seconds"])
        variant.generating.append(found["generating"])
        variant.made.append(found["made"])


def _start() -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "run", "--out", os.devnull]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str], asked: dict[str, Any], timeout: float) -> str:
    """Return the last line that a process printed; an empty string if it failed or took too long."""
    try:
        lines = process.communicate(json.dumps(asked) + "\n", timeout)[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return ""
    return lines[-1] if process.returncode == 0 and lines else ""


def _cache_without_images(folder: Path) -> Path:
    if (cache_root() / "partitions").is_dir():
        shutil.copytree(cache_root() / "partitions", folder / "cache" / "partitions")
    return folder / "cache"


def losses(variant: Variant, base: Variant, first: int) -> list[float]:
    """Return the part of a whole run's seconds that is lost, by repetition."""
    found = []
    for turn in range(min(len(variant.seconds), len(base.seconds))):
        last = 1 + min(len(variant.seconds[turn]), len(base.seconds[turn]))
        begin = min(first, last - 1)
        found.append(variant.whole(turn, begin, last) / base.whole(turn, begin, last) - 1)
    return found


def measure_kernels(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of each kernel, and of several dropped together."""
    base, singles = Variant(EVERY), [Variant(name, [name]) for name in options.kernels]
    for _ in range(options.repeats):
        measure([base, *singles], options)
    rows = [row_of(variant, base, options) for variant in (base, *singles)]
    write_record(options.out, "cuda", setting_of(options), rows)  # what follows takes minutes
    kernels = [row for row in rows if row["loss"] is not None and row["name"] in KERNELS]
    order = sorted(kernels, key=lambda row: row["loss"])
    sums = list(accumulate(max(row["loss"], 0.0) for row in order))
    number, tried = max(sum(total <= ALLOWED for total in sums), 2), dict[int, float]()
    while 2 <= number <= len(order) and number not in tried:
        off = [row["name"] for row in order[:number]]
        base, fewer = Variant(EVERY), Variant("dropped: " + ", ".join(off), off)
        for _ in range(options.repeats):
            measure([base, fewer], options)
        rows.append(row_of(fewer, base, options))
        tried[number] = rows[-1]["loss"]
        number += 1 if tried[number] <= ALLOWED else -1
    return rows


def measure_steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of four clients that train at once: each kernel off, then several."""
    clients, samples, epochs = 4, 670, 10
    rng, start = np.random.default_rng(0), read_state(network())
    images = torch.from_numpy(rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8)).cuda()
    labels = torch.from_numpy(rng.integers(0, 10, samples)).cuda()
    recipe, normalise = LocalTrainingConfig(epochs, 64, 1e-3), Normaliser((0.5,) * 3, (0.3,) * 3, "cuda")
    configure_torch("cuda", "bf16")
    rows: list[dict[str, Any]] = []

    def row(name: str, off: Sequence[str]) -> dict[str, Any]:
        with without(off), ThreadPoolExecutor(clients) as pool:
            engines = [GraphedEngine(network(), recipe, normalise, "bf16") for _ in range(clients)]
            seconds = []
            for _ in range(8):
                before = time.perf_counter()
                list(pool.map(lambda engine: engine.train(*start, images, labels, np.random.default_rng(0)), engines))
                seconds.append(time.perf_counter() - before)
        about = SWITCHES[off[0]][0] if len(off) == 1 else ""
        found = {"name": name, "off": list(off), "about": about, "seconds": statistics.median(seconds[1:])}
        base = [one["seconds"] for one in rows if not one["off"]]
        found |= {"passes": seconds[1:], "loss": found["seconds"] / statistics.mean(base) - 1 if base else 0.0}
        rows.append(found)
        print(json.dumps(found), flush=True)
        write_record(options.out, "cuda", {"clients": clients, "samples": samples, "epochs": epochs}, rows)
        return found

    row(EVERY, [])
    singles = [row(name, [name]) for name in KERNELS]
    row(EVERY, [])
    dropped: list[str] = []
    for single in sorted(singles, key=lambda one: one["loss"]):
        dropped.append(single["name"])
        if len(dropped) > 1 and row("dropped: " + ", ".join(dropped), dropped)["loss"] > ALLOWED:
            break
    return rows


def network() -> torch.nn.Module:
    return build_model("resnet18", 10, (32, 32, 3), seed=0)


def measure_slower(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of slower ways to run, each next to the run with every kernel."""
    together = [
        Variant(EVERY),
        Variant("graphs", ["graphs"]),
        Variant("eager engine", keys=["engine=eager"]),
    ]
    alone = [
        Variant(EVERY + ", one client at a time", keys=["actors=1"]),
        Variant("compiled", ["compiled"], ["engine=eager", "actors=1"]),
    ]
    measure([*together, *alone], options)
    return [row_of(variant, group[0], options) for group in (together, alone) for variant in group]


def row_of(variant: Variant, base: Variant, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the record."""
    lost = losses(variant, base, options.first)
    late = [second for turn in variant.seconds for second in turn[options.first - 2 :] or turn]
    return {
        "name": variant.name,
        "off": list(variant.off),
        "about": SWITCHES[variant.off[0]][0] if len(variant.off) == 1 else "",
        "keys": list(variant.keys),
        "start": min(variant.starts) if variant.starts else None,
        "round": statistics.mean(late) if late else None,
        "loss": statistics.median(lost) if lost else None,
        "losses": lost,
        "starts": variant.starts,
        "seconds": variant.seconds,
        "generating": variant.generating,
        "made": variant.made,
        "notes": sorted(set(variant.notes)),
    }


def measure_generation(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of generation: whole runs with and without the kernels, then the sampler alone."""
    base, plain = Variant(EVERY), Variant("fused", ["fused"])
    for _ in range(options.repeats):
        measure([base, plain], options)
    rows = [row_of(variant, base, options) for variant in (base, plain)]
    for row, variant in zip(rows, (base, plain), strict=True):
        sums = zip(variant.seconds, base.seconds, strict=True)
        row["losses"] = [sum(mine) / sum(all_on) - 1 for mine, all_on in sums]
        row["loss"] = statistics.median(row["losses"])
    write_record(options.out, "cuda", setting_of(options), rows)  # what follows takes a minute
    return rows + sampling_rates(read_config(CONF, options.set).generator, options)


def sampling_rates(folder: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return images per second of the sampler with every kernel and without each, in turns."""
    ways = {EVERY: [], **{name: [name] for name in GENERATION}, "compiled-unet": ["compiled-unet"]}
    made: dict[str, DiffusionGenerator] = {}
    firsts, rates = {}, {name: list[float]() for name in ways}
    # torch.compile comes last, since graphs of ours that were replayed after it crashed.
    for turn, names in [*((t, list(GENERATION)) for t in range(3)), *((t, ["compiled-unet"]) for t in range(3))]:
        for name in [EVERY, *names] if names != ["compiled-unet"] else names:
            with without(ways[name]):
                began = time.perf_counter()
                if turn == 0:
                    size = {"batch_size": options.batch, "device": "cuda"}
                    made[name] = DiffusionGenerator(Path(folder), num_classes=10, image_shape=(32, 32, 3), **size)
                count = options.batch * (2 if turn else 1)
                images = made[name].sample([SampleId(1, turn, i % 10, i // 10) for i in range(count)])
                taken = time.perf_counter() - began
            assert len(images) == count
            if turn:
                rates[name].append(count / taken)
            else:
                firsts[name] = taken
            print(f"sampler, {name}: {count} images in {taken:.2f} s", flush=True)
    base = statistics.median(rates[EVERY])
    return [
        {
            "name": f"sampler alone, {name}",
            "off": ways[name],
            "about": SWITCHES[name][0] if name in SWITCHES else "",
            "images_per_second": rates[name],
            "first_batch_seconds": firsts[name],
            "rate": statistics.median(rates[name]) / base,
        }
        for name in ways
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table that is printed and shown in the docs."""
    cells = []
    for row in rows:
        if "rate" in row:
            rate = f"{statistics.median(row['images_per_second']):,.0f} images/s"
            cells.append([row["name"], row["about"], f"{row['first_batch_seconds']:.1f}", rate, f"× {row['rate']:.2f}"])
            continue
        if "passes" in row:
            spread = f"{min(row['passes']):.3f} to {max(row['passes']):.3f}"
            cells.append([row["name"], row["about"], spread, f"{row['seconds']:.3f}", f"{100 * row['loss']:+.1f}"])
            continue
        loss = "–"
        if row["loss"] is not None:
            loss = f"{100 * row['loss']:+.1f} ({100 * min(row['losses']):+.1f} to {100 * max(row['losses']):+.1f})"
        numbers = [f"{row[key]:.3f}" if row[key] is not None else "–" for key in ("start", "round")]
        cells.append([row["name"], row["about"] + "; ".join(["", *row["notes"]]), *numbers, loss])
    return markdown(["without", "", "start s", "round s", "% of a whole run lost (range)"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*PARTS, "run"], help="run: a single run, asked for on stdin")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the runs")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--first", type=int, default=6, help="first round of the mean")
    parser.add_argument("--repeats", type=int, default=2)
    names = [*KERNELS, "triton", "launcher"]
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=names, help="measure only these")
    parser.add_argument("--batch", type=int, default=1024, help="batch of the sampler alone")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a run is given up")
    options = parser.parse_args()
    if options.what == "run":
        child()
        return
    rows = PARTS[options.what](options)
    write_record(options.out, "cuda", setting_of(options), rows)
    print(table(rows))


def setting_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the record says of the runs."""
    keys = [*KEYS, *([] if options.what == "generation" else ["policy=none"])]
    return {"conf": CONF.name, "keys": keys, "rounds": options.rounds, "first": options.first, "seed": "the default, 1"}


PARTS = {
    "steps": measure_steps,
    "kernels": measure_kernels,
    "slower": measure_slower,
    "generation": measure_generation,
}

if __name__ == "__main__":
    main()
