"""The findings of `fedeas doctor`, and the list of its checks.

A check is a function from a run-config to findings; a new one is added to `CHECKS`. Checks train, download and leave
behind nothing. They are imported one by one, so that the doctor also works where torch or Flower is missing or broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal

from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig

CHECKS = {
    "python": "packages.check_python",
    "packages": "packages.check_packages",
    "torch with torchvision": "packages.check_torch_pair",
    "callbacks": "packages.check_callbacks",
    "GPU": "machine.check_gpu",
    "engine": "machine.check_engine",
    "CUDA MPS": "machine.check_mps",
    "cores": "machine.check_cores",
    "memory": "machine.check_memory",
    "/dev/shm": "machine.check_shared_memory",
    "cache folder": "machine.check_cache_folder",
    "cache limit": "machine.check_cache_limit",
    "run folder": "machine.check_run_folder",
    "dataset": "inputs.check_dataset",
    "model": "inputs.check_model",
    "policy": "inputs.check_policy",
    "strategy": "inputs.check_strategy",
    "clients": "inputs.check_clients",
    "last batches": "inputs.check_last_batches",
    "generator": "inputs.check_generator",
    "plan": "inputs.check_plan",
    "Flower's commands": "federation.check_commands",
    "loopback port": "federation.check_port",
    "other SuperLink": "federation.check_other_superlink",
    "left processes": "federation.check_left_processes",
    "other Ray": "federation.check_other_ray",
    "GPU shares": "federation.check_shares",
}


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    """Name of the check; several checks with the same finding are joined by commas."""
    state: Literal["ok", "problem", "note"]
    """``problem``: a run of this config would fail or run badly. ``note``: nothing to fix, but worth knowing."""
    text: str
    fix: str = ""
    """What to do; every problem has a fix."""


def ok(name: str, text: str) -> Finding:
    """Return a finding that a check passed."""
    return Finding(name, "ok", text)


def note(name: str, text: str, fix: str = "") -> Finding:
    """Return a finding that needs no fix but is worth knowing."""
    return Finding(name, "note", text, fix)


def problem(name: str, text: str | Exception, fix: str) -> Finding:
    """Return a finding that a run would fail or run badly; an exception becomes one line."""
    return Finding(name, "problem", one_line(text, 400) or type(text).__name__, fix)


def examine(config: RunConfig) -> list[Finding]:
    """Return the findings of every check in `CHECKS`; those that say the same are one, with all their names."""
    found: dict[Finding, list[str]] = {}
    for finding in _examine(config):
        found.setdefault(replace(finding, name=""), []).append(finding.name)
    return [replace(finding, name=", ".join(names)) for finding, names in found.items()]


def _examine(config: RunConfig) -> Iterator[Finding]:
    """Yield the findings of every check; a check that raises becomes a problem."""
    for name, where in CHECKS.items():
        module, _, function = where.partition(".")
        try:
            yield from getattr(import_module(f"{__package__}.{module}"), function)(config)
        except ImportError as error:
            yield problem(name, f"could not be checked: {error}", "install what is missing, then run the check again")
        except Exception as error:
            cause = f"the check itself failed: {type(error).__name__}: {error}"
            yield problem(name, cause, "fix what the text names; if it names nothing, report this line as a bug")
