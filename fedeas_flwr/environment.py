"""The machine and the libraries that a result was made with."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_environment(device: str) -> dict[str, Any]:
    """What a reader of the result needs to know about the machine."""
    versions = {}
    for package in ("fedeas-flwr", "flwr", "ray", "torch", "torchvision", "diffusers", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": device,
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": versions,
        "code": code_digest(),
    }


def code_digest() -> str:
    """Name the state of this package's code, installed or not: SHA-256 of all its Python files with their names."""
    root, found = Path(__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
