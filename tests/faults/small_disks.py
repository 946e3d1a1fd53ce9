"""Tiny and read-only filesystems; mounting them needs a privilege."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tiny_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a filesystem in memory, such as ``size=256k``, or skip the test where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a filesystem needs a privilege: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def remount(folder: Path, options: str) -> None:
    """Change a mounted disk's size or make it read-only."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
