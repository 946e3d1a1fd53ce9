"""Services of a deployment for tests: processes on hosts that are network namespaces, ended with the test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from configparser import RawConfigParser
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from namespaces import Within, add_host, connect
from sandbox import USER, sandbox
from waiting import LONG, wait_until

from fedeas_flwr.common.processes import MARK, ProcessTree
from fedeas_flwr.launch.superlink import QUIET

DOCKER = Path(__file__).parents[2] / "docker"
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
        {"HOME": "/opt/fedeas", "USER": "fedeas", "LOGNAME": "fedeas", "LANG": "C.UTF-8"},
    )


class Compose:
    """The services of docker/compose.yaml without a container engine: each in a sandbox, on a host of its own.

    Parameters
    ----------
    stack
        Ends the services and removes the hosts.
    volume
        Folder in place of the volume ``lab``.
    """

    def __init__(self, stack: ExitStack, volume: Path) -> None:
        self._stack, self._volume = stack, volume
        self.services: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
        image = (DOCKER / "Dockerfile").read_text()
        self._command = json.loads(re.findall(r"^CMD (.+)$", image, re.M)[0])
        self._health = json.loads(re.findall(r"^HEALTHCHECK .*\n +CMD (.+)$", image, re.M)[0])
        self._workdir = re.findall(r"^WORKDIR (.+)$", image, re.M)[0]
        self._environment = dict(word.split("=", 1) for word in re.findall(r"^ENV (.+)$", image, re.M)[0].split())
        self._hosts, self._started = {"superlink": add_host(stack)}, set()

    def _host(self, service: str) -> Within:
        mode = self.services[service].get("network_mode", "")
        if mode == "none":
            return add_host(self._stack)
        name = mode.removeprefix("service:") or service
        if name not in self._hosts:
            self._hosts[name] = add_host(self._stack)
            network = f"10.213.{40 + len(self._hosts)}"
            connect(self._stack, self._hosts["superlink"], self._hosts[name], network)
            self._names(name).write_text(f"127.0.0.1 localhost\n{network}.1 superlink\n")
        return self._hosts[name]

    def _names(self, host: str) -> Path:
        return self._volume.parent / f"hosts-{host}"

    def words(self, service: str, command: Sequence[str]) -> list[str]:
        """Return the words that run a command in the container of a service."""
        what = self.services[service]
        assert what["read_only"] and what["tmpfs"] == ["/tmp"] and what["cap_drop"] == ["ALL"]
        host, mounts = self._host(service), dict(VENV)
        for mount in what["volumes"]:
            if isinstance(mount, str):
                mounts[mount.removeprefix("lab:")] = (self._volume, "rw")
            else:
                assert mount["source"] == "lab"
                mounts[mount["target"]] = (self._volume / mount["volume"]["subpath"], "rw")
        if (names := self._names(service)).exists():
            mounts["/etc/hosts"] = (names, "ro")
        return [*host, *sandbox(what.get("working_dir", self._workdir), mounts), *command]

    def environment(self, service: str) -> dict[str, str]:
        own = {**self._environment, **self.services[service].get("environment", {})}
        path = own["PATH"].replace("$PATH", os.environ["PATH"])
        return {**own, "PATH": path, "PYTHONPATH": str(DOCKER.parent)}

    def run(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        words, environment = self.words(service, command), self.environment(service)
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    def is_healthy(self, service: str) -> bool:
        test = self.services[service].get("healthcheck", {}).get("test", ["CMD", *self._health])
        assert test[0] == "CMD"
        time.sleep(1)
        return self.run(service, *test[1:]).returncode == 0

    def up(self, service: str) -> None:
        """Start a service after those it depends on, and wait until it is healthy or, if it is to end, has ended."""
        if service in self._started:
            return
        self._started.add(service)
        what = self.services[service]
        for other in what.get("depends_on", {}):
            self.up(other)
        words = self.words(service, what.get("command", self._command))
        log = self._volume.parent / f"{service}.log"
        process = start(self._stack, words, log, self.environment(service))
        if what["restart"] == "no":
            assert process.wait(LONG) == 0, log.read_text()
        else:
            wait_until(lambda: self.is_healthy(service), f"{service} is healthy")


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
