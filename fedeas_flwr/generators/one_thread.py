"""The same bits whatever the machine: torch's work on a CPU in one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
