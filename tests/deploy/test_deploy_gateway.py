"""A deployment on three hosts: a server with its gateway, a node, and an intruder who holds none of its files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from deployments import Lab
from namespaces import Within, add_host, connect
from waiting import wait_until

from fedeas_flwr.deploy.certificates import write_node_key
from fedeas_flwr.deploy.deployment import CONNECTION
from fedeas_flwr.launch.superlink import QUIET

SERVER_APP = """
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    question = RecordDict({"question": ConfigRecord({"number": 41})})
    messages = [Message(question, dst_node_id=node, message_type="query") for node in grid.get_node_ids()]
    replies = [reply.content["answer"]["number"] for reply in grid.send_and_receive(messages)]
    Path(context.run_config["answers"]).write_text(str(replies))
"""
CLIENT_APP = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    number = message.content["question"]["number"]
    return Message(RecordDict({"answer": ConfigRecord({"number": number + 1})}), reply_to=message)
"""
PROJECT = """
[project]
name = "asking"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "asking.server_app:app"
clientapp = "asking.client_app:app"
[tool.flwr.app.config]
answers = ""
"""


@dataclass(frozen=True)
class Hosts:
    """Return the command prefix of each host; the server is 10.213.20.1 to the node, 10.213.24.1 to the intruder."""

    server: Within
    node: Within
    intruder: Within


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("curl") is None:
        pytest.skip("this system has no curl")
    with ExitStack() as stack:
        found = Hosts(add_host(stack), add_host(stack), add_host(stack))
        connect(stack, found.server, found.node, "10.213.20")
        connect(stack, found.server, found.intruder, "10.213.24")
        yield found


def run(within: Within, *words: str | Path, **environment: str) -> str:
    done = subprocess.run([*within, *words], capture_output=True, text=True, check=False, env=environment or None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def statuses(within: Within, requests: list[tuple[str, ...]]) -> list[str]:
    """Return the HTTP status and number of bytes that curl gets for each request, without verification."""
    words: list[str] = []
    for request in requests:
        words += ["--next"] if words else []
        words += ["-s", "-k", "--path-as-is", "-m", "10", "-o", "/dev/null", "-w", "%{http_code} %{size_download}\n"]
        words += request
    return subprocess.run([*within, "curl", *words], capture_output=True, text=True, check=False).stdout.splitlines()


def ask_the_node(lab: Lab, hosts: Hosts, folder: Path) -> str:
    """Run a small app of one query, started on the server as an operator would, and return the replies of the nodes."""
    package = folder / "asking" / "asking"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server_app.py").write_text(SERVER_APP)
    (package / "client_app.py").write_text(CLIENT_APP)
    (folder / "asking" / "pyproject.toml").write_text(PROJECT)
    environment = {**lab.environment(FLWR_HOME=str(lab.folder / "flwr")), **QUIET}
    flwr, answers = Path(sys.executable).parent / "flwr", folder / "answers"
    run(hosts.server, flwr, "run", package.parent, CONNECTION, "--run-config", f'answers="{answers}"', **environment)
    wait_until(lambda: answers.exists() and answers.read_text(), "the node has replied")
    return answers.read_text()


DETOURS = (
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet%2f..%2fcontrol/list-runs",
    "/v1/fleet\\..\\control/list-runs",
    "//v1/control/list-runs",
    "/v1//control/list-runs",
    "/V1/CONTROL/list-runs",
)
"""Ways to write the path of a control request that a gateway might take for a node's."""


def test_gateway_admits_only_registered_nodes(tmp_path: Path, hosts: Hosts) -> None:
    addresses = ("10.213.20.1", "10.213.24.1")
    with Lab(tmp_path, 1, tmp_path, addresses, hosts.server) as lab:
        stranger = lab.folder / "stranger"
        shutil.copytree(lab.folder / "node-0", stranger)
        (stranger / "node.key").unlink()
        write_node_key(stranger)  # a key of its own making
        (stranger / "superlink-address").write_text(f"{addresses[1]}:{lab.deployment.port}\n")
        refused = lab.start(stranger, *hosts.intruder)
        run(hosts.server, sys.executable, "-m", "fedeas_flwr", "deploy", "register", lab.folder)
        lab.start_node(0, *hosts.node)

        loopback, wanted = f"https://{lab.deployment.control_address}", "/v1/control/list-runs"
        gate, plain = (f"{scheme}://{addresses[1]}:{lab.deployment.port}" for scheme in ("https", "http"))
        post = ("-X", "POST", "-H", "Content-Type: application/protobuf")
        assert statuses(hosts.server, [(*post, loopback + wanted)])[0].startswith("200 "), (
            "the request must work without the gateway"
        )
        paths = json.loads(run(hosts.server, "curl", "-s", "-k", f"{loopback}/openapi.json"))["paths"]
        fleet = [path for path in paths if path.startswith("/v1/fleet/")]
        assert {path.split("/")[2] for path in paths if path.startswith("/v1/")} >= {"control", "fleet", "runtime"}
        refused_by_gateway: list[tuple[str, ...]] = [
            *(("-X", method.upper(), gate + path) for path in paths if path not in fleet for method in paths[path]),
            *((gate + page,) for page in ("/", "/docs", "/openapi.json")),
            *((*post, gate + detour) for detour in DETOURS),
            *((*post, "-H", f"Host: {host}", gate + wanted) for host in ("localhost", "127.0.0.1:9093")),
            (*post, "--http2", gate + wanted),
        ]
        found = statuses(hosts.intruder, refused_by_gateway)
        assert dict(zip(refused_by_gateway, found, strict=True)) == dict.fromkeys(refused_by_gateway, "403 0")
        assert statuses(hosts.intruder, [(*post, plain + wanted)])[0].startswith("400 ")
        unsigned = statuses(hosts.intruder, [(*post, gate + path) for path in fleet])
        assert [answer.split()[0] for answer in unsigned] == ["401"] * len(fleet)
        beyond = f"https://{addresses[1]}:{lab.deployment.superlink_port}"
        assert statuses(hosts.intruder, [(*post, beyond + wanted)]) == ["000 0"], (
            "the SuperLink is reachable from outside"
        )

        assert ask_the_node(lab, hosts, tmp_path) == "[42]"
        wait_until(lambda: refused.poll() is not None, "the unregistered node has exited")
        assert "Failed to initialize the connection" in lab.said("stranger")
