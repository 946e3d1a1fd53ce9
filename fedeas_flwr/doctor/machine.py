"""Check the machine: GPU, cores, memory, and the folders that a run writes to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from fedeas_flwr.common.cores import CGROUP, usable_cores
from fedeas_flwr.common.devices import pick_device
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import cache_root, existing_part
from fedeas_flwr.common.text import show_bytes
from fedeas_flwr.config import RunConfig
from fedeas_flwr.doctor.findings import Finding, note, ok, problem
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.cache_maintenance import cache_limit, entries
from fedeas_flwr.launch.mps import CONTROL
from fedeas_flwr.launch.resources import clients_at_once
from fedeas_flwr.training import build

CLIENT_BYTES = 500_000_000
"""Memory of one client process without data, in bytes: importing torch, Flower and Ray takes 385 MB."""
MIN_DISK = 1_000_000_000
MIN_GPU = 1_000_000_000
OBJECT_STORE_PART = 0.3
"""Fraction of the memory that Ray reserves for its object store; if /dev/shm is smaller, Ray uses the disk."""
MAX_OBJECT_STORE = 10_000_000_000
"""Bytes above which Ray limits the object store to the size of /dev/shm."""
SHARED_MEMORY = Path("/dev/shm")
NETWORKED = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "fuse.sshfs", "9p", "virtiofs", "afs")


def on_gpu(config: RunConfig) -> bool:
    """Return whether a run of this config trains on a GPU here; `check_gpu` reports why not."""
    with suppress(ValueError):
        return pick_device(config.device) == "cuda"
    return False


def client_processes(config: RunConfig) -> int:
    """Return the number of parallel client processes; inline there is one."""
    return 1 if config.backend == "inline" else clients_at_once(config, on_gpu(config))


# ---------------------------------------------------------------------------------------------------- GPU


def check_gpu(config: RunConfig) -> Iterator[Finding]:
    """Check every CUDA device: its memory, whether a kernel runs, and bf16."""
    import torch

    if not torch.cuda.is_available():
        target = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        built = f"torch {torch.__version__} is built for {target}"
        if config.device == "cuda":
            fix = "set device=auto, or install a driver and a CUDA build of torch"
            yield problem("GPU", f"device = 'cuda', but torch finds no CUDA device ({built})", fix)
        elif Path("/proc/driver/nvidia/version").exists():
            fix = "install a CUDA build of torch, or check that nvidia-smi works and CUDA_VISIBLE_DEVICES is not empty"
            yield note("GPU", f"there is an NVIDIA driver, but torch finds no CUDA device ({built})", fix)
        else:
            yield note("GPU", f"none found; everything runs on the CPU ({built})")
        return
    for number in range(torch.cuda.device_count()):
        name, label = f"GPU {number}", torch.cuda.get_device_name(number)
        try:
            tiny_kernel(number)
            free, total = torch.cuda.mem_get_info(number)
        except RuntimeError as error:
            fix = "check nvidia-smi: the GPU may be full or in exclusive mode, or the driver too old for torch."
            yield problem(name, f"{label} does not run a kernel: {error}", f"{fix} Until then, use device=cpu")
            continue
        memory = f"{label}, {show_bytes(free)} of {show_bytes(total)} free, runs kernels"
        if free < MIN_GPU:
            fix = "end the processes that nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
            yield problem(name, memory, fix)
        elif not torch.cuda.is_bf16_supported(including_emulation=False):
            yield note(name, f"{memory}, no bf16", "set generation-precision=fp16 and precision=tf32")
        else:
            yield ok(name, f"{memory}, bf16")


def tiny_kernel(number: int) -> None:
    """Compute a sum on a GPU and raise RuntimeError if it is wrong."""
    import torch

    if (torch.ones(64, device=f"cuda:{number}") * 2).sum().item() != 128:
        raise RuntimeError("it computes 64 × 2 wrongly")


def check_engine(config: RunConfig) -> Iterable[Finding]:
    """Check that the engine works on the device that a run of this config uses; report only a problem."""
    try:
        build.check_engine(config, "cuda" if on_gpu(config) else "cpu")
    except ConfigError as error:
        return [problem("engine", error, "set engine=auto")]
    return []


def check_mps(config: RunConfig) -> Iterable[Finding]:
    """Check for NVIDIA's Multi-Process Service, with which Ray's client processes share a GPU well."""
    import torch

    if not torch.cuda.is_available():
        return []
    if any((process.info["name"] or "").startswith("nvidia-cuda-mps") for process in psutil.process_iter(["name"])):
        return [ok("CUDA MPS", "a control daemon is running; Ray's clients can share the GPU through it")]
    if shutil.which(CONTROL) is None:
        text = f"{CONTROL} is not on PATH: client processes under Ray and runs of a sweep take turns on the GPU"
        return [note("CUDA MPS", text, "backend=inline needs no MPS and is faster on one GPU")]
    if config.mps == "off":
        return [note("CUDA MPS", "mps = 'off': processes take turns on the GPU", "set mps=auto")]
    text = "found; a run under Ray starts and ends its own daemon, a sweep with --jobs one for all runs"
    return [ok("CUDA MPS", text)]


# ------------------------------------------------------------------------------------- cores and memory


def check_cores(config: RunConfig) -> Iterable[Finding]:
    """Check the number of cores against the number of parallel clients."""
    cores, clients = usable_cores(), client_processes(config)
    found = f"{cores} usable of {os.cpu_count()}; {clients} parallel client processes"
    if clients > cores and not on_gpu(config):
        return [note("cores", found, f"set actors={cores}: more clients than cores only wait for each other")]
    return [ok("cores", found)]


def free_memory() -> int:
    """Return the bytes that new processes can allocate, by the machine's memory and the container's limit."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):
        limit, used = (int((CGROUP / f"memory.{part}").read_text()) for part in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # the page cache is reclaimable
    return free


def check_memory(config: RunConfig) -> Iterable[Finding]:
    """Check free memory against the needs of the client processes without data."""
    free, clients = free_memory(), client_processes(config)
    needed = (clients + 1) * CLIENT_BYTES  # one more for the server
    text = f"{show_bytes(free)} free; {clients} client processes and the server take at least {show_bytes(needed)}"
    if free >= needed:
        return [ok("memory", text)]
    fits = free // CLIENT_BYTES - 1
    return [problem("memory", text, f"set actors={fits}" if fits > 0 else "free some, or set backend=inline")]


def check_shared_memory(config: RunConfig) -> Iterable[Finding]:
    """Check /dev/shm, where Ray keeps the objects that its processes exchange."""
    if config.backend == "inline" or not SHARED_MEMORY.is_dir():  # macOS has none
        return []
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = min(int(OBJECT_STORE_PART * free_memory()), max(MAX_OBJECT_STORE, free))
    text = f"{show_bytes(free)} free; Ray needs {show_bytes(needed)} for its object store"
    if free >= needed:
        return [ok("/dev/shm", text)]
    size = f"{-(-needed // 10**9)}g"
    fix = f"docker run --shm-size={size}, or as root mount -o remount,size={size} /dev/shm"
    return [note("/dev/shm", f"{text} and will use the disk, which is slower", fix)]


# ---------------------------------------------------------------------------------------------- folders


def check_cache_folder(config: RunConfig) -> Iterable[Finding]:
    """Check the cache folder for images, datasets and generators."""
    fix = "set FEDEAS_CACHE to a writable folder on a disk with free space"
    return [_check_folder("cache folder", cache_root(), fix)]


def check_run_folder(config: RunConfig) -> Iterator[Finding]:
    """Check the run folder, and report the file system that holds client states."""
    folder = Path(config.run_dir) if config.run_dir else Path("runs").absolute()
    found = _check_folder("run folder", folder, "give another folder with run-dir=/…, on a disk with free space")
    yield found
    if found.state == "problem":
        return
    kind = file_system(existing_part(folder))
    if kind.startswith(NETWORKED):
        yield note("client state", f"in the run folder, on {kind}: shared with other machines that mount it")
    else:
        fix = "SuperNodes on several machines need no shared folder if each client stays on its machine"
        yield note("client state", f"in the run folder, on {kind}: local to this machine", fix)


def _check_folder(name: str, folder: Path, fix: str) -> Finding:
    place = existing_part(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".fedeas-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        return problem(name, f"{folder} cannot be written: {place}: {error.strerror or error}", fix)
    free = shutil.disk_usage(place).free
    text = f"{folder}, writable, {show_bytes(free)} free"
    return ok(name, text) if free >= MIN_DISK else problem(name, text, f"free space ({show_bytes(MIN_DISK)}), or {fix}")


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, such as ext4 or nfs4."""
    real, best, kind = folder.resolve(), -1, "an unknown file system"
    for part in psutil.disk_partitions(all=True):
        mount = Path(part.mountpoint)
        if real.is_relative_to(mount) and len(mount.parts) >= best:  # a later mount hides an earlier one
            best, kind = len(mount.parts), part.fstype or kind
    return kind


def check_cache_limit(config: RunConfig) -> Iterable[Finding]:
    """Check the size limit of the image cache."""
    try:
        limit = cache_limit(config.cache_limit)
    except ValueError as error:
        return [problem("cache limit", error, "set a size such as FEDEAS_CACHE_LIMIT=20GB, or unset it")]
    used = sum(entry.bytes for entry in entries(ImageCache()))
    if limit is None:
        return [note("cache limit", f"none; {show_bytes(used)} of images so far", "set one with cache-limit=20GB")]
    return [ok("cache limit", f"{show_bytes(limit)}; {show_bytes(used)} of images so far")]
