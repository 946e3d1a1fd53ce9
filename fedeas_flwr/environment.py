"""The machine and the libraries that a result was made with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
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
    }
