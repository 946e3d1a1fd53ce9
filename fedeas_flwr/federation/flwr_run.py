"""Tell a user of plain `flwr run` which SuperLink runs the app, and which settings have no effect.

`flwr run` connects to whatever SuperLink answers on its port, and the app runs in the environment which that SuperLink
was started in. `fedeas run` starts its own SuperLink and sets the clients' resources itself.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from datetime import datetime
from importlib.machinery import PathFinder
from logging import INFO, WARNING
from pathlib import Path

import psutil
from flwr.serverapp import Grid

from fedeas_flwr.common.processes import MARK
from fedeas_flwr.common.project import NAME, code_digest
from fedeas_flwr.config import LAUNCHER_KEYS, RunConfig, parse_config
from fedeas_flwr.federation.flower_internals import SimulationGrid, get_flwr_home
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.generators.ray_service import clients_share_gpu

log = logging.getLogger("flwr").log

_PACKAGE = Path(__file__).resolve().parents[1]


def is_plain_run(grid: Grid) -> bool:
    """Return whether `flwr run` started this ServerApp, not `fedeas run`."""
    return MARK not in os.environ and not isinstance(grid, InlineGrid)


def log_surroundings(grid: Grid, config: RunConfig) -> None:
    """Log the SuperLink of a simulation, with a warning if it may be another project's, and keys without effect."""
    if isinstance(grid, SimulationGrid):
        log(INFO, "SuperLink: %s", describe_superlink())
        if foreign := describe_foreign_environment():
            log(WARNING, "This SuperLink's environment %s; to use another: docs/flwr-run.md", foreign)
    if keys := keys_without_effect(config):
        log(WARNING, "%s: no effect with `flwr run`, only `fedeas run` reads such keys; see --federation-config", keys)


def describe_superlink() -> str:
    """Return the SuperLink's process, if it is an ancestor of this one, and the home and Python of both."""
    process = ""
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            if any(Path(word).name == "flower-superlink" for word in parent.cmdline()[:2]):
                started = datetime.fromtimestamp(parent.create_time())
                process = f"process {parent.pid} of user {parent.username()}, "
                process += f"started {started:%Y-%m-%d %H:%M} in {parent.cwd()}, "
    return f"{process}home {get_flwr_home()}, Python {sys.executable}"


def describe_foreign_environment() -> str:
    """Return why this environment may be another project's: its own copy of this package is missing or differs.

    The copy that Flower has unpacked for this run does not count.
    """
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != _PACKAGE.parent]
    found = PathFinder.find_spec(_PACKAGE.name, elsewhere)
    if found is None or found.origin is None:
        return f"has no {NAME}, so another project may have started it"
    folder = Path(found.origin).parent
    return "" if code_digest(folder) == code_digest() else f"has other code of {NAME}, in {folder}"


def keys_without_effect(config: RunConfig) -> str:
    """Return the keys with other values than the defaults that only `fedeas run` reads."""
    given, default = config.to_user_dict(), parse_config({}).to_user_dict()
    return ", ".join(f"{key} = {given[key]!r}" for key in LAUNCHER_KEYS if given[key] != default[key])


def warn_without_gpu_share(device: str) -> None:
    """Log a warning if the server computes on a GPU, but Ray hides it from the clients."""
    if device == "cuda" and clients_share_gpu() is False:
        share = "client-resources-num-gpus=0.099 in --federation-config gives it to ten clients at a time"
        log(WARNING, "The clients have no share of this machine's GPU, so they cannot use it: %s", share)
