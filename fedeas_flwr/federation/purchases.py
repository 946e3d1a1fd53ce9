"""What clients buy under an adaptive policy, before the rounds that begin a part of its plan.

1. evaluate: every client online gets the global model, and scores its classes → 2. price: the server asks how many
images a client would buy at a level, until all of them together spend the part exactly → 3. shares: each client's
number, which it spends on its own classes when it next trains.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from logging import INFO
from typing import Any

import numpy as np

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.common.errors import MessageError
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.delivery import deliver
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.policies.adaptive import EVALUATE, Adaptive
from fedeas_flwr.policies.interface import EMPTY_SHARE, Share
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.strategies.records import ARRAYS, BUFFERS, to_record
from fedeas_flwr.waterfill import waterfill_level

log = logging.getLogger("flwr").log


def buy_images(training: TrainingRounds, state: Checkpoint) -> dict[str, Any] | None:
    """Let the clients evaluate the model and buy images, if the round that follows ``state`` needs it.

    Return the record of the purchase: its images, the level of the price, and each client's number; None if nothing was
    bought. A client that is offline or does not answer buys nothing, and the others spend the whole part. Raise as
    `TrainingRounds.check_quorum` does if too few answer; the part is then bought before the next round.
    """
    registry, number = training.clients, state.round + 1
    policy = registry.config.find_policy()
    if not isinstance(policy, Adaptive):
        return None
    due = policy.due(registry.shares.values(), number)
    if due <= 0 and not policy.evaluates_before(number):
        return None
    registry.manager.discover_new_nodes()
    # Not by `refused`, which a resumed run does not know.
    asked = [client for client in sorted(registry.nodes) if registry.shares.get(client) != EMPTY_SHARE]
    if not asked:
        return None
    purchase = _Purchase(training, policy, state, asked)
    purchase.evaluate()
    if due <= 0:
        return None
    level, bought = purchase.spend(due)
    for client, images in bought.items():
        share = registry.shares.get(client, Share())
        registry.shares[client] = replace(share, base=share.base + images)
    log(INFO, "round %d: %d clients buy %d images at level %.4g", number, len(bought), due, level)
    return {"images": due, "level": level, "clients": {str(client): images for client, images in bought.items()}}


class _ClientLostError(Exception):
    """A client did not answer: what it demanded before must not count in a search for the price."""


class _Purchase:
    """One purchase: the clients that take part in it, and those that failed with the reasons."""

    def __init__(self, training: TrainingRounds, policy: Adaptive, state: Checkpoint, asked: Sequence[int]) -> None:
        self._training, self._policy, self._state, self._asked = training, policy, state, asked
        self._clients, run = training.clients.manager.available(asked), training.run.identity()
        self._tasks = {client: training.task_of(client, state, run) for client in self._clients}
        self._failures = {client: "its node is offline" for client in asked if client not in self._clients}

    def evaluate(self) -> None:
        """Send the model to the clients, who score their classes."""
        model = {ARRAYS: to_record(self._state.trainable), BUFFERS: to_record(self._state.buffers)}
        self._ask(EVALUATE, model=model)

    def spend(self, total: int) -> tuple[float, dict[int, int]]:
        """Return the level at which the clients spend a total, and each one's number of images."""
        while True:
            with suppress(_ClientLostError):  # the others spend the total
                found = waterfill_level(total, self._demand)
                return found.level, dict(zip(self._clients, found.samples.tolist(), strict=True))

    def _demand(self, level: float) -> IntArray:
        """Return the number of images that each client would buy at a level."""
        clients = list(self._clients)
        counts = self._ask("price", level)
        if self._clients != clients:
            raise _ClientLostError
        return np.array([counts[client][0] for client in clients], dtype=np.int64)

    def _ask(self, question: str, at: float = 0.0, model: Mapping[str, Any] | None = None) -> dict[int, Sequence[int]]:
        """Ask the clients; return the numbers of those that answer, and leave out the others from now on."""
        training, registry = self._training, self._training.clients
        out = [
            messages.build_query(registry.nodes[c], question, at, task=self._tasks[c], model=model)
            for c in self._clients
        ]
        by_node = deliver(registry.grid, out, training.config.round_timeout) if out else {}
        replies = {client: by_node.get(registry.nodes[client]) for client in self._clients}
        found: dict[int, Sequence[int]] = {}
        for client in list(self._clients):
            try:
                reply = replies[client]
                if reply is None or reply.has_error():
                    raise MessageError(training.missing_reply_reason(client, replies))
                found[client] = registry.read_numbers(client, reply, self._policy, question, at)
            except MessageError as error:
                log(INFO, "client %d buys no images before this round: %s", client, error)
                self._failures[client] = f"{question}: {error}"
                self._clients.remove(client)
        failures = [{"client": client, "reason": why} for client, why in sorted(self._failures.items())]
        training.check_quorum(self._state.round + 1, self._asked, failures, replies)
        return found
