"""Python and the libraries, against the ranges that the project asks for."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.project import read_project
from fedeas_flwr.config import RunConfig
from fedeas_flwr.doctor.findings import Finding, ok, problem
from fedeas_flwr.runs.tensorboard import check_installed

SHOWN = ("torch", "torchvision", "flwr", "ray", "diffusers")
REINSTALL = "pip install -c constraints.txt -e . in the project's folder, or `make`"


def requirements() -> dict[str, SpecifierSet]:
    """Return each library's range. Ray's is Flower's to say: it comes with ``flwr[simulation]``."""
    ranges: dict[str, SpecifierSet] = {}
    for word in read_project().requirements:
        wanted = Requirement(word)
        ranges[wanted.name] = wanted.specifier
        for extra in wanted.extras:
            ranges |= {name: found for name, found in _of_extra(wanted.name, extra).items() if name not in ranges}
    return ranges


def _of_extra(name: str, extra: str) -> dict[str, SpecifierSet]:
    try:
        words = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (Requirement(word) for word in words)
    return {r.name: r.specifier for r in found if r.marker and _only_with(r, extra)}


def _only_with(wanted: Requirement, extra: str) -> bool:
    marker = wanted.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def check_python(config: RunConfig) -> Iterable[Finding]:
    """Python's version."""
    version, allowed = platform.python_version(), read_project().python
    if SpecifierSet(allowed).contains(version, prereleases=True):
        return [ok("python", version)]
    return [problem("python", f"{version} is not {allowed}", f"make a virtual environment with Python {allowed}")]


def check_packages(config: RunConfig) -> Iterator[Finding]:
    """The libraries whose versions matter most, one line each."""
    ranges = requirements()
    for name in SHOWN:
        allowed = ranges.get(name, SpecifierSet())
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            extra = "flwr[simulation]" if name == "ray" else name
            yield problem(name, f"is not installed; needed is {allowed or 'any'}", f"pip install '{extra}{allowed}'")
            continue
        # A local part such as +cpu says how it was built, not what it is: `contains` looks past it.
        if allowed.contains(version, prereleases=True):
            yield ok(name, f"{version} ({allowed or 'any'})")
        else:
            yield problem(name, f"{version} is not {allowed}", f"pip install '{name}{allowed}', or {REINSTALL}")


def check_torch_pair(config: RunConfig) -> Iterable[Finding]:
    """Whether torch and torchvision were built for each other: mismatched ones fail at import or at the first op."""
    name = "torch with torchvision"
    try:
        import torch
        import torchvision

        kept = torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 2), torch.tensor([0.9, 0.8]), 0.5)
        if kept.tolist() != [0]:
            raise RuntimeError(f"torchvision.ops.nms answered {kept.tolist()} instead of [0]")
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        return [problem(name, error, f"install a pair that belongs together: {REINSTALL}")]
    return [ok(name, "they work together")]


def check_tensorboard(config: RunConfig) -> Iterable[Finding]:
    """Whether a run that is to write for TensorBoard can; nothing is said of others."""
    if not config.tensorboard:
        return []
    try:
        check_installed()
    except ConfigError as error:
        return [problem("tensorboard", error, "install it, or give tensorboard=false")]
    return [ok("tensorboard", "is installed")]
