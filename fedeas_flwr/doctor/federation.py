"""Flower, Ray, and how a run would divide one GPU between its clients and the generator they share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil

from fedeas_flwr.common.processes import ProcessTree
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.doctor.findings import Finding, note, ok, problem
from fedeas_flwr.doctor.machine import on_gpu
from fedeas_flwr.federation.flower_internals import local_ports
from fedeas_flwr.generators.ray_service import GENERATOR_GPU_FRACTION, reserve_generator_gpu
from fedeas_flwr.launch.resources import ray_resources
from fedeas_flwr.launch.superlink import free_port, is_listening, own_environment

COMMANDS = ("flwr", "flower-superlink")
_DEFAULTS = "write what the text says, or gpu-share=0 and actors=0 for the defaults"
_SECONDS = 60.0
_SECONDS_PER_CLIENT = 3.0


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


def check_rehearsal(config: RunConfig) -> Iterable[Finding]:
    """Start Ray with a run's numbers and see the generator's actor scheduled beside all the clients.

    Ray counts GPUs without looking at them, so that the numbers are tested on a machine that has none.
    """
    name = "GPU shares under Ray"
    if config.backend == "inline" or not config.generates:
        return [note(name, "not tried: the run shares no generator under Ray (backend, policy)")]
    if config.ray_address:
        return [note(name, f"not tried: the run joins the Ray at {config.ray_address}, which is not looked at")]
    try:
        resources = ray_resources(config, on_gpu=True)
    except ValueError as error:
        return [problem(name, error, _DEFAULTS)]
    found = _rehearse(config, resources)
    if not found["error"]:
        clients = counted(int(found["clients"]), "client")
        return [ok(name, f"{clients} and the generator were scheduled, the last after {found['seconds']:.1f} s")]
    actors = int(resources["init-args-num-cpus"])
    fitting = f"actors={actors} gpu-share={reserve_generator_gpu(1 / actors):g}"
    taken = f"gpu-share = {resources['client-resources-num-gpus']:g}, actors = {actors}"
    return [problem(name, f"{taken}: {found['error']}", f"write {fitting}, or backend=inline")]


def _rehearse(config: RunConfig, resources: dict[str, float]) -> dict[str, float | str]:
    """Run rehearsal.py in a process of its own, and end whatever it leaves."""
    folder, mark = Path(tempfile.mkdtemp(prefix="fe-")), uuid.uuid4().hex  # short: Ray's sockets lie below it
    words = [sys.executable, "-m", "fedeas_flwr.doctor.rehearsal", json.dumps([config.to_user_dict(), resources])]
    package = Path(__file__).resolve().parents[2]  # started there, it finds the very package that runs here
    out, noise = folder / "out", folder / "noise"
    deadline = time.monotonic() + _SECONDS + _SECONDS_PER_CLIENT * resources["init-args-num-cpus"]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        streams = [stack.enter_context(path.open("wb")) for path in (out, noise)]
        process = subprocess.Popen(
            words,
            env=own_environment(folder, mark) | {"CUDA_VISIBLE_DEVICES": "0"},  # one GPU, whatever this shell may see
            cwd=package,
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        processes = ProcessTree(process, mark)
        stack.callback(processes.end)
        while process.poll() is None:
            processes.note()
            if time.monotonic() > deadline:
                return {"error": "Ray did not answer in time"}
            time.sleep(0.2)
        if process.returncode == 0:
            return dict(json.loads(out.read_text().splitlines()[-1]))
        last = noise.read_text(errors="replace").strip().rpartition("\n")[2]
        return {"error": f"Ray did not start: {last or f'exit code {process.returncode}'}"}
