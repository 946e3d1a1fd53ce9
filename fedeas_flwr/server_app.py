"""The ServerApp: validate the config, discover the clients, split the budget, train, evaluate and record."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedeas_flwr.callbacks.registry import Callbacks, open_callbacks
from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.errors import ConfigError, ProcessesDiedError, RunError, place_in_user_code
from fedeas_flwr.common.files import cache_hint, is_whole, write_checksums
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.processes import MARK, exit_after_block
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.common.text import MAX_LINE, one_line
from fedeas_flwr.config import RunConfig, generator_config, parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.data.node import run_folder
from fedeas_flwr.federation.client_manager import count_clients
from fedeas_flwr.federation.client_state import forget_kept_states, kept_states_writer
from fedeas_flwr.federation.delivery import is_simulated
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.flwr_run import is_plain_run, log_surroundings, warn_without_gpu_share
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.learners import find_learner
from fedeas_flwr.federation.node_keys import read_node_keys
from fedeas_flwr.generators.federated import federated_training, read_weights
from fedeas_flwr.generators.opening import generator_warning, hash_input_files
from fedeas_flwr.generators.ray_service import start_service
from fedeas_flwr.planning.run_plan import check_own_policy, describe_plan, planned_counts
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import GENERATOR, TRAINING
from fedeas_flwr.runs.metrics import describe_result
from fedeas_flwr.strategies.privacy import describe_noise
from fedeas_flwr.strategies.records import to_record
from fedeas_flwr.strategies.registry import build_strategy

log = logging.getLogger("flwr").log

USER_ERRORS = (RunError, ConfigError)
"""Errors that a user can fix. Their one line is complete: they are logged without a traceback."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federated training to its end, from the start or from its checkpoint."""
    with user_errors_in_one_line(grid):
        config = parse_config(context.run_config)
        callbacks = open_callbacks(config.callbacks)
        if not config.run_dir:
            config = config.with_changes(run_dir=str(run_folder(config, context.run_id)))
        if MARK not in os.environ:  # otherwise the launcher has checked this, and has opened the directory itself
            run = RunDirectory(Path(config.run_dir))
            run.refuse_if_it_runs()
            if config.resume and run.is_complete(config):  # a restarted SuperLink resumes whatever run it has
                log(INFO, "%s has finished: nothing to resume", run.path)
                return
        if config.resume and not config.clients:  # as many as before, however many nodes are online now
            config = config.with_changes(clients=RunDirectory(Path(config.run_dir)).config().clients)
        check_own_policy(config)
        device = configure_torch(config.device, config.precision)
        gpu = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
        run = RunDirectory.start(config, describe_environment(gpu))
        before_exit = nullcontext() if isinstance(grid, InlineGrid) else exit_after_block()
        with log_to(run.path / "flower.log"), before_exit:
            log(INFO, "Run directory: %s", run.path)
            if is_plain_run(grid):
                log_surroundings(grid, config)
            _run_recording_status(grid, config, run, device, callbacks)


def _run_recording_status(grid: Grid, config: RunConfig, run: RunDirectory, device: str, callbacks: Callbacks) -> None:
    """Run the training, and record its final status: finished, interrupted or failed."""
    try:
        with closing(callbacks):
            _run(grid, config, run, device, callbacks)
    except (KeyboardInterrupt, SystemExit):  # Flower's own processes raise SystemExit on a signal
        run.set_status("interrupted")
        raise
    except BaseException as error:
        run.set_status("failed", format_error(error), died=isinstance(error, ProcessesDiedError))
        log(ERROR, "The run failed: %s", format_error(error), exc_info=not isinstance(error, USER_ERRORS))
        raise
    finally:
        forget_kept_states()
    summary = run.summary()
    gaps = summary.get("gaps", "")
    stopped = f", stopped after round {summary['rounds']} by {summary['stopped']}" if "stopped" in summary else ""
    log(WARNING if gaps else INFO, "The run finished%s%s", stopped, f", with gaps: {gaps}" if gaps else "")
    log(INFO, "Result: %s; see %s", describe_result(summary), run.path)
    run.set_status("finished", gaps=gaps, warnings=callbacks.warnings)


def _run(grid: Grid, config: RunConfig, run: RunDirectory, device: str, callbacks: Callbacks) -> None:
    """Run the training."""
    config, learner = config.with_changes(clients=count_clients(grid, config)), find_learner(config)
    to_send = None
    if config.trains_generator:
        training = _train_generator(grid, config, run, device)
        config = config.with_changes(generator=str(training.path / GENERATOR))
        to_send = None if is_simulated(grid) else to_record(read_weights(training))
    warning = generator_warning(config)
    if warning:
        log(WARNING, "%s", warning)
    run.record_inputs(config.dataset, dataset_info(config.dataset).classes, hash_input_files(config), warning)
    federation, start = Federation(grid, config, build_strategy(config), run), _initial_state(config, run)
    federation.training.generator = to_send
    if noise := describe_noise(config, start.trainable):
        log(INFO, "%s", noise)
    federation.restore(start)
    federation.clients.manager.keys = read_node_keys()
    federation.clients.discover()
    run.record_clients(config.clients)
    if is_plain_run(grid):
        warn_without_gpu_share(device)
    with shared_generator(federation, config, run, device):
        federation.clients.plan()
        counts = planned_counts(config) if is_simulated(grid) else None
        log(INFO, "Plan: %s", describe_plan(config, counts))
        test = learner.central_test(config, device) if config.evaluation == "central" else None
        run.truncate_rounds(start.round)
        if isinstance(grid, InlineGrid) and grid.by_reference:  # clients keep their states in this process's memory
            start, federation.before_checkpoint = _on_device(start, device), kept_states_writer
            if device != "cpu":  # a quarter of the GPU's memory for states
                federation.before_checkpoint = partial(kept_states_writer, torch.cuda.mem_get_info()[1] // 4)
        elif is_simulated(grid) and device != "cpu" and _replies_fit(start, config):
            start = _on_device(start, device)  # then replies are checked and averaged there, and Γ̂ computed
        federation.stopped = callbacks.start_run(config, run.rounds())
        federation.on_round_end = callbacks.end_round
        federation.fit(start, test)
    learner.finish(config, run)
    callbacks.end_run(run.summary())


def _train_generator(grid: Grid, config: RunConfig, run: RunDirectory, device: str) -> RunDirectory:
    """Return the run directory of the training of a run's generator; train the generator unless it is there.

    In a simulation it is in the cache, and another run that trains the same one is waited for.
    """
    if is_simulated(grid):
        training = federated_training(config)
    else:
        training = generator_config(config).with_changes(run_dir=str(run.path / TRAINING))
    own = RunDirectory(Path(training.run_dir))
    own.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{own.path}.lock") if is_simulated(grid) else nullcontext():
        if is_whole(own.path / GENERATOR):
            log(INFO, "Generator: %s, which the federation has trained before", own.path / GENERATOR)
            return own
        training = training.with_changes(resume=own.has_rounds())
        RunDirectory.start(training, run.environment())
        with log_to(own.path / "flower.log"):
            log(INFO, "Training the generator first, %d rounds: %s", training.rounds, own.path)
            try:
                _run_recording_status(grid, training, own, device, open_callbacks(""))
            except RunError as error:
                kind = ProcessesDiedError if isinstance(error, ProcessesDiedError) else RunError
                raise kind(f"generator = 'federated': {error}") from None
        write_checksums(own.path / GENERATOR)
    return own


@contextmanager
def shared_generator(federation: Federation, config: RunConfig, run: RunDirectory, device: str) -> Iterator[None]:
    """Under Ray, serve one generator to all clients for the duration of the block; on other grids do nothing."""
    service = start_service(config, device)  # after the clients have replied, so Ray is running
    if service is None:
        yield
        return

    def release_gpu() -> None:
        stats = service.release_gpu()
        if stats is not None:
            run.save_service({"state": "resting", **stats})
            log(INFO, "Every client has generated its images; the generator is unloaded: %s", stats)

    try:
        federation.training.service = service.address()
        federation.on_generation_done = release_gpu
        run.save_service({"state": "serving", **service.stats()})
        yield
    finally:
        run.save_service({"state": "ended", **service.stats()})
        service.end()


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Write the log of Flower and of this package to a file as well."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("flwr", "fedeas_flwr")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        with suppress(OSError):  # a full disk; the run's own files report it
            handler.close()


class _LogFile(logging.FileHandler):
    """A log file that omits what a full disk does not take; `logging` would print a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextmanager
def user_errors_in_one_line(grid: Grid) -> Iterator[None]:
    """Let Flower log a user error that the block raises in one line, without a traceback.

    Flower logs the error after the app has raised it and then ends the process, so the filter is added only then and
    never removed. On the inline grid Flower logs nothing.
    """
    try:
        yield
    except USER_ERRORS:
        if not isinstance(grid, InlineGrid):
            logging.getLogger("flwr").addFilter(_remove_traceback)
        raise


def _remove_traceback(record: logging.LogRecord) -> bool:
    """Put a user error into the text of its log record, in place of the traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, USER_ERRORS):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {format_error(error)}", (), None
    return True


def format_error(error: BaseException) -> str:
    """Return an error in one line; one that is not a user error has its type, and its place in a user's own code."""
    text = one_line(error, MAX_LINE)
    if isinstance(error, USER_ERRORS):
        return text
    return f"{type(error).__name__}: {text}{cache_hint(error)}{place_in_user_code(error)}"


def _initial_state(config: RunConfig, run: RunDirectory) -> Checkpoint:
    """Return the checkpoint of a resumed run if it has one, else the untrained model."""
    trainable, buffers = find_learner(config).initial_state(config)
    checkpoint = run.load_checkpoint() if config.resume else None
    if checkpoint is None:
        checkpoint = Checkpoint(0, trainable, buffers)
    elif _shapes(checkpoint.trainable) != _shapes(trainable) or _shapes(checkpoint.buffers) != _shapes(buffers):
        raise RunError(f"the checkpoint in {run.path} does not hold the arrays of model '{config.model}'")
    # The file's order of arrays differs from the model's, which messages require.
    return replace(
        checkpoint,
        trainable={key: checkpoint.trainable[key] for key in trainable},
        buffers={key: checkpoint.buffers[key] for key in buffers},
        average={key: checkpoint.average[key] for key in trainable if checkpoint.average},
    )


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {key: tuple(array.shape) for key, array in arrays.items()}


def _on_device(state: Checkpoint, device: str) -> Checkpoint:
    """Return the state as tensors on the device, which messages pass by reference."""

    def move(arrays: Arrays) -> dict[str, Any]:
        return {key: torch.from_numpy(np.array(array)).to(device) for key, array in arrays.items()}

    return replace(state, trainable=move(state.trainable), buffers=move(state.buffers), average=move(state.average))


def _replies_fit(state: Checkpoint, config: RunConfig) -> bool:
    """Return whether a round's replies, twice, take at most a tenth of the GPU's memory, which clients use too."""
    bytes_of_model = sum(array.nbytes for part in (state.trainable, state.buffers) for array in part.values())
    return bool(20 * config.num_sampled(config.clients) * bytes_of_model <= torch.cuda.mem_get_info()[1])
