"""One training round with any Flower strategy; `TrainingRounds.train_round` is the server's side of the algorithm.

1. sample clients → 2. configure messages → 3. send, check replies → 4. sort them → 5. aggregate → 6. average buffers
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from logging import INFO
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.cores import threads_for
from fedeas_flwr.common.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.common.text import counted, numbered
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_registry import ClientRegistry
from fedeas_flwr.federation.delivery import deliver, has_died
from fedeas_flwr.federation.dissimilarity import gradient_dissimilarity
from fedeas_flwr.federation.grids import GridView
from fedeas_flwr.federation.messages import TrainReport, TrainTask
from fedeas_flwr.runs.checkpoints import Checkpoint, StrategyState
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.averaging import cast_like, weighted_average
from fedeas_flwr.strategies.interface import SendsExtra, Stateful
from fedeas_flwr.strategies.records import ARRAYS, read_validated, to_arrays, to_record

log = logging.getLogger("flwr").log

_DIVERGED = re.compile(r"^loss = |NaN or infinity|^the norm is ")
"""In the reasons for rejecting replies of clients whose training has diverged."""


@dataclass(frozen=True)
class RoundOutcome:
    """Reports of a round's accepted clients, and the failed clients with the reasons."""

    reports: list[TrainReport]
    failures: list[dict[str, Any]]
    seconds: dict[str, float]
    """Phase of the round → its duration in seconds."""
    gamma_hat: Callable[[], float] | None = None
    """Computes Γ̂ from the clients' models, which it holds in memory; ``None`` if `gamma-hat` is off."""


class AcceptedReply(NamedTuple):
    """A reply that passed all checks. The message holds the trainable arrays."""

    message: Message
    report: TrainReport
    buffers: Arrays


class TooFewRepliesError(RunError):
    """A round with fewer valid replies than `min-replies` requires; it leaves the model unchanged."""

    def __init__(self, text: str, failures: list[dict[str, Any]]) -> None:
        super().__init__(text)
        self.failures = failures


class TrainingRounds:
    """Runs training rounds: each one turns the global model of a round into that of the next."""

    def __init__(self, clients: ClientRegistry, strategy: Strategy, run: RunDirectory) -> None:
        self.clients, self.strategy, self.run, self.config = clients, strategy, run, clients.config
        self.service = ""
        """Address of the generator that all clients share; empty if every client opens its own."""
        self.generator: ArrayRecord | None = None
        """Weights to send to clients that have not generated images yet; None: they have the generator."""
        self.checkpointed: dict[int, int] = {}
        """Client → the last round whose reply the server used, according to its last checkpoint."""
        self.previously_checkpointed: dict[int, int] = {}
        """The same according to the checkpoint before it."""
        self._steps: dict[int, int] = {}
        """Client → number of training steps in its last round."""

    def train_round(self, state: Checkpoint) -> tuple[Checkpoint, RoundOutcome]:
        """Train the round that follows ``state``; return the state after it and its outcome.

        Raise as `check_quorum` does if too few clients reply.
        """
        number, started = state.round + 1, time.perf_counter()

        # 1. Sample the round's clients, nodes that joined since the last round included.
        self.clients.manager.discover_new_nodes()
        sampled = self.sample(number)

        # 2. Configure: the strategy builds a message per client that is online, and the client's task is added.
        online = self.clients.manager.available(sampled)
        out = self._configure(number, online, state)
        self._log_generation(number, online, state)

        # 3. Send, wait for the replies, and check each one.
        replies, checks = self._deliver_and_check(out, online, state)
        received = time.perf_counter()

        # 4. The valid replies are used in ascending client id, whatever their order of arrival.
        accepted, failures = self._split_replies(sampled, replies, checks)
        self.check_quorum(number, sampled, failures, replies)
        accepted = self._without_idle(number, accepted, failures)
        reports = [reply.report for reply in accepted]
        gamma_hat = self._gamma_hat(state, accepted)  # before step 5, in which the strategy may change the replies

        # 5. Aggregate the trainable arrays by the strategy.
        arrays, _ = self.strategy.aggregate_train(number, [reply.message for reply in accepted])
        trainable = self._checked_model(number, arrays, len(accepted), state.trainable)

        # 6. Average the buffers (BatchNorm statistics), weighted by the clients' real samples N_k.
        buffers = weighted_average([reply.buffers for reply in accepted], [report.examples for report in reports])

        self._steps |= {report.client: report.steps for report in reports}
        new_state = Checkpoint(
            round=number,
            trainable=trainable,
            buffers=buffers,
            accepted=state.accepted | {report.client: number for report in reports},
            generated=state.generated | {report.client: report.generated for report in reports},
            shares=self.clients.shares_to_keep(),
            strategy=self.strategy.state() if isinstance(self.strategy, Stateful) else StrategyState(),
            average=self._average(state, trainable) if self.config.task == "generator" else {},
        )
        seconds = {
            "clients": received - started,
            "aggregate": time.perf_counter() - received,
            "generating": sum(report.seconds_generating for report in reports),
            "training": sum(report.seconds_training for report in reports),
        }
        return new_state, RoundOutcome(reports, failures, seconds, gamma_hat)

    def _checked_model(self, number: int, record: ArrayRecord | None, replies: int, model: Arrays) -> Arrays:
        """Return the strategy's model; raise RunError if there is none, or if its names, shapes or values are wrong."""
        strategy = f"round {number}: strategy = '{self.config.strategy}' returned"
        if record is None:
            raise RunError(f"{strategy} no model for {counted(replies, 'reply', 'replies')}")
        arrays = to_arrays(record)
        if missing := [key for key in model if key not in arrays]:
            raise RunError(f"{strategy} a model without {missing[0]}")
        try:
            return read_validated(to_record(cast_like(arrays, model)), model)
        except MessageError as error:
            raise RunError(f"{strategy} a wrong model: {error}") from None

    def sample(self, number: int) -> list[int]:
        """Return the round's clients in ascending order: drawn uniformly without replacement, by seed and round."""
        clients = sorted(self.clients.nodes)
        count = self.config.num_sampled(len(clients))
        drawn = stream(self.config.seed, "sample", number).choice(len(clients), count, replace=False)
        return [clients[i] for i in sorted(drawn)]

    def task_of(self, client: int, state: Checkpoint, run: str) -> TrainTask:
        """Return a client's task in the round that follows ``state``; ``run`` is the run's identity."""
        return TrainTask(
            round=state.round + 1,
            beta=self.config.beta,
            accepted_round=state.accepted.get(client, 0),
            checkpointed_round=self.checkpointed.get(client, 0),
            previous_checkpointed_round=self.previously_checkpointed.get(client, 0),
            run=run,
            share=self.clients.share_of(client),
            service=self.service,
            task=self.config.task,
        )

    def _configure(self, number: int, online: Sequence[int], state: Checkpoint) -> list[Message]:
        """Return one message per client, in the order in which they are to be sent."""
        if not online:
            return []
        client_of = {node: client for client, node in self.clients.nodes.items()}
        view = GridView(self.clients.grid, [self.clients.nodes[client] for client in online])
        model, buffers = to_record(state.trainable), to_record(state.buffers)
        out = list(self.strategy.configure_train(number, model, ConfigRecord(), view))
        extra = to_record(self.strategy.extra() if isinstance(self.strategy, SendsExtra) else {})
        run = self.run.identity()
        for message in out:
            client = client_of[message.metadata.dst_node_id]
            task = self.task_of(client, state, run)
            messages.add_task(message, task, buffers, extra, None if client in state.generated else self.generator)

        def order(message: Message) -> tuple[int, int]:
            """Put clients that have images to generate first, then those with most steps, which would finish last."""
            client = client_of[message.metadata.dst_node_id]
            return -self._steps.get(client, 2**63), client

        return sorted(out, key=order)

    def _average(self, state: Checkpoint, trainable: Arrays) -> Arrays:
        """Return the moving average of the weights; its decay rises over the rounds, as that of diffusers' EMAModel."""
        number = state.round + 1
        decay = min(self.config.generator_training.ema_decay, number / (9 + number)) if state.average else 0.0
        return weighted_average([state.average or trainable, trainable], [decay, 1 - decay])

    def _log_generation(self, number: int, online: Sequence[int], state: Checkpoint) -> None:
        """Log which clients generate images before they train, with the bound that the server knows."""
        clients = [client for client in online if client not in state.generated]
        if not clients or not self.config.generates:
            return
        images = sum(self.clients.declared.max_images(client, self.clients.share_of(client)) for client in clients)
        what = "generate images before they train" if len(clients) > 1 else "generates images before it trains"
        builtin = "; a node without the built-in generator trains it first"
        first = builtin if self.config.generator_spec.kind == "builtin" and not self.service else ""
        log(INFO, "round %d: %s %s, at most %d in total%s", number, numbered("client", clients), what, images, first)

    def _deliver_and_check(
        self, out: Sequence[Message], online: Sequence[int], state: Checkpoint
    ) -> tuple[dict[int, Message | None], dict[int, AcceptedReply | str]]:
        """Send the messages; return each client's reply and, if one arrived, the checked one or its fault.

        Replies are checked in threads when they arrive, since the check reads every number of them.
        """
        extra = self.strategy.expected_extra() if isinstance(self.strategy, SendsExtra) else {}
        client_of = {self.clients.nodes[client]: client for client in online}
        checks: dict[int, Future[AcceptedReply | str]] = {}

        def check(client: int, reply: Message) -> AcceptedReply | str:
            try:
                report, buffers = messages.read_train_reply(reply, client, state.trainable, state.buffers, extra)
                self.clients.declared.check_report(report, self.clients.share_of(client))
            except MessageError as error:
                return str(error)
            return AcceptedReply(reply, report, buffers)

        with ThreadPoolExecutor(threads_for(state.trainable, len(online)), thread_name_prefix="checks") as pool:

            def begin(node: int, reply: Message) -> None:
                checks[client_of[node]] = pool.submit(check, client_of[node], reply)

            by_node = deliver(self.clients.grid, out, self.config.round_timeout, begin) if out else {}
            replies = {client: by_node.get(node) for node, client in client_of.items()}
            return replies, {client: checked.result() for client, checked in checks.items()}

    def _split_replies(
        self,
        sampled: Sequence[int],
        replies: Mapping[int, Message | None],
        checks: Mapping[int, AcceptedReply | str],
    ) -> tuple[list[AcceptedReply], list[dict[str, Any]]]:
        """Return the valid replies in ascending client id, and the failed clients with the reasons."""
        accepted: list[AcceptedReply] = []
        failures: list[dict[str, Any]] = []
        for client in sampled:
            result = checks.get(client) or self.missing_reply_reason(client, replies)
            if isinstance(result, AcceptedReply):
                accepted.append(result)
            else:
                log(INFO, "client %d: %s", client, result)
                failures.append({"client": client, "reason": result})
        return accepted, failures

    def missing_reply_reason(self, client: int, replies: Mapping[int, Message | None]) -> str:
        """Return why there is no reply of a client, or why it failed."""
        if client not in replies:
            return "its node is offline"
        if (reply := replies[client]) is None:
            limit = self.config.round_timeout
            return f"no reply within {limit:g} s" if limit else "no reply"
        return messages.failure_reason(reply)

    def check_quorum(
        self,
        number: int,
        sampled: Sequence[int],
        failures: list[dict[str, Any]],
        replies: Mapping[int, Message | None],
    ) -> None:
        """Raise `TooFewRepliesError`, or `ProcessesDiedError`, if more of the sampled clients failed than allowed."""
        if len(sampled) - len(failures) >= self.config.min_replies_for(len(sampled)):
            return
        first = failures[0]
        text = (
            f"round {number}: {len(failures)} of {len(sampled)} clients failed and min-replies = "
            f"{self.config.min_replies:g} does not allow it; client {first['client']}: {first['reason']}"
        )
        diverged = sum(_DIVERGED.search(failure["reason"]) is not None for failure in failures)
        if 2 * diverged > len(sampled) and self.config.task == "classifier":
            text += f"; training may have diverged: try a lower learning-rate (now {self.config.learning_rate:g})"
        if any(has_died(self.clients.grid, reply) for reply in replies.values()):
            raise ProcessesDiedError(text)
        raise TooFewRepliesError(text, failures)

    def _without_idle(
        self, number: int, accepted: list[AcceptedReply], failures: list[dict[str, Any]]
    ) -> list[AcceptedReply]:
        """Return the replies without clients that took no step of a generator's training (`small-clients`).

        With `dp`, whose noise is for all clients of a round, they stay.
        """
        if self.config.task == "classifier" or self.config.dp != "none":
            return accepted
        trained = [reply for reply in accepted if reply.report.steps]
        if not trained:
            text = f"round {number}: none of {counted(len(accepted), 'client')} has enough images to train on"
            raise TooFewRepliesError(text, failures)
        return trained

    def _gamma_hat(self, state: Checkpoint, accepted: Sequence[AcceptedReply]) -> Callable[[], float] | None:
        if self.config.gamma_hat == "off":
            return None
        start = dict(state.trainable)
        ends = [to_arrays(reply.message.content.array_records[ARRAYS]) for reply in accepted]
        if self.config.gamma_hat == "all-state":
            start |= state.buffers
            ends = [{**end, **reply.buffers} for end, reply in zip(ends, accepted, strict=True)]
        return partial(gradient_dissimilarity, start, ends, [reply.report.examples for reply in accepted])
