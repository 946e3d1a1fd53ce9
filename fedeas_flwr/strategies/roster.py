"""Before the rounds: who the clients are, what they declare, and what a matched budget gives each of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedeas_flwr import messages
from fedeas_flwr.allocation import shares
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.messages import Share
from fedeas_flwr.strategies.declarations import Declarations
from fedeas_flwr.strategies.delivery import deliver, has_died
from fedeas_flwr.strategies.disclosure import NeedsDisclosure
from fedeas_flwr.strategies.members import Members
from fedeas_flwr.waterfill import waterfill_level

log = logging.getLogger("flwr").log

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
        self.shares: dict[int, Share] = {}
        self.declared = Declarations(config)
        self.members = Members(grid, config, self.declared.note)
        self.nodes = self.members.nodes
        """Client → node."""
        self.refused: dict[int, str] = {}
        """Client → why its part of the plan was refused; it generates nothing."""

    def discover(self) -> int:
        """Learn which node is which client, and return how many there are."""
        self.members.gather()
        return len(self.nodes)

    def plan(self) -> None:
        """Agree on a matched budget: each client says two whole numbers and is given its share of the total.

        Once a run: who is there when it is resumed changes nobody's share.
        """
        if self.config.matched and self.config.policy != "greedy" and not self.shares:
            self.shares = self._matched_shares(sorted(self.nodes)) | dict.fromkeys(self.refused, NOTHING)

    def share_of(self, client: int) -> Share:
        """A client's part of a matched budget, which was spent on those who were there; other policies read none."""
        return self.shares.get(client, NOTHING)

    def _matched_shares(self, clients: Sequence[int]) -> dict[int, Share]:
        spent, absent = self._ask_all("plan", ("total", "absent"), self.declared.check_plan, self.config.beta)
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

    def _ask_all(self, question: str, keys: Sequence[str], check: Callable[..., None], at: float) -> list[Any]:
        """Ask every client, and return one array a key in ascending client id; a refused answer counts as zeros."""
        clients, rows = sorted(self.nodes), []
        replies = self.query([messages.ask(self.nodes[c], question, at) for c in clients])
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
                raise RunError(f"a client could not answer a query: {messages.failure_reason(reply)}")
        if len(replies) < len(questions):
            missing, within = len(questions) - len(replies), f"round-timeout = {self.config.round_timeout:g} s"
            raise RunError(f"{missing} of {len(questions)} clients did not answer a query within {within}")
        return [replies[question.metadata.dst_node_id] for question in questions]


def tell(strategy: NeedsDisclosure, config: RunConfig, clients: Mapping[int, int], replies: Sequence[Message]) -> None:
    """Check the answers of all clients (node → client), give them to the strategy, and say what that was."""
    disclosure = strategy.disclosure
    wanted, told = disclosure.wanted(config), {}
    try:
        for reply in replies:
            client = clients[reply.metadata.src_node_id]
            told[client] = messages.read_disclosed(reply, client, wanted)
        strategy.be_told({client: told[client] for client in sorted(told)})
    except MessageError as error:
        raise RunError(f"the answer to '{disclosure.question}' is not what it should be: {error}") from None
    size = sum(array.nbytes for array in wanted.values())
    log(INFO, "%s = true: each of %d clients disclosed %s (%d bytes)", disclosure.key, len(told), disclosure.what, size)
