"""One round of training around any strategy: who trains, what is sent, what is accepted, when too few replied.

In the order of `TrainingRounds.train_round`:

    sample by client id → strategy.configure_train → one task a client → send
    → check every reply → order by client id → strategy.aggregate_train → average the buffers
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import INFO
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.cores import map_ordered, threads_for
from fedeas_flwr.common.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_registry import ClientRegistry
from fedeas_flwr.federation.delivery import deliver, has_died
from fedeas_flwr.federation.dissimilarity import gradient_dissimilarity
from fedeas_flwr.federation.grids import GridView
from fedeas_flwr.federation.messages import TrainReport, TrainTask
from fedeas_flwr.runs.checkpoints import Arrays, Checkpoint, StrategyState
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.averaging import cast_like, weighted_average
from fedeas_flwr.strategies.interface import SendsExtra, Stateful
from fedeas_flwr.strategies.records import ARRAYS, to_arrays, to_record

log = logging.getLogger("flwr").log


@dataclass(frozen=True)
class RoundOutcome:
    """What a round's accepted clients said, and who failed and why."""

    reports: list[TrainReport]
    failures: list[dict[str, Any]]
    seconds: dict[str, float]
    gamma_hat: Callable[[], float] | None = None
    """Works Γ̂ out, of models that it holds on to: for when there is time. ``None`` if it is not wanted."""


class TooFewRepliesError(RunError):
    """A round below its quorum; it leaves the model as it was."""

    def __init__(self, text: str, failures: list[dict[str, Any]]) -> None:
        super().__init__(text)
        self.failures = failures


class TrainingRounds(ClientRegistry):
    """The clients behind a grid, and how a round turns one model of theirs into the next.

    Parameters
    ----------
    grid, config
        As of `ClientRegistry`.
    strategy
        How replies become a model.
    run
        Under whose identity clients keep their states.
    """

    def __init__(self, grid: Grid, config: RunConfig, strategy: Strategy, run: RunDirectory) -> None:
        super().__init__(grid, config)
        self.strategy, self.run = strategy, run
        self.service = ""  # address of the shared generator; empty: every client has its own
        self.checkpointed: dict[int, int] = {}
        """Client → the round its state would start from if the server came back from its checkpoint."""
        self._steps: dict[int, int] = {}

    def sample(self, round_number: int) -> list[int]:
        """The clients of a round: uniform without replacement, from a stream of the round's own."""
        clients = sorted(self.nodes)
        count = self.config.num_sampled(len(clients))
        chosen = stream(self.config.seed, "sample", round_number).choice(len(clients), count, replace=False)
        return [clients[i] for i in sorted(chosen)]

    def train_round(self, state: Checkpoint) -> tuple[Checkpoint, RoundOutcome]:
        """Send the model to a round's clients and merge what comes back."""
        number, began = state.round + 1, time.perf_counter()
        self.members.discover_new_nodes()
        chosen = self.sample(number)
        replies = self._send_round(number, self.members.available(chosen), state)
        received = time.perf_counter()
        accepted, failures = self._accept(chosen, replies, state)
        self._check_quorum(number, chosen, failures, replies)
        gamma_hat = self._gamma_hat(state, accepted)  # before the strategy, which may use the replies up
        arrays, _ = self.strategy.aggregate_train(number, [reply for reply, _, _ in accepted])
        if arrays is None:
            raise RunError(
                f"round {number}: {self.config.strategy} made no model of {counted(len(accepted), 'reply', 'replies')}"
            )
        reports = [report for _, report, _ in accepted]
        self._steps |= {report.client: report.steps for report in reports}
        merged = Checkpoint(
            round=number,
            trainable=cast_like(to_arrays(arrays), state.trainable),
            buffers=weighted_average([b for _, _, b in accepted], [r.examples for r in reports]),
            accepted=state.accepted | {r.client: number for r in reports},
            generated=state.generated | {r.client: r.generated for r in reports},
            shares=state.shares,
            strategy=self.strategy.state() if isinstance(self.strategy, Stateful) else StrategyState(),
        )
        seconds = {
            "clients": received - began,
            "aggregate": time.perf_counter() - received,
            "generating": sum(r.seconds_generating for r in reports),
            "training": sum(r.seconds_training for r in reports),
        }
        return merged, RoundOutcome(reports, failures, seconds, gamma_hat)

    def _gamma_hat(
        self, state: Checkpoint, accepted: Sequence[tuple[Message, TrainReport, Arrays]]
    ) -> Callable[[], float] | None:
        if self.config.gamma_hat == "off":
            return None
        start = dict(state.trainable)
        ends = [to_arrays(reply.content.array_records[ARRAYS]) for reply, _, _ in accepted]
        if self.config.gamma_hat == "all-state":
            start |= state.buffers
            ends = [{**end, **buffers} for end, (_, _, buffers) in zip(ends, accepted, strict=True)]
        return partial(gradient_dissimilarity, start, ends, [report.examples for _, report, _ in accepted])

    def _send_round(self, number: int, present: Sequence[int], state: Checkpoint) -> dict[int, Message | None]:
        """Send to the chosen clients that are there; return what each of them said, if anything."""
        if not present:
            return {}
        view = GridView(self.grid, [self.nodes[client] for client in present])
        model, buffers = to_record(state.trainable), to_record(state.buffers)
        clients = {node: client for client, node in self.nodes.items()}
        out = list(self.strategy.configure_train(number, model, ConfigRecord(), view))
        extra = to_record(self.strategy.extra() if isinstance(self.strategy, SendsExtra) else {})
        run = self.run.identity()
        for message in out:
            client = clients[message.metadata.dst_node_id]
            task = TrainTask(
                round=number,
                beta=self.config.beta,
                accepted_round=state.accepted.get(client, 0),
                checkpointed_round=self.checkpointed.get(client, 0),
                run=run,
                share=self.share_of(client),
                service=self.service,
            )
            messages.add_task(message, task, buffers, extra)
        # Largest first, so that it does not end the round alone; before all those who have their images still to make.
        out.sort(key=lambda message: clients[message.metadata.dst_node_id])
        out.sort(key=lambda message: -self._steps.get(clients[message.metadata.dst_node_id], 2**63))
        found = deliver(self.grid, out, self.config.round_timeout)
        return {client: found.get(self.nodes[client]) for client in present}

    def _accept(
        self, chosen: Sequence[int], replies: Mapping[int, Message | None], state: Checkpoint
    ) -> tuple[list[tuple[Message, TrainReport, Arrays]], list[dict[str, Any]]]:
        """Check every reply; return the good ones in ascending client id, and the failures with their reasons."""
        accepted: list[tuple[Message, TrainReport, Arrays]] = []
        failures: list[dict[str, Any]] = []
        extra = self.strategy.expected_extra() if isinstance(self.strategy, SendsExtra) else {}

        def read(client: int) -> tuple[Message, TrainReport, Arrays] | str:
            """What came, or why it does not count; empty if nothing came."""
            reply = replies.get(client)
            if reply is None or reply.has_error():
                return ""
            try:
                found = reply, *messages.read_train_reply(reply, client, state.trainable, state.buffers, extra)
                self.declared.check_report(found[1], self.share_of(client))
            except MessageError as error:
                return str(error)
            return found

        # Several at once, since every number of every reply is looked at; what is made of them, and what the log is
        # told, goes by client id.
        read_ones = map_ordered(read, chosen, threads_for(state.trainable, len(chosen)))
        for client, found in zip(chosen, read_ones, strict=True):
            if isinstance(found, str):
                reason = found or self._missing_reply_reason(client, replies)
                log(INFO, "client %d: %s", client, reason)
                failures.append({"client": client, "reason": reason})
            else:
                accepted.append(found)
        return accepted, failures

    def _missing_reply_reason(self, client: int, replies: Mapping[int, Message | None]) -> str:
        if client not in replies:
            return "its node is offline"
        if (reply := replies[client]) is None:
            return f"no reply within {self.config.round_timeout:g} s"
        return messages.failure_reason(reply)

    def _check_quorum(
        self,
        number: int,
        chosen: Sequence[int],
        failures: list[dict[str, Any]],
        replies: Mapping[int, Message | None],
    ) -> None:
        good = len(chosen) - len(failures)
        if good >= self.config.min_replies_for(len(chosen)):
            return
        first = failures[0]
        text = (
            f"round {number}: {len(failures)} of {len(chosen)} clients failed and min-replies = "
            f"{self.config.min_replies:g} does not allow it; client {first['client']}: {first['reason']}"
        )
        if any(has_died(reply) for reply in replies.values()):
            raise ProcessesDiedError(text)
        raise TooFewRepliesError(text, failures)
