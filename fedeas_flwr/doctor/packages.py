"""Check the versions of Python and the libraries against the project's requirements."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fedeas_flwr.callbacks.registry import open_callbacks
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.project import read_project
from fedeas_flwr.config import RunConfig
from fedeas_flwr.doctor.findings import Finding, ok, problem

SHOWN = ("torch", "torchvision", "flwr", "ray", "diffusers")
REINSTALL = "pip install -c constraints.txt -e . in the project's folder, or `make`"


def requirements() -> dict[str, SpecifierSet]:
    """Return each library's version range; Ray's comes from ``flwr[simulation]``."""
    ranges: dict[str, SpecifierSet] = {}
    for line in read_project().requirements:
        required = Requirement(line)
        ranges[required.name] = required.specifier
        for extra in required.extras:
            ranges |= {name: found for name, found in _of_extra(required.name, extra).items() if name not in ranges}
    return ranges


def _of_extra(name: str, extra: str) -> dict[str, SpecifierSet]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (Requirement(line) for line in lines)
    return {
        r.name: r.specifier
        for r in found
        if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate({"extra": ""})
    }


def check_python(config: RunConfig) -> Iterable[Finding]:
    """Check the version of Python."""
    version, allowed = platform.python_version(), read_project().python
    if SpecifierSet(allowed).contains(version, prereleases=True):
        return [ok("python", version)]
    return [problem("python", f"{version} is not {allowed}", f"create a virtual environment with Python {allowed}")]


def check_packages(config: RunConfig) -> Iterator[Finding]:
    """Check the versions of the main libraries, one finding each."""
    ranges = requirements()
    for name in SHOWN:
        allowed = ranges.get(name, SpecifierSet())
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            extra = "flwr[simulation]" if name == "ray" else name
            yield problem(name, f"is not installed; required: {allowed or 'any'}", f"pip install '{extra}{allowed}'")
            continue
        # `contains` ignores a local version such as +cpu, which names only the build.
        if allowed.contains(version, prereleases=True):
            yield ok(name, f"{version} ({allowed or 'any'})")
        else:
            yield problem(name, f"{version} is not {allowed}", f"pip install '{name}{allowed}', or {REINSTALL}")


def check_torch_pair(config: RunConfig) -> Iterable[Finding]:
    """Check that torch and torchvision fit together: a mismatched pair fails at import or at the first operator."""
    name = "torch with torchvision"
    try:
        import torch
        import torchvision

        kept = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), torch.tensor([0.9, 0.8]), 0.5)
        if kept.tolist() != [0]:
            raise RuntimeError(f"torchvision.ops.nms returned {kept.tolist()} instead of [0]")
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        return [problem(name, error, f"install a matching pair: {REINSTALL}")]
    return [ok(name, "they work together")]


def check_callbacks(config: RunConfig) -> Iterable[Finding]:
    """Check that the callbacks of the run can be created."""
    if not config.callbacks:
        return []
    try:
        callbacks = open_callbacks(config.callbacks)
    except ConfigError as error:
        return [problem("callbacks", error, "fix or install it, or remove it from callbacks")]
    return [ok("callbacks", f"{', '.join(callbacks.names)}: can be called")]
