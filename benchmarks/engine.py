"""Measure the client's training step and ten clients in parallel, with each optimisation, in one run.

    python benchmarks/engine.py --out results/engine/engine-h200.json
    python benchmarks/engine.py --without sgd,fetch      (with these kernels off; benchmarks/kernels.py: whole runs)

(a) one client: the loop of Flower's quickstart (DataLoader, eager, float32), then GPU data, tf32, channels_last, graph.
(b) ten clients: in parallel on streams of one process; as ten processes that take turns on the GPU, and that share it
    by MPS. (Ten clients one after the other have the rate of (a).)
(c) roofline: the floating-point operations per second of these rates, relative to one large matrix product.
Rates are images/s of training ResNet-18 (7×7 stem, 32×32 images, batch 64). Needs a CUDA GPU; --small runs the script
on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_records import markdown
from switches import TRAINING, add_option, without
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.launch.mps import shared_gpu
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser, build_model

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def network() -> torch.nn.Module:
    return build_model("resnet18", 10, (32, 32, 3), seed=0)


def seconds(work: Callable[[], object], device: str) -> float:
    """Return the wall-clock seconds of `work`, after one untimed call; the GPU is idle before and after."""
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def quickstart_loop(images: np.ndarray, labels: np.ndarray, epochs: int, device: str) -> Callable[[], object]:
    """Return the loop of Flower's quickstart: a DataLoader of normalised float images, SGD, one step at a time."""
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - torch.tensor(MEAN).view(1, 3, 1, 1)) / (
        torch.tensor(STD).view(1, 3, 1, 1)
    )
    loader = DataLoader(TensorDataset(pixels, torch.from_numpy(labels)), batch_size=64, shuffle=True)
    model = network().to(device).train()

    def work() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    return work


def worker(samples: int, epochs: int, precision: str) -> None:
    """Run one of several processes: warm up, print "ready", train on request, print "done"."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_precision(precision)
    engine = GraphedEngine(
        network(), LocalTrainingConfig(epochs, 64, 1e-3), Normaliser(MEAN, STD, device), precision, device
    )
    rng, start = np.random.default_rng(0), read_state(network())
    images = torch.from_numpy(rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, 10, samples)).to(device)
    for said in ("ready", "done"):
        engine.train(*start, images, labels, np.random.default_rng(0))
        print(said, flush=True)
        sys.stdin.readline()


def processes_rate(
    count: int, samples: int, epochs: int, precision: str, off: Sequence[str], environment: Mapping[str, str]
) -> float:
    """Return the total images/s of `count` processes that train at the same time, one client each."""
    words = [sys.executable, __file__, "--worker", f"{samples},{epochs},{precision}", "--without", ",".join(off)]
    started = [
        subprocess.Popen(words, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        _all_say(started, "ready")
        began = time.perf_counter()
        for process in started:
            print(file=process.stdin, flush=True)
        _all_say(started, "done")
        return count * samples * epochs / (time.perf_counter() - began)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _all_say(processes: Sequence[subprocess.Popen[str]], word: str) -> None:
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline().strip() != word:
            raise SystemExit(f"a client process ended before it was {word}")


def step_flops() -> float:
    """Return the floating-point operations of training on one image, forward and backward, as torch counts them."""
    model, images = network().train(), torch.zeros(2, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return float(counter.get_total_flops() / len(images))


def peak_flops(precision: str, device: str) -> float:
    """Return the floating-point operations per second of one large matrix product."""
    set_precision(precision)
    size = 8192 if device == "cuda" else 256
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.ones(size, size, device=device, dtype=kind) for _ in range(2))
    return 10 * 2 * size**3 / seconds(lambda: [a @ b for _ in range(10)], device)


def set_precision(precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"


def table(record: Mapping[str, Any]) -> str:
    """Return the table that is printed and shown in the docs."""
    rates = record["images_per_second"]
    first, cells = next(iter(rates.values())), []
    for name, rate in rates.items():
        part = record["part_of_peak"][name]
        eager = record["over_one_eager_client"][name]
        cells.append([name.strip(), f"{rate:,.0f}", f"{rate / first:.1f}", f"{eager:.1f}", f"{100 * part:.1f}"])
    head = ["", "images/s", "× the quickstart's loop", "× one eager client, tf32", "% of one large matrix product"]
    return markdown(head, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_option(parser, TRAINING)
    args = parser.parse_args()
    with without(args.without):
        if args.worker:
            given = args.worker.split(",")
            worker(int(given[0]), int(given[1]), given[2])
        else:
            measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Measure, print the table and write it to --out."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    samples, epochs, cohort = (8, 1, 2) if args.small else (2048, 10, 10)
    low = "bf16" if device == "cuda" else "fp32"  # CPUs emulate bf16 slowly
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (samples, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, samples)
    x, y = torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)
    recipe, normalise = LocalTrainingConfig(epochs, 64, 1e-3), Normaliser(MEAN, STD, device)
    start = read_state(network())
    rows: list[tuple[str, float]] = []

    def measure(name: str, work: Callable[[], object], clients: int = 1) -> None:
        measured(name, clients * samples * epochs / seconds(work, device))

    def measured(name: str, rate: float) -> None:
        rows.append((name, rate))
        print(f"{name:<58} {rate:>10,.0f} images/s  {rate / rows[0][1]:>6.2f} x", flush=True)

    def one(engine: EagerEngine | GraphedEngine) -> Callable[[], object]:
        return lambda: engine.train(*start, x, y, np.random.default_rng(0))

    set_precision("fp32")
    measure("(a) quickstart loop: DataLoader, eager, fp32", quickstart_loop(images, labels, epochs, device))
    measure("    eager, data on the GPU, fp32", one(EagerEngine(network(), recipe, normalise, device)))
    set_precision("tf32")
    measure("    eager, data on the GPU, tf32", one(EagerEngine(network(), recipe, normalise, device)))
    eager_rate = rows[-1][1]
    set_precision("fp32")
    measure("    graphed, fp32", one(GraphedEngine(network(), recipe, normalise, "fp32", device)))
    set_precision("tf32")
    measure("    graphed, tf32", one(GraphedEngine(network(), recipe, normalise, "tf32", device)))
    measure(f"    graphed, {low}", one(GraphedEngine(network(), recipe, normalise, low, device)))
    for precision, counts in (("tf32", [cohort]), (low, sorted({min(5, cohort), cohort, 2 * cohort}))):
        for count in counts:
            engines = [GraphedEngine(network(), recipe, normalise, precision, device) for _ in range(count)]
            with ThreadPoolExecutor(count) as pool:

                def at_once(engines: list[GraphedEngine] = engines, pool: ThreadPoolExecutor = pool) -> None:
                    list(pool.map(lambda e: e.train(*start, x, y, np.random.default_rng(0)), engines))

                measure(f"(b) {count} clients at once on {count} streams, {precision}", at_once, count)
    with tempfile.TemporaryDirectory(prefix="fe-") as folder, shared_gpu(Path(folder), os.environ, cohort) as shared:
        for how, more in (("taking turns", {}), *([("by MPS", shared)] if shared else [])):
            rate = processes_rate(cohort, samples, epochs, low, args.without, {**os.environ, **more})
            measured(f"(b) {cohort} processes, {how}, {low}", rate)
    flops = step_flops()
    peaks = {precision: peak_flops(precision, device) for precision in {"fp32", "tf32", low}}
    roofline = {name: rate * flops / peaks[name[-4:]] for name, rate in rows if name[-4:] in peaks}
    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    record = {
        "environment": describe_environment(name),
        "setting": {
            "model": "resnet18 7x7",
            "batch": 64,
            "samples": samples,
            "epochs": epochs,
            "without": args.without,
        },
        "images_per_second": dict(rows),
        "flops_per_image": flops,
        "peak_flops": peaks,
        "part_of_peak": roofline,
        "over_one_eager_client": {name: rate / eager_rate for name, rate in rows},
    }
    print(table(record))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
