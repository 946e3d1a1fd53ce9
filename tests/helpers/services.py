"""Services of a deployment for tests: processes on hosts that are network namespaces, ended with the test."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from configparser import RawConfigParser
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from namespaces import Within
from sandbox import USER, sandbox
from waiting import LONG

from fedeas_flwr.common.processes import MARK, ProcessTree
from fedeas_flwr.launch.superlink import QUIET

VENV = {"/opt/fedeas/venv": (Path(sys.prefix), "ro")}
"""Where start scripts look for Flower's commands."""


def give(folder: Path) -> None:
    """Give a folder and its files to the sandbox's user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)


def start(
    stack: ExitStack, words: Sequence[str | Path], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that ends with the stack; its output is appended to ``log``."""
    mark = uuid.uuid4().hex
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            env={"PATH": os.environ["PATH"], MARK: mark, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    stack.callback(process.wait)
    stack.callback(ProcessTree(process, mark).end)
    return process


def start_unit(stack: ExitStack, host: Within, unit: Path) -> subprocess.Popen[bytes]:
    """Start the service of a systemd unit on a host as the unit says: user, folders, read-only root, private /tmp."""
    parser = RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    service = parser["Service"]
    assert (service["User"], service["ProtectSystem"], service["PrivateTmp"]) == ("fedeas", "strict", "true")
    within = sandbox(service["WorkingDirectory"], {**VENV, service["ReadWritePaths"]: (unit.parent, "rw")})
    return start(
        stack,
        [*host, *within, service["ExecStart"]],
        unit.with_suffix(".log"),
        {"HOME": "/opt/fedeas", "LANG": "C.UTF-8"},
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a service and what it has started, as systemd does with what a crashed service leaves."""
    found = psutil.Process(process.pid)
    for each in [*found.children(recursive=True), found]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait(LONG)


def operate(host: Within, folder: Path, *words: str | Path) -> str:
    """Run a command of this environment on a host, with Flower's connection to the deployment; return its output."""
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")}
    command = [*host, Path(sys.executable).parent / words[0], *words[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
