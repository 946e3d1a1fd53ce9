"""Flower, Ray, and how a run would divide one GPU between its clients and the generator they share."""

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
from fedeas_flwr.launch.superlink import free_port, is_listening

COMMANDS = ("flwr", "flower-superlink")
_DEFAULTS = "write what the text says, or gpu-share=0 and actors=0 for the defaults"


def check_commands(config: RunConfig) -> Iterable[Finding]:
    """Flower's commands, beside this very Python: others would run another environment."""
    here = str(Path(sys.executable).parent)
    missing = [command for command in COMMANDS if shutil.which(command, path=here) is None]
    if not missing:
        return [ok("Flower's commands", f"{', '.join(COMMANDS)} in {here}")]
    elsewhere = [found for found in map(shutil.which, missing) if found]
    text = f"{', '.join(missing)} not in {here}" + (f" (but {', '.join(elsewhere)})" if elsewhere else "")
    return [problem("Flower's commands", text, f"{sys.executable} -m pip install 'flwr[simulation]'")]


def check_port(config: RunConfig) -> Iterable[Finding]:
    """A port of the loopback interface, as every run through Flower needs one."""
    try:
        return [ok("loopback port", f"127.0.0.1:{free_port()} could be bound; a run takes any free one")]
    except OSError as error:
        return [problem("loopback port", f"127.0.0.1: {error}", "bring the interface lo up, or write backend=inline")]


def check_other_superlink(config: RunConfig) -> Iterable[Finding]:
    """A SuperLink on Flower's own port: `flwr run` would use it, `fedeas run` does not."""
    busy = [port for port in local_ports() if is_listening(int(port))]
    if not busy:
        return []
    text = f"port {' and '.join(busy)} is in use: `flwr run` would talk to that one, `fedeas run` starts its own"
    return [note("other SuperLink", text)]


def check_other_ray(config: RunConfig) -> Iterable[Finding]:
    """A Ray that is not ours: `fedeas run` starts its own."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "local"):
        text = f"RAY_ADDRESS = {address!r}: `flwr run` would join that cluster, `fedeas run` only with ray-address"
        return [note("other Ray", text, "unset RAY_ADDRESS before `flwr run` with init-args: a cluster refuses them")]
    if any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])):
        return [note("other Ray", "one is running here; a run starts its own, and both share cores and memory")]
    return []


def check_shares(config: RunConfig) -> Iterable[Finding]:
    """The parts of a GPU that `fedeas run` would give its clients, and what they leave the generator."""
    if config.backend == "inline":
        return [note("GPU shares", "none: backend = 'inline' runs all clients in one process")]
    try:
        resources = ray_resources(config, on_gpu=True)
    except ValueError as error:
        if on_gpu(config):
            return [problem("GPU shares", error, _DEFAULTS)]
        return [note("GPU shares", f"on a machine with a GPU: {error}", _DEFAULTS)]
    share = resources["client-resources-num-gpus"]
    fitting = int(1 / share + 1e-6)
    actors = int(resources.get("init-args-num-cpus", fitting))  # a cluster is not told how many it holds
    clients = min(actors, fitting)
    text = f"{counted(clients, 'client')} × {share:g}, {GENERATOR_GPU_FRACTION} for the generator"
    if config.ray_address:
        return [note("GPU shares", f"{text} on a GPU of the Ray at {config.ray_address}, which is not looked at")]
    if not on_gpu(config):
        text += " (on a machine with a GPU)"
    if clients < config.actors:
        fix = f"gpu-share={reserve_generator_gpu(1 / actors):g} lets {config.actors} run at once"
        return [
            note("GPU shares", f"{text}: gpu-share = {config.gpu_share:g} allows fewer than actors = {actors}", fix)
        ]
    return [ok("GPU shares", text)]
