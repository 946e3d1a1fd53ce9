"""Which node is which client, and which clients are online.

In a simulation all nodes are online from the start. In a deployment they come and go: a machine is switched on late, is
offline for a round, or returns, perhaps under another node id while the old one still counts as online (a SuperNode
without a registered key gets a new id at every start). So a client is identified by its own id, not by its node's. The
server asks new nodes for it before every round.

A node cannot take the id of another. In a deployment its key decides which client it is. Without keys a client is the
node that was first seen with its id, until that node is offline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from logging import INFO, WARNING

from flwr.app import Message
from flwr.serverapp import Grid

from fedeas_flwr.common.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.delivery import collect, deliver, has_died, is_simulated
from fedeas_flwr.federation.flower_internals import APP_RAISED

log = logging.getLogger("flwr").log

_ANSWER_SECONDS, _SIMULATION_ANSWER_SECONDS = 60.0, 300.0
"""Seconds that the run waits for a node to identify itself: it starts a process for the reply, which imports torch.
A later reply counts too, but is not waited for. In a simulation all processes import torch at once, perhaps on a busy
machine."""
_NO_WAIT = 1e-9
"""Seconds for a query whose reply is collected later."""
_POLL_SECONDS = 0.2
"""Seconds between two checks of which nodes are online."""
_CLIENT_ERRORS = (messages.CLIENT_FAILED, APP_RAISED)
"""Error codes that a retry does not fix; the others concern nodes that are offline or not ready yet."""


class ClientManager:
    """Maps the federation's clients to their nodes.

    It calls ``declare`` with every client that takes part and its number of real samples.
    """

    def __init__(self, grid: Grid, config: RunConfig, declare: Callable[[int, int], None]) -> None:
        self._grid, self._config, self._declare = grid, config, declare
        self._classes = messages.classes_digest(dataset_info(config.dataset).classes)
        self.nodes: dict[int, int] = {}
        """Client → its node."""
        self.keys: Mapping[str, int] | None = None
        """Public key → its client; nodes with other keys are rejected. ``None`` if the app has no keys."""
        self.admitted: Collection[int] | None = None
        """Clients that made the strategy's disclosure; all others are excluded. ``None`` if it requires none."""
        self._online: dict[int, tuple[str, str]] = {}
        """Nodes online, in the order in which they were first seen → public key and when it connected, if known."""
        self._rejected: dict[int, str] = {}
        """Node → why it does not take part. It is asked again if it restarts."""
        self._rivals: dict[int, tuple[int, int]] = {}
        """Node → client id, which another node has, and number of samples. It takes over when that node is offline."""
        self._unanswered: dict[int, Message] = {}
        """Node → identity query to which it has not replied yet."""
        self._late_nodes: set[int] = set()
        """Nodes that the run has waited for in vain; they are asked again, but not waited for."""
        self._logged: set[str] = set()

    def wait_for_clients(self) -> None:
        """Wait until all clients have identified themselves.

        After ``node-wait`` seconds the run starts if the fraction `min-replies` of them has; the others may join later.
        If fewer have, raise `RunError`.
        """
        deadline, clients = time.monotonic() + self._config.node_wait, self._config.clients
        expected = clients if self.admitted is None else len(self.admitted)
        required = self._config.min_replies_for(clients)
        while True:
            nodes, late = self._nodes_online(), time.monotonic() >= deadline
            failed = self._query_unknown_nodes(nodes) if len(nodes) >= (required if late else expected) else []
            if len(self.nodes) >= expected:
                break
            if late or any(final for final, _ in failed):
                if len(self.nodes) < required:
                    raise _cannot_start_error(self._config, len(self._online), failed, self._rejections())
                log(WARNING, "Starting with %d of %d clients", len(self.nodes), clients)
                break
            time.sleep(_POLL_SECONDS)
        log(INFO, "Federation of %d clients", len(self.nodes))

    def available(self, sampled: Sequence[int]) -> list[int]:
        """Return the sampled clients that are online; while too few are, wait for up to ``node-wait`` seconds."""
        deadline = time.monotonic() + self._config.node_wait
        while True:
            online = set(self._grid.get_node_ids())
            available = [client for client in sampled if self.nodes[client] in online]
            if len(available) >= self._config.min_replies_for(len(sampled)) or time.monotonic() >= deadline:
                return available
            time.sleep(_POLL_SECONDS)
            self.discover_new_nodes()

    def discover_new_nodes(self) -> None:
        """Ask new nodes for their client ids."""
        self._query_unknown_nodes(self._nodes_online())

    def _nodes_online(self) -> list[int]:
        """Return the nodes that are online and not rejected, in the order in which they were first seen."""
        found: dict[int, tuple[str, str]]
        if self.keys is None and is_simulated(self._grid):
            found = dict.fromkeys(self._grid.get_node_ids(), ("", ""))
        else:
            nodes = self._grid.get_nodes()
            found = {n.node_id: (n.public_key.decode(errors="replace"), n.last_activated_at) for n in nodes}
        for node in [node for node, seen in self._online.items() if found.get(node) != seen]:  # gone or restarted
            for kept in (self._rejected, self._rivals, self._unanswered):
                kept.pop(node, None)
        self._online = {node: found[node] for node in [*self._online, *found] if node in found}
        for node, (key, _) in found.items():
            if self.keys is not None and key not in self.keys:
                self._rejected[node] = "is rejected: its key is none of this deployment's"
                self._log_once(f"Node {node} {self._rejected[node]}")
        return [node for node in self._online if node not in self._rejected]

    def _query_unknown_nodes(self, nodes: Collection[int]) -> list[tuple[bool, str]]:
        """Ask unknown nodes for their client ids; return the failures: whether a retry is useless, and the reason."""
        simulated = is_simulated(self._grid)
        seconds = _SIMULATION_ANSWER_SECONDS if simulated else _ANSWER_SECONDS
        self._replace_offline_nodes()
        known = {*self.nodes.values(), *self._rivals, *self._unanswered}
        questions = {node: messages.build_query(node, "identity") for node in nodes if node not in known}
        replies = collect(self._grid, list(self._unanswered.values()))
        if questions:
            patience = seconds if simulated or questions.keys() - self._late_nodes else _NO_WAIT
            replies |= deliver(self._grid, list(questions.values()), patience)
        if replies and all(has_died(self._grid, reply) for reply in replies.values()):
            raise ProcessesDiedError("every client process died during the identity query")
        failed: list[tuple[bool, str]] = []
        for node in [node for node in self._online if node in replies]:
            final, reason = self._admit(node, replies[node])
            if reason:
                failed.append((final, f"node {node} {reason}"))
                self._late_nodes.add(node)
                self._log_once(f"Node {node} {reason}")
        self._unanswered = {n: asked for n, asked in (self._unanswered | questions).items() if n not in replies}
        self._late_nodes |= self._unanswered.keys()
        silent = "has not identified itself yet"
        for node in self._unanswered:
            self._log_once(f"Node {node} {silent}; it takes part as soon as it does")
            failed.append((False, f"node {node} {silent}"))
        return failed

    def _admit(self, node: int, reply: Message) -> tuple[bool, str]:
        """Register the node by its answer; if that fails, return whether a retry is useless, and the reason."""
        try:
            client, partitions, examples, classes = messages.read_answer(reply, "partitions", "examples", "classes")
        except MessageError as error:
            final = not reply.has_error() or reply.error.code in _CLIENT_ERRORS
            return final, f"did not identify itself: {error}"
        if reason := self._refusal(client, partitions, classes, node):
            self._rejected[node] = reason
            return True, reason
        self._register(client, examples, node)
        return False, ""

    def _refusal(self, client: int, partitions: int, classes: int, node: int) -> str:
        """Return why a node cannot take part with these answers, or an empty text."""
        expected, key = self._config.clients, self._online[node][0]
        if self.keys is not None and self.keys[key] != client:
            return f"is rejected: it identifies itself as client {client}, but its key is client {self.keys[key]}'s"
        if classes != self._classes:
            differ = f"dataset = {self._config.dataset!r}: its class names or their order differ from the server's"
            return f"cannot take part: {differ}"
        if partitions and partitions != expected:
            return (
                f"cannot take part: client {client} holds one of {partitions} partitions, but the federation has "
                f"{counted(expected, 'client')}: set clients = {partitions} to wait for all of them, "
                f"or start the nodes with num-partitions = {expected}"
            )
        return ""

    def _register(self, client: int, examples: int, node: int) -> None:
        expected, current = self._config.clients, self.nodes.get(client)
        if current in self._online:
            self._rivals[node] = client, examples
            self._log_once(f"Node {node} {self._rival_reason(client)}")
        elif current is not None:
            log(INFO, "Client %d rejoined as node %d", client, node)
            self.nodes[client] = node
        elif (missed := self.admitted is not None and client not in self.admitted) or len(self.nodes) >= expected:
            why = "its strategy collected disclosures before the first round" if missed else f"clients = {expected}"
            self._rejected[node] = f"joined too late: {why}"
            self._log_once(f"Client {client} joined too late and is excluded from this run: {why}")
        else:
            self.nodes[client] = node
            self._declare(client, examples)

    def _replace_offline_nodes(self) -> None:
        """Let nodes take over the client ids of nodes that are offline now."""
        for node, (client, examples) in list(self._rivals.items()):
            if self.nodes[client] not in self._online:
                del self._rivals[node]
                self._register(client, examples, node)

    def _rejections(self) -> list[str]:
        """Return why nodes that are online do not take part."""
        rivals = {node: self._rival_reason(client) for node, (client, _) in self._rivals.items()}
        return [f"node {node} {why}" for node, why in (self._rejected | rivals).items()]

    def _rival_reason(self, client: int) -> str:
        both = f"both have the id of client {client}, give each node its own client-id or partition-id"
        return f"is rejected while node {self.nodes[client]} is online: {both}"

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log(WARNING, text)


def count_clients(grid: Grid, config: RunConfig) -> int:
    """Return the run's number of clients: `clients` if it is set, else the number of nodes in the federation."""
    deadline = time.monotonic() + config.node_wait
    while not config.clients:
        nodes = list(grid.get_node_ids())
        if nodes:
            return len(nodes)
        if time.monotonic() >= deadline:
            raise _cannot_start_error(config, 0, [], [])
        time.sleep(_POLL_SECONDS)
    return config.clients


def _cannot_start_error(
    config: RunConfig, nodes: int, failed: Sequence[tuple[bool, str]], rejected: Sequence[str]
) -> RunError:
    if failed:
        return RunError(next((why for final, why in failed if final), failed[0][1]))
    required = f"clients = {config.clients}" if config.clients else "a run needs at least one client"
    federation = f"{required}, but the federation has {counted(nodes, 'node')}"
    if rejected:
        return RunError(f"{federation}, and {rejected[0]}")
    return RunError(
        f"{federation}: start more, in a simulation with "
        f'--federation-config "num-supernodes={config.clients or 2}", or set clients = {nodes}'
    )
