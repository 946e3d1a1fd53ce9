"""How many clients train at once, and what Ray is told of it; on a GPU by a probe, whose answer is kept.

    python -m fedeas_flwr.launch.resources '{"model": "resnet18", …}'     a run-config; prints what was measured as JSON

The probe takes some seconds. More clients at once use a GPU better until they only wait for each other, and each takes
memory. Both depend on the GPU, the network, the batch and the precision, so they are measured: 1, 2, 4 … engines on
streams of one process. Ray's client processes share a GPU in the same way where CUDA's MPS runs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from fedeas_flwr.common.cores import usable_cores
from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.files import atomic_write, cache_root
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.generators.ray_service import reserve_generator_gpu
from fedeas_flwr.training.build import build_engine, network
from fedeas_flwr.training.engine import Engine, read_state
from fedeas_flwr.training.objective import CROSS_ENTROPY

logger = logging.getLogger(__name__)

DEFAULT_PARALLEL_CLIENTS = 10
"""Clients at once where the probe fails; also the most that pay on the one GPU measured, an H200 (docs/speed.md)."""
_SAMPLES, _EPOCHS = 8, 10  # batches a client, and how often
_PASSES = 3  # of which the best counts: whatever else a machine does takes time away, and the answer is kept
_MIN_GAIN = 0.05  # of the rate, that twice as many clients must bring
_FREE = 0.8  # of the GPU's memory that is free: the generator and the test need some
_PROCESS_BYTES = 1 << 30  # CUDA's own, in each of Ray's processes
_SECONDS = 180.0
_UNMEASURED = "FEDEAS_UNMEASURED"
"""The variable that names what this process could not measure. Neither it nor those it starts need try again: a sweep
asks about each of its runs beforehand."""
_KEYS = ("dataset", "model", "stem", "batch_size", "precision", "engine")


def clients_at_once(config: RunConfig, on_gpu: bool) -> int:
    """Return how many clients train at the same time: under Ray in a process each, inline on a GPU in a thread each."""
    if config.actors:
        return config.actors
    if on_gpu:
        return max_parallel_clients(config)
    usual = usable_cores()
    return min(usual, config.clients or usual)


def ray_resources(config: RunConfig, on_gpu: bool) -> dict[str, float]:
    """Return what Ray is told it has and what each client takes of it, in the keys of Flower's federation config."""
    actors = clients_at_once(config, on_gpu)
    resources: dict[str, float] = {"client-resources-num-cpus": 1}
    if on_gpu:  # a client that asks Ray for none is shown none
        resources["client-resources-num-gpus"] = reserve_generator_gpu(config.gpu_share or 1 / actors)
    if config.ray_address:  # a cluster has what it has; `actors` then says how many clients share one of its GPUs
        return resources
    return resources | {"init-args-num-cpus": actors, **({"init-args-num-gpus": 1} if on_gpu else {})}


def max_parallel_clients(config: RunConfig) -> int:
    """As many as the run has in a round, at most, and as pay on this GPU."""
    most = config.num_sampled(config.clients) if config.clients else DEFAULT_PARALLEL_CLIENTS
    if not torch.cuda.is_available():  # somebody wants to know how it would be on a machine with a GPU
        return min(most, DEFAULT_PARALLEL_CLIENTS)
    path = _cache_file(config)
    if path.name not in (failed := os.environ.get(_UNMEASURED, "").split()):
        try:
            return min(most, choose(_read_or_measure(config, path)))
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            os.environ[_UNMEASURED] = " ".join([*failed, path.name])
            usual, why = min(most, DEFAULT_PARALLEL_CLIENTS), _why(error)
            logger.warning("how many clients at once pay cannot be measured, so it is %d: %s", usual, why)
    return min(most, DEFAULT_PARALLEL_CLIENTS)


def _why(error: Exception) -> str:
    if not isinstance(error, subprocess.CalledProcessError):
        return one_line(error)
    last = next((line for line in reversed(error.stderr.split("\n")) if line.strip()), "")
    if error.returncode < 0:
        return f"the probe died ({signal.strsignal(-error.returncode)})"
    return one_line(last or f"the probe ended with {error.returncode}")


def choose(measured: Mapping[str, Any]) -> int:
    """The fewest clients beyond which twice as many bring next to nothing, as far as memory allows.

    Parameters
    ----------
    measured
        ``images_per_second`` by number of clients, ``bytes_a_client`` and ``bytes_free``.
    """
    most = int(_FREE * measured["bytes_free"] // (measured["bytes_a_client"] + _PROCESS_BYTES))
    rates = {int(count): float(rate) for count, rate in measured["images_per_second"].items()}
    allowed = {count: rate for count, rate in rates.items() if count <= max(1, most)}
    best = max(allowed.values())
    return min(count for count, rate in allowed.items() if rate * (1 + _MIN_GAIN) >= best)


def _cache_file(config: RunConfig) -> Path:
    properties = torch.cuda.get_device_properties(0)
    about = [str(properties), torch.__version__, *(str(getattr(config, key)) for key in _KEYS)]
    return cache_root() / "probes" / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"


def _read_or_measure(config: RunConfig, path: Path) -> dict[str, Any]:
    known = _read(path)
    if known is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Runs may start at once: two probes on one GPU would measure each other.
        with FileLock(path.parent / ".lock"):
            known = _read(path)
            if known is None:
                known = _measure_in_subprocess(config)
                atomic_write(path, json.dumps(known).encode())
    return known


def _read(path: Path) -> dict[str, Any] | None:
    """What was measured before; nothing if it was not, or if the file is damaged."""
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
        choose(known)
        return known
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _measure_in_subprocess(config: RunConfig) -> dict[str, Any]:
    """Measure in a process of its own: what it allocates is gone with it."""
    words = [sys.executable, "-m", __name__, json.dumps(config.to_user_dict())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def measure(config: RunConfig, device: str, counts: tuple[int, ...] = (1, 2, 4, 7, 10)) -> dict[str, Any]:
    """Train made-up clients, more and more at once, with the engine that the run would have."""
    info, batch = dataset_info(config.dataset), config.batch_size
    config = config.with_changes(local_epochs=_EPOCHS, momentum=0.0, weight_decay=0.0)
    rng, samples = np.random.default_rng(0), _SAMPLES * batch
    images = torch.from_numpy(rng.integers(0, 256, (samples, *info.image_shape), dtype=np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, len(info.classes), samples)).to(device)
    free, engines, rates, taken = _free(device), list[Engine](), dict[int, float](), 0
    start = read_state(network(config))
    for count in counts:
        while len(engines) < count:
            engines.append(build_engine(config, device, CROSS_ENTROPY, rank=len(engines)))
            engines[-1].train(*start, images, labels, np.random.default_rng(0))  # captures, and makes its buffers
            taken = taken or max(1, free - _free(device))  # somebody else may have let go of more meanwhile
        with ThreadPoolExecutor(count) as pool:
            for _ in range(_PASSES):
                began = time.perf_counter()
                list(pool.map(lambda e: e.train(*start, images, labels, np.random.default_rng(0)), engines))
                rate = count * samples * _EPOCHS / (time.perf_counter() - began)
                rates[count] = max(rate, rates.get(count, 0.0))
    return {"images_per_second": rates, "bytes_a_client": taken, "bytes_free": free}


def _free(device: str) -> int:
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 1 << 40


def main() -> None:
    """Measure what the command line's run-config says."""
    config = parse_config(json.loads(sys.argv[1]))
    print(json.dumps(measure(config, configure_torch(config.device, config.precision))))


if __name__ == "__main__":
    main()
