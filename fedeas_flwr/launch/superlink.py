"""Flower's processes for a run: the app, the environment, a SuperLink as a child process, and Flower's commands."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w

from fedeas_flwr.common.errors import RunFailedError
from fedeas_flwr.common.processes import MARK, ProcessTree, listens
from fedeas_flwr.common.project import NAME, read_project
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.launch.namespace import inside, listens_inside
from fedeas_flwr.launch.ray_head import head_environment, with_head
from fedeas_flwr.launch.watchdog import watchdog
from fedeas_flwr.runs.directory import RunDirectory

QUIET = {
    # Otherwise Flower runs `uv sync` on the app's dependencies for every run, and Flower and Ray send telemetry.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}

COMMANDS = ("flwr", "flower-superlink")
_PORT_TRIES = 3


def stage_app(config: RunConfig, folder: Path, *others: str) -> Path:
    """Write a Flower app of this package, with the run-config as its defaults, and return its folder.

    Flower copies only the package's Python files to other machines, and the files ``others``, which the caller writes.
    """
    package = Path(__file__).resolve().parents[1]
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    app = {
        "publisher": "fedeas",
        "fab-include": ["fedeas_flwr/**/*.py", *others],
        "components": {"serverapp": "fedeas_flwr.server_app:app", "clientapp": "fedeas_flwr.client_app:app"},
        "config": config.to_user_dict(),
    }
    project = {"name": NAME, "version": read_project().version, "license": "Apache-2.0", "dependencies": []}
    (folder / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}}))
    return folder


def own_environment(folder: Path, ray_address: str = "") -> dict[str, str]:
    """Return an environment for processes that share no Flower or Ray with others on this machine.

    ``folder`` is the launch's temporary folder, whose path is their mark. ``ray_address`` is the exception: the Ray
    cluster that the user asked to join.
    """
    own_ray = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # Ray then takes the loopback's address as its own; a namespace has no other that works.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    home = folder / "flwr"
    home.mkdir()
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])  # for custom models
    # With RAY_ADDRESS, Flower joins that cluster, which rejects our number of CPUs and GPUs.
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {
        **inherited,
        **QUIET,
        MARK: str(folder),
        "FLWR_HOME": str(home),
        **({"RAY_ADDRESS": ray_address} if ray_address else own_ray),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PATH": commands_path(os.environ),
    }


def commands_path(environment: Mapping[str, str]) -> str:
    """Return a PATH for Flower's commands: this Python's folder first, since its environment may not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])


def check_commands() -> None:
    """Raise `RunFailedError` if one of Flower's commands is missing."""
    for command in COMMANDS:
        if shutil.which(command, path=commands_path(os.environ)) is None:
            raise RunFailedError(f"{command} is missing: {sys.executable} -m pip install 'flwr[simulation]'")


def start_superlink(
    environment: dict[str, str],
    folder: Path,
    stack: ExitStack,
    run: RunDirectory,
    isolated: bool = False,
    resources: Mapping[str, float] | None = None,
) -> tuple[subprocess.Popen[bytes], ProcessTree]:
    """Start a SuperLink and wait until it answers; try again if another process takes its port first.

    If ``isolated``, the SuperLink and all it starts run in their own network namespace. With ``resources``, as from
    `ray_resources`, Ray starts at the same time; otherwise the run joins a cluster.
    """
    log = stack.enter_context((run.path / "superlink.log").open("ab"))
    stack.callback(ProcessTree(None, str(folder)).end)  # also ends what Ctrl-C interrupts before the callback below
    for _ in range(_PORT_TRIES):
        port = free_port()
        superlink = _spawn_superlink(port, environment, folder, log, inside() if isolated else [], resources)
        processes = ProcessTree(superlink, str(folder))
        stack.enter_context(watchdog(superlink.pid, folder))
        stack.callback(processes.end)
        if _is_ready(superlink, port, isolated):
            return superlink, processes
        processes.end()
    raise RunFailedError(
        f"Flower's SuperLink did not start, last tried on port {port}; see {run.path / 'superlink.log'}"
    )


def _spawn_superlink(
    port: int,
    environment: dict[str, str],
    folder: Path,
    log: Any,
    within: Sequence[str],
    resources: Mapping[str, float] | None,
) -> subprocess.Popen[bytes]:
    address = f"127.0.0.1:{port}"
    (folder / "flwr" / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": "own", "own": {"address": address, "insecure": True}}})
    )
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if resources is not None:
        command, environment = with_head(command, resources), environment | head_environment(free_port())
    return subprocess.Popen(
        [*within, *command],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # the launcher handles Ctrl-C
    )


def run_flwr_json(
    words: list[str], environment: dict[str, str], folder: Path, within: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a command of Flower's command line, after the words ``within``, and return its JSON output.

    Without one, return what it printed instead as ``error-message``.
    """
    command, own = [*within, "flwr", *words, "--format", "json"], {**environment, "PATH": commands_path(environment)}
    done = subprocess.run(command, env=own, cwd=folder, capture_output=True, text=True, check=False)
    _, brace, rest = done.stdout.partition("{")
    try:
        return dict(json.loads(brace + rest))
    except json.JSONDecodeError:
        return {"error-message": one_line(done.stderr or done.stdout, 300) or f"code {done.returncode}"}


def free_port() -> int:
    """Return a port of the loopback interface that is free at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def is_listening(port: int) -> bool:
    """Return whether a process listens on a loopback port."""
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0


def _is_ready(superlink: subprocess.Popen[bytes], port: int, isolated: bool) -> bool:
    """Wait until this SuperLink listens on the port; return False if it exits, as it does if the port is taken."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and superlink.poll() is None:
        if listens_inside(superlink.pid, port) if isolated else is_listening(port) and listens(superlink.pid, port):
            return True
        time.sleep(0.1)
    return False
