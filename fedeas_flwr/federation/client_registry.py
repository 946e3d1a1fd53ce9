"""The run's clients: who they are, what they declared, and each one's share of a matched budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from logging import INFO, WARNING

from flwr.app import Message
from flwr.serverapp import Grid

from fedeas_flwr.common.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_manager import ClientManager
from fedeas_flwr.federation.declarations import DeclaredSampleCounts
from fedeas_flwr.federation.delivery import deliver, has_died
from fedeas_flwr.policies.interface import EMPTY_SHARE, Share
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.strategies.interface import NeedsDisclosure

log = logging.getLogger("flwr").log


class ClientRegistry:
    """The clients behind a grid."""

    def __init__(self, grid: Grid, config: RunConfig) -> None:
        self.grid, self.config = grid, config
        self.shares: dict[int, Share] = {}
        """Client → its share of a matched budget."""
        self.declared = DeclaredSampleCounts(config)
        self.manager = ClientManager(grid, config, self.declared.note)
        self.nodes = self.manager.nodes
        """Client → node."""
        self.refused: dict[int, str] = {}
        """Client → why its reply to a matched policy was rejected; its share is empty."""

    def discover(self) -> int:
        """Wait for the clients to identify themselves; return their number."""
        self.manager.wait_for_clients()
        return len(self.nodes)

    def plan(self) -> None:
        """Split a matched policy's total among the clients, by the whole numbers that they reply with.

        This happens once per run: clients that are online when it is resumed do not change the shares.
        """
        policy = self.config.find_policy()
        if isinstance(policy, MatchedPolicy) and not self.shares:
            classes = len(dataset_info(self.config.dataset).classes)
            shares = policy.split_total(partial(self._query_all, policy), classes, self.config.policy_settings)
            self.shares = shares | dict.fromkeys(self.refused, EMPTY_SHARE)

    def shares_to_keep(self) -> dict[int, tuple[int, int, float]]:
        """Return the shares as a checkpoint stores them."""
        return {client: (share.base, share.extra, share.level) for client, share in self.shares.items()}

    def share_of(self, client: int) -> Share:
        """Return a client's share; an empty one for a client that joined after the total was split."""
        return self.shares.get(client, EMPTY_SHARE)

    def _query_all(self, policy: MatchedPolicy, question: str, at: float) -> dict[int, Sequence[int]]:
        """Ask every client; return the numbers of the clients never rejected, in ascending client id."""
        clients = sorted(self.nodes)
        replies = self._query([messages.build_query(self.nodes[c], question, at) for c in clients])
        found = {}
        for client, reply in zip(clients, replies, strict=True):
            try:
                found[client] = self.read_numbers(client, reply, policy, question, at)
            except MessageError as error:
                log(WARNING, "client %d gets no share of the budget, its reply is rejected: %s", client, error)
                self.refused.setdefault(client, f"{question}: {error}")
        return {client: numbers for client, numbers in found.items() if client not in self.refused}

    def read_numbers(
        self, client: int, reply: Message, policy: MatchedPolicy, question: str, at: float
    ) -> Sequence[int]:
        """Return the whole numbers of a client's reply to a question; raise `MessageError` for an impossible one."""
        keys = policy.questions.get(question, ())
        sender, *numbers = messages.read_answer(reply, *keys)
        if sender != client:
            raise MessageError(f"client-id = {sender}, but the question was for client {client}")
        if keys:
            self.declared.check_reply(client, policy, question, at, numbers)
        return numbers

    def collect_disclosures(self, strategy: NeedsDisclosure) -> None:
        """Ask every client for the strategy's disclosure, check the replies and pass them to the strategy."""
        disclosure, clients = strategy.disclosure, sorted(self.nodes)
        replies = self._query([messages.build_query(self.nodes[client], disclosure.question) for client in clients])
        expected = disclosure.expected(self.config)
        try:
            found = {
                client: messages.read_disclosed(reply, client, expected)
                for client, reply in zip(clients, replies, strict=True)
            }
            strategy.receive_disclosures(found)
        except MessageError as error:
            raise RunError(f"invalid reply to the question '{disclosure.question}': {error}") from None
        size = sum(array.nbytes for array in expected.values())
        text = "%s = true: %d clients disclosed %s (%d bytes each)"
        log(INFO, text, disclosure.key, len(found), disclosure.what, size)

    def _query(self, questions: Sequence[Message]) -> list[Message]:
        """Send queries and return the replies in the same order; raise `RunError` unless every client replies."""
        replies = deliver(self.grid, questions, self.config.round_timeout)
        for reply in replies.values():
            if has_died(self.grid, reply):
                raise ProcessesDiedError(f"client processes died during a query: {messages.failure_reason(reply)}")
            if reply.has_error():
                raise RunError(f"a client failed to answer a query: {messages.failure_reason(reply)}")
        if len(replies) < len(questions):
            missing, within = len(questions) - len(replies), f"round-timeout = {self.config.round_timeout:g} s"
            raise RunError(f"{missing} of {len(questions)} clients did not answer a query within {within}")
        return [replies[question.metadata.dst_node_id] for question in questions]
