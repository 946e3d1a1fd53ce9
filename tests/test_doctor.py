"""The doctor finds what is really wrong, says what to do about it, and never falls over itself."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from test_cli import QUICKSTART, fedeas

from fedeas_flwr import doctor, launch
from fedeas_flwr.cli_doctor import show
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data import dataset_info
from fedeas_flwr.doctor import Finding, federation, inputs, machine, packages
from fedeas_flwr.generators.ray_service import leave_sliver
from fedeas_flwr.training import cohort


def config(**changes: Any) -> RunConfig:
    return parse_config({"clients": 10, **{key.replace("_", "-"): value for key, value in changes.items()}})


def only(check: Callable[[RunConfig], Iterable[Finding]], given: RunConfig | None = None) -> Finding:
    (finding,) = check(given or config())
    return finding


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what makes a library appear in another version, or not at all (None)."""

    def pretend(**versions: str | None) -> None:
        real = metadata.version

        def lookup(name: str) -> str:
            found = versions.get(name, "") if name in versions else real(name)
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(packages.metadata, "version", lookup)

    return pretend


# ---------------------------------------------------------------------------------------------- packages


def test_the_ranges_are_the_projects_own_and_rays_is_flowers() -> None:
    ranges = packages.requirements()
    assert str(ranges["torchvision"]) == "<0.27,>=0.25"
    assert ranges["ray"].contains(metadata.version("ray")) and "==" in str(ranges["ray"])
    assert {finding.state for finding in packages.check_packages(config())} == {"ok"}


def test_an_old_or_absent_library_is_named_with_the_command_that_mends_it(shown: Callable[..., None]) -> None:
    shown(torch="2.4.1+cpu", ray=None, flwr="1.42.0")
    found = {finding.name: finding for finding in packages.check_packages(config())}
    assert {name: finding.state for name, finding in found.items()} == {
        "torch": "problem", "torchvision": "ok", "flwr": "problem", "ray": "problem", "diffusers": "ok"
    }  # fmt: skip
    assert found["torch"].text == "2.4.1+cpu is not <2.12,>=2.10"
    assert "pip install 'torch<2.12,>=2.10'" in found["torch"].fix
    assert "not installed" in found["ray"].text and "pip install 'flwr[simulation]==" in found["ray"].fix


def test_a_build_for_another_device_is_the_same_version(shown: Callable[..., None]) -> None:
    shown(torch="2.10.0+cu128", torchvision="0.25.0+cu128")
    assert {finding.state for finding in packages.check_packages(config())} == {"ok"}


def test_another_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(packages.check_python).state == "ok"
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.10.4")
    found = only(packages.check_python)
    assert found.state == "problem" and "3.10.4" in found.text and ">=3.11" in found.fix


def test_a_torchvision_without_its_operators_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(packages.check_torch_pair).state == "ok"

    def missing(*_: object) -> None:
        raise RuntimeError("operator torchvision::nms\ndoes not exist")

    monkeypatch.setattr("torchvision.ops.nms", missing)
    found = only(packages.check_torch_pair)
    assert (found.state, found.text) == ("problem", "operator torchvision::nms does not exist")
    assert "constraints.txt" in found.fix


# --------------------------------------------------------------------------------------------------- GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU as torch would describe it; its values can be changed."""
    facts = {"free": 70 * 10**9, "bf16": True, "kernel": lambda number: None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (facts["free"], 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: facts["bf16"])
    probed = {
        "images_per_second": {"1": 10.0, "5": 50.0, "10": 50.0},
        "bytes_a_client": 10**9,
        "bytes_free": 7 * 10**10,
    }
    monkeypatch.setattr(cohort, "_known_or_measured", lambda given: probed)
    monkeypatch.setattr(machine, "tiny_kernel", lambda number: facts["kernel"](number))
    return facts


def test_no_gpu_is_a_note_unless_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert only(machine.check_gpu).state == "note"
    assert list(machine.check_mps(config())) == []
    found = only(machine.check_gpu, config(device="cuda"))
    assert found.state == "problem" and "device = 'cuda'" in found.text and "device=auto" in found.fix
    assert not machine.on_gpu(config(device="cuda"))


def test_a_gpu_is_described_and_its_failings_named(gpu: dict[str, Any]) -> None:
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


def test_mps_is_looked_for_on_the_path(gpu: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not on PATH" in only(machine.check_mps).text
    command = tmp_path / "nvidia-cuda-mps-control"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    found = only(machine.check_mps)
    assert found.state == "ok" and "starts one of its own" in found.text
    off = only(machine.check_mps, config(mps="off"))
    assert off.state == "note" and off.fix == "mps=auto"
    daemon = type("Process", (), {"info": {"name": "nvidia-cuda-mps-control"}})
    monkeypatch.setattr(psutil, "process_iter", lambda wanted: [daemon])
    assert only(machine.check_mps).state == "ok"


# ------------------------------------------------------------------------------------- cores and memory


def test_a_containers_limits_count_not_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert machine.usable_cores() == 64
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cores() == 64
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    found = only(machine.check_cores, config(clients=100))
    assert found.state == "note" and found.text.startswith("3 usable of 64; 64 client") and "actors=3" in found.fix
    assert only(machine.check_cores, config(clients=100, backend="inline")).state == "ok"

    for name, number in (("max", "2000000000"), ("current", "1500000000")):
        (tmp_path / f"memory.{name}").write_text(number)
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 600000000\n")
    assert machine.free_memory() == 1_100_000_000
    short = only(machine.check_memory, config(actors=5))
    assert (short.state, short.fix) == ("problem", "write actors=1")
    assert "1.1 GB free" in short.text and "3 GB or more" in short.text
    assert only(machine.check_memory, config(actors=1)).state == "ok"


def test_a_small_shared_memory_is_noted_with_the_size_it_should_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=64 * 2**20)
    monkeypatch.setattr(machine, "free_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = only(machine.check_shared_memory)
    assert found.state == "note" and "67.1 MB free; Ray wants 4.8 GB" in found.text and "--shm-size=5g" in found.fix
    assert list(machine.check_shared_memory(config(backend="inline"))) == []


# ---------------------------------------------------------------------------------------------- folders


def test_a_file_in_place_of_a_folder_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("FEDEAS_CACHE", str(blocked / "cache"))
    cache = only(machine.check_cache_folder)
    assert cache.state == "problem" and str(blocked) in cache.text and "FEDEAS_CACHE" in cache.fix
    run = only(machine.check_run_folder, config(run_dir=str(blocked / "run")))
    assert run.state == "problem" and str(blocked) in run.text and "run-dir=" in run.fix
    assert blocked.read_text() == "not a folder"


def test_a_full_disk_is_a_problem_and_looking_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "not" / "yet"))
    assert only(machine.check_cache_folder).state == "ok"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(machine, "LITTLE_DISK", 10**18)
    found = only(machine.check_cache_folder)
    assert found.state == "problem" and "make room" in found.fix


@pytest.mark.parametrize(("kind", "words"), [("nfs4", "other machines"), ("ext4", "own disk")])
def test_the_run_folders_file_system_is_named(
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


def test_a_limit_that_is_no_size_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    assert only(machine.check_cache_limit).text.startswith("none; 0 B")
    assert only(machine.check_cache_limit, config(cache_limit="20GB")).state == "ok"
    monkeypatch.setenv("FEDEAS_CACHE_LIMIT", "lots")
    found = only(machine.check_cache_limit)
    assert found.state == "problem" and "FEDEAS_CACHE_LIMIT = 'lots'" in found.text and "20GB" in found.fix


# ------------------------------------------------------------------------------------------------ inputs


def cifar(folder: Path, **changes: Any) -> RunConfig:
    return config(dataset="cifar10", data_dir=str(folder), policy="none", **changes)


def test_a_dataset_is_found_wanting_or_to_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(inputs.check_dataset).state == "ok"
    monkeypatch.delenv("FEDEAS_OFFLINE", raising=False)
    assert only(inputs.check_dataset, cifar(tmp_path)).state == "note"
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")
    missing = only(inputs.check_dataset, cifar(tmp_path))
    assert missing.state == "problem" and f"put cifar10.npz in {tmp_path}" in missing.text
    assert "data-dir" in missing.fix and "FEDEAS_OFFLINE" in missing.fix

    info = dataset_info("cifar10")
    arrays = {
        "x_train": np.zeros((info.num_train, 32, 32, 3), np.uint8), "y_train": np.zeros(info.num_train, np.int64),
        "x_test": np.zeros((info.num_test, 32, 32, 3), np.uint8), "y_test": np.zeros(info.num_test, np.int64),
    }  # fmt: skip
    np.savez_compressed(tmp_path / "cifar10.npz", **arrays)
    assert only(inputs.check_dataset, cifar(tmp_path)).text == f"cifar10, {tmp_path}/cifar10.npz"
    arrays["y_test"] = arrays["y_test"][:-1]
    np.savez_compressed(tmp_path / "cifar10.npz", **arrays)
    wrong = only(inputs.check_dataset, cifar(tmp_path))
    assert wrong.state == "problem" and "y_test" in wrong.text and "[10000]" in wrong.text
    (tmp_path / "cifar10.npz").write_bytes(b"PK not really")
    assert "damaged" in only(inputs.check_dataset, cifar(tmp_path)).text


def test_weights_that_are_not_there_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(inputs.check_model).state == "ok"
    gone = only(inputs.check_model, cifar(tmp_path, model="resnet18", weights=f"{tmp_path}/gone.safetensors"))
    assert gone.state == "problem" and "gone.safetensors" in gone.text and "weights" in gone.fix
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    official = cifar(tmp_path, model="resnet18", weights="imagenet")
    monkeypatch.delenv("FEDEAS_OFFLINE", raising=False)
    assert only(inputs.check_model, official).state == "note"
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")
    offline = only(inputs.check_model, official)
    assert offline.state == "problem" and str(tmp_path) in offline.text and "safetensors" in offline.fix
    assert only(inputs.check_model, config(model="nowhere:net")).state == "problem"


def test_a_generators_folder_is_checked_part_by_part(tmp_path: Path, digits_generator: Path) -> None:
    assert only(inputs.check_generator, config(policy="none")).state == "note"
    assert only(inputs.check_generator) == Finding("generator", "ok", f"builtin, {digits_generator}")
    folder = tmp_path / "model"
    given = config(generator=str(folder))
    missing = only(inputs.check_generator, given)
    assert missing.state == "problem" and str(folder) in missing.text and "train-generator" in missing.fix
    shutil.copytree(digits_generator, folder)
    found = only(inputs.check_generator, given)
    assert (found.state, found.text) == ("ok", f"{folder}, 10 classes, images [8, 8, 1]")
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    assert "safetensors" in only(inputs.check_generator, given).text
    settings = json.loads((folder / "unet" / "config.json").read_text())
    (folder / "unet" / "config.json").write_text(json.dumps({**settings, "num_class_embeds": 4}))
    few = only(inputs.check_generator, given)
    assert few.state == "problem" and "num_class_embeds" in few.text and "is 4" in few.text


def test_an_untrained_builtin_is_a_note_and_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path))
    found = only(inputs.check_generator)
    assert found.state == "note" and "the first run trains it" in found.text
    assert list(tmp_path.iterdir()) == []


def test_a_bank_needs_images_of_every_class(tmp_path: Path) -> None:
    path = tmp_path / "bank.npz"
    given = config(generator=f"bank:{path}")
    assert "there is no bank" in only(inputs.check_generator, given).text
    np.savez(path, x=np.zeros((30, 8, 8, 1), np.uint8), y=np.repeat(np.arange(10), 3))
    assert only(inputs.check_generator, given).text.endswith("3 images or more of every class")
    np.savez(path, x=np.zeros((30, 8, 8, 1), np.uint8), y=np.repeat([0, 1, 2, 4, 5, 6, 7, 8, 9, 9], 3))
    short = only(inputs.check_generator, given)
    assert short.state == "problem" and "no images of 1 classes: 3" in short.text


# -------------------------------------------------------------------------------------- Flower and Ray


def test_flowers_commands_must_be_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(federation.check_commands).state == "ok"
    monkeypatch.setattr(federation.sys, "executable", str(tmp_path / "python"))
    found = only(federation.check_commands)
    assert found.state == "problem" and "flower-superlink" in found.text
    assert found.fix == f"{tmp_path}/python -m pip install 'flwr[simulation]'"


def test_a_busy_port_is_fine_and_a_dead_loopback_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr.cli.constant as flower

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        monkeypatch.setattr(flower, "LOCAL_SUPERLINK_HTTP_API_PORT", port)
        found = only(federation.check_other_superlink)
        assert found.state == "note" and port in found.text
        assert only(federation.check_port).state == "ok"
    monkeypatch.setattr(flower, "LOCAL_CONTROL_API_PORT", port)
    assert list(federation.check_other_superlink(config())) == []

    def refuse() -> int:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(federation, "free_port", refuse)
    dead = only(federation.check_port)
    assert dead.state == "problem" and "Cannot assign" in dead.text and "backend=inline" in dead.fix


def test_another_ray_is_a_note_and_a_run_does_not_join_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = only(federation.check_other_ray)
    assert found.state == "note" and "10.0.0.1:6379" in found.text
    assert "RAY_ADDRESS" not in launch.own_environment(tmp_path, "mark")


def test_shares_that_leave_no_sliver_are_a_problem_with_values_that_fit(gpu: dict[str, Any]) -> None:
    fine = only(federation.check_shares)
    assert fine.state == "ok" and fine.text.startswith("5 clients × 0.199, 0.004 for the generator")
    tiny = only(federation.check_shares, config(gpu_share=0.0005))
    assert tiny.state == "problem" and "gpu-share = 0.0005: 2,000 clients" in tiny.text
    assert "gpu-share=0.002 or more, or actors=996 or fewer" in tiny.text and "gpu-share=0" in tiny.fix
    assert leave_sliver(0.002) == 0.001 and leave_sliver(1 / 996) == 0.001
    assert only(federation.check_shares, config(actors=997)).state == "problem"
    assert only(federation.check_shares, config(actors=997, device="cpu")).state == "note"
    assert only(federation.check_rehearsal, config(actors=997, device="cpu")).text.startswith("gpu-share = ")
    fewer = only(federation.check_shares, config(actors=5, gpu_share=0.5))
    assert fewer.state == "note" and fewer.text.startswith("2 clients × 0.498") and "gpu-share=0.199" in fewer.fix
    assert only(federation.check_shares, config(backend="inline")).state == "note"


@pytest.mark.slow
def test_the_generators_actor_fits_beside_the_clients_under_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four quarters less a thousandth leave exactly the sliver."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # must not be joined
    found = only(federation.check_rehearsal, config(actors=4, gpu_share=0.25))
    assert found.state == "ok" and found.text.startswith("4 clients and the generator were scheduled"), found


@pytest.mark.slow
def test_clients_that_fill_the_gpu_are_found_by_ray_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "leave_sliver", lambda share: share)  # a launcher that forgot the generator
    found = only(federation.check_rehearsal, config(actors=4, gpu_share=0.25))
    assert found.state == "problem" and found.text.startswith("gpu-share = 0.25, actors = 4: ")
    assert "actors=4 gpu-share=0.249" in found.fix and "backend=inline" in found.fix


def test_a_rehearsal_that_dies_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation.sys, "executable", shutil.which("false"))
    found = only(federation.check_rehearsal)
    assert found.state == "problem" and "Ray did not start: exit code 1" in found.text
    assert only(federation.check_rehearsal, config(policy="none")).state == "note"


# ------------------------------------------------------------------------------------------- the command


def test_a_check_that_raises_is_a_problem_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def falls(given: RunConfig) -> list[Finding]:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(packages, "check_torch_pair", falls)
    monkeypatch.setattr(doctor, "CHECKS", {"first": "packages.check_torch_pair", "python": "packages.check_python"})
    first, second = doctor.examine(config())
    assert (first.name, first.state) == ("first", "problem") and "ZeroDivisionError: two lines" in first.text
    assert first.fix and second.state == "ok"


def test_without_torch_every_line_is_still_there(tmp_path: Path) -> None:
    code = (
        "import json, sys; sys.modules['torch'] = None; from fedeas_flwr.config import parse_config;"
        "from fedeas_flwr.doctor import examine;"
        "print(json.dumps([[f.name, f.state, f.text, f.fix] for f in examine(parse_config({}))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {name: (state, text, fix) for name, state, text, fix in json.loads(done.stdout)}
    assert found["python"][0] == "ok"
    assert found["torch with torchvision"][0] == "problem" and "torch" in found["torch with torchvision"][1]
    assert found["GPU"] == (
        "problem",
        "could not be checked: import of torch halted; None in sys.modules",
        "install what is missing, then ask again",
    )
    assert set(doctor.CHECKS) - {"packages", "other SuperLink", "other Ray"} <= set(found)


def test_a_narrow_terminal_loses_no_word() -> None:
    out = io.StringIO()
    findings = [
        Finding("cache folder", "problem", "/a/very/long/path/" + "x" * 60 + " [red] cannot be written", "set a key"),
        Finding("GPU", "note", "none found"),
    ]
    show(findings, Console(file=out, width=40, no_color=True))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[-1] == "1 problem, 1 note"
    column = "".join(line[lines[0].index("what") :].strip() for line in lines[1:-1])
    assert "x" * 60 in column and "[red]" in column and "set a key" in column
    assert [line.split()[0] for line in lines if line.startswith(("problem", "note"))] == ["problem", "note"]


def test_the_command_says_it_with_its_exit_code(tmp_path: Path, digits_generator: Path) -> None:
    fine = fedeas("doctor", QUICKSTART, "actors=1", "--format", "json", cwd=tmp_path)
    assert fine.returncode == 0, fine.stdout + fine.stderr
    found = json.loads(fine.stdout)
    assert all(list(line) == ["name", "state", "text", "fix"] for line in found)
    assert {"python", "torch", "dataset", "generator", "run folder"} <= {line["name"] for line in found}
    assert list(tmp_path.iterdir()) == []
    bad = fedeas("doctor", "dataset=cifar10", "policy=none", f"data-dir={tmp_path}", cwd=tmp_path)
    assert bad.returncode == 1 and bad.stderr == ""
    assert "problem  dataset" in bad.stdout and bad.stdout.splitlines()[-1].startswith("1 problem, ")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("nowhere.toml",), ["nowhere.toml"]),
        (("betta=1",), ["betta", "beta"]),
        (("--format", "xml"), ["format", "xml", "json"]),
    ],
)
def test_a_mistaken_word_is_one_line(words: tuple[str, ...], parts: list[str]) -> None:
    done = fedeas("doctor", *words)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and all(part in line for part in parts)
