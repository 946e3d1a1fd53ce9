"""A deployment on loopback for tests: starts SuperLink and SuperNodes by their scripts, records replies, ends them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from waiting import LONG, wait_until

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.processes import MARK, ProcessTree
from fedeas_flwr.deploy.deployment import CONNECTION, Deployment, write_deployment
from fedeas_flwr.deploy.registry import list_nodes, register_nodes
from fedeas_flwr.launch.superlink import QUIET, free_port, run_flwr_json
from fedeas_flwr.runs.directory import RunDirectory

WATCH = '''
"""On the PYTHONPATH of a deployment: records which processes import diffusers, and every reply to the server."""
import importlib.abc, importlib.machinery, json, os, sys

def note(name, value):
    with open(os.path.join(os.environ["FEDEAS_WATCH"], name), "a") as file:
        file.write(json.dumps(value) + "\\n")

def watch_replies(module):
    pull = module.HttpGrid.pull_messages
    def pull_messages(self, message_ids):
        found = list(pull(self, message_ids))
        for message in found:
            if not message.has_content():
                continue
            content = message.content
            note("replies", {
                "type": message.metadata.message_type,
                "arrays": {n: {k: list(a.shape) for k, a in r.items()} for n, r in content.array_records.items()},
                "metrics": {n: dict(r) for n, r in content.metric_records.items()},
                "configs": {n: dict(r) for n, r in content.config_records.items()},
            })
        return found
    module.HttpGrid.pull_messages = pull_messages

class Watcher(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "diffusers":
            note("diffusers", os.environ["FEDEAS_CACHE"])
        if name != "flwr.superlink.grid.http_grid":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            watch_replies(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Watcher())
'''


def free_ports() -> tuple[int, int]:
    """Return two free ports."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def is_open(port: int, pid: int, state: str = "0A") -> bool:
    """Return whether a port is open on the host (maybe a network namespace) of a process, or in another state."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            if any(f[1].endswith(f":{port:04X}") and f[3] == state for f in map(str.split, lines)):
                return True
    return False


class Lab:
    """A deployment whose machines are folders of one machine.

    Parameters
    ----------
    folder
        For everything.
    nodes
        How many.
    generator
        The nodes' local generator.
    hosts
        Addresses of the server; nodes use the first.
    within
        Words before a command that run it on the server.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        generator: Path,
        hosts: tuple[str, ...] = ("127.0.0.1",),
        within: tuple[str, ...] = (),
    ) -> None:
        self.folder, self._within = folder / "lab", within
        self.deployment = Deployment(hosts, *free_ports(), nodes, "/opt/fedeas")
        write_deployment(self.deployment, self.folder)
        self._stack, self._mark = ExitStack(), uuid.uuid4().hex
        self.watched = folder / "watched"
        self.watched.mkdir()
        (self.watched / "sitecustomize.py").write_text(WATCH)
        for node in self.deployment.node_folders(self.folder):
            self.set_node_config(node, f'{(node / "node-config").read_text().strip()} generator="{generator}"')

    def __enter__(self) -> Lab:
        with ExitStack() as failed:
            failed.callback(self._stack.close)
            self._start_superlink()
            self._start_gateway()
            failed.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start_superlink(self) -> None:
        self._superlink = self.start(self.folder / "superlink", *self._within)
        wait_until(lambda: is_open(self.deployment.superlink_port, self._superlink.pid), "the SuperLink listens")

    def _start_gateway(self) -> None:
        self._gateway = self.start(self.folder / "superlink", *self._within, script="gateway.sh")
        wait_until(lambda: is_open(self.deployment.port, self._gateway.pid), "the gateway listens")

    def restart_gateway(self) -> None:
        self._gateway.terminate()
        self._gateway.wait(LONG)
        self._start_gateway()

    def restart_superlink(self) -> None:
        """Restart as systemd does: send SIGTERM to every process of the unit, wait, then start a new one."""
        server = psutil.Process(self._superlink.pid)
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        self._superlink.wait(LONG)
        assert not psutil.wait_procs(processes[1:], timeout=LONG)[1]
        self._start_superlink()

    def set_node_config(self, node: Path, text: str) -> None:
        (node / "node-config").write_text(text + "\n")

    def start(
        self, folder: Path, *within: str, script: str = "start.sh", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Run a folder's script (``within`` another command); its output goes to output.log next to it."""
        log = self._stack.enter_context((folder / "output.log").open("ab"))
        process = subprocess.Popen(
            [*within, folder / script],
            env=self.environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._stack.callback(process.wait)
        self._stack.callback(ProcessTree(process, self._mark).end)
        return process

    def start_node(self, number: int, *within: str) -> subprocess.Popen[bytes]:
        return self.start(self.deployment.node_folders(self.folder)[number], *within, NODE_PORT=str(free_port()))

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("FEDEAS_CACHE", "FLWR_HOME", "RAY_ADDRESS")}
        path = os.pathsep.join([str(self.watched), os.environ.get("PYTHONPATH", "")])
        own = {"FEDEAS_BIN": str(Path(sys.executable).parent), "PYTHONPATH": path, "FEDEAS_WATCH": str(self.watched)}
        return {**inherited, **own, MARK: self._mark, **more}

    def register(self) -> list[str]:
        return register_nodes(self.deployment, self.folder)

    def online(self) -> int:
        return sum(node["status"] == "online" for node in list_nodes(self.folder))

    def submit(self, **changes: Any) -> RunDirectory:
        """Start a run with Flower's own command; ``changes`` are snake_case keys."""
        run = self.folder / "superlink" / "runs" / uuid.uuid4().hex[:8]
        values = {"run-dir": str(run), **{k.replace("_", "-"): v for k, v in changes.items()}}
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        environment = {**self.environment(FLWR_HOME=str(self.folder / "flwr")), **QUIET}
        command = ["run", str(self.folder / "app"), CONNECTION, "--run-config", words]
        answer = run_flwr_json(command, environment, self.folder)
        assert answer.get("run-id"), answer
        return RunDirectory(run)

    def follow(self, run: RunDirectory, seconds: float = LONG) -> RunDirectory:
        """Wait for the end of a run; raise if it failed."""
        wait_until(lambda: run.status()[0] in ("finished", "failed"), f"{run.path} ends", seconds)
        if run.status()[0] != "finished":
            raise RunError(run.status()[1])
        return run

    def notes(self, name: str) -> list[Any]:
        """Return what was recorded: ``replies`` or ``diffusers``."""
        path = self.watched / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def said(self, folder: str) -> str:
        return (self.folder / folder / "output.log").read_text(errors="replace")
