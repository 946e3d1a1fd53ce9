"""The comparison with other frameworks: all peers get the same job, and its numbers are correct."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedeas_flwr.data.federated import federated_data

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the benchmark, with a cache of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    import peers

    return peers


def small(**changes: Any) -> argparse.Namespace:
    """Return the options of a small run."""
    given = {"small": True, "rounds": 3, "device": "cpu", "data_dir": "", "weights": "imagenet"}
    return argparse.Namespace(**{**given, **changes})


def test_clients_of_equal_parts_have_different_images(peers: ModuleType) -> None:
    config = peers.run_config("C", small())
    peers.store_equal_parts(config, 5)
    held = federated_data(config, config.clients).partition.train
    assert [len(part) for part in held] == [5] * 200
    assert len(np.unique(np.concatenate(held))) == 1000


def test_published_job_has_the_settings_of_pfl_research(peers: ModuleType) -> None:
    config = peers.run_config("B", small(small=False))
    assert (config.clients, config.num_sampled(1000), peers.IMAGES_EACH["B"]) == (1000, 50, 50)
    assert (config.local_epochs, config.batch_size, config.learning_rate) == (1, 10, 0.1)


def test_plain_loop_trains_the_sampled_clients(peers: ModuleType, tmp_path: Path) -> None:
    config = peers.run_config("A", small())
    peers.write_job(config, [], tmp_path)
    from peer_programs.job import Job
    from peer_programs.plain_torch import main

    job = Job(tmp_path)
    job.device = "cpu"
    images, labels = job.client(3)
    assert len(images) == len(labels) == len(federated_data(config, 10).partition.train[3])
    torch.manual_seed(0)
    main(job)
    rounds = peers.rounds_of("torch", tmp_path, config)
    sizes = [3 * sum(len(job.partition[k]) for k in sampled) for sampled in job.sampled]
    assert [each["images"] for each in rounds] == sizes
    assert rounds[-1]["accuracy"] > 0.5


def test_summary_excludes_the_first_round(peers: ModuleType) -> None:
    rounds = [{"end": end, "images": 100, "accuracy": end / 100} for end in (10.0, 11.0, 13.0, 17.0)]
    found = peers.summary([{**rounds[0], "accuracy": None}, *rounds[1:]], launched=4.0, timed=2)
    assert found["seconds_until_round_1"] == 6.0
    assert found["round_seconds"] == [1.0, 2.0]
    assert found["rounds_per_second_total"] == pytest.approx(2 / 3, abs=1e-4)
    assert found["images_per_second"] == pytest.approx(200 / 3, abs=0.1)
    assert found["accuracies"] == [0.11, 0.13, 0.17]


def test_ratios_are_to_the_fastest_variant(peers: ModuleType, tmp_path: Path) -> None:
    speed = {"rounds_per_second_median": 1.0, "rounds_per_second_total": 1.0, "seconds_until_round_1": 1.0}
    common = {**speed, "job": "A", "complete": True, "rounds": 60, "accuracy_last_20": 0.5}
    for peer, rate in {"flower:5": 100.0, "flower:10": 200.0, "torch": 50.0}.items():
        row = {**common, "peer": peer, "images_per_second": rate, "peak_gpu_mb": None, "peak_host_mb": 1}
        (tmp_path / f"{peer.replace(':', '-')}.json").write_text(json.dumps({"rows": [row]}))
    line = next(line for line in peers.table(tmp_path).splitlines() if "| torch |" in line)
    assert "| 50 | 0.25 | – |" in line


def test_programs_import_nothing_of_the_project() -> None:
    programs = sorted((BENCHMARKS / "peer_programs").glob("*.py"))
    assert len(programs) > 4
    assert not [path.name for path in programs if "fedeas_flwr" in path.read_text(encoding="utf-8")]
