"""A fixture that fails if a run under Ray leaves processes, shared memory or folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def flower_processes() -> set[int]:
    """Return the pids of Flower's and Ray's processes, found by name and command line."""
    found = set()
    for process in psutil.process_iter(["cmdline", "name", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:  # dead, but not reaped by its parent yet
            continue
        words = " ".join([process.info["name"] or "", *(process.info["cmdline"] or [])])
        if any(
            word in words
            for word in ("raylet", "gcs_server", "ray::", "flower-super", "flwr-simulation", "ray/_private")
        ):
            found.add(process.pid)
    return found


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    before = flower_processes(), shared_memory(), set(Path(tempfile.gettempdir()).glob("fe-*"))
    yield
    assert flower_processes() <= before[0]
    assert shared_memory() <= before[1]
    assert set(Path(tempfile.gettempdir()).glob("fe-*")) <= before[2]
