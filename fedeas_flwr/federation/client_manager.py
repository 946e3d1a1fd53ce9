"""Who takes part: which node is which client, and who is there just now.

In a simulation all nodes are there from the start. In a deployment they come and go: a machine is switched on late, is
away for a round, or comes back, perhaps under another node id while the old one still counts as online (a SuperNode
without a registered key is given a new one at every start). The client's own id says who it is. So whoever is new is
asked, before every round, and the node that answered last is the client's.
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
"""What a node gets to say who it is: a process is started for it there, and torch is imported."""
_POLL_SECONDS = 0.2
_CLIENT_ERRORS = (messages.CLIENT_FAILED, APP_RAISED)
"""Errors that asking again does not mend; the others are about nodes that are gone or not there yet."""


class ClientManager:
    """The federation's clients, known by their own ids.

    Parameters
    ----------
    grid
        Whose nodes they are.
    config
        ``clients`` is the number K of those that take part in this run, now or later.
    declare
        Told every client that takes part and its number of real samples.
    """

    def __init__(self, grid: Grid, config: RunConfig, declare: Callable[[int, int], None]) -> None:
        self._grid, self._config, self._declare = grid, config, declare
        self._classes = messages.classes_digest(dataset_info(config.dataset).classes)
        self.nodes: dict[int, int] = {}
        """Client → the node that last said it is that client."""
        self.asked: Collection[int] | None = None
        """Clients that were asked what the strategy had to know: all others stay out. ``None``: nobody has to."""
        self._done_with: set[int] = set()
        """Nodes of clients that have a newer one, or that came too late."""

    def wait_for_clients(self) -> None:
        """Wait for the clients and learn who they are.

        After ``node-wait`` seconds the run starts with the part of them that `min-replies` asks for; the others may
        join later.
        """
        deadline, clients = time.monotonic() + self._config.node_wait, self._config.clients
        wanted, enough = clients if self.asked is None else len(self.asked), self._config.min_replies_for(clients)
        while True:
            nodes, late = list(self._grid.get_node_ids()), time.monotonic() >= deadline
            failed = self._query_unknown_nodes(nodes) if len(nodes) >= (enough if late else wanted) else []
            if len(self.nodes) >= wanted:
                break
            if late or any(final for final, _ in failed):
                if len(self.nodes) < enough:
                    raise _cannot_start_error(self._config, nodes, failed)
                log(WARNING, "Starting with %d of %d clients", len(self.nodes), clients)
                break
            time.sleep(_POLL_SECONDS)
        log(INFO, "Federation of %d clients", len(self.nodes))

    def available(self, chosen: Sequence[int]) -> list[int]:
        """Those of ``chosen`` that can be sent to now; below the quorum, up to ``node-wait`` seconds are given them."""
        deadline = time.monotonic() + self._config.node_wait
        while True:
            online = set(self._grid.get_node_ids())
            there = [client for client in chosen if self.nodes[client] in online]
            if len(there) >= self._config.min_replies_for(len(chosen)) or time.monotonic() >= deadline:
                return there
            time.sleep(_POLL_SECONDS)
            self.discover_new_nodes()

    def discover_new_nodes(self) -> None:
        """Ask nodes that are new who they are."""
        self._query_unknown_nodes(list(self._grid.get_node_ids()))

    def _query_unknown_nodes(self, nodes: Collection[int]) -> list[tuple[bool, str]]:
        """Ask those not known yet; return the failures: whether the client itself refused, and why."""
        known = {*self.nodes.values(), *self._done_with}
        asked = {node for node in nodes if node not in known}
        questions = [messages.build_query(node, "identity") for node in sorted(asked)]
        failed: list[tuple[bool, str]] = []
        replies = deliver(self._grid, questions, ANSWER_SECONDS) if questions else {}
        if replies and all(map(has_died, replies.values())):
            raise ProcessesDiedError("every client process died when asked who it is")
        for node, reply in replies.items():
            try:
                if reply.has_error():
                    raise MessageError(messages.failure_reason(reply))
                client, partitions, examples, classes = messages.read_answer(reply, "partitions", "examples", "classes")
            except MessageError as error:
                final = not reply.has_error() or reply.error.code in _CLIENT_ERRORS
                failed.append((final, f"node {node} does not say who it is: {error}"))
                continue
            if classes != self._classes:
                others = f"dataset = {self._config.dataset!r}: its classes are others there than on the server"
                failed.append((True, f"node {node} cannot take part: {others}, by name or order"))
                log(WARNING, failed[-1][1])
                continue
            self._register(client, partitions, examples, node, asked)
        silent = f"did not say who it is within {ANSWER_SECONDS:g} s"
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
            raise RunError(f"two nodes say they are client {client}: give each its own client-id or partition-id")
        if client in self.nodes:
            log(INFO, "Client %d is back, as node %d", client, node)
            self._done_with.add(self.nodes[client])
        elif (missed := self.asked is not None and client not in self.asked) or len(self.nodes) >= expected:
            self._done_with.add(node)
            why = "its strategy asked all clients before the first round" if missed else f"clients = {expected}"
            log(WARNING, "Client %d came too late for this run: %s", client, why)
            return
        self.nodes[client] = node
        self._declare(client, examples)


def count_clients(grid: Grid, config: RunConfig) -> int:
    """How many clients the run has: what `clients` says, else as many as the federation has nodes."""
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
    wanted = f"clients = {config.clients}" if config.clients else "a run needs at least one client"
    return RunError(
        f"{wanted}, but the federation has {counted(len(nodes), 'node')}: start more, in a simulation with "
        f'--federation-config "num-supernodes={config.clients or 2}", or set clients = {len(nodes)}'
    )
