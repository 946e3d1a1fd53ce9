"""What this machine can do for a run: `fedeas doctor`.

A check is a small function from a run-config to findings; a new one is written in the file it belongs to and added to
`CHECKS`. Nothing is trained, downloaded or left behind. Checks are imported when their turn comes: the doctor must have
something to say where torch or Flower is missing or broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from fedeas_flwr.config import RunConfig
from fedeas_flwr.doctor.findings import Finding, problem

__all__ = ["CHECKS", "Finding", "examine"]

CHECKS = {
    "python": "packages.check_python",
    "packages": "packages.check_packages",
    "torch with torchvision": "packages.check_torch_pair",
    "tensorboard": "packages.check_tensorboard",
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
    "strategy": "inputs.check_strategy",
    "clients": "inputs.check_clients",
    "last batches": "inputs.check_last_batches",
    "generator": "inputs.check_generator",
    "plan": "inputs.check_plan",
    "Flower's commands": "federation.check_commands",
    "loopback port": "federation.check_port",
    "other SuperLink": "federation.check_other_superlink",
    "other Ray": "federation.check_other_ray",
    "GPU shares": "federation.check_shares",
}


def examine(config: RunConfig, rehearse: bool = False) -> Iterator[Finding]:
    """Make every check, the quick ones first; one that raises is a finding itself.

    Parameters
    ----------
    config
        Of the run that is meant.
    rehearse
        Also start a small Ray and divide its GPU as the run would, about 15 seconds.

    Yields
    ------
    Finding
    """
    checks = {**CHECKS, "GPU shares under Ray": "federation.check_rehearsal"} if rehearse else CHECKS
    for name, where in checks.items():
        module, _, function = where.partition(".")
        try:
            yield from getattr(import_module(f"{__name__}.{module}"), function)(config)
        except ImportError as error:
            yield problem(name, f"could not be checked: {error}", "install what is missing, then ask again")
        except Exception as error:
            cause = f"the check itself failed: {type(error).__name__}: {error}"
            yield problem(name, cause, "mend what the text names; if it names nothing, report it with this line")
