"""Number of parallel clients: limited by measured speed, GPU memory and the clients of a round."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.launch import resources
from fedeas_flwr.training import build as build_module

GIGABYTE = 1 << 30


def measured(rates: dict[str, float], free: int = 100 * GIGABYTE) -> dict[str, Any]:
    return {"images_per_second": rates, "bytes_a_client": GIGABYTE, "bytes_free": free}


def test_choose_adds_clients_while_faster_and_in_memory() -> None:
    rates = {"1": 80.0, "2": 120.0, "4": 180.0, "7": 182.0, "10": 175.0}
    assert resources.choose(measured(rates)) == 4
    assert resources.choose(measured({**rates, "10": 280.0})) == 10
    assert resources.choose(measured(rates, free=7 * GIGABYTE)) == 2  # 0.8 · 7 GB by 2 GB each
    assert resources.choose(measured(rates, free=0)) == 1


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: "a GPU that is none")
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    monkeypatch.setenv("FEDEAS_UNMEASURED", "")  # set, so that monkeypatch restores it


def config(**keys: Any) -> RunConfig:
    values = {"device": "cpu", "policy": "none", "clients": 20, "participation": 0.5, **keys}
    return parse_config({key.replace("_", "-"): value for key, value in values.items()})


def test_probe_measures_once_and_is_cached(
    simulated_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "__name__", "short_probe")  # the module that the new process runs
    keys = {"model": "users_models:tiny", "batch_size": 2}
    found = resources.max_parallel_clients(config(**keys))
    (kept,) = tmp_path.glob("probes/*.json")
    record = json.loads(kept.read_text())
    assert list(record["images_per_second"]) == ["1", "2", "4", "7", "10"] and found == resources.choose(record)
    assert all(rate > 0 for rate in record["images_per_second"].values())
    kept.write_text(json.dumps(measured({"1": 10.0, "4": 40.0, "10": 80.0})))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("measured again"))
    assert resources.max_parallel_clients(config(**keys)) == 10
    assert resources.max_parallel_clients(config(participation=0.1, **keys)) == 2, "more than the clients of a round"


def test_concurrent_runs_measure_once(simulated_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two concurrent probes would each measure half of the GPU, and the result is cached."""
    probes: list[Any] = []

    def slow_probe(words: Any, **more: Any) -> Any:
        probes.append(words)
        time.sleep(0.5)
        return subprocess.CompletedProcess(words, 0, json.dumps(measured({"1": 10.0, "4": 40.0, "10": 80.0})))

    monkeypatch.setattr(subprocess, "run", slow_probe)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(resources.max_parallel_clients, [config(seed=1), config(seed=2), config(seed=3)]))
    assert found == [10, 10, 10] and len(probes) == 1


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine, `fedeas doctor` reports what a run would do on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("measured"))
    assert resources.max_parallel_clients(config(participation=1.0)) == resources.DEFAULT_PARALLEL_CLIENTS
    assert resources.max_parallel_clients(config(participation=0.1)) == 2


def test_failed_probe_logs_a_warning_and_uses_the_default(
    simulated_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert resources.max_parallel_clients(config(model="no_such:network")) == resources.DEFAULT_PARALLEL_CLIENTS
    (said,) = caplog.messages
    assert "using 10: " in said and "no_such" in said and "\n" not in said
    monkeypatch.setattr(resources, "_SECONDS", 0.01)
    assert resources.max_parallel_clients(config(participation=0.2)) == 4


def test_crashed_probe_is_not_repeated_and_is_logged(
    simulated_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sweep asks for each of its runs before the first one; each repeated probe would take seconds."""
    probes: list[Any] = []

    def crashing(words: Any, **more: Any) -> Any:
        probes.append(words)
        raise subprocess.CalledProcessError(-signal.SIGSEGV, words, "", "")

    monkeypatch.setattr(subprocess, "run", crashing)
    assert [resources.max_parallel_clients(config(seed=seed)) for seed in (1, 2, 3)] == [
        resources.DEFAULT_PARALLEL_CLIENTS
    ] * 3
    assert len(probes) == 1
    assert caplog.messages == [
        "could not measure how many clients to train in parallel; using 10: the probe died (Segmentation fault)"
    ]
    assert (
        resources.max_parallel_clients(config(batch_size=16)) == resources.DEFAULT_PARALLEL_CLIENTS and len(probes) == 2
    ), "that is another question"
    code = "import os, sys; print(*os.environ[sys.argv[1]].split(), sep='\\n')"
    told = subprocess.Popen([sys.executable, "-c", code, "FEDEAS_UNMEASURED"], stdout=subprocess.PIPE, text=True)
    names = [resources._cache_file(config(batch_size=size)).name for size in (config().batch_size, 16)]
    assert told.communicate()[0].split() == names, "runs started by it did not inherit both names"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"images_per_second": {}, "bytes_a_client": 1, "bytes_free": 1}'])
def test_damaged_measurement_is_repeated(
    simulated_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def probe(words: Any, **more: Any) -> Any:
        return subprocess.CompletedProcess(words, 0, json.dumps(measured({"1": 10.0, "4": 40.0})))

    monkeypatch.setattr(subprocess, "run", probe)
    assert resources.max_parallel_clients(config()) == 4
    (kept,) = tmp_path.glob("probes/*.json")
    whole = kept.read_text()
    kept.write_text(text)
    assert resources.max_parallel_clients(config()) == 4
    assert kept.read_text() == whole


def test_probe_of_a_generator_measures_the_memory_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([100 * GIGABYTE, 90 * GIGABYTE])
    monkeypatch.setattr(resources, "_free", lambda device: next(free))
    monkeypatch.setattr(resources, "build_network", lambda config: pytest.fail("built a classifier"))
    recipe = {"generator-training": {"local-steps": 1, "batch-size": 2}}
    found = resources.measure(config(task="generator", **recipe), "cpu")
    assert found["bytes_a_client"] == 10 * GIGABYTE
    assert resources.choose(found) == 7  # 80 GB of 100, by 11 GB each


def test_probe_uses_the_engine_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, int]] = []
    build = build_module.build_engine

    def noting(config: RunConfig, device: str, objective: Any, rank: int) -> Any:
        built.append((config.engine, rank))
        return build(config, device, objective, rank)

    monkeypatch.setattr(resources, "build_engine", noting)
    monkeypatch.setattr(resources, "_EPOCHS", 1)
    found = resources.measure(config(model="users_models:tiny", batch_size=2, engine="eager"), "cpu", (1, 3))
    assert list(found["images_per_second"]) == [1, 3] and built == [("eager", 0), ("eager", 1), ("eager", 2)]
