"""Nodes that join, leave and reconnect: which are queried, which take part, and what is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from test_federation import EXAMPLES, START, VALUES, toy_app

from fedeas_flwr.allocation import distribute, eligible_pairs
from fedeas_flwr.common.errors import ProcessesDiedError, RunError
from fedeas_flwr.config import parse_config
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_manager import count_clients
from fedeas_flwr.federation.delivery import deliver
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.training_round import TooFewRepliesError
from fedeas_flwr.policies import ClientView, MatchedPolicy, Share
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.registry import build_strategy
from fedeas_flwr.waterfill import waterfill_count

SUPERLINK = 1
SLEEP = "fedeas_flwr.federation.client_manager.time.sleep"


class ChurnGrid(InlineGrid):
    """A grid whose nodes the test starts, stops and kills; a killed node stays listed as online."""

    def __init__(self, *clients: int, of: int = 3) -> None:
        super().__init__(toy_app(), 0, {})
        self._of, self._dead, self.asked = of, set[int](), list[int]()
        for client in clients:
            self.start(client, 100 + client)

    def start(self, client: int, node: int) -> None:
        place = {"partition-id": client, "num-partitions": self._of}
        self._contexts[node] = Context(run_id=1, node_id=node, node_config=place, state=RecordDict(), run_config={})

    def stop(self, node: int) -> None:
        del self._contexts[node]

    def kill(self, node: int) -> None:
        self._dead.add(node)

    def revive(self, node: int) -> None:
        self._dead.remove(node)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        alive = []
        for message in messages:
            if message.metadata.message_type == "query":
                self.asked.append(message.metadata.dst_node_id)
            if message.metadata.dst_node_id not in self._dead:
                alive.append(message)
        return super().send_and_receive(alive)


def start_federation(folder: Path, grid: ChurnGrid, **keys: Any) -> Federation:
    values = {"clients": 3, "participation": 1.0, "policy": "fedeas", "run-dir": str(folder), "min-replies": 0.5}
    config = parse_config({**values, "node-wait": 0, **keys})
    run = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    run.clients.discover()
    return run


def weighted_mean(*clients: int) -> float:
    return sum(EXAMPLES[c] * VALUES[c] for c in clients) / sum(EXAMPLES[c] for c in clients)


def never_wait(seconds: float) -> None:
    raise AssertionError("waited for nodes")


def test_unresponsive_node_is_named_in_the_error(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 1, 2)
    grid.kill(101)
    with pytest.raises(RunError, match="node 101 did not identify itself within"):
        start_federation(tmp_path, grid, **{"min-replies": 1.0})


def test_discover_does_not_wait_for_excluded_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLEEP, never_wait)
    values = {"clients": 3, "policy": "none", "run-dir": str(tmp_path), "min-replies": 0.5, "node-wait": 60}
    config = parse_config(values)
    run = Federation(ChurnGrid(0, 1, 2), config, build_strategy(config), RunDirectory.start(config, {}))
    run.clients.manager.admitted = {0, 2}
    assert run.clients.discover() == 2 and sorted(run.clients.nodes) == [0, 2]


def test_identity_query_that_fails_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node would fail again: a quorum starts without it, and without a quorum its error ends the run."""
    monkeypatch.setattr(SLEEP, never_wait)
    grid = ChurnGrid(0, 2)
    grid.start(3, 103)  # toy_app has no sample count for this client, and raises
    run = start_federation(tmp_path / "quorum", grid, **{"node-wait": 60})
    assert sorted(run.clients.nodes) == [0, 2]
    with pytest.raises(RunError, match=r"^node 103 did not identify itself: IndexError: tuple index out of range$"):
        start_federation(tmp_path / "all", grid, **{"node-wait": 60, "min-replies": 1.0})


def test_offline_client_is_recorded_and_the_rest_averaged(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 1, 2)
    run = start_federation(tmp_path, grid)
    run.clients.plan()
    grid.stop(101)
    state, outcome = run.training.train_round(START)
    assert outcome.failures == [{"client": 1, "reason": "its node is offline"}]
    assert state.trainable["w"] == pytest.approx(np.full(2, weighted_mean(0, 2)))
    assert state.accepted == {0: 1, 2: 1}


def test_round_without_any_online_client_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's strategies would wait for a node, and a SuperLink rejects an empty list of messages."""
    grid = ChurnGrid(0, 1, 2)
    run = start_federation(tmp_path, grid)
    for node in (100, 101, 102):
        grid.stop(node)
    monkeypatch.setattr(run.strategy, "configure_train", lambda *args: pytest.fail("configured without clients"))
    monkeypatch.setattr(grid, "send_and_receive", lambda *args, **more: pytest.fail("sent an empty list"))
    with pytest.raises(TooFewRepliesError, match=r"^round 1: 3 of 3 clients failed .* client 0: its node is offline$"):
        run.training.train_round(START)


def test_restarted_node_is_matched_by_its_client_id(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 1, 2)
    run = start_federation(tmp_path, grid)
    run.clients.plan()
    grid.kill(101)
    grid.start(1, 7)  # the old node id is still listed
    state, outcome = run.training.train_round(START)
    assert outcome.failures == []
    assert run.clients.nodes == {0: 100, 1: 7, 2: 102}
    run.training.train_round(state)
    assert grid.asked == [100, 101, 102, 7]  # no node is queried twice


def test_run_starts_with_a_quorum_and_others_join_later(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 2)
    run = start_federation(tmp_path, grid)
    run.clients.plan()
    state, outcome = run.training.train_round(START)
    assert [r.client for r in outcome.reports] == [0, 2]
    grid.start(1, 101)
    state, outcome = run.training.train_round(state)
    assert [r.client for r in outcome.reports] == [0, 1, 2]
    assert state.trainable["w"] == pytest.approx(np.full(2, weighted_mean(0, 1, 2)))


def test_run_without_a_quorum_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"clients = 3, but the federation has 2 nodes: start more"):
        start_federation(tmp_path, ChurnGrid(0, 2), **{"min-replies": 1.0})


def test_round_waits_for_its_quorum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ChurnGrid(0, 1, 2)
    run = start_federation(tmp_path, grid, **{"min-replies": 1.0, "node-wait": 5.0})
    run.clients.plan()
    grid.stop(101)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            grid.start(1, 55)

    monkeypatch.setattr(SLEEP, sleep)
    _, outcome = run.training.train_round(START)
    assert len(waited) == 3
    assert outcome.failures == []


def test_client_id_beyond_num_clients_is_excluded(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 1, of=2)
    run = start_federation(tmp_path, grid, clients=2)
    run.clients.plan()
    grid.start(0, 300)
    grid._contexts[300].node_config["partition-id"] = 2
    _, outcome = run.training.train_round(START)
    assert [r.client for r in outcome.reports] == [0, 1]
    run.training.train_round(START)
    assert grid.asked.count(300) == 1


@pytest.mark.parametrize("policy", ["uniform", "missing-only", "waterfill"])
def test_matched_total_is_distributed_once(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that join later, in the run or after a resume, generate nothing; no other share changes."""
    tasks: dict[int, Share] = {}
    add_task = messages.add_task

    def listen(message: Message, task: messages.TrainTask, *rest: Any) -> None:
        tasks[message.metadata.dst_node_id] = task.share
        add_task(message, task, *rest)

    monkeypatch.setattr(messages, "add_task", listen)
    keys, counts = {"policy": policy, "total": 60, "rounds": 2}, np.array([[9, *[0] * 9], [3, *[1] * 9], [0, *[7] * 9]])

    def images(share: Share, client: int) -> int:
        held = counts[[client]]
        if policy == "waterfill":
            return int(waterfill_count(held, share.level)[0]) + share.extra
        pairs = eligible_pairs(held, absent_only=policy == "missing-only")[0]
        return int(distribute(pairs, share.base, share.extra).sum())

    def answers(asked_by: MatchedPolicy, question: str, at: float) -> dict[int, list[int]]:
        views = {
            client: ClientView(counts[[client]], run.config.policy_settings) for client in sorted(run.clients.nodes)
        }
        return {client: asked_by.reply(view, question, at)[0].tolist() for client, view in views.items()}

    grid = ChurnGrid(0, 2)
    run = start_federation(tmp_path / "r", grid, **keys)
    monkeypatch.setattr(run.clients, "_query_all", answers)
    run.clients.plan()
    grid.start(1, 101)
    run.fit(START, lambda *model: {"accuracy": 0.5})
    first = tasks.copy()
    assert sum(images(first[100 + client], client) for client in (0, 2)) == 60 and images(first[101], 1) == 0

    tasks.clear()
    kept = run.run.load_checkpoint()
    assert kept is not None
    run = start_federation(tmp_path / "resumed", ChurnGrid(0, 1), **keys)
    run.restore(kept)
    run.clients.plan()  # sends no query: these clients could not answer one
    run.training.train_round(replace(kept, trainable=START.trainable, buffers=START.buffers))
    assert tasks == {100: first[100], 101: first[101]}


def test_two_nodes_with_one_client_id_are_rejected(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 1)
    grid.start(1, 200)
    with pytest.raises(RunError, match="two nodes have the id of client 1"):
        start_federation(tmp_path, grid)


class SuperLinkErrorGrid(ChurnGrid):
    """Replies for killed nodes as a SuperLink does: with its own node id, and before all other replies."""

    def __init__(self, *clients: int, error: int = ErrorCode.NODE_UNAVAILABLE) -> None:
        super().__init__(*clients)
        self._error = error

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        answered = super().send_and_receive(sent)
        return [*map(self._error_reply, (m for m in sent if m.metadata.dst_node_id in self._dead)), *answered]

    def _error_reply(self, message: Message) -> Message:
        message.metadata.__dict__["_message_id"] = f"to-{message.metadata.dst_node_id}"
        reply = Message(Error(self._error, "Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK
        return reply


def test_superlink_error_reply_counts_for_the_lost_node(tmp_path: Path) -> None:
    grid = SuperLinkErrorGrid(1, 2)
    grid.start(0, SUPERLINK)  # worst case: a client's node has the SuperLink's id
    run = start_federation(tmp_path, grid)
    run.clients.plan()
    grid.kill(101)
    replies = deliver(grid, [messages.build_query(node, "identity") for node in (SUPERLINK, 101, 102)], 0)
    assert replies[101].error.code == ErrorCode.NODE_UNAVAILABLE
    assert [messages.read_answer(replies[node])[0] for node in (SUPERLINK, 102)] == [0, 2]
    state, outcome = run.training.train_round(START)
    (failure,) = outcome.failures
    assert failure["client"] == 1 and "Node Unavailable" in failure["reason"]
    assert state.trainable["w"] == pytest.approx(np.full(2, weighted_mean(0, 2)))


def test_run_waits_for_late_and_unavailable_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, waits = SuperLinkErrorGrid(0, 1), 0
    grid.kill(101)

    def sleep(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 2:
            grid.start(2, 102)
        if waits == 4:
            grid.revive(101)

    monkeypatch.setattr(SLEEP, sleep)
    run = start_federation(tmp_path, grid, **{"min-replies": 1.0, "node-wait": 60})
    assert run.clients.nodes == {0: 100, 1: 101, 2: 102} and waits == 4
    assert grid.asked == [100, 101, 102, 101, 101]  # none before all are online


def test_identity_query_raises_if_every_process_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLEEP, lambda seconds: None)
    grid = SuperLinkErrorGrid(0, 1, 2, error=ErrorCode.UNKNOWN)  # Flower's code if Ray's actor died
    grid.kill(101)
    assert sorted(start_federation(tmp_path / "one", grid).clients.nodes) == [0, 2]
    for node in (100, 102):
        grid.kill(node)
    with pytest.raises(ProcessesDiedError, match=r"^every client process died during the identity query$"):
        start_federation(tmp_path / "all", grid)


def test_reply_to_an_earlier_message_is_ignored() -> None:
    grid = ChurnGrid(0)
    (late,) = grid.send_and_receive([messages.build_query(100, "identity")])
    grid.send_and_receive = lambda out, *, timeout=None: [late]  # type: ignore[method-assign]
    assert deliver(grid, [messages.build_query(100, "identity")], 0) == {}


def test_count_clients_defaults_to_connected_nodes() -> None:
    assert count_clients(ChurnGrid(0, 1, 2), parse_config({})) == 3
    with pytest.raises(RunError, match="a run needs at least one client"):
        count_clients(ChurnGrid(), parse_config({"node-wait": 0}))


def test_count_clients_waits_for_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ChurnGrid()
    monkeypatch.setattr(SLEEP, lambda seconds: grid.start(0, 100))
    assert count_clients(grid, parse_config({"node-wait": 60})) == 1


def test_round_record_counts_clients_that_have_not_joined(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 2)
    run = start_federation(tmp_path, grid)
    run.clients.plan()
    state, outcome = run.training.train_round(START)
    assert run._round_metadata(state, outcome)["not_joined"] == 1
    grid.start(1, 101)
    state, outcome = run.training.train_round(state)
    assert "not_joined" not in run._round_metadata(state, outcome)
