"""Which node is which client, and which clients are online.

In a simulation all nodes are online from the start. In a deployment they come and go: a machine is switched on late, is
offline for a round, or returns, perhaps under another node id while the old one still counts as online (a SuperNode
without a registered key gets a new id at every start). So a client is identified by its own id, not by its node's. The
server asks new nodes for it before every round, and the node that answered last belongs to the client.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from logging import INFO, WARNING

from flwr.serverapp import Grid

from fedeas_flwr.common.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.delivery import deliver, has_died
from fedeas_flwr.federation.flower_internals import APP_RAISED

log = logging.getLogger("flwr").log

ANSWER_SECONDS = 120.0
"""Seconds that a node has to identify itself: it starts a process for the reply, which imports torch."""
_POLL_SECONDS = 0.2
"""Seconds between two checks of which nodes are online."""
_CLIENT_ERRORS = (messages.CLIENT_FAILED, APP_RAISED)
"""Error codes that a retry does not fix; the others concern nodes that are offline or not ready yet."""


class ClientManager:
    """Maps the federation's clients to their nodes.

    Parameters
    ----------
    grid
        The grid of the nodes.
    config
        ``clients`` is the number K of clients that take part in this run, now or later.
    declare
        Called with every client that takes part and its number of real samples.
    """

    def __init__(self, grid: Grid, config: RunConfig, declare: Callable[[int, int], None]) -> None:
        self._grid, self._config, self._declare = grid, config, declare
        self._classes = messages.classes_digest(dataset_info(config.dataset).classes)
        self.nodes: dict[int, int] = {}
        """Client → the node that last identified itself as that client."""
        self.admitted: Collection[int] | None = None
        """Clients that made the strategy's disclosure; all others are excluded. ``None`` if it requires none."""
        self._ignored_nodes: set[int] = set()
        """Nodes of clients that have a newer node, or that joined too late."""

    def wait_for_clients(self) -> None:
        """Wait until all clients have identified themselves.

        After ``node-wait`` seconds the run starts if the fraction `min-replies` of them has; the others may join later.

        Raises
        ------
        RunError
            If too few clients have identified themselves by then.
        """
        deadline, clients = time.monotonic() + self._config.node_wait, self._config.clients
        expected = clients if self.admitted is None else len(self.admitted)
        required = self._config.min_replies_for(clients)
        while True:
            nodes, late = list(self._grid.get_node_ids()), time.monotonic() >= deadline
            failed = self._query_unknown_nodes(nodes) if len(nodes) >= (required if late else expected) else []
            if len(self.nodes) >= expected:
                break
            if late or any(final for final, _ in failed):
                if len(self.nodes) < required:
                    raise _cannot_start_error(self._config, nodes, failed)
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
        self._query_unknown_nodes(list(self._grid.get_node_ids()))

    def _query_unknown_nodes(self, nodes: Collection[int]) -> list[tuple[bool, str]]:
        """Ask unknown nodes for their client ids; return the failures: whether a retry is useless, and the reason."""
        known = {*self.nodes.values(), *self._ignored_nodes}
        asked = {node for node in nodes if node not in known}
        questions = [messages.build_query(node, "identity") for node in sorted(asked)]
        failed: list[tuple[bool, str]] = []
        replies = deliver(self._grid, questions, ANSWER_SECONDS) if questions else {}
        if replies and all(map(has_died, replies.values())):
            raise ProcessesDiedError("every client process died during the identity query")
        for node, reply in replies.items():
            try:
                if reply.has_error():
                    raise MessageError(messages.failure_reason(reply))
                client, partitions, examples, classes = messages.read_answer(reply, "partitions", "examples", "classes")
            except MessageError as error:
                final = not reply.has_error() or reply.error.code in _CLIENT_ERRORS
                failed.append((final, f"node {node} did not identify itself: {error}"))
                continue
            if classes != self._classes:
                differ = f"dataset = {self._config.dataset!r}: its class names or their order differ from the server's"
                failed.append((True, f"node {node} cannot take part: {differ}"))
                log(WARNING, failed[-1][1])
                continue
            self._register(client, partitions, examples, node, asked)
        silent = f"did not identify itself within {ANSWER_SECONDS:g} s"
        return failed + [(False, f"node {node} {silent}") for node in sorted(asked - replies.keys())]

    def _register(self, client: int, partitions: int, examples: int, node: int, asked: Collection[int]) -> None:
        expected = self._config.clients
        if partitions and partitions != expected:
            raise RunError(
                f"client {client} holds one of {partitions} partitions, but the federation has "
                f"{counted(expected, 'client')}: set clients = {partitions} to wait for all of them, "
                f"or start the nodes with num-partitions = {expected}"
            )
        if self.nodes.get(client) in asked:
            raise RunError(f"two nodes have the id of client {client}: give each its own client-id or partition-id")
        if client in self.nodes:
            log(INFO, "Client %d rejoined as node %d", client, node)
            self._ignored_nodes.add(self.nodes[client])
        elif (missed := self.admitted is not None and client not in self.admitted) or len(self.nodes) >= expected:
            self._ignored_nodes.add(node)
            why = "its strategy collected disclosures before the first round" if missed else f"clients = {expected}"
            log(WARNING, "Client %d joined too late and is excluded from this run: %s", client, why)
            return
        self.nodes[client] = node
        self._declare(client, examples)


def count_clients(grid: Grid, config: RunConfig) -> int:
    """Return the run's number of clients: `clients` if it is set, else the number of nodes in the federation."""
    deadline = time.monotonic() + config.node_wait
    while not config.clients:
        nodes = list(grid.get_node_ids())
        if nodes:
            return len(nodes)
        if time.monotonic() >= deadline:
            raise _cannot_start_error(config, nodes, [])
        time.sleep(_POLL_SECONDS)
    return config.clients


def _cannot_start_error(config: RunConfig, nodes: Collection[int], failed: Sequence[tuple[bool, str]]) -> RunError:
    if failed:
        return RunError(next((why for final, why in failed if final), failed[0][1]))
    required = f"clients = {config.clients}" if config.clients else "a run needs at least one client"
    return RunError(
        f"{required}, but the federation has {counted(len(nodes), 'node')}: start more, in a simulation with "
        f'--federation-config "num-supernodes={config.clients or 2}", or set clients = {len(nodes)}'
    )
