"""List and register the nodes of a SuperLink with Flower's command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import RunFailedError
from fedeas_flwr.common.text import MAX_LINE, one_line
from fedeas_flwr.deploy.deployment import CONNECTION, Deployment
from fedeas_flwr.launch.superlink import QUIET, is_listening, run_flwr_json


def register_nodes(deployment: Deployment, folder: Path) -> list[str]:
    """Register the nodes' public keys with the SuperLink; return one line per node. Repeating it is harmless.

    RunFailedError is raised if the SuperLink cannot be reached from here or rejects a key.
    """
    if not is_listening(deployment.superlink_port):
        raise RunFailedError(
            f"{deployment.control_address} does not answer: start superlink/start.sh on the server, "
            f"and on another machine open a tunnel to it: {deployment.tunnel}"
        )
    lines = []
    for node in deployment.node_folders(folder):
        answer = _flwr(folder, "supernode", "register", str(node / "node.pub"), CONNECTION, "--name", node.name)
        reason = one_line(answer.get("error-message", ""), MAX_LINE)
        if answer.get("success"):
            lines.append(f"{node.name}: registered as node {answer['node-id']}")
        elif "already in use" in reason:
            lines.append(f"{node.name}: already registered")
        else:
            raise RunFailedError(f"{node.name} could not be registered: {reason or answer}")
    return lines


def list_nodes(folder: Path) -> list[dict[str, Any]]:
    """Return the SuperLink's nodes as Flower describes them."""
    answer = _flwr(folder, "supernode", "list", CONNECTION)
    if not answer.get("success"):
        raise RunFailedError(answer.get("error-message", answer))
    return list(answer["nodes"])


def _flwr(folder: Path, *words: str) -> dict[str, Any]:
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(folder / "flwr")}
    return run_flwr_json(list(words), environment, folder)
