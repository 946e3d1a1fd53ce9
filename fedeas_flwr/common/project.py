"""Read the project's version and requirements, and describe the machine and code that produced a result."""

from __future__ import annotations

import hashlib
import os
import platform
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

NAME = "fedeas-flwr"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Project:
    """Version, Python range and requirements, as in pyproject.toml."""

    version: str
    python: str
    """Supported range of Python versions."""
    requirements: list[str]


def read_project(package: Path = _PACKAGE) -> Project:
    """Read the project from pyproject.toml next to the package or, without one, from the installed distribution.

    Raise `ValueError` if there is neither.
    """
    path = package.parent / "pyproject.toml"
    if path.is_file():
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        if found.get("name") == NAME:
            return Project(found["version"], found["requires-python"], found["dependencies"])
    try:
        installed = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise ValueError(f"{package} is not in a source tree, and {NAME} is not installed: pip install it") from None
    return Project(installed.version, installed.metadata["Requires-Python"], installed.requires or [])


def describe_environment(device: str) -> dict[str, Any]:
    """Return the machine, package versions and code digest to record with a result."""
    versions = {}
    for package in ("fedeas-flwr", "flwr", "ray", "torch", "torchvision", "diffusers", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
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


def code_digest(package: Path = _PACKAGE) -> str:
    """Return a digest of this package's code: SHA-256 of the names and contents of its Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
