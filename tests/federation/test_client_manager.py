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
from flwr.proto.node_pb2 import NodeInfo
from test_federation import EXAMPLES, START, VALUES, toy_app
from timelines import Clock

from fedeas_flwr.allocation import distribute, eligible_pairs
from fedeas_flwr.common.errors import ProcessesDiedError, RunError
from fedeas_flwr.config import parse_config
from fedeas_flwr.federation import delivery, messages
from fedeas_flwr.federation.client_manager import count_clients
from fedeas_flwr.federation.delivery import deliver
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.training_round import TooFewRepliesError
from fedeas_flwr.policies.interface import ClientView, Share
from fedeas_flwr.policies.matched import MatchedPolicy
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
    with pytest.raises(RunError, match="node 101 has not identified itself yet"):
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
    place = r"\(test_federation.py, line [0-9]+\)"
    with pytest.raises(RunError, match=rf"^node 103 did not .*: IndexError: tuple index out of range {place}$"):
        start_federation(tmp_path / "all", grid, **{"node-wait": 60, "min-replies": 1.0})


def test_invalid_identity_reply_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLEEP, never_wait)
    monkeypatch.setattr("test_federation.EXAMPLES", (30, -1, 60))
    with pytest.raises(RunError, match=r"^node 101 did not identify itself: examples = -1"):
        start_federation(tmp_path, ChurnGrid(0, 1, 2), **{"node-wait": 60, "min-replies": 1.0})


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
    grid.stop(101)
    grid.start(1, 7)
    state, outcome = run.training.train_round(START)
    assert outcome.failures == []
    assert run.clients.nodes == {0: 100, 1: 7, 2: 102}
    run.training.train_round(state)
    assert grid.asked == [100, 101, 102, 7]  # no node is queried twice


def test_client_keeps_its_node_while_that_is_online(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without keys, a second node with the same id waits: it may be an impostor, or the same machine restarted."""
    grid = ChurnGrid(0, 1, 2)
    run = start_federation(tmp_path, grid)
    run.clients.plan()
    grid.start(1, 7)
    state = START
    for _ in range(2):
        state, outcome = run.training.train_round(state)
        assert outcome.failures == [] and run.clients.nodes[1] == 101
    refused = "Node 7 is rejected while node 101 is online: both have the id of client 1, give each node its own"
    assert [refused in text for text in warnings(caplog)] == [True]
    grid.stop(101)
    _, outcome = run.training.train_round(state)
    assert outcome.failures == [] and run.clients.nodes[1] == 7
    assert grid.asked == [100, 101, 102, 7]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


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


def test_round_with_a_quorum_does_not_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ChurnGrid(0, 1, 2)
    run = start_federation(tmp_path, grid, **{"node-wait": 60})
    run.clients.plan()
    grid.stop(101)
    monkeypatch.setattr(SLEEP, never_wait)
    _, outcome = run.training.train_round(START)
    assert [r.client for r in outcome.reports] == [0, 2]


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


def test_first_node_seen_with_an_id_is_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ChurnGrid(0, 1)
    grid.start(1, 50)  # a lower node id, but seen later
    run = start_federation(tmp_path / "quorum", grid)
    assert run.clients.nodes == {0: 100, 1: 101}
    with pytest.raises(RunError, match="node 50 is rejected while node 101 is online: both have the id of client 1"):
        start_federation(tmp_path / "all", grid, **{"min-replies": 1.0})


def test_second_node_of_a_client_may_restart_as_another(tmp_path: Path) -> None:
    grid = ChurnGrid(0, 1)
    grid.start(1, 7)
    run = start_federation(tmp_path, grid)
    grid.stop(7)
    run.clients.manager.discover_new_nodes()
    grid.start(2, 7)
    run.clients.manager.discover_new_nodes()
    assert run.clients.nodes == {0: 100, 1: 101, 2: 7}


def test_late_node_with_other_partitions_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grid = ChurnGrid(0, 2)
    run = start_federation(tmp_path / "run", grid)
    run.clients.plan()
    grid.start(1, 101)
    grid._contexts[101].node_config["num-partitions"] = 5
    caplog.clear()
    state = START
    for _ in range(3):
        state, outcome = run.training.train_round(state)
        assert [r.client for r in outcome.reports] == [0, 2]
    assert ["Node 101 cannot take part: client 1 holds one of 5 partitions" in t for t in warnings(caplog)] == [True]
    assert grid.asked.count(101) == 1
    grid.stop(101)
    run.training.train_round(state)
    grid.start(1, 101)
    _, outcome = run.training.train_round(state)
    assert [r.client for r in outcome.reports] == [0, 1, 2]
    grid._contexts[101].node_config["num-partitions"] = 5
    with pytest.raises(RunError, match="node 101 cannot take part: client 1 holds one of 5 partitions"):
        start_federation(tmp_path / "start", grid, **{"min-replies": 1.0})


def test_nodes_with_data_of_their_own_have_no_partitions(tmp_path: Path) -> None:
    run = start_federation(tmp_path, ChurnGrid(0, 1, 2, of=0), **{"min-replies": 1.0})
    assert sorted(run.clients.nodes) == [0, 1, 2]


class KeyGrid(ChurnGrid):
    """A grid whose nodes have keys; ``started`` is when a node's process connected."""

    def __init__(self, *clients: int, of: int = 3) -> None:
        self.started = dict[int, str]()
        super().__init__(*clients, of=of)

    def start(self, client: int, node: int) -> None:
        super().start(client, node)
        self.started[node] = self.started.get(node, "") + "again "

    def get_nodes(self) -> Iterable[NodeInfo]:
        for node in self.get_node_ids():
            yield NodeInfo(node_id=node, public_key=f"key {node}".encode(), last_activated_at=self.started[node])


def keyed_federation(folder: Path, grid: ChurnGrid, **keys: Any) -> Federation:
    """Start a federation whose clients 0, 1, 2 have the keys of nodes 100, 101, 102."""
    config = parse_config({"clients": 3, "participation": 1.0, "policy": "fedeas", "run-dir": str(folder), **keys})
    run = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    run.clients.manager.keys = {f"key {100 + client}": client for client in range(3)}
    run.clients.discover()
    return run


@pytest.mark.parametrize("late", [False, True])
def test_node_with_an_unknown_key_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture, late: bool) -> None:
    grid = KeyGrid()
    if not late:
        grid.start(0, 7)
    for client in range(3):
        grid.start(client, 100 + client)
    run = keyed_federation(tmp_path, grid)
    if late:
        grid.start(0, 7)
    state, outcome = run.training.train_round(START)
    assert outcome.failures == [] and run.clients.nodes == {0: 100, 1: 101, 2: 102}
    run.training.train_round(state)
    assert 7 not in grid.asked
    assert warnings(caplog) == ["Node 7 is rejected: its key is none of this deployment's"]


@pytest.mark.parametrize("late", [False, True])
def test_node_with_another_clients_id_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture, late: bool) -> None:
    """Also while the honest node is offline, and until its own node-config is corrected and it restarts."""
    grid = KeyGrid(2)
    if late:
        grid.start(0, 100)
    grid.start(0, 101)  # client 1's key
    run = keyed_federation(tmp_path, grid, **{"min-replies": 0.3, "node-wait": 0})
    if not late:
        grid.start(0, 100)
    state, outcome = run.training.train_round(START)
    assert [r.client for r in outcome.reports] == [0, 2] and run.clients.nodes == {0: 100, 2: 102}
    named = "Node 101 is rejected: it identifies itself as client 0, but its key is client 1's"
    assert [text for text in warnings(caplog) if "rejected" in text] == [named]
    grid.stop(100)
    state, outcome = run.training.train_round(state)
    assert outcome.failures == [{"client": 0, "reason": "its node is offline"}]
    grid.start(1, 101)  # not seen offline in between
    _, outcome = run.training.train_round(state)
    assert [r.client for r in outcome.reports] == [1, 2]


def test_run_of_strangers_does_not_start(tmp_path: Path) -> None:
    grid = KeyGrid()
    for client in range(3):
        grid.start(client, client)
    with pytest.raises(RunError, match=r"^clients = 3, .* 3 nodes, and node 0 is rejected: its key is none of this"):
        keyed_federation(tmp_path, grid, **{"node-wait": 0})


class DeploymentGrid(KeyGrid):
    """A grid with push and pull, as in a deployment.

    Killed nodes are silent, nodes in ``errors`` reply with an error of this code, and a node in ``restarts`` loses its
    first message in a restart 10 s later.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *clients: int) -> None:
        super().__init__(*clients)
        self.clock, self.errors, self.restarts = Clock(), dict[int, int](), set[int]()
        self.open: dict[str, Message] = {}
        self.received: list[tuple[int, str]] = []
        monkeypatch.setattr(delivery, "InlineGrid", LookupError)  # this one is to be treated as Flower's
        monkeypatch.setattr(delivery, "time", self.clock)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"{len(self.received)} to {node}"
            self.received.append((node, message.metadata.message_type))
            self.open[message.metadata.message_id] = message
            yield message.metadata.message_id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for key in list(message_ids):
            node = self.open[key].metadata.dst_node_id
            if node in self.restarts and self.clock.now > 10:
                self.restarts.remove(node)
                self.start(node - 100, node)
                self._dead.add(node)
            if node in self.errors:
                yield Message(Error(self.errors[node], "as it likes"), reply_to=self.open.pop(key))
            elif node not in self._dead | self.restarts:
                yield self._app(self.open.pop(key), self._contexts[node])


def test_silent_node_costs_a_minute_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grid = DeploymentGrid(monkeypatch, 0, 2)
    run = start_federation(tmp_path, grid)
    grid.start(1, 101)
    grid.kill(101)
    caplog.clear()
    state, _ = run.training.train_round(START)
    assert grid.clock.now == 60
    for _ in range(2):
        state, _ = run.training.train_round(state)
    assert grid.clock.now == 60
    assert warnings(caplog) == ["Node 101 has not identified itself yet; it takes part as soon as it does"]
    grid.start(1, 101)  # restarted, still silent: a new question, without waiting
    state, _ = run.training.train_round(state)
    assert grid.clock.now == pytest.approx(60) and grid.received.count((101, "query")) == 2
    grid.revive(101)
    _, outcome = run.training.train_round(state)
    assert [r.client for r in outcome.reports] == [0, 1, 2] and grid.received.count((101, "query")) == 2


def test_node_that_failed_once_is_not_waited_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = DeploymentGrid(monkeypatch, 0, 2)
    run = start_federation(tmp_path, grid)
    grid.start(1, 101)
    grid.errors[101] = ErrorCode.NODE_UNAVAILABLE
    run.clients.manager.discover_new_nodes()
    del grid.errors[101]
    grid.kill(101)
    run.clients.manager.discover_new_nodes()
    assert grid.clock.now < 1 and grid.received.count((101, "query")) == 2


def test_start_counts_late_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = DeploymentGrid(monkeypatch, 0, 1, 2)
    grid.kill(101)
    monkeypatch.setattr(SLEEP, lambda seconds: grid.revive(101))
    run = start_federation(tmp_path, grid, **{"min-replies": 1.0, "node-wait": 600})
    assert len(run.clients.nodes) == 3 and grid.received.count((101, "query")) == 1


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN, ErrorCode.CLIENT_APP_CRASHED])
def test_error_of_a_node_is_not_taken_for_dead_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A node can reply with any code: it is not asked for minutes, and does not end the run."""
    grid, times = DeploymentGrid(monkeypatch, 0, 1, 2), 1 if code == ErrorCode.UNKNOWN else 2
    run = start_federation(tmp_path, grid, **{"min-replies": 1.0, "round-timeout": 290})
    grid.errors[101] = code
    with pytest.raises(TooFewRepliesError, match="client 1: as it likes"):
        run.training.train_round(START)
    assert grid.received.count((101, "train")) == times and grid.clock.now == 0

    caplog.clear()
    grid.start(1, 300)
    grid.errors[300] = code
    for _ in range(3):
        run.clients.manager.discover_new_nodes()
    assert warnings(caplog).count("Node 300 did not identify itself: as it likes") == 1
    assert grid.clock.now == 0


def test_node_that_restarts_in_a_round_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = DeploymentGrid(monkeypatch, 0, 1, 2)
    run = start_federation(tmp_path, grid, **{"round-timeout": 1800})
    grid.restarts.add(101)
    state, outcome = run.training.train_round(START)
    assert outcome.failures == [{"client": 1, "reason": "its node went offline after the message was sent"}]
    assert grid.clock.now == 12
    grid.revive(101)
    _, outcome = run.training.train_round(state)
    assert outcome.failures == []


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


def test_node_that_can_never_take_part_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named in the error, and not the node before it that may yet answer."""
    monkeypatch.setattr(SLEEP, never_wait)
    grid = SuperLinkErrorGrid(0, 1, 2)
    grid.kill(100)
    grid._contexts[101].node_config["num-partitions"] = 5
    with pytest.raises(RunError, match=r"^node 101 cannot take part: client 1 holds one of 5 partitions"):
        start_federation(tmp_path, grid, **{"min-replies": 1.0, "node-wait": 60})


def test_identity_query_raises_if_every_process_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLEEP, lambda seconds: None)
    grid = SuperLinkErrorGrid(0, 1, 2, error=ErrorCode.UNKNOWN)  # Flower's code if Ray's actor died
    grid.kill(101)
    assert sorted(start_federation(tmp_path / "one", grid).clients.nodes) == [0, 2]
    for node in (100, 102):
        grid.kill(node)
    with pytest.raises(ProcessesDiedError, match=r"^every client process died during the identity query$"):
        start_federation(tmp_path / "all", grid)


def test_process_that_died_in_a_round_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "time", Clock())
    grid = SuperLinkErrorGrid(0, 1, 2, error=ErrorCode.UNKNOWN)
    run = start_federation(tmp_path, grid, **{"min-replies": 1.0})
    grid.kill(101)
    with pytest.raises(ProcessesDiedError, match="round 1: 1 of 3 clients failed"):
        run.training.train_round(START)


def test_process_that_died_in_a_plan_query_is_reported_as_such(tmp_path: Path) -> None:
    """The launcher then resumes the run in new processes."""
    grid = SuperLinkErrorGrid(0, 1, 2, error=ErrorCode.UNKNOWN)
    run = start_federation(tmp_path, grid, policy="uniform")
    grid.kill(101)
    with pytest.raises(ProcessesDiedError):
        run.clients.plan()


def test_messages_are_sent_again_while_a_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "time", Clock())
    grid = SuperLinkErrorGrid(0, 1, 2, error=ErrorCode.UNKNOWN)

    def ask() -> dict[int, Message]:
        grid.asked.clear()
        return deliver(grid, [messages.build_query(node, "identity") for node in (100, 101, 102)], 0)

    grid.kill(101)
    assert [reply.has_error() for _, reply in sorted(ask().items())] == [False, True, False]
    assert grid.asked.count(101) > 10
    for node in (100, 102):
        grid.kill(node)
    assert all(reply.has_error() for reply in ask().values())
    assert grid.asked.count(101) == 1 + delivery._PROBE_ATTEMPTS


def test_second_reply_to_a_message_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwiceGrid(ChurnGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return [reply for reply in super().send_and_receive(messages) for _ in range(2)]

    reported: list[int] = []
    out = [messages.build_query(node, "identity") for node in (100, 101)]
    assert sorted(deliver(TwiceGrid(0, 1), out, 0, lambda node, reply: reported.append(node))) == [100, 101]
    assert reported == [100, 101]


def test_node_that_was_offline_already_has_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = DeploymentGrid(monkeypatch, 0, 1)
    grid.kill(101)
    grid.stop(101)
    replies = deliver(grid, [messages.build_query(node, "identity") for node in (100, 101)], 6)
    assert sorted(replies) == [100] and grid.clock.now == 6


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


def test_only_clients_that_are_online_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[int, int]] = []

    def evaluate(grid: Any, config: Any, nodes: dict[int, int], state: Any) -> dict[str, Any]:
        asked.append(nodes)
        return {"accuracy": 0.5}

    monkeypatch.setattr("fedeas_flwr.federation.federation.evaluate_on_clients", evaluate)
    grid = ChurnGrid(0, 1, 2)
    run = start_federation(tmp_path, grid, rounds=1)
    run.clients.plan()
    grid.stop(101)
    run.fit(START, None)
    assert asked == [{0: 100, 2: 102}]
