"""Nodes that come and go for good, new certificates and new versions: `fedeas deploy add-node`, `revoke-node` …"""

from __future__ import annotations

import ssl
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from deployments import Lab
from runners import run_in_process
from test_deploy import own_file
from waiting import wait_until

from fedeas_flwr.common.project import read_project
from fedeas_flwr.config import RunConfig
from fedeas_flwr.deploy import certificates, registry
from fedeas_flwr.deploy.deployment import Deployment, read_deployment, write_deployment
from fedeas_flwr.deploy.maintenance import add_node, renew_certificate, revoke_node
from fedeas_flwr.doctor.deployment import examine
from fedeas_flwr.federation.node_keys import read_node_keys

pytestmark = pytest.mark.flower

PORT = 9
"""Port of a SuperLink that is not running."""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    write_deployment(Deployment(("superlink.lab.example",), 9092, PORT, 2, "/opt/fedeas"), tmp_path / "lab")
    return tmp_path / "lab"


@pytest.fixture
def asked(lab: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replace the SuperLink by one that accepts everything; return the requests to it."""
    requests: list[tuple[str, ...]] = []

    def flwr(folder: Path, *words: str) -> dict[str, Any]:
        requests.append(words)
        return {"success": True, "node-id": 77}

    def nodes(folder: Path) -> list[dict[str, Any]]:
        folders = read_deployment(folder).node_folders(folder)
        return [
            {"node-id": str(70 + n), "status": "online", "public-key": registry.public_key(node)}
            for n, node in enumerate(folders)
        ]

    monkeypatch.setattr(registry, "is_listening", lambda port: True)
    monkeypatch.setattr(registry, "_flwr", flwr)
    monkeypatch.setattr(registry, "list_nodes", nodes)
    return requests


def deploy(lab: Path, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run_in_process("deploy", command, "lab", *words, cwd=lab.parent)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def default_clients(lab: Path) -> int:
    app = tomllib.loads((lab / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return int(app["config"]["clients"])


@pytest.mark.parametrize("words", [("add-node",), ("revoke-node", "node-1")])
def test_without_a_superlink_nothing_changes(lab: Path, words: tuple[str, ...]) -> None:
    before = files(lab)
    done = deploy(lab, *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"127.0.0.1:{PORT} does not answer" in done.stderr
    assert files(lab) == before


def test_add_node_writes_and_registers_one_node(lab: Path, asked: list[tuple[str, ...]]) -> None:
    before = files(lab)
    done = deploy(lab, "add-node")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("node-2: registered as node 77\n")
    assert [words[:2] for words in asked] == [("supernode", "register")] * 3
    assert read_deployment(lab).nodes == default_clients(lab) == 3
    after = files(lab)
    changed = {name for name, content in before.items() if after[name] != content}
    assert changed == {"deployment.toml", "app/pyproject.toml", "app/fedeas_flwr/node-keys.json"}
    added = {Path(name) for name in after if name not in before}
    assert {path.name.replace("node-2", "node-0") for path in added} == {p.name for p in (lab / "node-0").iterdir()}
    assert {path.parts[0] for path in added} == {"node-2"}
    assert (lab / "node-2" / "node.key").stat().st_mode & 0o777 == 0o600
    assert 'client-id=2 data-path="/data/images"' in (lab / "node-2" / "node-config").read_text()
    assert sorted((read_node_keys(lab / "app") or {}).values()) == [0, 1, 2]


def test_revoked_node_is_no_longer_part_of_the_deployment(lab: Path, asked: list[tuple[str, ...]]) -> None:
    done = deploy(lab, "revoke-node", "node-0")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "node-0: revoked; it was node 70")
    assert asked == [("supernode", "unregister", "70", "deployment")]
    assert (default_clients(lab), list((read_node_keys(lab / "app") or {}).values())) == (1, [1])
    assert [node.name for node in read_deployment(lab).node_folders(lab)] == ["node-1"]
    assert deploy(lab, "register").stdout == "node-1: registered as node 77\n"
    assert not any(found.name == "node-0" for found in examine(lab, RunConfig()))
    again = deploy(lab, "revoke-node", "node-0")
    assert (again.returncode, again.stderr) == (2, "error: node = 'node-0': must be one of node-1\n")
    assert "registered as node" in deploy(lab, "add-node").stdout
    assert [node.name for node in read_deployment(lab).node_folders(lab)] == ["node-1", "node-2"]


def test_renewed_certificate_needs_no_change_on_nodes(lab: Path) -> None:
    before = files(lab)
    done = deploy(lab, "renew")
    assert (done.returncode, done.stdout.splitlines()[0][:38]) == (0, "superlink/server.crt is valid until 20")
    after = files(lab)
    assert {name for name in after if before.get(name) != after[name]} == {
        *("superlink/server.crt", "superlink/server.key")
    }
    assert before.keys() == after.keys()
    assert (lab / "superlink" / "server.key").stat().st_mode & 0o777 == 0o600
    words = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_hostname", "superlink.lab.example"]
    subprocess.run([*words, "-CAfile", lab / "node-0" / "ca.crt", lab / "superlink" / "server.crt"], check=True)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
        lab / "superlink" / "server.crt", lab / "superlink" / "server.key"
    )


@pytest.mark.parametrize("missing", ["ca/ca.key", "superlink"])
def test_renewal_without_the_files_it_needs_is_one_line(lab: Path, missing: str) -> None:
    (lab / missing).rename(lab / "elsewhere")
    done = deploy(lab, "renew")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{lab}/{missing} is missing" in done.stderr


def test_certificate_expires_with_its_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "AUTHORITY_DAYS", 10)
    certificates.write_authority(tmp_path)
    certificates.write_server_certificate(tmp_path, tmp_path, ("lab",))
    authority, server = (x509.load_pem_x509_certificate((tmp_path / f).read_bytes()) for f in ("ca.crt", "server.crt"))
    assert server.not_valid_after_utc == authority.not_valid_after_utc


def test_upgrade_names_machines_of_another_version(lab: Path) -> None:
    version = read_project().version
    project = lab / "app" / "pyproject.toml"
    project.write_text(project.read_text().replace("rounds = 20", "rounds = 7"))
    expected = files(lab)
    for machine in ("superlink", "node-1"):
        (lab / machine / "version").write_text("0.0.9\n")
        (lab / machine / "start.sh").write_text("#!/bin/sh\n")
    (lab / "node-0" / "version").unlink()
    (lab / "app" / "fedeas_flwr" / "client_app.py").write_text("")
    done = deploy(lab, "upgrade")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:4] == [
        f"app/ is fedeas-flwr {version}",
        f"superlink: 0.0.9 → {version}",
        f"node-0: an older version → {version}",
        f"node-1: 0.0.9 → {version}",
    ]
    assert files(lab) == expected
    assert deploy(lab, "upgrade").stdout == f"app/ is fedeas-flwr {version}\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nodes_and_certificate_change_during_a_run(tmp_path: Path, digits_generator: Path) -> None:
    """A new certificate, a new node and a revoked one: the run continues, and the other nodes' processes stay."""
    keys: dict[str, Any] = {"clients": 3, "rounds": 200, "participation": 1.0, "local_epochs": 1, "policy": "none"}
    keys |= {"min_replies": 0.3, "node_wait": 1.0, "round_timeout": 60.0}
    with Lab(tmp_path, 2, digits_generator) as lab:
        for number, node in enumerate(lab.deployment.node_folders(lab.folder)):
            lab.set_node_config(node, f'client-id={number} data-path="{own_file(node, number)}"')
        lab.register()
        stays, leaves = lab.start_node(0), lab.start_node(1)
        run = lab.submit(**keys)

        def another_round(clients: list[int]) -> None:
            done = len(run.rounds())
            wait_until(lambda: any(r["clients"] == clients for r in run.rounds()[done:]), f"a round of {clients}")

        another_round([0, 1])
        old = ssl.get_server_certificate(("127.0.0.1", lab.deployment.port))
        renew_certificate(lab.deployment, lab.folder)
        lab.restart_gateway()
        assert ssl.get_server_certificate(("127.0.0.1", lab.deployment.port)) != old
        another_round([0, 1])

        node, lines = add_node(lab.deployment, lab.folder)
        assert [line.split()[1] for line in lines] == ["already", "already", "registered"]
        lab.deployment = read_deployment(lab.folder)
        lab.set_node_config(node, f'client-id=2 data-path="{own_file(node, 2)}"')
        lab.start_node(2)
        lab.restart_superlink()  # with the new certificate
        lab.submit(**keys, run_dir=str(run.path), resume=True)
        another_round([0, 1, 2])

        assert revoke_node(lab.deployment, lab.folder, "node-1") is not None
        wait_until(lambda: leaves.poll() is not None, "the revoked node has exited")
        another_round([0, 2])
        back = lab.start(lab.folder / "node-1")
        wait_until(lambda: back.poll() is not None, "the revoked node is rejected")
        assert (stays.poll(), run.status()[0]) == (None, "running")
