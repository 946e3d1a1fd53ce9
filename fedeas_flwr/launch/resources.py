"""Number of clients that train in parallel, and the resources Ray is given; on a GPU measured once and cached.

    python -m fedeas_flwr.launch.resources '{"model": "resnet18", …}'     run-config; prints the measurement as JSON

The probe takes a few seconds. More parallel clients use a GPU better up to a point, and each takes memory. Both depend
on the GPU, the network, the batch size and the precision, so the probe measures 1, 2, 4, 7 and 10 engines on streams of
one process. Ray's client processes share a GPU in the same way under CUDA's MPS.
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
from fedeas_flwr.training.build import build_engine, build_network
from fedeas_flwr.training.engine import Engine, read_state
from fedeas_flwr.training.objective import CROSS_ENTROPY

logger = logging.getLogger(__name__)

DEFAULT_PARALLEL_CLIENTS = 10
"""Parallel clients if the probe fails; also the useful maximum on the one GPU measured, an H200 (docs/speed.md)."""
PARALLEL_GENERATOR_CLIENTS = 5
"""Parallel clients that train a generator on a GPU: an H200 trains 15 % more images per second with 5 than with 10
(results/federated-generator/)."""
_SAMPLES, _EPOCHS = 8, 10  # batches per client, and epochs
_PASSES = 3  # the best pass counts: other load only slows a pass down, and the result is cached
_MIN_GAIN = 0.05  # fraction of the rate that more clients must add
_FREE = 0.8  # fraction of the free GPU memory for clients: generator and evaluation need the rest
_PROCESS_BYTES = 1 << 30  # CUDA context of each of Ray's processes
_SECONDS = 180.0
_UNMEASURED = "FEDEAS_UNMEASURED"
"""Environment variable with the measurements that failed, so that neither this process nor the runs that a sweep starts
try them again."""
_KEYS = ("dataset", "model", "stem", "batch_size", "precision", "engine")


def clients_at_once(config: RunConfig, on_gpu: bool) -> int:
    """Return the number of clients that train in parallel: processes under Ray, threads inline on a GPU."""
    if config.actors:
        return config.actors
    if on_gpu and config.task == "generator":
        return PARALLEL_GENERATOR_CLIENTS
    if on_gpu:
        return max_parallel_clients(config)
    cores = usable_cores()
    return min(cores, config.clients or cores)


def ray_resources(config: RunConfig, on_gpu: bool) -> dict[str, float]:
    """Return the resources of Ray and of each client, as keys of Flower's federation config."""
    actors = clients_at_once(config, on_gpu)
    resources: dict[str, float] = {"client-resources-num-cpus": 1}
    if on_gpu:  # Ray hides the GPU from a client that requests none
        resources["client-resources-num-gpus"] = reserve_generator_gpu(config.gpu_share or 1 / actors)
    if config.ray_address:  # a cluster sets its own size; `actors` is then the number of clients per GPU
        return resources
    return resources | {"init-args-num-cpus": actors, **({"init-args-num-gpus": 1} if on_gpu else {})}


def max_parallel_clients(config: RunConfig) -> int:
    """Return the number of clients worth training in parallel on this GPU, at most those of a round."""
    most = config.num_sampled(config.clients) if config.clients else DEFAULT_PARALLEL_CLIENTS
    default = min(most, DEFAULT_PARALLEL_CLIENTS)
    if not torch.cuda.is_available():  # `fedeas doctor` asks what a machine with a GPU would do
        return default
    path, failed = _cache_file(config), os.environ.get(_UNMEASURED, "").split()
    if path.name in failed:
        return default
    try:
        return min(most, choose(_read_or_measure(config, path)))
    except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        os.environ[_UNMEASURED] = " ".join([*failed, path.name])
        text = "could not measure how many clients to train in parallel; using %d: %s"
        logger.warning(text, default, _reason(error))
        return default


def _reason(error: Exception) -> str:
    if not isinstance(error, subprocess.CalledProcessError):
        return one_line(error)
    last = next((line for line in reversed(error.stderr.split("\n")) if line.strip()), "")
    if error.returncode < 0:
        return f"the probe died ({signal.strsignal(-error.returncode)})"
    return one_line(last or f"the probe ended with {error.returncode}")


def choose(measured: Mapping[str, Any]) -> int:
    """Return the smallest number of clients whose rate is within 5 % of the best that fits in memory; see `measure`."""
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
        # Locked: probes of two runs on one GPU would disturb each other.
        with FileLock(path.parent / ".lock"):
            known = _read(path)
            if known is None:
                known = _measure_in_subprocess(config)
                atomic_write(path, json.dumps(known).encode())
    return known


def _read(path: Path) -> dict[str, Any] | None:
    """Return the cached measurement, or None if it is missing or damaged."""
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
        choose(known)
        return known
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _measure_in_subprocess(config: RunConfig) -> dict[str, Any]:
    """Measure in a separate process, which frees its GPU memory when it exits."""
    words = [sys.executable, "-m", __name__, json.dumps(config.to_user_dict())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def measure(config: RunConfig, device: str, counts: tuple[int, ...] = (1, 2, 4, 7, 10)) -> dict[str, Any]:
    """Return images per second by number of parallel clients, with random images and the run's engine."""
    info, batch = dataset_info(config.dataset), config.batch_size
    config = config.with_changes(local_epochs=_EPOCHS, momentum=0.0, weight_decay=0.0)
    rng, samples = np.random.default_rng(0), _SAMPLES * batch
    images = torch.from_numpy(rng.integers(0, 256, (samples, *info.image_shape), dtype=np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, len(info.classes), samples)).to(device)
    free, engines, rates, taken = _free(device), list[Engine](), dict[int, float](), 0
    start = read_state(build_network(config))

    def train(engine: Engine) -> None:
        engine.train(*start, images, labels, np.random.default_rng(0))

    for count in counts:
        while len(engines) < count:
            engines.append(build_engine(config, device, CROSS_ENTROPY, rank=len(engines)))
            train(engines[-1])  # captures CUDA graphs and allocates buffers
            taken = taken or max(1, free - _free(device))  # another process may have freed more
        with ThreadPoolExecutor(count) as pool:
            for _ in range(_PASSES):
                began = time.perf_counter()
                list(pool.map(train, engines))
                rate = count * samples * _EPOCHS / (time.perf_counter() - began)
                rates[count] = max(rate, rates.get(count, 0.0))
    return {"images_per_second": rates, "bytes_a_client": taken, "bytes_free": free}


def _free(device: str) -> int:
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 1 << 40


def main() -> None:
    """Measure with the run-config of the command line and print the result."""
    config = parse_config(json.loads(sys.argv[1]))
    print(json.dumps(measure(config, configure_torch(config.device, config.precision))))


if __name__ == "__main__":
    main()
