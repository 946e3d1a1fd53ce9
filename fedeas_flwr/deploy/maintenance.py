"""Change a deployment that exists: add or revoke a node, renew the SuperLink's certificate, upgrade scripts and app."""

from __future__ import annotations

import datetime
import os
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path

import tomli_w
from cryptography import x509

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_folder, atomic_write
from fedeas_flwr.common.project import read_project
from fedeas_flwr.config import parse_config
from fedeas_flwr.deploy.certificates import write_server_certificate
from fedeas_flwr.deploy.deployment import (
    REVOKED,
    VERSION,
    Deployment,
    write_app,
    write_node,
    write_node_scripts,
    write_settings,
    write_superlink_scripts,
)
from fedeas_flwr.deploy.node_folders import write_client_keys
from fedeas_flwr.deploy.registry import node_ids, register_nodes, require_superlink, unregister_node


def add_node(deployment: Deployment, folder: Path) -> tuple[Path, list[str]]:
    """Write the folder of another node and register its key; return the folder and the lines of `register_nodes`."""
    require_superlink(deployment)
    number = deployment.nodes
    grown, node = replace(deployment, nodes=number + 1), folder / f"node-{number}"
    if node.exists():
        raise ConfigError(f"{node} already exists, but deployment.toml has only {number} nodes: move it away")
    with atomic_folder(node) as root:
        write_node(grown, number, root, folder / "flwr" / "ca.crt")
        (root / "node-config").write_text(f'client-id={number} data-path="/data/images"\n', encoding="utf-8")
    write_settings(grown, folder)
    _set_default_clients(grown, folder)
    return node, register_nodes(grown, folder)


def revoke_node(deployment: Deployment, folder: Path, name: str) -> int | None:
    """Unregister a node, mark its folder and remove its key from the app.

    Return the id under which Flower had the node registered, or ``None`` if it had not.
    """
    nodes = {node.name: node for node in deployment.node_folders(folder)}
    if name not in nodes:
        raise ConfigError(f"node = '{name}': must be one of {', '.join(nodes)}")
    require_superlink(deployment)
    node_id = node_ids(folder).get(name)
    if node_id is not None:
        unregister_node(folder, node_id)
    now = datetime.datetime.now(datetime.UTC)
    (nodes[name] / REVOKED).write_text(f"{now:%Y-%m-%d %H:%M} UTC\n", encoding="utf-8")
    _set_default_clients(deployment, folder)
    write_client_keys(folder / "app", deployment.node_folders(folder))
    return node_id


def renew_certificate(deployment: Deployment, folder: Path) -> datetime.datetime:
    """Write a new key and certificate of the SuperLink, signed by the same authority; return when it expires.

    Nodes keep ``ca.crt``, with which they verify the old certificate and the new one.
    """
    superlink = folder / "superlink"
    if not (folder / "ca" / "ca.key").is_file():
        raise ConfigError(f"{folder}/ca/ca.key is missing: only the authority's key can sign a certificate")
    if not superlink.is_dir():
        raise ConfigError(f"{superlink} is missing: copy it back from the server, then renew")
    with tempfile.TemporaryDirectory(dir=superlink) as fresh:
        write_server_certificate(folder / "ca", Path(fresh), deployment.hosts)
        for name in ("server.key", "server.crt"):
            os.replace(Path(fresh) / name, superlink / name)
    return x509.load_pem_x509_certificate((superlink / "server.crt").read_bytes()).not_valid_after_utc


def upgrade(deployment: Deployment, folder: Path) -> list[str]:
    """Write the app, scripts and units of the installed version; return one line per machine of another version.

    The app keeps its run-config. Keys, certificates and each ``node-config`` stay as they are.
    """
    version = read_project().version
    project = tomllib.loads((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))
    config = parse_config(project["tool"]["flwr"]["app"]["config"])
    with atomic_folder(folder / "app") as app:
        write_app(config, app, deployment.node_folders(folder))
    lines = []
    for machine in (folder / "superlink", *deployment.node_folders(folder)):
        if not machine.is_dir():
            continue
        path = machine / VERSION
        before = path.read_text(encoding="utf-8").strip() if path.is_file() else "an older version"
        if machine.name == "superlink":
            write_superlink_scripts(deployment, machine)
        else:
            write_node_scripts(deployment, int(machine.name.removeprefix("node-")), machine)
        if before != version:
            lines.append(f"{machine.name}: {before} → {version}")
    return lines


def _set_default_clients(deployment: Deployment, folder: Path) -> None:
    """Set the default of ``clients`` in the app's run-config to the number of nodes, at least 1."""
    path = folder / "app" / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))
    project["tool"]["flwr"]["app"]["config"]["clients"] = max(1, len(deployment.node_folders(folder)))
    atomic_write(path, tomli_w.dumps(project).encode())
