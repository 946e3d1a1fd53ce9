"""Choose the device of a run and configure torch for it: one CPU thread, so that results are equal bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedeas_flwr.common.cuda import capturing
from fedeas_flwr.common.errors import ConfigError


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let torch use one thread inside the block if it computes on a CPU.

    Sums are split among threads, so their number changes the last bits, and processes differ in it.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def pick_device(wanted: str) -> str:
    """Return the device, ``cpu`` or ``cuda``, that ``auto``, ``cpu`` or ``cuda`` means on this machine.

    Raise `ConfigError` if ``cuda`` is wanted and torch finds no CUDA device.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch finds no CUDA device: use 'auto' or 'cpu'")
    return "cpu" if wanted == "cpu" or not torch.cuda.is_available() else "cuda"


def configure_torch(wanted: str, precision: str = "tf32") -> str:
    """Set the threads, CUDA queues and TF32 use of this process, and return the device that it computes on.

    Torch uses one thread per client: with more, sums are split differently and the last bits depend on the machine's
    load. OpenMP keeps this number per thread, so every client sets it in the thread that it runs in.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # otherwise oneDNN leaves a file perf-PID.map in /tmp
    # CUDA runs 8 streams in parallel unless this is set before it starts, and ten clients have one stream each. Under
    # MPS all processes share the queues, and launch/mps.py sets the number for this process.
    if not os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = pick_device(wanted)
    if device == "cuda":
        matmul, cudnn, tf32 = torch.backends.cuda.matmul, torch.backends.cudnn, precision != "fp32"
        if (matmul.allow_tf32, cudnn.allow_tf32) != (tf32, tf32):
            with capturing:  # a generator in another thread may have changed them until it is done
                matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    return device
