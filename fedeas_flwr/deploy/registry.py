"""List and register the nodes of a SuperLink."""

from __future__ import annotations

import http.client
import os
import ssl
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import RunFailedError
from fedeas_flwr.common.text import MAX_LINE, one_line
from fedeas_flwr.deploy.deployment import CONNECTION, Deployment, read_deployment
from fedeas_flwr.deploy.node_folders import client_keys, public_key, write_client_keys
from fedeas_flwr.federation.flower_internals import parse_node_list
from fedeas_flwr.launch.superlink import QUIET, is_listening, run_flwr_json


def register_nodes(deployment: Deployment, folder: Path) -> list[str]:
    """Register the nodes' public keys with the SuperLink; return one line per node. Repeating it is harmless.

    The app gets the keys too, each with the client id in its node's node-config: repeat this if a client id changes.

    RunFailedError is raised if the SuperLink cannot be reached from here or rejects a key.
    """
    nodes = deployment.node_folders(folder)
    client_keys(nodes)  # raises before anything is registered
    require_superlink(deployment)
    lines = []
    for node in nodes:
        answer = _flwr(folder, "supernode", "register", str(node / "node.pub"), CONNECTION, "--name", node.name)
        reason = one_line(answer.get("error-message", ""), MAX_LINE)
        if answer.get("success"):
            lines.append(f"{node.name}: registered as node {answer['node-id']}")
        elif "already in use" in reason:
            lines.append(f"{node.name}: already registered")
        else:
            raise RunFailedError(f"{node.name} could not be registered: {reason or answer}")
    write_client_keys(folder / "app", nodes)
    return lines


def require_superlink(deployment: Deployment) -> None:
    """Raise `RunFailedError` if the SuperLink cannot be reached from here."""
    if not is_listening(deployment.superlink_port):
        raise RunFailedError(
            f"{deployment.control_address} does not answer: start superlink/start.sh on the server, "
            f"and on another machine open a tunnel to it: {deployment.tunnel}"
        )


def unregister_node(folder: Path, node_id: int) -> None:
    """Unregister a node; the SuperLink then rejects its key and never registers that key again."""
    answer = _flwr(folder, "supernode", "unregister", str(node_id), CONNECTION)
    if not answer.get("success"):
        reason = one_line(answer.get("error-message", ""), MAX_LINE)
        raise RunFailedError(f"node {node_id} could not be unregistered: {reason or answer}")


def node_ids(folder: Path) -> dict[str, int]:
    """Return the registered nodes of the deployment: name of the folder → Flower's node id."""
    found = {node["public-key"]: int(node["node-id"]) for node in list_nodes(folder) if is_registered(node)}
    keys = {node.name: public_key(node) for node in read_deployment(folder).node_folders(folder)}
    return {name: found[key] for name, key in keys.items() if key in found}


def is_registered(node: dict[str, Any]) -> bool:
    """Return whether the SuperLink admits the node; it also lists the nodes that were unregistered."""
    return bool(node["status"] != "unregistered")


def list_nodes(folder: Path) -> list[dict[str, Any]]:
    """Return the SuperLink's nodes: ``node-id``, ``status`` and ``public-key``.

    The control API is asked directly, because `flwr supernode list` does not print the keys.
    """
    deployment = read_deployment(folder)
    try:
        trusted = ssl.create_default_context(cafile=folder / "flwr" / "ca.crt")
        connection = http.client.HTTPSConnection("127.0.0.1", deployment.superlink_port, timeout=30, context=trusted)
        connection.request("POST", "/v1/control/list-nodes", headers={"Content-Type": "application/protobuf"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise RunFailedError(f"{deployment.control_address} does not list its nodes: {error}") from None
    if answer.status != http.HTTPStatus.OK:
        raise RunFailedError(f"{deployment.control_address} does not list its nodes: it answers {answer.status}")
    return parse_node_list(content)


def _flwr(folder: Path, *words: str) -> dict[str, Any]:
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")}
    return run_flwr_json(list(words), environment, folder)
