"""All names of Flower that are not part of its public interface, except those whose random numbers
`strategies/flower.py` seeds.

A Flower release may move any of them without notice; tests/federation/test_flower_internals.py has a test for each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

from flwr.app import Message
from flwr.common.config import parse_config_args as parse_config_args
from flwr.common.constant import ErrorCode
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.utils import get_flwr_home as get_flwr_home

APP_RAISED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
"""Error code of the reply that Flower writes if a ClientApp raises."""


@runtime_checkable
class SimulationGrid(Protocol):
    """Grid of Flower's simulation, whose replies are in this process; no other grid has this attribute."""

    pull_interval: float


_announced: SimpleQueue[int] = SimpleQueue()
"""Nodes that messages were sent to, in the order of the messages."""


def forward_messages_at_once() -> None:
    """Let Flower's simulation pass a message to a client process when it is announced, in the order of announcement.

    Flower's own function asks for the messages of every node ten times per second. Call this in the process of a
    simulation, before its clients start; in others it does nothing.
    """
    if module := sys.modules.get("flwr.server.superlink.fleet.vce.vce_api"):
        module.__dict__["add_messages_to_queue"] = _forward_messages


def announce_messages(nodes: Iterable[int]) -> None:
    """Report that messages to these nodes were pushed to a simulation's grid."""
    for node in nodes:
        _announced.put(node)


def _forward_messages(state: Any, queue: Any, nodes_mapping: Iterable[int], f_stop: Any) -> None:
    """Do what Flower's `add_messages_to_queue` does; messages that were not announced take up to a second."""
    while not f_stop.is_set():
        try:
            nodes: Iterable[int] = [_announced.get(timeout=1.0)]
        except Empty:
            nodes = nodes_mapping
        for node in nodes:
            for message in state.get_message_ins(node_id=node, limit=1):
                queue.put(message)


def identify_process() -> None:
    """Set the identity that a process needs to create messages; Flower sets it in its own processes."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def set_message_id(message: Message) -> None:
    """Give a message an id, as Flower's grids do; the reply refers to it."""
    message.metadata.__dict__["_message_id"] = str(uuid4())


def parse_node_list(content: bytes) -> list[dict[str, Any]]:
    """Return the nodes in a SuperLink's answer to ``/v1/control/list-nodes``."""
    from flwr.proto.control_pb2 import ListNodesResponse

    return [
        {"node-id": str(node.node_id), "status": node.status, "public-key": node.public_key.decode(errors="replace")}
        for node in ListNodesResponse.FromString(content).nodes_info
    ]


def local_ports() -> tuple[str, str]:
    """Return the two ports of the SuperLink that `flwr run` starts or connects to."""
    from flwr.cli.constant import LOCAL_CONTROL_API_PORT, LOCAL_SUPERLINK_HTTP_API_PORT

    return LOCAL_SUPERLINK_HTTP_API_PORT, LOCAL_CONTROL_API_PORT


def published_files(names: Iterable[str]) -> list[str]:
    """Return those of an app's files whose format `flwr app publish` uploads."""
    from flwr.cli.utils import filter_paths_for_publish

    return list(filter_paths_for_publish(dict.fromkeys(names, b"")))


def check_app(folder: Path, name: str) -> None:
    """Check an app's folder, which will have a name, as `flwr app publish` and the Hub do; print its size.

    Raise ValueError with Flower's message if Flower would reject the app.
    """
    import click
    from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.utils import validate_project_name

    try:
        validate_project_name(name, "The folder's name")
        build_fab_from_disk(folder)
        _validate_files(_collect_file_paths(folder))
    except click.ClickException as error:
        raise ValueError(error.format_message()) from None
