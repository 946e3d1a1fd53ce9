"""The rounds of a run, one after another: test, record and checkpoint each, and decide when to stop.

What happens within a round is in `training_round.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, replace
from logging import ERROR, INFO, WARNING
from types import TracebackType
from typing import Any

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.errors import MessageError, RunError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_registry import collect_disclosures
from fedeas_flwr.federation.delivery import deliver
from fedeas_flwr.federation.messages import TrainReport
from fedeas_flwr.federation.training_round import RoundOutcome, TooFewRepliesError, TrainingRounds
from fedeas_flwr.policies import Share
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import summarise
from fedeas_flwr.strategies.flower import FlowerStrategyAdapter
from fedeas_flwr.strategies.interface import NeedsDisclosure, Stateful
from fedeas_flwr.strategies.records import to_record
from fedeas_flwr.training.evaluation import Evaluate

log = logging.getLogger("flwr").log


class Federation(TrainingRounds):
    """A grid's clients, and the run that trains them.

    Parameters
    ----------
    grid, config, strategy
        As of `TrainingRounds`.
    run
        Where the run is recorded.
    """

    def __init__(self, grid: Grid, config: RunConfig, strategy: Strategy, run: RunDirectory) -> None:
        super().__init__(grid, config, strategy, run)
        self.on_generation_done: Callable[[], None] = lambda: None
        self.before_checkpoint: Callable[[], None] = lambda: None
        self.on_round_end: Callable[[Mapping[str, Any]], None] = lambda record: None

    def restore(self, start: Checkpoint) -> None:
        """Go on from what the server held after a round; before `discover`, since some clients may come too late."""
        self.checkpointed = start.accepted
        self.shares = {client: Share(*share) for client, share in start.shares.items()}
        if isinstance(self.strategy, FlowerStrategyAdapter) and self.config.dp != "none":
            self.strategy.noise = self.run.noise(begun=start.round > 0)
        if isinstance(self.strategy, Stateful):
            self.strategy.load_state(start.strategy)
        if isinstance(self.strategy, NeedsDisclosure):
            self.members.asked = self.strategy.disclosing_clients() or None

    def fit(self, start: Checkpoint, test: Evaluate | None) -> None:
        """Train from ``start``, which was taken up, to the last round, recording every round.

        ``test`` scores (trainable, buffers) on a test set of the server's; without it the clients are asked.

        A round's Γ̂, the server's test of it, its record and its checkpoint go on beside the training of the next
        round, and are done before that one's begin: a client keeps the versions of its state that the last two
        checkpoints may need, not those of a third. States and replies are never changed in place, so that those of a
        round stay as they are meanwhile.

        However it ends, the rounds that are recorded are kept, also between two checkpoints.
        """
        if isinstance(self.strategy, NeedsDisclosure) and not self.strategy.disclosing_clients():
            clients, question = sorted(self.nodes), self.strategy.disclosure.question
            replies = self.query([messages.build_query(self.nodes[client], question) for client in clients])
            collect_disclosures(
                self.strategy, self.config, {node: client for client, node in self.nodes.items()}, replies
            )
            self.members.asked = self.strategy.disclosing_clients()
        start = replace(start, shares={client: astuple(share) for client, share in self.shares.items()})
        self._recorded, self._saved, self._begun = start, start.round, start.round
        try:
            state = self._rounds(start, test)
        except BaseException:
            self._checkpoint_last_recorded_round()
            raise
        self.run.save_model({**state.trainable, **state.buffers})
        spent = self._privacy_spent(state)
        self.run.save_summary(
            {**summarise(self.run.rounds(), self.config.threshold), **({"privacy": spent} if spent else {})}
        )

    def _rounds(self, state: Checkpoint, test: Evaluate | None) -> Checkpoint:
        """Train, test and record round after round; return what the server holds after the last."""
        failed = 0
        with BackgroundTask() as background:
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
                    self.on_generation_done()
                outcome.seconds["end_wait"] = background.wait()
                self._end_round(state, outcome, test, background)
                del outcome  # it holds the clients' models, and the next ones are on their way
        return state

    def _checkpoint(self, state: Checkpoint) -> None:
        self.run.save_checkpoint(state)
        self.checkpointed, self._saved = state.accepted, state.round

    def _checkpoint_last_recorded_round(self) -> None:
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

    def _end_round(
        self, state: Checkpoint, outcome: RoundOutcome, test: Evaluate | None, background: BackgroundTask
    ) -> None:
        """Γ̂, test, record and, where it is due, checkpoint of a round; beside the next one if the server tests it."""
        last = state.round == self.config.rounds
        checkpoint = last or state.round % self.config.checkpoint_every == 0
        if checkpoint:  # now: the next round's clients change what they keep in memory
            self.before_checkpoint()
        alone = last or test is None  # clients cannot test while they train
        known = self._round_metadata(state, outcome)  # now: it asks the strategy, which the next round changes

        def end() -> None:
            measured = self._measure(state, outcome, test, alone)
            seconds = {phase: round(s, 4) for phase, s in outcome.seconds.items()}
            record = {"round": state.round, **measured, **known, "seconds": seconds}
            self.run.append_round(record)
            self.on_round_end(record)
            self._recorded = state
            if checkpoint:
                self._checkpoint(state)
            log(INFO, "[round %d/%d] accuracy %.4f", state.round, self.config.rounds, measured["accuracy"])

        def finish_round_logging_errors() -> (
            None
        ):  # at once: the clients' round, after which it is raised, may take hours
            try:
                end()
            except BaseException as error:
                log(ERROR, "round %d is not recorded: %s", state.round, error)
                raise

        if alone:
            end()
        else:
            background.start(finish_round_logging_errors)

    def _measure(self, state: Checkpoint, outcome: RoundOutcome, test: Evaluate | None, alone: bool) -> dict[str, Any]:
        """A round's scores and Γ̂; the time they took goes to its seconds, and to its wait where no client trains."""
        began = time.perf_counter()
        gamma_hat = outcome.gamma_hat() if outcome.gamma_hat is not None else None
        measured = time.perf_counter()
        if test is None:
            scores = evaluate_on_clients(self.grid, self.config, self._available_clients(), state)
        else:
            scores = test(state.trainable, state.buffers)
        tested = time.perf_counter()
        outcome.seconds["gamma_hat"], outcome.seconds["evaluate"] = measured - began, tested - measured
        outcome.seconds["end_wait"] += tested - began if alone else 0.0
        return {**scores, "gamma_hat": gamma_hat}

    def _round_metadata(self, state: Checkpoint, outcome: RoundOutcome) -> dict[str, Any]:
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

    def _available_clients(self) -> dict[int, int]:
        return {client: self.nodes[client] for client in self.members.available(sorted(self.nodes))}

    def _refused_in(self, number: int) -> list[dict[str, Any]]:
        """Refusals of the plan, which are recorded with the first round."""
        return [{"client": c, "reason": why} for c, why in sorted(self.refused.items())] if number == 1 else []

    def _privacy_spent(self, state: Checkpoint) -> dict[str, Any] | None:
        return self.strategy.privacy_spent(state) if isinstance(self.strategy, FlowerStrategyAdapter) else None


def _mean(reports: Sequence[TrainReport], value: Callable[[TrainReport], float]) -> float | None:
    if not reports:  # a failed round
        return None
    return sum(value(r) * r.examples for r in reports) / sum(r.examples for r in reports)


def evaluate_on_clients(grid: Grid, config: RunConfig, nodes: Mapping[int, int], state: Checkpoint) -> dict[str, Any]:
    """Ask the clients that are there (client → node) for their scores, and return the round's."""
    model, buffers = to_record(state.trainable), to_record(state.buffers)
    questions = [messages.evaluate_message(node, model, buffers) for node in nodes.values()]
    reports = []
    failed = f"no reply within {config.round_timeout:g} s"
    clients = {node: client for client, node in nodes.items()}
    for node, reply in deliver(grid, questions, config.round_timeout).items():
        client = clients[node]
        try:
            if reply.has_error():
                raise MessageError(messages.failure_reason(reply))
            reports.append(messages.read_evaluate_reply(reply, client))
        except MessageError as error:
            failed = f"client {client}: {error}"
    if len(reports) < config.min_replies_for(len(questions)):
        missing = len(questions) - len(reports)
        raise RunError(
            f"evaluation: {missing} of {len(questions)} clients failed and min-replies = "
            f"{config.min_replies:g} does not allow it; {failed}"
        )
    reports = sorted((r for r in reports if r.examples), key=lambda r: r.client)
    if not reports:
        raise RunError("evaluation: no client has test data of its own")
    examples = sum(r.examples for r in reports)
    own = {r.client: r.correct / r.examples for r in reports}
    worst = min(own, key=lambda client: own[client])
    return {
        "accuracy": sum(r.correct for r in reports) / examples,
        "mean_client_accuracy": sum(own.values()) / len(own),
        "worst_client_accuracy": own[worst],
        "worst_client": worst,
        "loss": sum(r.loss * r.examples for r in reports) / examples,
    }


class BackgroundTask:
    """Does one piece of work at a time in a thread of its own; the block's end waits for it, however the block ends.

    What the work raises is raised by the next `wait`, or by the block's end: there also in place of an error of the
    block's own, which came later. Only an interruption goes before it.
    """

    def __enter__(self) -> BackgroundTask:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="beside-the-clients")
        self._work: Future[None] | None = None
        return self

    def start(self, work: Callable[[], None]) -> None:
        """Begin with ``work``; the piece before must have been waited for."""
        assert self._work is None
        self._work = self._pool.submit(work)

    def wait(self) -> float:
        """Wait until the work is done, if there is any; return the seconds it took to wait."""
        began = time.perf_counter()
        if self._work is not None:
            try:
                self._work.result()
            except Exception:  # the work's own, to be raised once; whoever is interrupted here has yet to wait
                self._work = None
                raise
            self._work = None
        return time.perf_counter() - began

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = error is not None and not isinstance(error, Exception)
        try:
            with suppress(*([Exception] if interrupted else [])):
                self.wait()
        finally:
            self._pool.shutdown()
