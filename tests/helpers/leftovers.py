"""What a run under Ray must not leave behind: processes, shared memory, folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


def flowers_processes() -> set[int]:
    """Processes of Flower and Ray, by what they call themselves."""
    found = set()
    for process in psutil.process_iter(["cmdline", "name", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:  # dead, and its parent's to bury
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
def nothing_is_left_behind() -> Iterator[None]:
    before = flowers_processes(), shared_memory(), set(Path(tempfile.gettempdir()).glob("fe-*"))
    yield
    assert flowers_processes() <= before[0]
    assert shared_memory() <= before[1]
    assert set(Path(tempfile.gettempdir()).glob("fe-*")) <= before[2]
