"""The server's loop around any strategy: who trains, what is accepted, what is kept, when to stop.

One round, in the order of `Federation.train_round`:

    sample by client id → strategy.configure_train → one task a client → send
    → check every reply → order by client id → strategy.aggregate_train → average the buffers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log

from fedeas_flwr import messages
from fedeas_flwr.allocation import shares
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import dataset_info
from fedeas_flwr.grids import GridView
from fedeas_flwr.messages import MessageError, Share, TrainReport, TrainTask
from fedeas_flwr.metrics import summarise
from fedeas_flwr.runs import Arrays, Checkpoint, RunDirectory, RunError, StrategyState
from fedeas_flwr.strategies.averaging import like_model, weighted_average
from fedeas_flwr.strategies.disclosure import NeedsDisclosure, tell
from fedeas_flwr.strategies.dissimilarity import gradient_dissimilarity
from fedeas_flwr.strategies.federated_evaluation import ask_clients_to_test
from fedeas_flwr.strategies.flower import Composed
from fedeas_flwr.strategies.members import Members, by_client
from fedeas_flwr.strategies.server_part import SendsExtra, Stateful
from fedeas_flwr.streams import stream
from fedeas_flwr.waterfill import waterfill_level

Evaluate = Callable[[Arrays, Arrays], dict[str, Any]]


@dataclass(frozen=True)
class RoundOutcome:
    """What a round's accepted clients said, and who failed and why."""

    reports: list[TrainReport]
    failures: list[dict[str, Any]]
    seconds: dict[str, float]
    gamma_hat: float | None = None


class Federation:
    """A grid's clients, and the run that trains them.

    Parameters
    ----------
    grid
        Any of Flower's grids, or the inline one.
    config
        The validated run-config.
    strategy
        How replies become a model.
    run
        Where the run is recorded.
    """

    def __init__(self, grid: Grid, config: RunConfig, strategy: Strategy, run: RunDirectory) -> None:
        self.grid, self.config, self.strategy, self.run = grid, config, strategy, run
        self.service = ""  # address of the shared generator; empty: every client has its own
        self.when_all_have_generated: Callable[[], None] = lambda: None
        self.before_checkpoint: Callable[[], None] = lambda: None
        self.when_a_round_ends: Callable[[Mapping[str, Any]], None] = lambda record: None
        self.members = Members(grid, config)
        self.nodes = self.members.nodes
        self.shares: dict[int, Share] = {}
        self.checkpointed: dict[int, int] = {}
        """Client → the round its state would start from if the server came back from its checkpoint."""
        self._steps: dict[int, int] = {}

    # ------------------------------------------------------------------------------- before the rounds

    def discover(self) -> int:
        """Learn which node is which client, and return how many there are."""
        self.members.gather()
        self.members.closed = isinstance(self.strategy, NeedsDisclosure)
        return len(self.nodes)

    def plan(self) -> None:
        """Agree on a matched budget: each client says two whole numbers and is given its share of the total."""
        clients = sorted(self.nodes)
        if not self.config.matched or self.config.policy == "greedy":
            self.shares = dict.fromkeys(clients, Share())
            return
        spent, absent = self._ask_all("plan", "total", "absent")
        total = self.config.total or int(spent.sum())
        if self.config.policy == "waterfill":
            water = waterfill_level(total, lambda level: self._ask_all("waterfill", "count", level=level)[0])
            self.shares = {c: Share(extra=int(e), level=water.level) for c, e in zip(clients, water.extra, strict=True)}
            return
        pairs = (
            absent
            if self.config.policy == "missing-only"
            else np.full_like(absent, len(dataset_info(self.config.dataset).classes))
        )
        parts = shares(total, pairs)
        self.shares = {c: Share(base, extra) for c, (base, extra) in zip(clients, parts, strict=True)}

    def _ask_all(self, question: str, *keys: str, level: float = 0.0) -> list[Any]:
        """Ask every client, and return one array a key in ascending client id."""
        replies = self._query([messages.ask(self.nodes[c], question, level) for c in sorted(self.nodes)])
        rows = sorted(messages.read_answer(reply, *keys) for reply in replies)
        return [np.array(column, dtype=np.int64) for column in list(zip(*rows, strict=True))[1:]]

    def _query(self, questions: Sequence[Message]) -> list[Message]:
        replies = list(self.grid.send_and_receive(questions, timeout=self.config.round_timeout or None))
        for reply in replies:
            if reply.has_error():
                raise RunError(f"a client could not answer the first query: {messages.failure_reason(reply)}")
        if len(replies) < len(questions):
            raise RunError(
                f"{len(questions) - len(replies)} of {len(questions)} clients did not answer the first query"
            )
        return replies

    # -------------------------------------------------------------------------------------- the rounds

    def fit(self, start: Checkpoint, test: Evaluate | None) -> None:
        """Train from ``start`` to the last round, recording every round.

        ``test`` scores (trainable, buffers) on a test set of the server's; without it the clients are asked.
        """
        state, self.checkpointed = start, start.accepted
        if isinstance(self.strategy, Stateful):
            self.strategy.load_state(start.strategy)
        if isinstance(self.strategy, NeedsDisclosure) and not self.strategy.is_told():
            clients, question = sorted(self.nodes), self.strategy.disclosure.question
            replies = self._query([messages.ask(self.nodes[client], question) for client in clients])
            tell(self.strategy, self.config, {node: client for client, node in self.nodes.items()}, replies)
        while state.round < self.config.rounds:
            state, outcome = self.train_round(state)
            if state.generated.keys() >= self.nodes.keys():
                self.when_all_have_generated()
            began = time.perf_counter()
            scores = (
                test(state.trainable, state.buffers)
                if test
                else ask_clients_to_test(self.grid, self.config, self._present(), state)
            )
            outcome.seconds["evaluate"] = time.perf_counter() - began
            self._record(
                {
                    "round": state.round,
                    **scores,
                    "train_loss": _mean(outcome.reports, lambda r: r.loss),
                    "gamma_hat": outcome.gamma_hat,
                    **({"epsilon": spent["epsilon"]} if (spent := self._privacy_spent(state)) else {}),
                    "clients": [r.client for r in outcome.reports],
                    "failures": outcome.failures,
                    "generated": sum(state.generated.values()),
                    "made": sum(r.made for r in outcome.reports),
                    "rejected": sum(r.rejected for r in outcome.reports),
                    "steps": sum(r.steps for r in outcome.reports),
                    "seconds": {phase: round(s, 4) for phase, s in outcome.seconds.items()},
                }
            )
            if state.round % self.config.checkpoint_every == 0 or state.round == self.config.rounds:
                self.before_checkpoint()
                self.run.save_checkpoint(state)
                self.checkpointed = state.accepted
            log(INFO, "[round %d/%d] accuracy %.4f", state.round, self.config.rounds, scores["accuracy"])
        self.run.save_model({**state.trainable, **state.buffers})
        spent = self._privacy_spent(state)
        self.run.save_summary(
            {**summarise(self.run.rounds(), self.config.threshold), **({"privacy": spent} if spent else {})}
        )

    def _present(self) -> dict[int, int]:
        return {client: self.nodes[client] for client in self.members.present(sorted(self.nodes))}

    def _record(self, record: dict[str, Any]) -> None:
        self.run.append_round(record)
        self.when_a_round_ends(record)

    def _privacy_spent(self, state: Checkpoint) -> dict[str, Any] | None:
        return self.strategy.privacy_spent(state) if isinstance(self.strategy, Composed) else None

    def sample(self, round_number: int) -> list[int]:
        """The clients of a round: uniform without replacement, from a stream of the round's own."""
        clients = sorted(self.nodes)
        count = self.config.sampled(len(clients))
        chosen = stream(self.config.seed, "sample", round_number).choice(len(clients), count, replace=False)
        return [clients[i] for i in sorted(chosen)]

    def train_round(self, state: Checkpoint) -> tuple[Checkpoint, RoundOutcome]:
        """Send the model to a round's clients and merge what comes back."""
        number, began = state.round + 1, time.perf_counter()
        self.members.look()
        chosen = self.sample(number)
        replies = self._send_round(number, self.members.present(chosen), state)
        received = time.perf_counter()
        accepted, failures = self._accept(chosen, replies, state)
        self._check_quorum(number, chosen, failures)
        checked = time.perf_counter()
        gamma_hat = self._gamma_hat(state, accepted)  # before the strategy, which may use the replies up
        measured = time.perf_counter()

        arrays, _ = self.strategy.aggregate_train(number, [reply for reply, _, _ in accepted])
        if arrays is None:
            raise RunError(f"round {number}: {self.config.strategy} made no model of {len(accepted)} replies")
        reports = [report for _, report, _ in accepted]
        self._steps |= {report.client: report.steps for report in reports}
        merged = Checkpoint(
            round=number,
            trainable=like_model(messages.to_arrays(arrays), state.trainable),
            buffers=weighted_average([b for _, _, b in accepted], [r.examples for r in reports]),
            accepted=state.accepted | {r.client: number for r in reports},
            generated=state.generated | {r.client: r.generated for r in reports},
            strategy=self.strategy.state() if isinstance(self.strategy, Stateful) else StrategyState(),
        )
        seconds = {
            "clients": received - began,
            "gamma_hat": measured - checked,
            "aggregate": time.perf_counter() - measured + checked - received,
            "generating": sum(r.seconds_generating for r in reports),
            "training": sum(r.seconds_training for r in reports),
        }
        return merged, RoundOutcome(reports, failures, seconds, gamma_hat)

    def _gamma_hat(self, state: Checkpoint, accepted: Sequence[tuple[Message, TrainReport, Arrays]]) -> float | None:
        if self.config.gamma_hat == "off":
            return None
        start = dict(state.trainable)
        ends = [messages.to_arrays(reply.content.array_records[messages.ARRAYS]) for reply, _, _ in accepted]
        if self.config.gamma_hat == "all-state":
            start |= state.buffers
            ends = [{**end, **buffers} for end, (_, _, buffers) in zip(ends, accepted, strict=True)]
        return gradient_dissimilarity(start, ends, [report.examples for _, report, _ in accepted])

    def _send_round(self, number: int, present: Sequence[int], state: Checkpoint) -> dict[int, Message | None]:
        """Send to the chosen clients that are there; return what each of them said, if anything."""
        if not present:
            return {}
        view = GridView(self.grid, [self.nodes[client] for client in present])
        model, buffers = messages.to_record(state.trainable), messages.to_record(state.buffers)
        clients = {node: client for client, node in self.nodes.items()}
        out = list(self.strategy.configure_train(number, model, ConfigRecord(), view))
        extra = messages.to_record(self.strategy.extra() if isinstance(self.strategy, SendsExtra) else {})
        run = self.run.identity()
        for message in out:
            client = clients[message.metadata.dst_node_id]
            task = TrainTask(
                round=number,
                beta=self.config.beta,
                accepted_round=state.accepted.get(client, 0),
                checkpointed_round=self.checkpointed.get(client, 0),
                run=run,
                share=self.shares.get(client, Share()),  # a matched total was spent on those who were there
                service=self.service,
            )
            messages.add_task(message, task, buffers, extra)
        # Largest first, so that it does not end the round alone; before all those who have their images still to make.
        out.sort(key=lambda message: clients[message.metadata.dst_node_id])
        out.sort(key=lambda message: -self._steps.get(clients[message.metadata.dst_node_id], 2**63))
        replies = view.send_and_receive(out, timeout=self.config.round_timeout or None)
        return dict.fromkeys(present) | by_client(out, replies, self.nodes)

    def _accept(
        self, chosen: Sequence[int], replies: Mapping[int, Message | None], state: Checkpoint
    ) -> tuple[list[tuple[Message, TrainReport, Arrays]], list[dict[str, Any]]]:
        """Check every reply; return the good ones in ascending client id, and the failures with their reasons."""
        accepted: list[tuple[Message, TrainReport, Arrays]] = []
        failures: list[dict[str, Any]] = []
        extra = self.strategy.extra_wanted() if isinstance(self.strategy, SendsExtra) else {}
        for client in chosen:
            try:
                if client not in replies:
                    raise MessageError("its node is offline")
                reply = replies[client]
                if reply is None:
                    raise MessageError(f"no reply within {self.config.round_timeout:g} s")
                if reply.has_error():
                    raise MessageError(messages.failure_reason(reply))
                report, buffers = messages.read_train_reply(reply, client, state.trainable, state.buffers, extra)
                accepted.append((reply, report, buffers))
            except MessageError as error:
                log(INFO, "client %d: %s", client, error)
                failures.append({"client": client, "reason": str(error)})
        return accepted, failures

    def _check_quorum(self, number: int, chosen: Sequence[int], failures: Sequence[Mapping[str, Any]]) -> None:
        good = len(chosen) - len(failures)
        if good == 0 or good < self.config.min_replies * len(chosen):
            first = failures[0]
            raise RunError(
                f"round {number}: {len(failures)} of {len(chosen)} clients failed and min-replies = "
                f"{self.config.min_replies:g} does not allow it; client {first['client']}: {first['reason']}"
            )


def _mean(reports: Sequence[TrainReport], value: Callable[[TrainReport], float]) -> float:
    return sum(value(r) * r.examples for r in reports) / sum(r.examples for r in reports)
