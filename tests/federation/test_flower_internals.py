"""One test per private Flower name in use; it fails if a Flower release changes that name.

Fix such a change in fedeas_flwr/federation/flower_internals.py.
"""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from queue import Queue
from typing import Any, get_type_hints
from unittest.mock import Mock

import click
import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid, InMemoryGrid

from fedeas_flwr.federation import flower_internals


def make_message() -> Message:
    return Message(RecordDict(), dst_node_id=3, message_type="query")


def test_identify_process_allows_creating_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    with pytest.raises(RuntimeError, match="TaskIdentity"):
        make_message()
    flower_internals.identify_process()
    assert make_message().metadata.src_node_id == 1


def test_reply_holds_the_id_of_its_message() -> None:
    flower_internals.identify_process()
    message, other = make_message(), make_message()
    for each in (message, other):
        flower_internals.set_message_id(each)
    assert message.metadata.message_id != other.metadata.message_id
    reply = Message(RecordDict(), reply_to=message)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id


def test_set_run_takes_flowers_run_class() -> None:
    assert get_type_hints(Grid.set_run)["run"] is flower_internals.Run


def test_simulation_grid_excludes_the_http_grid() -> None:
    in_memory, http = InMemoryGrid(Mock()), HttpGrid.__new__(HttpGrid)
    assert isinstance(in_memory, flower_internals.SimulationGrid)
    assert not isinstance(http, flower_internals.SimulationGrid)


def test_simulation_starts_the_function_that_forwards_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.server.superlink.fleet.vce import vce_api

    name, own = "add_messages_to_queue", flower_internals._forward_messages
    monkeypatch.setattr(vce_api, name, getattr(vce_api, name))  # restored after the test
    before = inspect.signature(vce_api.add_messages_to_queue)
    flower_internals.forward_messages_at_once()
    assert getattr(vce_api, name) is own and name in vce_api.run_api.__code__.co_names
    assert list(before.parameters) == list(inspect.signature(own).parameters)


def test_announced_messages_are_forwarded_at_once_in_their_order() -> None:
    waiting, forwarded, stop = {3: "c", 1: "a", 2: "b"}, Queue[str](), threading.Event()

    class State:
        def get_message_ins(self, node_id: int, limit: int) -> list[Any]:
            return [waiting.pop(node_id)] if node_id in waiting else []

    flower_internals.announce_messages([3, 1])
    thread = threading.Thread(target=flower_internals._forward_messages, args=(State(), forwarded, [1, 2, 3], stop))
    thread.start()
    assert [forwarded.get(timeout=0.8) for _ in range(2)] == ["c", "a"]
    assert forwarded.get(timeout=30) == "b"  # not announced: found a second later
    stop.set()
    flower_internals.announce_messages([1])
    thread.join(30)
    assert not thread.is_alive()


def test_app_raised_is_flowers_error_code() -> None:
    assert flower_internals.APP_RAISED == 2


def test_node_config_is_parsed_as_flower_parses_it() -> None:
    read = flower_internals.parse_config_args
    assert read(['client-id=3 data-path="/data/images"']) == {"client-id": 3, "data-path": "/data/images"}
    with pytest.raises((ValueError, click.ClickException), match="invalid format"):
        read(["data-path=/data/images"])


def test_local_superlink_ports_are_valid() -> None:
    assert all(0 < int(port) < 2**16 for port in flower_internals.local_ports())


def test_flwr_home_is_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert flower_internals.get_flwr_home() == tmp_path


def test_node_list_has_public_keys() -> None:
    from flwr.proto.control_pb2 import ListNodesResponse
    from flwr.proto.node_pb2 import NodeInfo

    listed = ListNodesResponse(nodes_info=[NodeInfo(node_id=2**63 + 1, status="offline", public_key=b"PEM")])
    found = {"node-id": str(2**63 + 1), "status": "offline", "public-key": "PEM"}
    assert flower_internals.parse_node_list(listed.SerializeToString()) == [found]


def test_check_app_raises_flowers_message(tmp_path: Path) -> None:
    assert flower_internals.published_files(["a/b.py", "plot.png", "LICENSE"]) == ["a/b.py", "LICENSE"]
    with pytest.raises(ValueError, match="a valid app name must start with a letter"):
        flower_internals.check_app(tmp_path, "1")
    with pytest.raises(ValueError, match=r"pyproject\.toml not found"):
        flower_internals.check_app(tmp_path, "one")
