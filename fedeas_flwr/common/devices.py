"""The device that a run computes on, and how it computes there: in one thread on a CPU, so that bits do not differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedeas_flwr.common.cuda import capturing
from fedeas_flwr.common.errors import ConfigError


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let torch use one thread if it works on a CPU, and put their number back afterwards.

    Sums are split among threads: their number changes the last bits, and a process may have any.
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


def pick_device(wanted: str, precision: str = "tf32") -> str:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device that is there, and set how it computes.

    One torch thread a client: with more, sums are split differently and the last bits depend on the machine's load.
    """
    torch.set_num_threads(1)
    # How many streams may run side by side: 8 unless told so before CUDA starts, and ten clients have one each. Under
    # MPS all processes share them, and launch/mps.py says how many this one has.
    if not os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = 'cuda', but torch finds no CUDA device: use 'auto' or 'cpu'")
    if wanted == "cpu" or not torch.cuda.is_available():
        return "cpu"
    matmul, cudnn, tf32 = torch.backends.cuda.matmul, torch.backends.cudnn, precision != "fp32"
    if (matmul.allow_tf32, cudnn.allow_tf32) != (tf32, tf32):
        with capturing:  # a generator in another thread may compute otherwise for a moment, and needs it until its end
            matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    return "cuda"
