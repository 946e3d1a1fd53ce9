"""Before the rounds: who the clients are, what they declare, and what a matched budget gives each of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from fedeas_flwr.policies import EMPTY_SHARE, POLICIES, MatchedPolicy, Share
from fedeas_flwr.strategies.interface import NeedsDisclosure

log = logging.getLogger("flwr").log


class ClientRegistry:
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
        self.declared = DeclaredSampleCounts(config)
        self.members = ClientManager(grid, config, self.declared.note)
        self.nodes = self.members.nodes
        """Client → node."""
        self.refused: dict[int, str] = {}
        """Client → why its part of the plan was refused; it generates nothing."""

    def discover(self) -> int:
        """Learn which node is which client, and return how many there are."""
        self.members.wait_for_clients()
        return len(self.nodes)

    def plan(self) -> None:
        """Agree on a matched budget: clients say the whole numbers that their policy asks for, and get their shares.

        Once a run: who is there when it is resumed changes nobody's share.
        """
        policy = POLICIES[self.config.policy]
        if isinstance(policy, MatchedPolicy) and not self.shares:
            classes = len(dataset_info(self.config.dataset).classes)
            shares = policy.split_total(partial(self._query_all, policy), classes, self.config.policy_settings)
            self.shares = shares | dict.fromkeys(self.refused, EMPTY_SHARE)

    def share_of(self, client: int) -> Share:
        """A client's part of a matched budget, which was spent on those who were there; other policies read none."""
        return self.shares.get(client, EMPTY_SHARE)

    def _query_all(self, policy: MatchedPolicy, question: str, at: float) -> dict[int, Sequence[int]]:
        """Ask every client; return the numbers of those that were never refused, in ascending client id."""
        clients, keys = sorted(self.nodes), policy.questions[question]
        replies = self.query([messages.build_query(self.nodes[c], question, at) for c in clients])
        found = {}
        for client, reply in zip(clients, replies, strict=True):
            try:
                sender, *numbers = messages.read_answer(reply, *keys)
                if sender != client:
                    raise MessageError(f"client-id = {sender}, but the question was for client {client}")
                self.declared.check_reply(client, policy, question, at, numbers)
                found[client] = numbers
            except MessageError as error:
                log(WARNING, "client %d is refused a part of the plan: %s", client, error)
                self.refused.setdefault(client, f"{question}: {error}")
        return {client: numbers for client, numbers in found.items() if client not in self.refused}

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


def collect_disclosures(
    strategy: NeedsDisclosure, config: RunConfig, clients: Mapping[int, int], replies: Sequence[Message]
) -> None:
    """Check the answers of all clients (node → client), give them to the strategy, and say what that was."""
    disclosure = strategy.disclosure
    wanted, told = disclosure.expected(config), {}
    try:
        for reply in replies:
            client = clients[reply.metadata.src_node_id]
            told[client] = messages.read_disclosed(reply, client, wanted)
        strategy.receive_disclosures({client: told[client] for client in sorted(told)})
    except MessageError as error:
        raise RunError(f"the answer to '{disclosure.question}' is not what it should be: {error}") from None
    size = sum(array.nbytes for array in wanted.values())
    log(INFO, "%s = true: each of %d clients disclosed %s (%d bytes)", disclosure.key, len(told), disclosure.what, size)
