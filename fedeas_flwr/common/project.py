"""The project's version and requirements, and the machine and code that a result was made with."""

from __future__ import annotations

import hashlib
import os
import platform
import tomllib
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NAME = "fedeas-flwr"
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Project:
    """What pyproject.toml alone decides."""

    version: str
    python: str
    """The range of Pythons."""
    requirements: list[str]


def read_project(package: Path = _PACKAGE) -> Project:
    """Read it for a package's folder.

    Raises
    ------
    ValueError
        If that is no source tree and nothing is installed, in one line.
    """
    path = package.parent / "pyproject.toml"
    if path.is_file():
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
        if found.get("name") == NAME:
            return Project(found["version"], found["requires-python"], found["dependencies"])
    try:
        installed = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        raise ValueError(f"{package} is no source tree, and {NAME} is not installed: pip install it") from None
    return Project(installed.version, installed.metadata["Requires-Python"], installed.requires or [])


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
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
