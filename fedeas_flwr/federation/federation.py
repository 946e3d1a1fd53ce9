"""A run's rounds in sequence: train, evaluate, record and checkpoint each one, and stop after the last.

`training_round.py` has the steps within a training round.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from logging import ERROR, INFO, WARNING
from types import TracebackType
from typing import Any

from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedeas_flwr.common.errors import MessageError, ProcessesDiedError, RunError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_registry import ClientRegistry
from fedeas_flwr.federation.delivery import deliver, has_died
from fedeas_flwr.federation.learners import find_learner
from fedeas_flwr.federation.purchases import buy_images
from fedeas_flwr.federation.training_round import RoundOutcome, TooFewRepliesError, TrainingRounds
from fedeas_flwr.policies.interface import Share
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import LOST, STARTUP, UNSAVED, round_warnings, summarise
from fedeas_flwr.strategies.flower import FlowerStrategyAdapter, unsaved_attributes
from fedeas_flwr.strategies.interface import NeedsDisclosure, Stateful
from fedeas_flwr.strategies.records import to_record
from fedeas_flwr.training.evaluation import Evaluate

log = logging.getLogger("flwr").log


class Federation:
    """Runs federated training from a checkpoint to the last round."""

    def __init__(self, grid: Grid, config: RunConfig, strategy: Strategy, run: RunDirectory) -> None:
        self.grid, self.config, self.strategy, self.run = grid, config, strategy, run
        self.clients = ClientRegistry(grid, config)
        self.training = TrainingRounds(self.clients, strategy, run)
        self.on_generation_done: Callable[[], None] = lambda: None
        """Called after every client has generated all its images."""
        self.before_checkpoint: Callable[[], Callable[[], None]] = lambda: lambda: None
        """Called after a round that gets a checkpoint. It returns a function, which is called while the next round
        trains, just before the checkpoint."""
        self.on_round_end: Callable[[Mapping[str, Any]], str | None] = lambda record: None
        """Called with the record of each round; may return why this round should be the run's last."""
        self.stopped = ""
        """Why the run ends after the last recorded round, whatever `rounds` is; empty if it goes on."""
        self._warned: set[str] = set()
        self._attributes, self._lost = unsaved_attributes(strategy), list[str]()

    def restore(self, start: Checkpoint) -> None:
        """Load the server's state from ``start``.

        Call this before the clients are discovered: a strategy that requires disclosures excludes clients that joined
        after them.
        """
        self.training.checkpointed = start.accepted
        if start.round and (previous := self.run.load_previous_checkpoint()):
            self.training.previously_checkpointed = previous.accepted
        self.clients.shares = {client: Share(*share) for client, share in start.shares.items()}
        if isinstance(self.strategy, FlowerStrategyAdapter) and self.config.dp != "none":
            self.strategy.noise = self.run.noise(begun=start.round > 0)
        if isinstance(self.strategy, Stateful):
            self.strategy.load_state(start.strategy)
        if start.round:
            self._lost = next((record.get(UNSAVED, []) for record in self.run.rounds()[-1:]), [])
        if isinstance(self.strategy, NeedsDisclosure):
            self.clients.manager.admitted = self.strategy.disclosing_clients() or None

    def fit(self, start: Checkpoint, test: Evaluate | None) -> None:
        """Train from ``start``, which `restore` has loaded, to the last round; record every round and the summary.

        ``test`` evaluates (trainable, buffers) on the server's test set; without it the clients evaluate.

        The server computes Γ̂, evaluates, records and checkpoints a round while the next one trains, and finishes this
        before the round after that starts: a client keeps the states that the last two checkpoints may need, not those
        of a third. States and replies are never changed in place, so both rounds can be read at the same time.

        If `on_round_end` ends the run after a round, the round that trains meanwhile is dropped: the result does not
        depend on which of them was faster, and a resumed run continues from the last recorded round.

        However training ends, the recorded rounds are kept, also those after the last checkpoint that was due.
        """
        if isinstance(self.strategy, NeedsDisclosure) and not self.strategy.disclosing_clients():
            self.clients.collect_disclosures(self.strategy)
            self.clients.manager.admitted = self.strategy.disclosing_clients()
        self._recorded, self._checkpointed_round, self._round_in_progress = start, start.round, start.round
        try:
            state = self._run_rounds(start, test)
        finally:  # after an error, or if a callback stopped the run; otherwise it was due
            self._checkpoint_last_recorded_round()
        self.run.save_model({key: array for arrays in state.result() for key, array in arrays.items()})
        spent = self._privacy_spent(state)
        self.run.save_summary(
            {
                **summarise(self.run.rounds(), self.config.threshold),
                **({"stopped": self.stopped} if self.stopped and state.round < self.config.rounds else {}),
                **({"privacy": spent} if spent else {}),
            }
        )

    def _run_rounds(self, state: Checkpoint, test: Evaluate | None) -> Checkpoint:
        """Train, evaluate and record round by round; return the state after the last recorded round."""
        gc.freeze()  # what exists by now, such as modules, is not searched for garbage in every round
        consecutive_failures, startup = 0, {STARTUP: self.run.seconds_since_start()}
        last_part = self.config.find_policy().parts[-1]
        with BackgroundTask() as background:
            while state.round < self.config.rounds and not self.stopped:
                self._round_in_progress, bought = state.round + 1, None
                try:
                    bought = buy_images(self.training, state)
                    (state, outcome), consecutive_failures = self.training.train_round(state), 0
                except TooFewRepliesError as error:
                    consecutive_failures += 1
                    if consecutive_failures >= self.config.failed_rounds:
                        background.wait()
                        if not self.stopped:
                            raise
                    log(WARNING, "%s; the model is unchanged", error)
                    state = replace(state, round=state.round + 1, shares=self.clients.shares_to_keep())
                    outcome = RoundOutcome([], error.failures, {})
                if all(state.accepted.get(client, 0) >= last_part for client in self.clients.nodes):
                    self.on_generation_done()
                outcome.seconds["end_wait"] = background.wait()  # for the previous round
                gc.collect()  # its models: Flower's `array_records` is a view of a message that is in a reference cycle
                outcome.seconds.update(startup)
                startup = {}
                if not self.stopped:
                    self._end_round(state, outcome, bought, test, background)
                del outcome  # frees the clients' models before the next round's arrive
        return self._recorded

    def _end_round(
        self,
        state: Checkpoint,
        outcome: RoundOutcome,
        bought: Mapping[str, Any] | None,
        test: Evaluate | None,
        background: BackgroundTask,
    ) -> None:
        """Measure, record and, if due, checkpoint a round; in the background if the server evaluates."""
        last = state.round == self.config.rounds
        checkpoint_due = last or state.round % self.config.checkpoint_every == 0
        # Before the next round, whose clients replace the states that they keep in memory.
        write_client_states = self.before_checkpoint() if checkpoint_due else None
        # Clients cannot evaluate while they train.
        blocking = last or (test is None and self.config.evaluates_in(state.round))
        metadata = self._round_metadata(state, outcome)  # before the next round, which changes the strategy
        metadata |= {"bought": bought} if bought else {}

        def finish_round() -> None:
            measured = self._measure(state, outcome, test, blocking)
            seconds = {phase: round(s, 4) for phase, s in outcome.seconds.items()}
            record = {"round": state.round, **measured, **metadata, "seconds": seconds}
            self.run.append_round(record)
            self._recorded = state
            if write_client_states is not None:
                write_client_states()
                self._checkpoint(state)
            score = "accuracy" if "accuracy" in measured else "loss"
            if measured[score] is not None:
                log(INFO, "[round %d/%d] %s %.4f", state.round, self.config.rounds, score, measured[score])
            for kind, warning in round_warnings(record, self.config).items():
                if kind not in self._warned:
                    log(WARNING, "%s", warning)
                    self._warned.add(kind)
            self.stopped = self.on_round_end(record) or ""

        def finish_round_logging_errors() -> None:
            try:
                finish_round()
            except BaseException as error:  # logged now: it is raised after the next round, perhaps hours later
                log(ERROR, "round %d is not recorded: %s", state.round, error)
                raise

        if blocking:
            finish_round()
        else:
            background.start(finish_round_logging_errors)

    def _measure(
        self, state: Checkpoint, outcome: RoundOutcome, test: Evaluate | None, blocking: bool
    ) -> dict[str, Any]:
        """Return a round's scores and Γ̂; add their durations to its seconds, and to `end_wait` if ``blocking``."""
        started = time.perf_counter()
        gamma_hat = outcome.gamma_hat() if outcome.gamma_hat is not None else None
        measured = time.perf_counter()
        if not self.config.evaluates_in(state.round):
            scores: dict[str, Any] = {"loss": None}
        elif test is not None:
            scores = test(*state.result())
        else:
            online = self.clients.manager.available(sorted(self.clients.nodes))
            nodes = {client: self.clients.nodes[client] for client in online}
            scores = evaluate_on_clients(self.grid, self.config, nodes, state)
        evaluated = time.perf_counter()
        outcome.seconds["gamma_hat"], outcome.seconds["evaluate"] = measured - started, evaluated - measured
        outcome.seconds["end_wait"] += evaluated - started if blocking else 0.0
        return {**scores, "gamma_hat": gamma_hat}

    def _round_metadata(self, state: Checkpoint, outcome: RoundOutcome) -> dict[str, Any]:
        """Return a round's record without scores, Γ̂ and seconds."""
        reports, spent = outcome.reports, self._privacy_spent(state)
        examples = sum(report.examples for report in reports)
        loss = sum(report.loss * report.examples for report in reports) / examples if reports else None
        refused = sorted(self.clients.refused.items()) if state.round == 1 else []  # recorded with the first round
        absent = max(0, self.config.clients - len(self.clients.nodes))
        limited = [{"client": report.client, "images": report.not_made} for report in reports if report.not_made]
        attributes = unsaved_attributes(self.strategy)
        unsaved = sorted(name for name, found in attributes.items() if self._attributes.get(name) != found)
        lost, self._lost = self._lost, []
        return {
            "train_loss": loss,
            **({"epsilon": spent["epsilon"]} if spent else {}),
            "clients": [report.client for report in reports],
            **({"not_joined": absent} if absent else {}),
            "failures": [*({"client": client, "reason": why} for client, why in refused), *outcome.failures],
            "generated": sum(state.generated.values()),
            "made": sum(report.made for report in reports),
            "rejected": sum(report.rejected for report in reports),
            **({"not_made": limited} if limited else {}),
            "steps": sum(report.steps for report in reports),
            **({UNSAVED: unsaved} if unsaved else {}),
            **({LOST: lost} if lost else {}),
        }

    def _checkpoint(self, state: Checkpoint) -> None:
        self.run.save_checkpoint(state)
        self.training.previously_checkpointed, self.training.checkpointed = self.training.checkpointed, state.accepted
        self._checkpointed_round = state.round

    def _checkpoint_last_recorded_round(self) -> None:
        """Checkpoint the last recorded round if clients still hold its states.

        They do if it is the round before the one in progress. If an evaluation failed or was not waited for, the last
        record is older, and clients that trained since have dropped the states it needs. The run then resumes from the
        existing checkpoint.
        """
        state = self._recorded
        if state.round <= self._checkpointed_round or state.round < self._round_in_progress - 1:
            return
        try:
            self.before_checkpoint()()
            self._checkpoint(state)
        except Exception as error:  # a full disk or a broken GPU must not hide the error that ended the run
            log(ERROR, "no checkpoint of round %d: %s", state.round, error)

    def _privacy_spent(self, state: Checkpoint) -> dict[str, Any] | None:
        return self.strategy.privacy_spent(state) if isinstance(self.strategy, FlowerStrategyAdapter) else None


def evaluate_on_clients(grid: Grid, config: RunConfig, nodes: Mapping[int, int], state: Checkpoint) -> dict[str, Any]:
    """Let the clients (client → node) evaluate the model on their own test images; return the round's scores.

    Raise `RunError` if no client is online, fewer reply than `min-replies` requires, or none has test images, and
    `ProcessesDiedError` if too few replied and client processes died.
    """
    if not nodes:
        raise RunError("evaluation: no client is online")
    model, buffers = map(to_record, state.result())
    questions = [messages.evaluate_message(node, model, buffers, config.task) for node in nodes.values()]
    replies = deliver(grid, questions, config.round_timeout)
    reports, failed = [], f"no reply within {config.round_timeout:g} s"
    for client, node in nodes.items():
        try:
            if node in replies:
                reports.append(messages.read_evaluate_reply(replies[node], client))
        except MessageError as error:
            failed = f"client {client}: {error}"
    if len(reports) < config.min_replies_for(len(questions)):
        missing = len(questions) - len(reports)
        kind = ProcessesDiedError if any(has_died(grid, reply) for reply in replies.values()) else RunError
        raise kind(
            f"evaluation: {missing} of {len(questions)} clients failed and min-replies = "
            f"{config.min_replies:g} does not allow it; {failed}"
        )
    reports = sorted((report for report in reports if report.examples), key=lambda report: report.client)
    if not reports:
        raise RunError("evaluation: no client has test data of its own")
    return find_learner(config).scores(reports)


class BackgroundTask:
    """Runs one task at a time in a background thread.

    Leaving the `with` block waits for the task, even if the block raised. The task's exception is re-raised by the next
    `wait()` or on exit. On exit it replaces an exception of the block, which happened later; only an interruption
    (KeyboardInterrupt, SystemExit) takes precedence.
    """

    def __enter__(self) -> BackgroundTask:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="end-of-round")
        self._task: Future[None] | None = None
        return self

    def start(self, task: Callable[[], None]) -> None:
        """Start ``task``; the previous one must have been waited for."""
        assert self._task is None
        self._task = self._pool.submit(task)

    def wait(self) -> float:
        """Wait for the task, if there is one; return the seconds spent waiting."""
        started = time.perf_counter()
        if self._task is not None:
            try:
                self._task.result()
            except Exception:  # the task's own, raised once; after an interruption here the task is still waited for
                self._task = None
                raise
            self._task = None
        return time.perf_counter() - started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        interrupted = error is not None and not isinstance(error, Exception)
        try:
            with suppress(*([Exception] if interrupted else [])):
                self.wait()
        finally:
            self._pool.shutdown()
