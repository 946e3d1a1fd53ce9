"""Row 2: clients raise, reply late or not at all. They are recorded with id and reason; the rest is averaged."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from lossy import lossy_app
from runners import finish, quick, run_in_process
from test_federation import START, federation, toy_app
from timelines import Clock

from fedeas_flwr import client_app
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.federation import delivery, messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.runs.checkpoints import Checkpoint


class LateGrid(InlineGrid):
    """A grid on which client 1's replies arrive one round late."""

    late: Message | None = None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        for reply in list(super().send_and_receive(messages)):
            if reply.metadata.src_node_id != 2 or reply.metadata.message_type == "query":
                yield reply
                continue
            if self.late is not None:
                yield self.late
            self.late = reply


def test_late_reply_counts_as_missing_and_not_for_the_next_round(tmp_path: Path) -> None:
    made = federation(tmp_path, toy_app(), LateGrid, **{"min-replies": 0.5, "round-timeout": 5})
    state = START
    for number in (1, 2, 3):
        state, outcome = made.training.train_round(state)
        assert outcome.failures == [{"client": 1, "reason": "no reply within 5 s"}]
        assert state.trainable["w"] == pytest.approx((30 * 1.0 + 60 * 2.0) / 90)
        assert state.accepted == {0: number, 2: number}


class PollingGrid(InlineGrid):
    """A grid with push and pull like Flower's; client 1 never replies."""

    pull_interval = 0.1

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.replies = {r.metadata.reply_to_message_id: r for r in self.send_and_receive(messages)}
        return list(self.replies)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = [key for key in message_ids if key in self.replies]
        return [self.replies.pop(key) for key in wanted if self.replies[key].metadata.src_node_id != 2]


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_reply_timeout_ignores_jumps_of_the_system_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """The clock jumps at every read; Flower's own wait would end at once or an hour late."""
    grid = PollingGrid(toy_app(), 3, {})
    monkeypatch.setattr(delivery, "InlineGrid", LateGrid)  # this one is to be treated as Flower's
    reads = 0

    def jumping() -> float:
        nonlocal reads
        reads += 1
        return 1e9 + jump * reads

    monkeypatch.setattr(time, "time", jumping)
    clock = Clock()
    monkeypatch.setattr(delivery, "time", clock)
    replies = delivery.deliver(grid, [messages.build_query(node, "identity") for node in (1, 2, 3)], 0.5)
    assert sorted(replies) == [1, 3]
    assert clock.now == pytest.approx(0.5)


class RejectingGrid(PollingGrid):
    """Returns an empty id for a message to a node that was just unregistered, as Flower's SuperLink does."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        out = list(messages)
        return [key if out[i].metadata.dst_node_id != 2 else "" for i, key in enumerate(super().push_messages(out))]


def test_message_rejected_by_the_superlink_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, clock = RejectingGrid(toy_app(), 3, {}), Clock()
    monkeypatch.setattr(delivery, "InlineGrid", LateGrid)  # this one is to be treated as Flower's
    monkeypatch.setattr(delivery, "time", clock)
    replies = delivery.deliver(grid, [messages.build_query(node, "identity") for node in (1, 2, 3)], 1800.0)
    assert sorted(replies) == [1, 2, 3] and clock.now == 0
    assert messages.failure_reason(replies[2]) == "the SuperLink did not take the message"
    assert not delivery.has_died(grid, replies[2])


class SimulationGrid(InlineGrid):
    """A grid with push and pull like Flower's simulation grid; replies are ready after `seconds`."""

    pull_interval = 0.1
    seconds, pulls, there_at = 0.2525, 0, 0.0
    clock: Clock

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.replies = {r.metadata.reply_to_message_id: r for r in InlineGrid.send_and_receive(self, messages)}
        self.there_at = self.clock.now + self.seconds
        return list(self.replies)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulls += 1
        return [self.replies[key] for key in message_ids] if self.clock.now >= self.there_at else []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        pytest.fail("Flower's own wait was used, which polls ten times a second")


@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_in_process_replies_are_polled_every_5_ms(monkeypatch: pytest.MonkeyPatch, timeout: float) -> None:
    grid = SimulationGrid(toy_app(), 3, {})
    grid.clock = Clock()
    monkeypatch.setattr(delivery, "time", grid.clock)
    monkeypatch.setattr(delivery, "InlineGrid", LateGrid)  # this one is to be treated as Flower's
    replies = delivery.deliver(grid, [messages.build_query(node, "identity") for node in (1, 2, 3)], timeout)
    assert sorted(replies) == [1, 2, 3]
    assert grid.pulls == 52  # at once and every 5 ms; with Flower's interval, 4


class HalfReadyGrid:
    """A grid with push and pull like Flower's simulation grid; each pull returns half of the outstanding replies."""

    pull_interval = 0.1

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.asked = {str(number): message for number, message in enumerate(messages)}
        for key, message in self.asked.items():
            message.metadata.__dict__["_message_id"] = key
        return list(self.asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        keys = sorted(message_ids)
        return [Message(RecordDict(), reply_to=self.asked[key]) for key in keys[: -(-len(keys) // 2)]]


def test_poll_interval_grows_with_outstanding_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull costs time per outstanding reply, and only the delay of the last reply matters."""
    InlineGrid(toy_app(), 1, {})  # sets the process identity that Flower's messages need
    grid, clock = HalfReadyGrid(), Clock()
    monkeypatch.setattr(delivery, "time", clock)
    replies = delivery.deliver(grid, [messages.build_query(node, "identity") for node in range(1000)], 0.0)  # type: ignore[arg-type]
    assert sorted(replies) == list(range(1000))
    assert clock.slept == pytest.approx([0.1, 0.05, 0.025, 0.0124, 0.0062, *[0.005] * 4])


def test_remote_superlink_is_polled_every_3_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class RemoteGrid(SimulationGrid):
        @property
        def pull_interval(self) -> float:
            raise AttributeError("no such thing")

    grid = RemoteGrid(toy_app(), 3, {})
    grid.clock = Clock()
    monkeypatch.setattr(delivery, "time", grid.clock)
    monkeypatch.setattr(delivery, "InlineGrid", LateGrid)
    assert sorted(delivery.deliver(grid, [messages.build_query(1, "identity")], 0.0)) == [1]
    assert grid.clock.slept == [3.0]


def fail_in(rounds: set[int]):
    def misbehave(client: int, message: Message) -> Message | None:
        if messages.read_task(message).round in rounds:
            raise ConnectionError("cut off")
        return None

    return misbehave


def test_run_stops_after_max_consecutive_failed_rounds(tmp_path: Path) -> None:
    made = federation(tmp_path, toy_app(fail_in({2, 3, 5, 6, 7})), **{"failed-rounds": 3, "rounds": 9})
    with pytest.raises(RunError, match=r"round 7: 3 of 3 clients failed .* ConnectionError: cut off"):
        made.fit(START, lambda trainable, buffers: {"accuracy": float(trainable["w"][0]) / 1024})
    rounds = made.run.rounds()
    assert [len(record["failures"]) for record in rounds] == [0, 3, 3, 0, 3, 3]
    assert [record["clients"] for record in rounds][:3] == [[0, 1, 2], [], []]
    reason = rounds[1]["failures"][2]["reason"]
    assert re.fullmatch(r"ConnectionError: cut off \(test_2_failing_clients.py, line [0-9]+\)", reason)
    assert rounds[1]["failures"][2]["client"] == 2
    assert rounds[2]["accuracy"] == rounds[0]["accuracy"] > 0, "a failed round changed the model"
    assert rounds[1]["train_loss"] is None
    checkpoint = made.run.load_checkpoint()
    assert isinstance(checkpoint, Checkpoint) and checkpoint.round == 6
    assert np.array_equal(checkpoint.trainable["w"], np.float32([1024 * rounds[0]["accuracy"]] * 2))


def test_first_failed_round_stops_the_run_by_default(tmp_path: Path) -> None:
    made = federation(tmp_path, toy_app(fail_in({2})), rounds=9)
    with pytest.raises(RunError, match="round 2: 3 of 3 clients failed"):
        made.fit(START, lambda trainable, buffers: {"accuracy": 0.5})
    assert json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])["round"] == 1


def test_run_with_missing_replies_finishes_with_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_app, "app", lossy_app(lambda client, number: "lost" if client == 1 < number else ""))
    keys = {"policy": "none", "participation": 1.0, "min_replies": 0.5}
    run = finish(quick(tmp_path / "r", **keys))
    gaps = "2 replies missing in 2 of 3 rounds (client 1 in rounds 2, 3)"
    assert run.read_json("status.json") == {"status": "finished", "error": "", "gaps": gaps}
    assert run.state() == "finished", "a run with gaps counts as unfinished"
    assert f"WARNING The run finished, with gaps: {gaps}\n" in (run.path / "flower.log").read_text()
    again = run_in_process("resume", str(run.path)).stdout.splitlines()
    assert f"finished, with gaps: {gaps}" in again
    monkeypatch.undo()
    whole = finish(quick(tmp_path / "whole", **keys))
    assert whole.read_json("status.json") == {"status": "finished", "error": ""}
    assert "INFO The run finished\n" in (whole.path / "flower.log").read_text()
    assert "gaps" not in run_in_process("resume", str(whole.path)).stdout
