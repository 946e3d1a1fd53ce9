"""The run's clients: who they are, what they declared, and each one's share of a matched budget.

A client's number of real samples N_k is its weight in every average, and a matched budget is split by it. So a client
declares it once, before the first round, and at most `max-examples`. A reply with another weight is rejected, and so is
a plan that no client with N_k samples can have.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from logging import INFO, WARNING

from flwr.app import Message
from flwr.serverapp import Grid

from fedeas_flwr.common.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_manager import ClientManager
from fedeas_flwr.federation.delivery import deliver, has_died
from fedeas_flwr.federation.messages import TrainReport
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


class DeclaredSampleCounts:
    """Records the clients' numbers of real samples, and checks later messages against them."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._classes = config, len(dataset_info(config.dataset).classes)
        self._examples: dict[int, int] = {}

    def note(self, client: int, examples: int) -> None:
        """Record a client's first declaration; later ones, after it rejoins, are ignored."""
        self._examples.setdefault(client, examples)

    def check_report(self, report: TrainReport, share: Share) -> None:
        """Raise `MessageError` if a train reply's numbers do not match the declaration."""
        declared, limit = self._examples[report.client], self._config.max_examples
        if max(declared, report.examples) > limit:
            raise MessageError(f"num-examples = {max(declared, report.examples)}, but max-examples = {limit}")
        if report.examples != declared and self._config.data_change == "refuse":
            raise MessageError(f"num-examples = {report.examples}, but the client first declared {declared}")
        images = self.max_images(report.client, share, report.examples)
        if report.generated + report.not_made > images:
            more = f" and not-made = {report.not_made}" if report.not_made else ""
            raise MessageError(f"generated = {report.generated}{more}, but its plan cannot exceed {images}")

    def max_images(self, client: int, share: Share, examples: int = 0) -> int:
        """Return the most images that a client's plan can have, by its declared samples or, if more, ``examples``."""
        samples, settings = max(self._examples[client], examples), self._config.policy_settings
        return self._config.find_policy().max_total(samples, self._classes, settings, share)

    def check_reply(self, client: int, policy: MatchedPolicy, question: str, at: float, numbers: Sequence[int]) -> None:
        """Raise `MessageError` if no label counts with the declared number of samples give this reply to a question."""
        samples, settings = self._examples[client], self._config.policy_settings
        bounds = policy.max_reply(samples, self._classes, settings, question, at)
        for key, number, limit in zip(policy.questions[question], numbers, bounds, strict=True):
            if number > limit:
                raise MessageError(f"{key} = {number}, but it is at most {limit} with {counted(samples, 'sample')}")
