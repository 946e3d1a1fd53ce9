"""Check Flower, Ray, and how a run would share one GPU between its clients and the generator."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.doctor.findings import Finding, note, ok, problem
from fedeas_flwr.doctor.machine import on_gpu
from fedeas_flwr.federation.flower_internals import local_ports
from fedeas_flwr.generators.ray_service import GENERATOR_GPU_FRACTION, reserve_generator_gpu
from fedeas_flwr.launch.resources import ray_resources
from fedeas_flwr.launch.superlink import COMMANDS, free_port, is_listening
from fedeas_flwr.launch.watchdog import dead_launches

_DEFAULTS = "set what the text says, or gpu-share=0 and actors=0 for the defaults"


def check_commands(config: RunConfig) -> Iterable[Finding]:
    """Check that Flower's commands are in this Python's folder: others would use another environment."""
    here = str(Path(sys.executable).parent)
    missing = [command for command in COMMANDS if shutil.which(command, path=here) is None]
    if not missing:
        return [ok("Flower's commands", f"{', '.join(COMMANDS)} in {here}")]
    elsewhere = [found for found in map(shutil.which, missing) if found]
    text = f"{', '.join(missing)} not in {here}" + (f" (but {', '.join(elsewhere)})" if elsewhere else "")
    return [problem("Flower's commands", text, f"{sys.executable} -m pip install 'flwr[simulation]'")]


def check_port(config: RunConfig) -> Iterable[Finding]:
    """Check that a port of the loopback interface can be bound, which every Flower run needs."""
    try:
        return [ok("loopback port", f"127.0.0.1:{free_port()} can be bound; a run uses any free port")]
    except OSError as error:
        return [problem("loopback port", f"127.0.0.1: {error}", "bring the interface lo up, or set backend=inline")]


def check_other_superlink(config: RunConfig) -> Iterable[Finding]:
    """Report a SuperLink on Flower's default port: `flwr run` would use it, `fedeas run` does not."""
    busy = [port for port in local_ports() if is_listening(int(port))]
    if not busy:
        return []
    text = f"port {' and '.join(busy)} is in use: `flwr run` would connect to it, `fedeas run` starts its own SuperLink"
    return [note("other SuperLink", text)]


def check_left_processes(config: RunConfig) -> Iterable[Finding]:
    """Report processes of a killed run, whose launcher and watchdog died at the same moment."""
    for folder, pids in dead_launches().items():
        if pids:
            text = f"a killed run left {', '.join(map(str, pids))} running, with files in {folder}"
            yield note("left processes", text, "any other `fedeas` command ends them")


def check_other_ray(config: RunConfig) -> Iterable[Finding]:
    """Report another Ray on this machine: `fedeas run` starts its own."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "local"):
        text = f"RAY_ADDRESS = {address!r}: `flwr run` would join that cluster, `fedeas run` only with ray-address"
        return [note("other Ray", text, "unset RAY_ADDRESS before `flwr run` with init-args: a cluster rejects them")]
    if any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])):
        return [note("other Ray", "Ray is already running here; a run starts its own, and both share cores and memory")]
    return []


def check_shares(config: RunConfig) -> Iterable[Finding]:
    """Report the GPU share of each client, and check that they leave the generator its share."""
    if not on_gpu(config) and not config.ray_address:
        return []
    if config.backend == "inline":
        return [note("GPU shares", "none: backend = 'inline' runs all clients in one process")]
    try:
        resources = ray_resources(config, on_gpu=True)
    except ValueError as error:
        return [problem("GPU shares", error, _DEFAULTS)]
    share = resources["client-resources-num-gpus"]
    fitting = int(1 / share + 1e-6)
    actors = int(resources.get("init-args-num-cpus", fitting))  # not set for a cluster
    clients = min(actors, fitting)
    text = f"{counted(clients, 'client')} × {share:g}, {GENERATOR_GPU_FRACTION} for the generator"
    if config.ray_address:
        return [note("GPU shares", f"{text} on a GPU of the Ray at {config.ray_address}, which is not checked")]
    if clients < config.actors:
        fix = f"gpu-share={reserve_generator_gpu(1 / actors):g} lets {config.actors} clients train in parallel"
        text += f": gpu-share = {config.gpu_share:g} allows fewer than actors = {actors}"
        return [note("GPU shares", text, fix)]
    return [ok("GPU shares", text)]
