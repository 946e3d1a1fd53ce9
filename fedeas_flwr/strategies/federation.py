"""The server's loop around any strategy: who trains, what is accepted, what is kept, when to stop.

One round, in the order of `Federation.train_round`:

    sample by client id → strategy.configure_train → one task a client → send
    → check every reply → order by client id → strategy.aggregate_train → average the buffers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import ERROR, INFO, WARNING
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.supercore import log

from fedeas_flwr import messages
from fedeas_flwr.array_records import to_arrays, to_record
from fedeas_flwr.config import RunConfig
from fedeas_flwr.grids import GridView
from fedeas_flwr.messages import MessageError, Share, TrainReport, TrainTask
from fedeas_flwr.metrics import summarise
from fedeas_flwr.runs import Arrays, Checkpoint, ProcessesDiedError, RunDirectory, RunError, StrategyState
from fedeas_flwr.strategies.averaging import like_model, weighted_average
from fedeas_flwr.strategies.beside import Beside
from fedeas_flwr.strategies.delivery import deliver, has_died
from fedeas_flwr.strategies.disclosure import NeedsDisclosure, tell
from fedeas_flwr.strategies.dissimilarity import gradient_dissimilarity
from fedeas_flwr.strategies.federated_evaluation import ask_clients_to_test
from fedeas_flwr.strategies.flower import Composed
from fedeas_flwr.strategies.roster import Roster
from fedeas_flwr.strategies.server_part import SendsExtra, Stateful
from fedeas_flwr.streams import stream

Evaluate = Callable[[Arrays, Arrays], dict[str, Any]]


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


class Federation(Roster):
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
        super().__init__(grid, config)
        self.strategy, self.run = strategy, run
        self.service = ""  # address of the shared generator; empty: every client has its own
        self.when_all_have_generated: Callable[[], None] = lambda: None
        self.before_checkpoint: Callable[[], None] = lambda: None
        self.when_a_round_ends: Callable[[Mapping[str, Any]], None] = lambda record: None
        self.checkpointed: dict[int, int] = {}
        """Client → the round its state would start from if the server came back from its checkpoint."""
        self._steps: dict[int, int] = {}

    def fit(self, start: Checkpoint, test: Evaluate | None) -> None:
        """Train from ``start`` to the last round, recording every round.

        ``test`` scores (trainable, buffers) on a test set of the server's; without it the clients are asked.

        A round's Γ̂, the server's test of it, its record and its checkpoint go on beside the training of the next round,
        and are done before that one's begin: a client keeps the versions of its state that the last two checkpoints may
        need, not those of a third. States and replies are never changed in place, so that those of a round stay as they
        are meanwhile.

        However it ends, the rounds that are recorded are kept, also between two checkpoints.
        """
        self.checkpointed = start.accepted
        if isinstance(self.strategy, Stateful):
            self.strategy.load_state(start.strategy)
        self.members.closed = isinstance(self.strategy, NeedsDisclosure)
        if isinstance(self.strategy, NeedsDisclosure) and not self.strategy.is_told():
            clients, question = sorted(self.nodes), self.strategy.disclosure.question
            replies = self.query([messages.ask(self.nodes[client], question) for client in clients])
            tell(self.strategy, self.config, {node: client for client, node in self.nodes.items()}, replies)
        self._recorded, self._saved, self._begun = start, start.round, start.round
        try:
            state = self._rounds(start, test)
        except BaseException:
            self._keep_what_is_recorded()
            raise
        self.run.save_model({**state.trainable, **state.buffers})
        spent = self._privacy_spent(state)
        self.run.save_summary(
            {**summarise(self.run.rounds(), self.config.threshold), **({"privacy": spent} if spent else {})}
        )

    def _rounds(self, state: Checkpoint, test: Evaluate | None) -> Checkpoint:
        """Train, test and record round after round; return what the server holds after the last."""
        failed = 0
        with Beside() as beside:
            while state.round < self.config.rounds:
                self._begun = state.round + 1
                try:
                    (state, outcome), failed = self.train_round(state), 0
                except TooFewRepliesError as error:
                    failed += 1
                    if failed >= self.config.failed_rounds:
                        raise
                    log(WARNING, "%s; the model stays as it is", error)
                    state, outcome = replace(state, round=state.round + 1), RoundOutcome([], error.failures, {})
                if state.generated.keys() >= self.nodes.keys():
                    self.when_all_have_generated()
                outcome.seconds["end_wait"] = beside.wait()
                self._end_round(state, outcome, test, beside)
                del outcome  # it holds the clients' models, and the next ones are on their way
        return state

    def _checkpoint(self, state: Checkpoint) -> None:
        self.run.save_checkpoint(state)
        self.checkpointed, self._saved = state.accepted, state.round

    def _keep_what_is_recorded(self) -> None:
        """Checkpoint the last recorded round, if clients still have its states: of the round before the one begun.

        Where a test failed or was not waited for, the last record is older, and the clients that trained since have
        dropped what it would need; then the checkpoint that is there is the one to go on from.
        """
        state = self._recorded
        if state.round <= self._saved or state.round < self._begun - 1:
            return
        try:
            self.before_checkpoint()
            self._checkpoint(state)
        except Exception as error:  # must not hide what ended the run: a full disk, a broken GPU
            log(ERROR, "no checkpoint of round %d: %s", state.round, error)

    def _end_round(self, state: Checkpoint, outcome: RoundOutcome, test: Evaluate | None, beside: Beside) -> None:
        """Γ̂, test, record and, where it is due, checkpoint of a round; beside the next one if the server tests it."""
        last = state.round == self.config.rounds
        checkpoint = last or state.round % self.config.checkpoint_every == 0
        if checkpoint:  # now: the next round's clients change what they keep in memory
            self.before_checkpoint()
        alone = last or test is None  # clients cannot test while they train
        known, seconds, work_out = self._known(state, outcome), outcome.seconds, outcome.gamma_hat

        def end() -> None:
            began = time.perf_counter()
            gamma_hat = work_out() if work_out is not None else None
            measured = time.perf_counter()
            if test is None:
                scores = ask_clients_to_test(self.grid, self.config, self._present(), state)
            else:
                scores = test(state.trainable, state.buffers)
            tested = time.perf_counter()
            seconds["gamma_hat"], seconds["evaluate"] = measured - began, tested - measured
            seconds["end_wait"] += tested - began if alone else 0.0
            self._record(
                {
                    "round": state.round,
                    **scores,
                    "gamma_hat": gamma_hat,
                    **known,
                    "seconds": {phase: round(s, 4) for phase, s in seconds.items()},
                }
            )
            self._recorded = state
            if checkpoint:
                self._checkpoint(state)
            log(INFO, "[round %d/%d] accuracy %.4f", state.round, self.config.rounds, scores["accuracy"])

        def end_or_say_why_not() -> None:  # at once: the clients' round, after which it is raised, may take hours
            try:
                end()
            except BaseException as error:
                log(ERROR, "round %d is not recorded: %s", state.round, error)
                raise

        if alone:
            end()
        else:
            beside.start(end_or_say_why_not)

    def _known(self, state: Checkpoint, outcome: RoundOutcome) -> dict[str, Any]:
        """What a round's record says beside scores, Γ̂ and seconds."""
        return {
            "train_loss": _mean(outcome.reports, lambda r: r.loss),
            **({"epsilon": spent["epsilon"]} if (spent := self._privacy_spent(state)) else {}),
            "clients": [r.client for r in outcome.reports],
            "failures": [*self._refused_in(state.round), *outcome.failures],
            "generated": sum(state.generated.values()),
            "made": sum(r.made for r in outcome.reports),
            "rejected": sum(r.rejected for r in outcome.reports),
            "steps": sum(r.steps for r in outcome.reports),
        }

    def _present(self) -> dict[int, int]:
        return {client: self.nodes[client] for client in self.members.present(sorted(self.nodes))}

    def _record(self, record: dict[str, Any]) -> None:
        self.run.append_round(record)
        self.when_a_round_ends(record)

    def _refused_in(self, number: int) -> list[dict[str, Any]]:
        """Refusals of the plan, which are recorded with the first round."""
        return [{"client": c, "reason": why} for c, why in sorted(self.refused.items())] if number == 1 else []

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
        self._check_quorum(number, chosen, failures, replies)
        gamma_hat = self._gamma_hat(state, accepted)  # before the strategy, which may use the replies up
        arrays, _ = self.strategy.aggregate_train(number, [reply for reply, _, _ in accepted])
        if arrays is None:
            raise RunError(f"round {number}: {self.config.strategy} made no model of {len(accepted)} replies")
        reports = [report for _, report, _ in accepted]
        self._steps |= {report.client: report.steps for report in reports}
        merged = Checkpoint(
            round=number,
            trainable=like_model(to_arrays(arrays), state.trainable),
            buffers=weighted_average([b for _, _, b in accepted], [r.examples for r in reports]),
            accepted=state.accepted | {r.client: number for r in reports},
            generated=state.generated | {r.client: r.generated for r in reports},
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
        ends = [to_arrays(reply.content.array_records[messages.ARRAYS]) for reply, _, _ in accepted]
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
                share=self.shares.get(client, Share()),  # a matched total was spent on those who were there
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
                self.declared.check_report(report, self.shares.get(client, Share()))
                accepted.append((reply, report, buffers))
            except MessageError as error:
                log(INFO, "client %d: %s", client, error)
                failures.append({"client": client, "reason": str(error)})
        return accepted, failures

    def _check_quorum(
        self,
        number: int,
        chosen: Sequence[int],
        failures: list[dict[str, Any]],
        replies: Mapping[int, Message | None],
    ) -> None:
        good = len(chosen) - len(failures)
        if good > 0 and good >= self.config.min_replies * len(chosen):
            return
        first = failures[0]
        text = (
            f"round {number}: {len(failures)} of {len(chosen)} clients failed and min-replies = "
            f"{self.config.min_replies:g} does not allow it; client {first['client']}: {first['reason']}"
        )
        if any(has_died(reply) for reply in replies.values()):
            raise ProcessesDiedError(text)
        raise TooFewRepliesError(text, failures)


def _mean(reports: Sequence[TrainReport], value: Callable[[TrainReport], float]) -> float | None:
    if not reports:  # a failed round
        return None
    return sum(value(r) * r.examples for r in reports) / sum(r.examples for r in reports)
