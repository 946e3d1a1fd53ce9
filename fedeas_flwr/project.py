"""What the project says of itself: its pyproject.toml in a source tree, else the installed package's metadata."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

NAME = "fedeas-flwr"
_PACKAGE = Path(__file__).resolve().parent


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
