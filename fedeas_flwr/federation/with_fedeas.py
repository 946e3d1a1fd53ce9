"""The server's half of FedEAS in another Flower app: `with_fedeas` makes any strategy send β to the clients.

The client's half is `Augmenter`; docs/in-your-flower-app.md shows both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from logging import INFO
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.messages import AugmentTask
from fedeas_flwr.policies.interface import EMPTY_SHARE, PolicySettings, Share
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import AT_ONCE, POLICIES, allocate

log = logging.getLogger("flwr").log

_S = TypeVar("_S", bound=Strategy)
_ANSWER_SECONDS = 3600.0
"""Seconds that the server waits for all replies to a question, as Flower waits for a round."""


def with_fedeas(
    strategy: _S,
    beta: float,
    policy: str = "fedeas",
    *,
    gamma: float = 0.5,
    strict_mean: bool = True,
    total: int | None = None,
) -> _S:
    """Return the strategy, changed to send a policy and its β with every train message.

    Each client plans by itself with an `Augmenter`. A matched policy (uniform, missing-only, waterfill) splits one
    total among the nodes that are online before round 1, by the integers that they reply with; nodes that join later
    generate nothing.

    Parameters
    ----------
    strategy
        Any Flower strategy. Its ``configure_train`` is replaced by one that calls it and adds keys to the messages'
        config.
    beta
        Scale of the budgets; `fedeas plan` helps to choose it.
    policy
        Name of a policy that needs no other clients' label counts and plans once, before the client first trains.
    gamma, strict_mean, total
        As for `allocate`.

    Raises
    ------
    ValueError
        In one line, if the policy does not exist or does not take a value.
    RunError
        Under a matched policy, in round 1, if a client does not answer.
    """
    if policy not in AT_ONCE:
        raise ValueError(f"policy={policy!r}: must be one of {', '.join(AT_ONCE)}")
    allocate([[1, 0]], policy, beta=beta, gamma=gamma, strict_mean=strict_mean, total=total)  # checks the values
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={strategy!r}: must be a Strategy of flwr.serverapp")
    task = AugmentTask(policy, float(beta), float(gamma), strict_mean)
    rule, configure, shares = POLICIES[policy], strategy.configure_train, dict[int, Share]()

    def configure_train(server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        out = list(configure(server_round, arrays, config, grid))  # waits for the nodes that the strategy needs
        if isinstance(rule, MatchedPolicy) and (server_round == 1 or not shares):
            shares.clear()
            shares.update(_split_total(rule, task, PolicySettings(beta, gamma, strict_mean, total), grid))
        for message in out:
            share = shares.get(message.metadata.dst_node_id, EMPTY_SHARE)
            messages.add_augment_task(message, replace(task, share=share))
        return out

    strategy.configure_train = configure_train  # type: ignore[method-assign]
    return strategy


def _split_total(policy: MatchedPolicy, task: AugmentTask, settings: PolicySettings, grid: Grid) -> Mapping[int, Share]:
    """Return each node's share of a matched total, by the integers that the nodes reply with."""
    nodes = list(grid.get_node_ids())

    @cache
    def ask(question: str, at: float) -> dict[int, tuple[int, ...]]:
        """Return each node's client id, number of classes and integers, in the order of the client ids."""
        out = [messages.build_query(node, question, at, messages.AUGMENT_QUERY) for node in nodes]
        for message in out:
            messages.add_augment_task(message, task)
        replies = list(grid.send_and_receive(out, timeout=_ANSWER_SECONDS))
        failed = [messages.failure_reason(reply) for reply in replies if reply.has_error()]
        if failed or len(replies) < len(nodes):
            why = failed[0] if failed else f"no reply within {_ANSWER_SECONDS:g} s"
            needed = 'every ClientApp must answer @app.query("fedeas") with Augmenter.answer(...)'
            raise RunError(f"policy = {policy.name!r}: {needed}; one did not: {why}")
        keys = "classes", *policy.questions[question]
        found = {reply.metadata.src_node_id: messages.read_answer(reply, *keys) for reply in replies}
        return dict(sorted(found.items(), key=lambda item: (item[1][0], item[0])))

    first = ask("plan", settings.beta)
    classes = {row[1] for row in first.values()}
    if len(classes) != 1:
        found = ", ".join(map(str, sorted(classes)))
        raise RunError(f"policy = {policy.name!r}: clients have {found} classes; all must have the same number")

    def query(question: str, at: float) -> dict[int, tuple[int, ...]]:
        return {node: row[2:] for node, row in ask(question, at).items()}

    log(INFO, "policy %s: splitting one total among %d clients", policy.name, len(nodes))
    return policy.split_total(query, classes.pop(), settings)
