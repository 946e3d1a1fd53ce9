"""Flower's private names that are used: a test each, which fails if a release of Flower changes it.

What is to be mended is then in fedeas_flwr/federation/flower_internals.py.
"""

from __future__ import annotations

from typing import get_type_hints
from unittest.mock import Mock

import click
import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid, InMemoryGrid

from fedeas_flwr.federation import flower_internals


def a_message() -> Message:
    return Message(RecordDict(), dst_node_id=3, message_type="query")


def test_a_process_has_the_identity_that_messages_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    with pytest.raises(RuntimeError, match="TaskIdentity"):
        a_message()
    flower_internals.identify_process()
    assert a_message().metadata.src_node_id == 1


def test_a_reply_names_the_message_that_it_answers() -> None:
    flower_internals.identify_process()
    message, other = a_message(), a_message()
    for each in (message, other):
        flower_internals.set_message_id(each)
    assert message.metadata.message_id != other.metadata.message_id
    reply = Message(RecordDict(), reply_to=message)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id


def test_a_grid_is_given_flowers_run() -> None:
    assert get_type_hints(Grid.set_run)["run"] is flower_internals.Run


def test_simulation_grid_is_told_from_that_of_a_superlink() -> None:
    in_memory, http = InMemoryGrid(Mock()), HttpGrid.__new__(HttpGrid)
    assert isinstance(in_memory, flower_internals.SimulationGrid)
    assert not isinstance(http, flower_internals.SimulationGrid)


def test_an_app_that_raises_has_a_code_of_its_own() -> None:
    assert flower_internals.APP_RAISED == 2


def test_a_node_config_is_read_as_flower_reads_it() -> None:
    read = flower_internals.parse_config_args
    assert read(['client-id=3 data-path="/data/images"']) == {"client-id": 3, "data-path": "/data/images"}
    with pytest.raises((ValueError, click.ClickException), match="invalid format"):
        read(["data-path=/data/images"])


def test_the_local_superlink_has_two_ports() -> None:
    assert all(0 < int(port) < 2**16 for port in flower_internals.local_ports())
