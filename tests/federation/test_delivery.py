"""Messages to Flower's simulation share their arrays, and replies are handed over when they arrive."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedeas_flwr.federation import delivery, flower_internals, messages
from fedeas_flwr.strategies.records import ARRAYS, BUFFERS, CONFIG, to_arrays, to_record

LARGE = np.arange(30_000, dtype=np.float32)
_store: list[Any] = []


class StoreOfRay:
    """Stands for `ray`: stores objects in this process."""

    @staticmethod
    def put(value: Any) -> int:
        _store.append(value)
        return len(_store) - 1

    @staticmethod
    def get(reference: int) -> Any:
        return _store[reference]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    _store.clear()
    flower_internals.identify_process()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(put=StoreOfRay.put, get=StoreOfRay.get))


def train_messages(arrays: ArrayRecord, buffers: ArrayRecord) -> list[Message]:
    records = {ARRAYS: arrays, BUFFERS: buffers}
    return [Message(RecordDict({**records, CONFIG: ConfigRecord({"n": n})}), n, "train") for n in range(3)]


@pytest.mark.parametrize("as_tensors", [False, True])
def test_messages_of_a_round_share_one_copy_of_the_model(ray: None, as_tensors: bool) -> None:
    model = {"w": torch.from_numpy(LARGE.copy())} if as_tensors else {"w": LARGE}
    out = train_messages(to_record(model), to_record({"n": np.array(4)}))
    delivery._share_arrays(out)
    delivery._share_arrays(out)  # as for a message that is sent again
    assert len(_store) == 1
    for number, message in enumerate(out):
        stream = pickle.dumps(message)
        assert len(stream) < 5_000
        received = pickle.loads(stream).content
        assert list(received) == [ARRAYS, BUFFERS, CONFIG] and received.config_records[CONFIG]["n"] == number
        assert np.array_equal(to_arrays(received.array_records[ARRAYS])["w"], LARGE)
        assert to_arrays(received.array_records[BUFFERS])["n"] == 4


class OneByOneGrid:
    """A grid with push and pull like Flower's simulation grid; each pull returns one reply."""

    pull_interval = 0.1

    def push_messages(self, out: Any) -> list[str]:
        self.asked = list(out)
        for message in self.asked:
            flower_internals.set_message_id(message)
        return [message.metadata.message_id for message in self.asked]

    def pull_messages(self, message_ids: Any) -> list[Message]:
        return [Message(RecordDict(), reply_to=self.asked.pop())]


def test_replies_are_reported_before_the_last_arrives(ray: None) -> None:
    grid, found = OneByOneGrid(), []
    out = [messages.build_query(node, "identity") for node in (5, 6, 7)]

    def report(node: int, reply: Message) -> None:
        found.append((node, len(grid.asked)))

    assert sorted(delivery.deliver(grid, out, 0.0, report)) == [5, 6, 7]  # type: ignore[arg-type]
    assert found == [(7, 2), (6, 1), (5, 0)]
