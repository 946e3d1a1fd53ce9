"""Before the rounds: who the clients are, what they declare, and what a matched budget gives each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log

from fedeas_flwr import messages
from fedeas_flwr.allocation import shares
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.messages import MessageError, Share
from fedeas_flwr.runs import ProcessesDiedError, RunError
from fedeas_flwr.strategies.declarations import Declarations
from fedeas_flwr.strategies.delivery import deliver, has_died
from fedeas_flwr.waterfill import waterfill_level

NOTHING = Share(level=2.0)
"""No image under any policy: a marginal gain, which waterfill's level is, never exceeds 1."""


class Roster:
    """The clients behind a grid.

    Parameters
    ----------
    grid
        Any of Flower's grids, or the inline one.
    config
        The validated run-config.
    """

    def __init__(self, grid: Grid, config: RunConfig) -> None:
        self.grid, self.config = grid, config
        self.nodes: dict[int, int] = {}
        """Client → node."""
        self.shares: dict[int, Share] = {}
        self.declared = Declarations(config)
        self.refused: dict[int, str] = {}
        """Client → why its part of the plan was refused; it generates nothing."""

    def discover(self) -> int:
        """Learn which node is which client, and return how many there are."""
        nodes = wait_for_nodes(self.grid, self.config)
        replies = self.query([messages.ask(node, "identity") for node in nodes])
        for reply in replies:
            client, partitions, examples = self._read_identity(reply)
            if client in self.nodes:
                raise RunError(f"two nodes say they are client {client}: give each its own partition-id")
            if partitions != len(nodes):
                raise RunError(
                    f"client {client} holds one of {partitions} partitions, but the federation has {len(nodes)} nodes: "
                    f"set clients = {partitions} to wait for all of them"
                )
            self.nodes[client] = reply.metadata.src_node_id
            self.declared.note(client, examples)
        log(INFO, "Federation of %d clients", len(self.nodes))
        return len(self.nodes)

    def _read_identity(self, reply: Message) -> tuple[int, ...]:
        try:
            return messages.read_answer(reply, "partitions", "examples")
        except MessageError as error:
            raise RunError(f"node {reply.metadata.src_node_id} does not say who it is: {error}") from None

    def plan(self) -> None:
        """Agree on a matched budget: each client says two whole numbers and is given its share of the total."""
        if self.config.matched and self.config.policy != "greedy":
            self.shares = self._matched_shares(sorted(self.nodes)) | dict.fromkeys(self.refused, NOTHING)
        else:
            self.shares = dict.fromkeys(self.nodes, Share())

    def _matched_shares(self, clients: Sequence[int]) -> dict[int, Share]:
        spent, absent = self._ask_all("plan", ("total", "absent"), self.declared.check_plan)
        total = self.config.total or int(spent.sum())
        if self.config.policy == "waterfill":
            water = waterfill_level(total, self._count_at)
            return {c: Share(extra=int(e), level=water.level) for c, e in zip(clients, water.extra, strict=True)}
        pairs = (
            absent
            if self.config.policy == "missing-only"
            else np.full_like(absent, len(dataset_info(self.config.dataset).classes))
        )
        pairs[[client in self.refused for client in clients]] = 0
        parts = shares(total, pairs)
        return {c: Share(base, extra) for c, (base, extra) in zip(clients, parts, strict=True)}

    def _count_at(self, level: float) -> Any:
        def check(client: int, count: int) -> None:
            self.declared.check_count(client, count, level)

        return self._ask_all("waterfill", ("count",), check, level)[0]

    def _ask_all(self, question: str, keys: Sequence[str], check: Callable[..., None], level: float = 0.0) -> list[Any]:
        """Ask every client, and return one array a key in ascending client id; a refused answer counts as zeros."""
        clients, rows = sorted(self.nodes), []
        replies = self.query([messages.ask(self.nodes[c], question, level) for c in clients])
        for client, reply in zip(clients, replies, strict=True):
            try:
                found, *numbers = messages.read_answer(reply, *keys)
                if found != client:
                    raise MessageError(f"client-id = {found}, but the question was for client {client}")
                check(client, *numbers)
            except MessageError as error:
                log(WARNING, "client %d is refused a part of the plan: %s", client, error)
                self.refused.setdefault(client, f"{question}: {error}")
            rows.append([0] * len(keys) if client in self.refused else numbers)
        return [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]

    def query(self, questions: Sequence[Message]) -> list[Message]:
        """Ask, and return the answers in the order of the questions; all must answer."""
        replies = deliver(self.grid, questions, self.config.round_timeout)
        for reply in replies.values():
            if has_died(reply):
                raise ProcessesDiedError(f"client processes died over a query: {messages.failure_reason(reply)}")
            if reply.has_error():
                raise RunError(f"a client could not answer the first query: {messages.failure_reason(reply)}")
        if len(replies) < len(questions):
            raise RunError(
                f"{len(questions) - len(replies)} of {len(questions)} clients did not answer the first query"
            )
        return [replies[question.metadata.dst_node_id] for question in questions]


def wait_for_nodes(grid: Grid, config: RunConfig) -> list[int]:
    """Wait for the federation's nodes; their number is the federation's own unless ``clients`` says otherwise."""
    deadline = time.monotonic() + config.node_wait
    while True:
        nodes = sorted(grid.get_node_ids())
        if nodes and len(nodes) == (config.clients or len(nodes)):
            return nodes
        if time.monotonic() >= deadline:
            wanted = f"clients = {config.clients}" if config.clients else "a run needs at least one client"
            raise RunError(
                f"{wanted}, but the federation has {len(nodes)} nodes: "
                f'pass --federation-config "num-supernodes={config.clients or 2}" or set clients = {len(nodes)}'
            )
        time.sleep(0.2)
