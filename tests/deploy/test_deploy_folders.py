"""What `fedeas deploy init` writes and `fedeas deploy check` reports, with files and one TLS server in this process."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import shutil
import socket
import ssl
import subprocess
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ordinary_user import ordinary_user
from PIL import Image
from runners import run_in_process

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.deploy import certificates
from fedeas_flwr.deploy.certificates import write_authority, write_node_key
from fedeas_flwr.deploy.deployment import Deployment, read_deployment, write_deployment
from fedeas_flwr.deploy.node_folders import public_key, write_client_keys
from fedeas_flwr.doctor.deployment import check_gateway, check_node, check_superlink, examine
from fedeas_flwr.doctor.findings import Finding
from fedeas_flwr.federation.node_keys import KEYS_FILE, read_node_keys

pytestmark = pytest.mark.flower


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Return a port that is bound, so that no other process can listen on it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def lab(tmp_path: Path, silent_port: int) -> Path:
    """Write a deployment of two nodes whose SuperLink is not running."""
    deployment = Deployment(("127.0.0.1", "superlink.lab.example"), silent_port, 9, 2, "/opt/fedeas")
    write_deployment(deployment, tmp_path / "lab")
    assert read_deployment(tmp_path / "lab") == deployment
    return tmp_path / "lab"


def problems(findings: Iterator[Finding]) -> list[str]:
    """Return the problems, except that no SuperLink runs here."""
    found = list(findings)
    assert all(finding.fix for finding in found if finding.state == "problem")
    return [finding.text for finding in found if finding.state == "problem" and finding.name != "SuperLink"]


def test_each_machine_gets_only_its_own_files(lab: Path) -> None:
    assert sorted(path.name for path in lab.iterdir()) == [
        *("app", "ca", "deployment.toml", "flwr", "node-0", "node-1", "superlink")
    ]
    assert [p.relative_to(lab).as_posix() for p in sorted(lab.rglob("*.key"))] == [
        *("ca/ca.key", "node-0/node.key", "node-1/node.key", "superlink/server.key")
    ]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in lab.rglob("*.key"))
    keys = {(lab / f"node-{n}" / "node.pub").read_text() for n in range(2)}
    assert len(keys) == 2
    unit = (lab / "node-1" / "fedeas-node-1.service").read_text()
    assert "ExecStart=/opt/fedeas/node-1/start.sh\n" in unit and "Restart=always\n" in unit
    connection = tomllib.loads((lab / "flwr" / "config.toml").read_text())["superlink"]["deployment"]
    assert connection["root-certificates"] == str(lab / "flwr" / "ca.crt")
    assert (lab / "flwr" / "ca.crt").read_bytes() == (lab / "ca" / "ca.crt").read_bytes()
    for script in lab.glob("*/start.sh"):
        subprocess.run(["sh", "-n", script], check=True)
        assert script.stat().st_mode & 0o111
    app = tomllib.loads((lab / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    run = parse_config(app["config"])
    assert (run.clients, run.min_replies, run.round_timeout > 0) == (2, 0.5, True)


def test_openssl_verifies_the_certificate(lab: Path) -> None:
    command = [
        "openssl",
        "verify",
        "-x509_strict",
        "-purpose",
        "sslserver",
        "-verify_hostname",
        "superlink.lab.example",
    ]
    files = ["-CAfile", str(lab / "ca" / "ca.crt"), str(lab / "superlink" / "server.crt")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


VALID = {"hosts": ("lab",), "port": 9092, "superlink_port": 9093, "nodes": 2, "install_dir": "/opt/fedeas"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nodes": 0}, "nodes = 0: must be from 1 to 10000"),
        ({"port": 70_000}, "port = 70000"),
        ({"superlink_port": 0}, "superlink-port = 0: must be from 1 to 65535"),
        ({"superlink_port": 9092}, "superlink-port = 9092: must differ from port"),
        ({"hosts": ("lab:9092:x/..",)}, "must be a name or an address, without a port"),
        ({"hosts": ("cafe:9092",)}, "must be a name or an address, without a port"),
        ({"hosts": ("2001:DB8::1",)}, "host = '2001:DB8::1': must be written 2001:db8::1"),
        ({"hosts": ("$(reboot)",)}, "host = '$(reboot)'"),
        ({"install_dir": "relative"}, "install-dir = 'relative': must be an absolute path"),
        ({"install_dir": "/opt/fedeas\nUser=root"}, "must be an absolute path without spaces"),
    ],
)
def test_invalid_deployment_is_one_line(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Deployment(**{**VALID, **changes})  # type: ignore[arg-type]
    assert reason in str(caught.value)


def test_keys_are_never_overwritten(lab: Path) -> None:
    before = (lab / "node-0" / "node.key").read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        write_deployment(read_deployment(lab), lab)
    assert (lab / "node-0" / "node.key").read_bytes() == before


def test_unwritable_folder_is_named_as_given(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with ordinary_user():
        done = run_in_process("deploy", "init", "shut/lab", "--nodes", "1", "--host", "lab", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (
        *(2, ""),
        f"error: {tmp_path}/shut/lab: Permission denied\n",
    )


def test_unreadable_deployment_is_not_called_missing(lab: Path) -> None:
    (lab / "deployment.toml").chmod(0)
    with ordinary_user():
        done = run_in_process("deploy", "register", str(lab))
    assert (done.returncode, done.stderr) == (2, f"error: {lab}/deployment.toml: Permission denied\n")


def test_superlink_that_does_not_answer_is_a_problem(lab: Path) -> None:
    (found,) = [finding for finding in examine(lab, RunConfig()) if finding.name == "SuperLink"]
    assert (found.state, "does not answer" in found.text) == ("problem", True)


def test_new_deployment_has_no_problem(lab: Path) -> None:
    assert problems(examine(lab, RunConfig())) == []
    assert problems(examine(lab / "node-0", RunConfig())) == []
    assert problems(examine(lab / "superlink", RunConfig())) == []
    with pytest.raises(ConfigError, match="neither a deployment nor a machine's folder"):
        list(examine(lab / "flwr", RunConfig()))
    (lab / "superlink" / "start.sh").unlink()
    assert problems(examine(lab, RunConfig())) == ["start.sh missing"]
    shutil.rmtree(lab / "superlink")  # moved to the server, as keys should be
    missing = "ca.crt, server.crt, server.key, start.sh, Caddyfile, gateway.sh missing"
    assert problems(examine(lab, RunConfig())) == [missing]


def test_check_node_names_its_partition_of_the_dataset(lab: Path) -> None:
    """On the operator's computer, the run's dataset is not known."""
    assert [(one.state, one.text) for one in check_node(lab / "node-1", None)] == [
        ("ok", "client 1, partition 1 of 2 of the run's dataset")
    ]
    found = next(check_node(lab / "node-1", RunConfig(dataset="cifar10", policy="none")))
    assert (found.state, found.text) == ("note", "client 1, partition 1 of 2 of the run's dataset cifar10")
    assert "data-path" in found.fix


def test_check_node_finds_each_fault(lab: Path, tmp_path: Path) -> None:
    node = lab / "node-0"

    def found() -> list[str]:
        return problems(check_node(node, RunConfig()))

    (node / "node.key").chmod(0o644)
    assert found() == ["others can read node.key"]
    (node / "node.key").chmod(0o600)
    (node / "ca.key").write_bytes((lab / "ca" / "ca.key").read_bytes())
    assert "it contains ca.key" in found()
    (node / "ca.key").unlink()
    (node / "node-config").write_text("partition-id=5 num-partitions=2\n")
    assert found() == ["node-config: partition-id = 5: must be a whole number from 0 to 1"]
    (node / "node-config").write_text(f'client-id=0 data-path="{tmp_path}/gone"\n')
    assert "is not there" in found()[0]
    (desk,) = check_node(node, None)  # it is a path of the node's machine
    assert (desk.state, desk.text) == ("ok", "client 0, its own data; checked only on its machine: data-path")
    (node / "node.key").unlink()
    write_node_key(tmp_path)
    (node / "node.key").write_bytes((tmp_path / "node.key").read_bytes())
    assert "node.pub does not belong to node.key" in found()
    (node / "node.pub").unlink()
    assert found() == ["node.pub missing"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("client-id=0 data-path=/data/images", "node-config: data-path=/data/images cannot be read; put text"),
        ('client-id=0 data-path="/data', 'node-config: data-path="/data cannot be read; put text'),
        ('client-id=0, data-path="/data"', "node-config: client-id=0, cannot be read"),
        ("partition-id=0 partition-id=1 num-partitions=2", "node-config: a key is given twice"),
        ("client-id=0 data-path = '/x'", "node-config: \"data-path = '/x'\" is not key=value; Flower would ignore it"),
        ('client-id=0 data-path=""', "node-config: data-path is missing, or for a trial"),
        ("partition-id=0 num-partitions=2 generate=no", "node-config: generate=no cannot be read; put text in quotes"),
        ("partition-id=0 num-partitions=2 max-images=-3", "node-config: max-images = -3: must be a whole number"),
        ('partition-id=0 num-partitions=2 device="gpu"', "device = 'gpu': must be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_check_reports_an_unreadable_node_config(lab: Path, text: str, found: str) -> None:
    """Also on the operator's machine, where the other nodes are still checked."""
    (lab / "node-0" / "node-config").write_text(text)
    for findings in (check_node(lab / "node-0", RunConfig()), examine(lab, RunConfig())):
        (told,) = problems(findings)
        assert told.startswith(found) and "\n" not in told


def test_check_node_gives_the_fix_of_the_error(lab: Path, tmp_path: Path) -> None:
    node, data = lab / "node-0", tmp_path / "images"

    def fix(text: str) -> str:
        (node / "node-config").write_text(text)
        (found,) = check_node(node, RunConfig())
        assert found.state == "problem"
        return found.fix

    assert fix("partition-id=5 num-partitions=2\n") == f"correct {node}/node-config"
    (data / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(data / "cat" / "1.png")
    other = f"give the config of a run whose dataset is not digits, or another data-path in {node}/node-config"
    assert fix(f'client-id=0 data-path="{data}"\n') == f"correct the images in {data}, {other}"


def test_check_node_reports_missing_gpu_only_on_the_node(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (lab / "node-0" / "node-config").write_text('partition-id=0 num-partitions=2 device="cuda"\n')
    (told,) = problems(check_node(lab / "node-0", RunConfig()))
    assert told.startswith("device = 'cuda', but torch finds no CUDA device")
    assert problems(check_node(lab / "node-1", RunConfig(device="cuda"))), "device of the run was ignored"
    (found,) = check_node(lab / "node-0", None)
    assert (found.state, found.text.partition("; ")[2]) == ("ok", "checked only on its machine: device")
    (told,) = problems(check_node(lab / "node-1", RunConfig(engine="graphed")))
    assert told.startswith("engine = 'graphed'")


@pytest.mark.parametrize(
    ("limit", "ending", "states"),
    [
        ("max-images=500", "generates at most 500 images", ["note", "problem"]),
        ('generate="no"', "generates no images", ["note"]),
    ],
)
def test_check_node_names_its_limit(lab: Path, limit: str, ending: str, states: list[str]) -> None:
    """A node that generates nothing needs no generator."""
    (lab / "node-0" / "node-config").write_text(f'partition-id=0 num-partitions=2 generator="/none" {limit}\n')
    found = list(check_node(lab / "node-0", RunConfig()))
    assert (found[0].text.endswith(f"; {ending}"), [finding.state for finding in found]) == (True, states)
    (desk,) = check_node(lab / "node-0", None)
    assert desk.text.endswith(f"; {ending}; checked only on its machine: generator")


def test_check_node_compares_data_and_generator_with_run(lab: Path, tmp_path: Path, digits_generator: Path) -> None:
    node, images = lab / "node-0", tmp_path / "images"

    def found(run: RunConfig, generator: Path | str = digits_generator, data: Path = images) -> list[tuple[str, str]]:
        (node / "node-config").write_text(f'client-id=0 data-path="{data}" generator="{generator}"\n')
        return [(f.state, f.text) for f in check_node(node, run)]

    for label, side in ((0, 8), (3, 12), (3, 30), (3, 31)):  # of any size: a run resizes them
        (images / str(label)).mkdir(parents=True, exist_ok=True)
        Image.new("L", (side, side)).save(images / str(label) / f"{side}.png")
    fits = ("ok", f"{digits_generator}, 10 classes, images [8, 8, 1]")
    assert found(RunConfig()) == [("ok", "client 0, its own data: 4 images of 2 of the 10 classes"), fits]
    tested = RunConfig(protocol="paper", evaluation="federated")
    assert found(tested)[0][1] == "client 0, its own data: 3 images of 2 of the 10 classes, 1 for evaluation"
    assert found(RunConfig(policy="none"), tmp_path / "none")[1][0] == "note"
    state, text = found(RunConfig(), tmp_path / "none")[1]
    assert (state, f"there is no {tmp_path}/none/unet/config.json" in text) == ("problem", True)
    cifar = RunConfig(dataset="cifar100", generator="elsewhere")  # the node's generator overrides the run's
    assert (found(cifar)[1][0], "the dataset's are [32, 32, 3]" in found(cifar)[1][1]) == ("problem", True)
    for name in ("cat", "dog"):  # classes that no built-in dataset has
        (tmp_path / "public" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / "public" / name / f"{number}.png")
    (tmp_path / "pets" / "dog").mkdir(parents=True)
    Image.new("RGB", (20, 30)).save(tmp_path / "pets" / "dog" / "rex.jpg")
    public = RunConfig(dataset=f"own:{tmp_path}/public", generator="elsewhere")
    state, text = found(public, f"bank:{tmp_path}/public", tmp_path / "pets")[1]
    assert (state, "test images included" in text) == ("note", True)
    shutil.copytree(tmp_path / "public", tmp_path / "bank")
    assert found(public, f"bank:{tmp_path}/bank", tmp_path / "pets") == [
        ("ok", "client 0, its own data: 1 image of 1 of the 2 classes"),
        ("ok", f"bank {tmp_path}/bank, at least 5 images per class"),
    ]
    (images / "seven").mkdir()
    state, text = found(RunConfig())[0]
    assert (state, f"{images} has a subfolder 'seven'; the dataset's classes are 0, 1, 2, 3" in text) == (
        "problem",
        True,
    )
    np.savez(tmp_path / "mine.npz", x=np.zeros((5, 9, 9, 1), np.uint8), y=np.arange(5))
    state, text = found(RunConfig(), data=tmp_path / "mine.npz")[0]
    assert (state, "x must be uint8 [N, 8, 8, 1]" in text) == ("problem", True)


def test_check_superlink_finds_each_fault(lab: Path, tmp_path: Path) -> None:
    folder = lab / "superlink"
    assert problems(check_superlink(folder, ("superlink.lab.example", "127.0.0.1"))) == []
    assert "it is not valid for 'other.example'" in problems(check_superlink(folder, ("other.example",)))[0]
    key = (folder / "server.key").read_bytes()
    (folder / "server.key").write_bytes((lab / "ca" / "ca.key").read_bytes())
    assert [f.text for f in check_superlink(folder, ())] == ["server.key is not the key of server.crt"]
    (folder / "server.key").write_bytes(key)
    write_authority(tmp_path)
    (folder / "ca.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
    assert "do not fit together" in problems(check_superlink(folder, ()))[0]


@pytest.mark.parametrize(("days", "states"), [(-0.01, ["problem"]), (20, ["note", "ok"]), (40, ["ok"])])
def test_expired_certificate_is_not_ok(
    lab: Path, monkeypatch: pytest.MonkeyPatch, days: float, states: list[str]
) -> None:
    (lab / "superlink" / "server.key").unlink()
    monkeypatch.setattr(certificates, "SERVER_DAYS", days)
    certificates.write_server_certificate(lab / "ca", lab / "superlink", ("superlink.lab.example",))
    assert [finding.state for finding in check_superlink(lab / "superlink", ())] == states


def test_check_works_without_the_authoritys_key(lab: Path, tmp_path: Path) -> None:
    """The authority's key is kept offline, as the guide recommends."""
    shutil.rmtree(lab / "ca")
    assert problems(examine(lab, RunConfig())) == []
    write_authority(tmp_path)
    (lab / "node-1" / "ca.crt").write_bytes((tmp_path / "ca.crt").read_bytes())
    assert problems(examine(lab, RunConfig())) == ["its ca.crt is from another authority"]


@pytest.mark.parametrize("name", ["superlink-address", "ca.crt"])
def test_check_node_without_connection_files_reports_only_that(lab: Path, name: str) -> None:
    (lab / "node-0" / name).unlink()
    assert [finding.text for finding in examine(lab / "node-0", RunConfig())] == [f"{name} missing"]


def test_check_finds_two_nodes_with_one_client_id(lab: Path) -> None:
    (lab / "node-1" / "node-config").write_text("partition-id=0 num-partitions=2\n")
    assert problems(examine(lab, RunConfig())) == ["0 is given to two nodes"]


def test_check_superlink_without_gateway_file_is_a_problem(lab: Path) -> None:
    (lab / "superlink" / "Caddyfile").unlink()
    assert problems(check_superlink(lab / "superlink", ())) == ["Caddyfile missing"]
    noted = (lab / "deployment.toml").read_text()
    (lab / "deployment.toml").write_text(noted.replace("superlink_port = 9\n", ""))
    for command in ("check", "register"):
        done = run_in_process("deploy", command, "lab", cwd=lab.parent)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"{lab}/deployment.toml cannot be read: 'superlink_port'" in done.stderr


@pytest.mark.parametrize(("host", "warns"), [(None, False), ("localhost", False), ("0.0.0.0", True)])
def test_superlink_script_warns_beyond_the_loopback(lab: Path, tmp_path: Path, host: str | None, warns: bool) -> None:
    command = tmp_path / "flower-superlink"
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    environment = {"FEDEAS_BIN": str(tmp_path), "PATH": "/usr/bin:/bin"} | ({"SUPERLINK_HOST": host} if host else {})
    start = lab / "superlink" / "start.sh"
    done = subprocess.run([start], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"--host {host or '127.0.0.1'} --port 9 --ssl-certfile server.crt")
    assert (done.stderr.count("\n"), "run code on this server and on every node" in done.stderr) == (warns, warns)


@contextlib.contextmanager
def listening(folder: Path, status: int = 403) -> Iterator[str]:
    """Run a server with the folder's certificate that answers every request with one status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_check_gateway_verifies_its_authority(lab: Path, silent_port: int, tmp_path: Path) -> None:
    with listening(lab / "superlink") as address:
        assert [f.state for f in check_gateway(address, lab / "node-0")] == ["ok"]
        write_authority(tmp_path)
        found = list(check_gateway(address, tmp_path))
    assert [f.state for f in found] == ["problem"]
    assert "has no certificate of this deployment" in found[0].text
    assert [f.state for f in check_gateway(f"127.0.0.1:{silent_port}", lab / "node-0")] == ["note"]


@pytest.mark.parametrize("address", ["superlink.lab.example", ":9092", "127.0.0.1:99999"])
def test_check_gateway_rejects_addresses_without_host_or_valid_port(lab: Path, address: str) -> None:
    (found,) = check_gateway(address, lab / "node-0")
    assert (found.state, found.text) == ("problem", f"superlink-address = '{address}': must be HOST:PORT")


@pytest.mark.parametrize(
    ("host", "proxy", "code", "reason"),
    [
        ("superlink.invalid", "", 1, "does not resolve"),
        ("superlink.invalid", "http://127.0.0.1:9", 0, "does not resolve"),  # the proxy resolves it
        ("127.0.0.1", "", 0, "does not answer"),  # nodes are checked before the server starts
    ],
)
def test_check_node_that_cannot_connect(
    lab: Path, silent_port: int, monkeypatch: pytest.MonkeyPatch, host: str, proxy: str, code: int, reason: str
) -> None:
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    (lab / "node-0" / "superlink-address").write_text(f"{host}:{silent_port}\n")
    done = run_in_process("deploy", "check", str(lab / "node-0"), "policy=none")
    assert (done.returncode, f"{host}:{silent_port} {reason}" in done.stdout) == (code, True), done.stdout


def test_operator_need_not_resolve_the_servers_name(tmp_path: Path) -> None:
    write_deployment(Deployment(("superlink.invalid",), 9092, 9093, 1, "/opt/fedeas"), tmp_path / "lab")
    (found,) = (f for f in examine(tmp_path / "lab", RunConfig()) if f.name == "gateway")
    assert (found.state, "does not resolve" in found.text) == ("note", True)


@pytest.mark.parametrize("status", [200, 401, 404, 502])
def test_check_gateway_with_other_status_than_403_is_a_problem(lab: Path, status: int) -> None:
    with listening(lab / "superlink", status) as address:
        (lab / "node-0" / "superlink-address").write_text(address)
        (found,) = problems(examine(lab / "node-0", RunConfig()))
    assert f"{address} answers {status} to POST /v1/control/list-runs" in found


def listed(folder: Path, node: int, status: str = "online") -> dict[str, str]:
    return {"node-id": str(node), "status": status, "public-key": public_key(folder)}


def check_registered(monkeypatch: pytest.MonkeyPatch, lab: Path, *nodes: dict[str, str]) -> list[tuple[str, str]]:
    """Return what is reported about the registered nodes and the app, if the SuperLink lists these nodes."""
    monkeypatch.setattr("fedeas_flwr.doctor.deployment.is_listening", lambda port: True)
    monkeypatch.setattr("fedeas_flwr.doctor.deployment.list_nodes", lambda folder: list(nodes))
    found = [f for f in examine(lab, RunConfig()) if f.name in ("registered nodes", "app")]
    assert all(finding.fix for finding in found if finding.state != "ok")
    return [(finding.state, finding.text) for finding in found]


def test_check_compares_registered_keys(lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [listed(lab / f"node-{n}", 11 + n) for n in range(2)]
    assert check_registered(monkeypatch, lab, *ours) == [("ok", "all 2 are online")]
    write_node_key(tmp_path)
    stranger = listed(tmp_path, 13, "registered")
    named = ("problem", "node 13 (registered) has a key that no node of this deployment has")
    assert check_registered(monkeypatch, lab, *ours, stranger) == [named, ("ok", "all 2 are online")]
    assert check_registered(monkeypatch, lab, ours[0], stranger) == [named, ("problem", "not registered: node-1")]
    gone = {**stranger, "status": "unregistered"}
    offline = {**ours[1], "status": "offline"}
    assert check_registered(monkeypatch, lab, ours[0], offline, gone) == [("note", "1 of 2 are online, not node-1")]
    revoked = {**ours[1], "status": "unregistered"}
    assert check_registered(monkeypatch, lab, ours[0], revoked) == [("problem", "not registered: node-1")]


def test_check_compares_the_apps_keys(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [listed(lab / f"node-{n}", 11 + n) for n in range(2)]
    folders = read_deployment(lab).node_folders(lab)
    (lab / "node-1" / "node-config").write_text('client-id=7 data-path="/data"\n')
    changed = ("problem", "it has other keys or client ids than the nodes' folders")
    assert check_registered(monkeypatch, lab, *ours) == [changed, ("ok", "all 2 are online")]
    write_client_keys(lab / "app", folders)
    assert read_node_keys(lab / "app") == {public_key(lab / "node-0"): 0, public_key(lab / "node-1"): 7}
    assert check_registered(monkeypatch, lab, *ours) == [("ok", "all 2 are online")]
    (lab / "app" / KEYS_FILE).write_text("[]")
    assert "cannot be read" in check_registered(monkeypatch, lab, *ours)[0][1]
    (lab / "app" / KEYS_FILE).unlink()
    assert check_registered(monkeypatch, lab, *ours)[0] == changed
    (lab / "node-1" / "node-config").write_text("partition-id=0 num-partitions=2\n")
    with pytest.raises(ConfigError, match="node-1: another node has the client id 0, too"):
        write_client_keys(lab / "app", folders)


def test_check_of_unreadable_node_config_checks_the_rest(lab: Path) -> None:
    (lab / "node-1" / "node-config").write_bytes(b"client-id=\xff")
    found = list(examine(lab, RunConfig()))
    assert [finding.name for finding in found if finding.state == "problem"] == ["node-1", "SuperLink"]


def test_clients_keys_travel_with_the_app(lab: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(lab / "app"))) as bundle:
        assert json.loads(bundle.read(KEYS_FILE)) == read_node_keys(lab / "app")


def test_deploy_init_and_check_commands(tmp_path: Path, silent_port: int) -> None:
    words = ("deploy", "init", "lab", "--nodes", "2", "--host", "127.0.0.1")
    made = run_in_process(*words, "--port", str(silent_port), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert f"FLWR_HOME={tmp_path}/lab/flwr flwr run {tmp_path}/lab/app deployment" in made.stdout
    spaced = run_in_process("deploy", "init", "lab two", *words[3:], cwd=tmp_path).stdout
    assert f"fedeas deploy register '{tmp_path}/lab two'\n" in spaced and f"check '{tmp_path}/lab two'\n" in spaced
    assert f"FLWR_HOME='{tmp_path}/lab two/flwr' flwr run '{tmp_path}/lab two/app' deployment" in spaced
    (tmp_path / "lab" / "node-1" / "node.key").chmod(0o640)
    checked = run_in_process("deploy", "check", "lab", cwd=tmp_path)
    assert checked.returncode == 1
    assert "others can read node.key" in checked.stdout
    again = run_in_process(*words, cwd=tmp_path)
    assert (again.returncode, again.stderr.count("\n"), "already exists" in again.stderr) == (2, 1, True)
