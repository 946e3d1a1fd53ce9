"""The start scripts and systemd units of a deployment, with Caddy, but with small scripts as Flower's commands."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path

import psutil
import pytest
from deployments import free_ports, is_open
from waiting import wait_until

from fedeas_flwr.deploy.deployment import Deployment, write_deployment

SUPERNODE = """#!/bin/sh
trap 'exit 0' TERM
sleep 1000 &
echo $! > "$FAKES/superexec"
echo "$@" > "$FAKES/supernode"
while [ ! -e $FAKES/refused ]; do sleep 0.05; done
exit 3
"""
"""A SuperNode that starts a process in the background, as Flower's starts flower-superexec."""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    write_deployment(Deployment(("127.0.0.1",), 9092, 9093, 1, "/opt/fedeas"), tmp_path / "lab")
    return tmp_path / "lab"


def start_node(lab: Path) -> subprocess.Popen[str]:
    fakes = lab.parent / "bin"
    fakes.mkdir()
    (fakes / "flower-supernode").write_text(SUPERNODE)
    (fakes / "flower-supernode").chmod(0o755)
    environment = {"FEDEAS_BIN": str(fakes), "FAKES": str(fakes), "PATH": os.environ["PATH"]}
    start = ["env", "--default-signal=INT,HUP", lab / "node-0" / "start.sh"]  # tests run with nohup or & ignore them
    return subprocess.Popen(start, env=environment, text=True)


def superexec(lab: Path) -> psutil.Process:
    path = lab.parent / "bin" / "supernode"
    wait_until(path.exists, "the SuperNode has started")
    return psutil.Process(int((path.parent / "superexec").read_text()))


def test_node_script_ends_what_the_supernode_started(lab: Path) -> None:
    node = start_node(lab)
    left = superexec(lab)
    (lab.parent / "bin" / "refused").touch()
    assert node.wait(30) == 3
    wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, "its child has ended")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_node_script_passes_a_signal_on(lab: Path, number: signal.Signals) -> None:
    node = start_node(lab)
    left = superexec(lab)
    node.send_signal(number)
    assert node.wait(30) == 0
    wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, "its child has ended")


def test_script_finds_the_installation_next_to_its_folder(lab: Path) -> None:
    installed = lab / "venv" / "bin"
    installed.mkdir(parents=True)
    (installed / "flower-superlink").write_text("#!/bin/sh\necho started\n")
    (installed / "flower-superlink").chmod(0o755)
    done = subprocess.run(
        [lab / "superlink" / "start.sh"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=True
    )
    assert done.stdout == b"started\n"


@contextmanager
def gateway(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run the gateway of a folder, and wait until it listens or has ended."""
    environment = {"FEDEAS_BIN": str(Path(sys.executable).parent), "PATH": os.environ["PATH"]}
    command = [folder / "gateway.sh"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_open(port, process.pid), "the gateway listens")
            yield process
        finally:
            process.terminate()
            process.wait(30)


def test_second_gateway_on_a_port_ends_and_a_restarted_one_serves(tmp_path: Path) -> None:
    port, superlink_port = free_ports()
    write_deployment(Deployment(("127.0.0.1",), port, superlink_port, 1, "/opt/fedeas"), tmp_path / "lab")
    folder = tmp_path / "lab" / "superlink"
    trusted = ssl.create_default_context(cafile=folder / "ca.crt")

    def status(connection: HTTPSConnection) -> int:
        connection.request("GET", "/")
        answer = connection.getresponse()
        answer.read()
        return answer.status

    connection = HTTPSConnection("127.0.0.1", port, context=trusted)
    with gateway(folder, port) as first:
        assert status(connection) == 403
        with gateway(folder, port) as second:
            error = second.communicate(timeout=30)[1]
        assert (second.returncode, error.count("\n"), f":{port} is in use" in error) == (1, 1, True), error
        assert (first.poll(), status(connection)) == (None, 403)
    assert connection.sock.recv(1) == b""
    connection.close()  # after the gateway has closed it, so that the gateway's port is in TIME_WAIT
    assert (is_open(port, os.getpid()), is_open(port, os.getpid(), "06")) == (False, True)
    with gateway(folder, port) as again:
        assert (again.poll(), status(connection)) == (None, 403)


def test_resume_script_waits_for_the_superlink(lab: Path) -> None:
    folder, fakes = lab / "superlink", lab.parent / "bin"
    fakes.mkdir()
    # Like Flower's command, it fails until the SuperLink answers.
    (fakes / "flwr").write_text('#!/bin/sh\necho "$@" >>"$FAKES/asked"\n[ $(wc -l <"$FAKES/asked") -gt 1 ]\n')
    (fakes / "flwr").chmod(0o755)
    environment = {"FEDEAS_BIN": str(fakes), "FAKES": str(fakes), "PATH": os.environ["PATH"]}

    def resume() -> str:
        return subprocess.run(
            [folder / "resume.sh"], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert resume() == f"nothing to resume: {folder} has no file resume\n"
    (folder / "resume").write_text('rounds=20\nrun-dir="/opt/fedeas/superlink/runs/first"\n')
    resume()
    assert (fakes / "asked").read_text().splitlines() == [
        "list deployment",
        "list deployment",
        'run app deployment --run-config rounds=20 run-dir="/opt/fedeas/superlink/runs/first"  resume=true',
    ]
    connection = tomllib.loads((folder / "operator" / "config.toml").read_text())["superlink"]["deployment"]
    assert connection == {"address": "127.0.0.1:9093", "root-certificates": f"{folder}/ca.crt"}


def test_systemd_accepts_every_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this system has no systemd-analyze")
    write_deployment(Deployment(("127.0.0.1",), 9092, 9093, 2, str(tmp_path / "lab")), tmp_path / "lab")
    units = sorted((tmp_path / "lab").glob("*/*.service"))
    assert [unit.name for unit in units] == [
        *("fedeas-node-0.service", "fedeas-node-1.service"),
        *("fedeas-gateway.service", "fedeas-resume.service", "fedeas-superlink.service"),
    ]
    command = ["systemd-analyze", "verify", "--man=no", *units]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
