"""A server and five nodes, each a host of its own with its systemd units, over links that delay and lose packets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from namespaces import Within, add_host, must
from runners import CHEAP, finish, small, weights
from services import give, kill, operate, start, start_unit
from waiting import wait_until

from fedeas_flwr import client_app
from fedeas_flwr.deploy.deployment import Deployment, write_deployment
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.interface import ClientRound

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.timeout(3000)]

DELAY, LOSS = 0.1, 0.05
"""Seconds that each packet takes in each direction, and the fraction that is lost."""
PARTITION_SECONDS, RESTART_SECONDS = 30.0, 10.0
PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
PATIENCE = 900.0


class Hosts:
    """The hosts of a deployment and the services on them, which are restarted whenever they end.

    Parameters
    ----------
    stack
        Ends the services and removes the hosts.
    folder
        For everything.
    nodes
        How many.
    """

    def __init__(self, stack: ExitStack, folder: Path, nodes: int) -> None:
        must("test", "-c", "/dev/net/tun")
        self._stack, self.lab, self._folder = stack, folder / "lab", folder
        addresses = tuple(f"10.213.{60 + number}.1" for number in range(6))
        write_deployment(Deployment(addresses, 9092, 9093, nodes, "/opt/fedeas"), self.lab)
        self.superlink, self.hosts = self.lab / "superlink", {"superlink": add_host(stack)}
        self._services: dict[str, tuple[Within, Path]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._closed = threading.Event()
        for number in range(nodes):
            self.link(number)
        stack.callback(self._closed.set)

    def link(self, number: int) -> None:
        """Add the host of a node and its link to the server."""
        name, network = f"node-{number}", f"10.213.{60 + number}"
        self.hosts[name] = add_host(self._stack)
        script, log = Path(__file__).parents[1] / "helpers" / "slow_link.py", self._folder / f"link-{number}.log"
        ends = self.hosts["superlink"][-1], self.hosts[name][-1]
        start(
            self._stack, [sys.executable, script, *ends, network, str(DELAY), str(LOSS), self.switch(number)], log, {}
        )
        wait_until(lambda: "ready" in log.read_text(), f"the link of {name} is there")
        (self.lab / name / "superlink-address").write_text(f"{network}.1:9092\n")

    def switch(self, number: int) -> Path:
        """Return the file that stops all packets of a node while it exists."""
        return self._folder / f"stopped-{number}"

    def describe(self, number: int, of: int, generator: Path) -> None:
        """Write a node's node-config: a part of the digits, and a generator in the node's own folder."""
        node = self.lab / f"node-{number}"
        shutil.copytree(generator, node / "generator")
        own = f'generator="/opt/fedeas/node-{number}/generator"'
        (node / "node-config").write_text(f"partition-id={number} num-partitions={of} {own}\n")

    def start(self, host: str, service: str) -> None:
        """Start a service, and again ten seconds after each end, as its unit says."""
        folder = self.lab / host
        give(folder)
        self._services[service] = self.hosts[host], folder / f"fedeas-{service}.service"
        threading.Thread(target=self._keep, args=(service,), daemon=True).start()
        wait_until(lambda: service in self._running, f"{service} is started")

    def _keep(self, service: str) -> None:
        while not self._closed.is_set():
            self._running[service] = start_unit(self._stack, *self._services[service])
            if service == "superlink" and (self.superlink / "resume").exists():
                start_unit(self._stack, self.hosts["superlink"], self.superlink / "fedeas-resume.service")
            self._running[service].wait()
            self._closed.wait(RESTART_SECONDS)

    def kill(self, service: str) -> None:
        """Kill a service and what it has started."""
        kill(self._running[service])

    def operate(self, *words: str | Path) -> str:
        """Run a command of the operator, who is on the server."""
        return operate(self.hosts["superlink"], self.lab, *words)

    def all_online(self, nodes: int) -> bool:
        """Return whether `fedeas deploy check` finds all nodes online and no problem."""
        try:
            return f"all {nodes} are online" in self.operate("fedeas", "deploy", "check", self.lab)
        except AssertionError:
            return False

    def start_all(self, nodes: int) -> None:
        """Start the server, register all nodes and start them."""
        self.start("superlink", "superlink")
        self.start("superlink", "gateway")
        log = self.superlink / "fedeas-superlink.log"
        wait_until(lambda: log.exists() and "Uvicorn running" in log.read_text(), "the SuperLink listens")
        self.operate("fedeas", "deploy", "register", self.lab)
        for number in range(nodes):
            self.start(f"node-{number}", f"node-{number}")

    def submit(self, keys: dict[str, Any], **more: Any) -> RunDirectory:
        """Start a run, or resume it."""
        values = {"run-dir": "/opt/fedeas/superlink/runs/first", **keys, **more}
        words = [f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in values.items()]
        self.operate("flwr", "run", self.lab / "app", "deployment", "--run-config", " ".join(words))
        return RunDirectory(self.superlink / "runs" / "first")

    def listening(self, host: str) -> dict[int, bool]:
        """Return the TCP ports on which a host listens, and whether only on its loopback."""
        found: dict[int, bool] = {}
        tables = subprocess.run([*self.hosts[host], "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True)
        for line in tables.stdout.decode().splitlines():
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                found[int(port, 16)] = address in ("0100007F", "00000000000000000000000001000000")
        return found


def documented_ports() -> dict[str, tuple[int, bool]]:
    """Return the table of ports in docs/deployment.md: who listens → the port, and whether only on the loopback."""
    rows = re.findall(r"^\| (\d+)(?: and up)?, (\w+) \| (.+?) \|", PAGE.read_text(), re.M)
    return {who: (int(port), where.startswith("loopback")) for port, who, where in rows}


def test_five_nodes_over_bad_links_give_the_weights_of_a_simulation(tmp_path: Path, digits_generator: Path) -> None:
    """Also with a partition, a killed node, a renewed certificate and a killed SuperLink, which resumes by itself."""
    keys: dict[str, Any] = {"clients": 5, "rounds": 10, "participation": 0.6, "local_epochs": 1, "beta": 4.0, **CHEAP}
    keys |= {"policy": "fedeas", "min_replies": 1.0}
    patient = {"node_wait": 300.0, "round_timeout": 150.0}
    with ExitStack() as stack:
        hosts = Hosts(stack, tmp_path, 5)
        for number in range(5):
            hosts.describe(number, 5, digits_generator)
        shutil.copytree(hosts.lab / "app", hosts.superlink / "app")
        hosts.start_all(5)
        run = hosts.submit(keys, **patient)
        words = {"run-dir": "/opt/fedeas/superlink/runs/first", **keys, **patient}
        resume = "\n".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in words.items())

        def wait_for(number: int) -> None:
            """Wait for a round; an operator resumes a run that stopped because a node did not reply."""

            def reached() -> bool:
                if run.state() in ("failed", "interrupted") and not (hosts.superlink / "resume").exists():
                    hosts.submit(keys, **patient, resume=True)
                    wait_until(lambda: run.state() not in ("failed", "interrupted"), "the run is resumed")
                return len(run.rounds()) >= number

            wait_until(reached, f"round {number} is recorded", PATIENCE)

        wait_for(1)
        ports = documented_ports()
        assert hosts.listening("superlink") == dict([ports["gateway"], ports["SuperLink"]])
        for number in range(5):
            first, local = ports["SuperNode"]
            assert hosts.listening(f"node-{number}") == {first + number: local}

        hosts.switch(1).touch()
        threading.Event().wait(PARTITION_SECONDS)
        hosts.switch(1).unlink()
        wait_for(3)
        hosts.kill("node-2")
        wait_for(5)
        before = (hosts.superlink / "server.crt").read_bytes()
        hosts.operate("fedeas", "deploy", "renew", hosts.lab)
        give(hosts.superlink)
        hosts.kill("gateway")
        assert (hosts.superlink / "server.crt").read_bytes() != before
        wait_for(7)
        (hosts.superlink / "resume").write_text(resume)
        give(hosts.superlink / "resume")
        hosts.kill("superlink")
        wait_until(lambda: run.state() == "finished", "the run ends", PATIENCE)
    assert [record["round"] for record in run.rounds()] == list(range(1, 11))
    simulated = finish(small(tmp_path / "simulated", **keys, generator=str(digits_generator)))
    assert weights(run) == weights(simulated)


def test_added_node_trains_like_a_client_that_was_missing(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"clients": 3, "participation": 1.0, "local_epochs": 1, "policy": "none", "min_replies": 0.5}
    with ExitStack() as stack:
        hosts = Hosts(stack, tmp_path, 2)
        for number in range(2):
            hosts.describe(number, 3, digits_generator)
        hosts.start_all(2)
        run = hosts.submit({**keys, "rounds": 3}, node_wait=20.0)
        wait_until(lambda: run.state() == "finished", "three rounds with two nodes are done", PATIENCE)
        hosts.operate("fedeas", "deploy", "add-node", hosts.lab)
        hosts.describe(2, 3, digits_generator)
        hosts.operate("fedeas", "deploy", "register", hosts.lab)
        hosts.link(2)
        hosts.start("node-2", "node-2")
        wait_until(lambda: hosts.all_online(3), "all nodes are online")
        hosts.submit({**keys, "rounds": 6}, node_wait=20.0, resume=True)
        wait_until(lambda: len(run.rounds()) == 6 and run.state() == "finished", "three more are done", PATIENCE)
    assert [len(record["clients"]) for record in run.rounds()] == [2, 2, 2, 3, 3, 3]

    def missing_at_first(**fields: Any) -> ClientRound:
        if fields["client"] == 2 and fields["number"] <= 3:
            raise TimeoutError("not there")
        return ClientRound(**fields)

    monkeypatch.setattr(client_app, "ClientRound", missing_at_first)
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **keys, rounds=6)))
