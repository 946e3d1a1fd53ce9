"""`fedeas doctor`'s checks of the machine: GPU, cores, memory, folders, Flower and Ray."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_doctor import config, only

from fedeas_flwr.commands.reproduce import default_jobs
from fedeas_flwr.common import cores
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.doctor import federation, machine
from fedeas_flwr.doctor.findings import Finding
from fedeas_flwr.generators.ray_service import reserve_generator_gpu
from fedeas_flwr.launch import resources
from fedeas_flwr.launch.superlink import own_environment
from fedeas_flwr.training.build import build_engine
from fedeas_flwr.training.objective import CROSS_ENTROPY

pytestmark = pytest.mark.flower

# --------------------------------------------------------------------------------------------------- GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Simulate a GPU; the returned values can be changed."""
    facts = {"free": 70 * 10**9, "bf16": True, "kernel": lambda number: None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (facts["free"], 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: facts["bf16"])
    probed = {
        "images_per_second": {"1": 10.0, "5": 50.0, "10": 50.0},
        "bytes_a_client": 10**9,
        "bytes_free": 7 * 10**10,
    }
    monkeypatch.setattr(resources, "_read_or_measure", lambda given, path: probed)
    monkeypatch.setattr(machine, "tiny_kernel", lambda number: facts["kernel"](number))
    return facts


def test_check_gpu_without_gpu_is_a_note_unless_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert only(machine.check_gpu).state == "note"
    assert list(machine.check_mps(config())) == []
    found = only(machine.check_gpu, config(device="cuda"))
    assert found.state == "problem" and "device = 'cuda'" in found.text and "device=auto" in found.fix
    assert not machine.on_gpu(config(device="cuda"))


def test_check_engine_without_gpu_is_a_problem(gpu: dict[str, Any]) -> None:
    assert list(machine.check_engine(config())) == list(machine.check_engine(config(engine="graphed"))) == []
    found = only(machine.check_engine, config(engine="graphed", device="cpu"))
    assert (found.state, found.fix) == ("problem", "set engine=auto")
    with pytest.raises(ConfigError, match=re.escape(found.text)):
        build_engine(config(engine="graphed"), "cpu", CROSS_ENTROPY)


def test_check_gpu_describes_it_and_names_its_faults(gpu: dict[str, Any]) -> None:
    assert only(machine.check_gpu) == Finding("GPU 0", "ok", "NVIDIA T4, 70 GB of 80 GB free, runs kernels, bf16")
    gpu["bf16"] = False
    assert "generation-precision=fp16" in only(machine.check_gpu).fix
    gpu["free"] = 3 * 10**8
    full = only(machine.check_gpu)
    assert full.state == "problem" and "300 MB of 80 GB" in full.text and "nvidia-smi" in full.fix

    def wedged(number: int) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy")

    gpu["kernel"] = wedged
    broken = only(machine.check_gpu)
    assert broken.state == "problem" and "are busy" in broken.text and "device=cpu" in broken.fix


def test_check_mps_looks_on_the_path(gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on PATH" in only(machine.check_mps).text
    command = tmp_path / "nvidia-cuda-mps-control"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    found = only(machine.check_mps)
    assert found.state == "ok" and "starts and ends its own daemon" in found.text
    off = only(machine.check_mps, config(mps="off"))
    assert off.state == "note" and off.fix == "set mps=auto"
    daemon = type("Process", (), {"info": {"name": "nvidia-cuda-mps-control"}})
    monkeypatch.setattr(psutil, "process_iter", lambda wanted: [daemon])
    assert only(machine.check_mps).state == "ok"


# ------------------------------------------------------------------------------------- cores and memory


def test_checks_use_the_containers_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores.usable_cores() == 64
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores.usable_cores() == 64
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    found = only(machine.check_cores, config(clients=100))
    assert (found.state, found.text) == ("ok", "3 usable of 64; 3 parallel client processes")
    assert (default_jobs("smoke"), default_jobs("full")) == (3, 1)
    found = only(machine.check_cores, config(clients=100, actors=5))
    assert found.state == "note" and "3 usable of 64; 5 parallel" in found.text and "actors=3" in found.fix
    assert only(machine.check_cores, config(clients=100, backend="inline")).state == "ok"

    for name, number in (("max", "2000000000"), ("current", "1500000000")):
        (tmp_path / f"memory.{name}").write_text(number)
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 600000000\n")
    assert machine.free_memory() == 1_100_000_000
    short = only(machine.check_memory, config(actors=5))
    assert (short.state, short.fix) == ("problem", "set actors=1")
    assert "1.1 GB free" in short.text and "at least 3 GB" in short.text
    assert only(machine.check_memory, config(actors=1)).state == "ok"


def test_check_shared_memory_too_small_notes_needed_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=64 * 2**20)
    monkeypatch.setattr(machine, "free_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = only(machine.check_shared_memory)
    assert found.state == "note" and "67.1 MB free; Ray needs 4.8 GB" in found.text and "--shm-size=5g" in found.fix
    assert list(machine.check_shared_memory(config(backend="inline"))) == []


# ---------------------------------------------------------------------------------------------- folders


def test_cache_folder_below_a_file_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("FEDEAS_CACHE", str(blocked / "cache"))
    cache = only(machine.check_cache_folder)
    assert cache.state == "problem" and str(blocked) in cache.text and "FEDEAS_CACHE" in cache.fix
    run = only(machine.check_run_folder, config(run_dir=str(blocked / "run")))
    assert run.state == "problem" and str(blocked) in run.text and "run-dir=" in run.fix
    assert blocked.read_text() == "not a folder"


def test_full_disk_is_a_problem_and_checks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "not" / "yet"))
    assert only(machine.check_cache_folder).state == "ok"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(machine, "MIN_DISK", 10**18)
    found = only(machine.check_cache_folder)
    assert found.state == "problem" and "free space" in found.fix


@pytest.mark.parametrize(("kind", "words"), [("nfs4", "other machines"), ("ext4", "local to this machine")])
def test_check_names_the_file_system_of_the_run_folder(
    kind: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = type("Part", (), {})
    parts = []
    for mount, fstype in (("/", "overlay"), (str(tmp_path), kind), ("/elsewhere/deep/down/there", "tmpfs")):
        parts.append(part())
        parts[-1].mountpoint, parts[-1].fstype = mount, fstype
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)
    folder, state = machine.check_run_folder(config(run_dir=str(tmp_path / "run")))
    assert folder.state == "ok"
    assert state.state == "note" and f"on {kind}:" in state.text and words in state.text


def test_check_cache_limit_with_invalid_size_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    assert only(machine.check_cache_limit).text.startswith("none; 0 B")
    assert only(machine.check_cache_limit, config(cache_limit="20GB")).state == "ok"
    monkeypatch.setenv("FEDEAS_CACHE_LIMIT", "lots")
    found = only(machine.check_cache_limit)
    assert found.state == "problem" and "FEDEAS_CACHE_LIMIT = 'lots'" in found.text and "20GB" in found.fix


# -------------------------------------------------------------------------------------- Flower and Ray


def test_check_commands_looks_in_this_pythons_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(federation.check_commands).state == "ok"
    monkeypatch.setattr(federation.sys, "executable", str(tmp_path / "python"))
    found = only(federation.check_commands)
    assert found.state == "problem" and "flower-superlink" in found.text
    assert found.fix == f"{tmp_path}/python -m pip install 'flwr[simulation]'"


def test_busy_port_is_ok_and_unusable_loopback_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr.cli.constant as flower

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        monkeypatch.setattr(flower, "LOCAL_SUPERLINK_HTTP_API_PORT", port)
        found = only(federation.check_other_superlink)
        assert found.state == "note" and port in found.text
        assert only(federation.check_port).state == "ok"
    with socket.socket() as silent:  # bound but not listening, so that no other process can use it
        silent.bind(("127.0.0.1", 0))
        for name in ("LOCAL_SUPERLINK_HTTP_API_PORT", "LOCAL_CONTROL_API_PORT"):
            monkeypatch.setattr(flower, name, str(silent.getsockname()[1]))
        assert list(federation.check_other_superlink(config())) == []

    def refuse() -> int:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(federation, "free_port", refuse)
    dead = only(federation.check_port)
    assert dead.state == "problem" and "Cannot assign" in dead.text and "backend=inline" in dead.fix


def test_check_other_ray_notes_a_cluster_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = only(federation.check_other_ray)
    assert found.state == "note" and "10.0.0.1:6379" in found.text
    assert "RAY_ADDRESS" not in own_environment(tmp_path)


def test_check_shares_without_room_for_generator_is_a_problem(gpu: dict[str, Any]) -> None:
    fine = only(federation.check_shares)
    assert fine.state == "ok" and fine.text.startswith("5 clients × 0.199, 0.004 for the generator")
    tiny = only(federation.check_shares, config(gpu_share=0.0005))
    assert tiny.state == "problem" and "gpu-share = 0.0005: 2,000 clients" in tiny.text
    assert "gpu-share=0.002 or more, or actors=996 or fewer" in tiny.text and "gpu-share=0" in tiny.fix
    assert reserve_generator_gpu(0.002) == 0.001 and reserve_generator_gpu(1 / 996) == 0.001
    assert only(federation.check_shares, config(actors=997)).state == "problem"
    for keys in ({}, {"actors": 997}, {"backend": "inline"}):
        assert list(federation.check_shares(config(device="cpu", **keys))) == []
    fewer = only(federation.check_shares, config(actors=5, gpu_share=0.5))
    assert fewer.state == "note" and fewer.text.startswith("2 clients × 0.498") and "gpu-share=0.199" in fewer.fix
    assert only(federation.check_shares, config(backend="inline")).state == "note"


def test_check_shares_of_a_cluster_reports_one_gpu(gpu: dict[str, Any]) -> None:
    joined = {"ray_address": "10.0.0.2:6379", "gpu_share": 0.25}
    shares = only(federation.check_shares, config(**joined))
    assert shares.state == "note" and shares.text.startswith("4 clients × 0.249, 0.004 for the generator on a GPU of")
    assert "10.0.0.2:6379" in shares.text
    assert only(federation.check_shares, config(**joined | {"gpu_share": 0.0005})).state == "problem"
