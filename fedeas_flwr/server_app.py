"""The ServerApp: validate, find the clients, agree on a plan, train, evaluate, record."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.errors import ConfigError, ProcessesDiedError, RunError
from fedeas_flwr.common.files import cache_hint
from fedeas_flwr.common.processes import MARK
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.data.node import run_folder
from fedeas_flwr.federation.client_manager import count_clients
from fedeas_flwr.federation.client_state import forget_kept_states, write_kept_states
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.generators.opening import hash_input_files
from fedeas_flwr.generators.ray_service import start_service
from fedeas_flwr.runs.checkpoints import Arrays, Checkpoint
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.tensorboard import event_log
from fedeas_flwr.strategies.registry import build_strategy
from fedeas_flwr.training.build import network
from fedeas_flwr.training.evaluation import central_test
from fedeas_flwr.training.models import split_state

log = logging.getLogger("flwr").log

USER_ERRORS = (RunError, ConfigError)
"""What a user can mend: the line says all of it."""


def _in_one_line(record: logging.LogRecord) -> bool:
    """Take the traceback off what Flower logs of an error that was foreseen; a filter of its logger."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, USER_ERRORS):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {format_error(error)}", (), None
    return True


logging.getLogger("flwr").addFilter(_in_one_line)
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federated training from start, or from its checkpoint, to end."""
    config = parse_config(context.run_config)
    if not config.run_dir:
        config = config.with_changes(run_dir=str(run_folder(config, context.run_id)))
    if MARK not in os.environ:  # else the launcher has looked, and is at work there itself
        RunDirectory(Path(config.run_dir)).refuse_if_it_runs()
    if config.resume and not config.clients:  # as many as before, not as many as happen to be there now
        config = config.with_changes(clients=RunDirectory(Path(config.run_dir)).config().clients)
    device = configure_torch(config.device, config.precision)
    run = RunDirectory.start(config, describe_environment(_device_name(device)))
    with log_to(run.path / "flower.log"):
        log(INFO, "Run directory: %s", run.path)
        _run_recording_status(grid, config, run, device)


def _run_recording_status(grid: Grid, config: RunConfig, run: RunDirectory, device: str) -> None:
    """Do the run, and leave its status behind however it ends."""
    try:
        run.record_inputs(config.dataset, dataset_info(config.dataset).classes, hash_input_files(config))
        clients = count_clients(grid, config)
        config = config.with_changes(clients=clients)
        federation, start = Federation(grid, config, build_strategy(config), run), _start(config, run)
        federation.restore(start)
        federation.discover()
        run.record_clients(clients)
        with shared_generator(federation, config, run, device):
            federation.plan()
            test = central_test(config, clients, device) if config.evaluation == "central" else None
            run.truncate_rounds(start.round)
            if getattr(grid, "live", False):  # clients of this very process keep their states in memory meanwhile
                start, federation.before_checkpoint = _on_device(start, device), _client_state_flusher(device)
            with event_log(run.path / "tensorboard", start.round) if config.tensorboard else nullcontext() as write:
                federation.on_round_end = write or federation.on_round_end
                federation.fit(start, test)
    except (KeyboardInterrupt, SystemExit):  # the latter is how Flower's own processes answer a signal
        run.set_status("interrupted")
        raise
    except BaseException as error:
        run.set_status("failed", format_error(error), died=isinstance(error, ProcessesDiedError))
        log(ERROR, "The run failed: %s", format_error(error), exc_info=not isinstance(error, USER_ERRORS))
        raise
    finally:
        forget_kept_states()
    run.set_status("finished")


@contextmanager
def shared_generator(federation: Federation, config: RunConfig, run: RunDirectory, device: str) -> Iterator[None]:
    """Under Ray, hold one generator for all clients until the block ends; elsewhere do nothing."""
    service = start_service(config, device)  # not before a client has answered: Ray is certainly running then
    if service is None:
        yield
        return

    def rest() -> None:
        done = service.release_gpu()
        if done is not None:
            run.save_service({"state": "resting", **done})
            log(INFO, "Every client has its images; the generator is unloaded: %s", done)

    try:
        federation.service = service.address()
        federation.on_generation_done = rest
        run.save_service({"state": "serving", **service.stats()})
        yield
    finally:
        run.save_service({"state": "ended", **service.stats()})
        service.end()


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Keep Flower's log, and what our own modules say, in the run directory too."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("flwr", "fedeas_flwr")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def format_error(error: BaseException) -> str:
    """An error as the user is told it: our own speak for themselves, others say what kind they are."""
    text = one_line(error, None)
    return text if isinstance(error, (RunError, ConfigError)) else f"{type(error).__name__}: {text}{cache_hint(error)}"


def _start(config: RunConfig, run: RunDirectory) -> Checkpoint:
    """The run's checkpoint if it resumes and has one, else the untrained model."""
    trainable, buffers = split_state(network(config))
    checkpoint = run.load_checkpoint() if config.resume else None
    if checkpoint is None:
        checkpoint = Checkpoint(0, trainable, buffers)
    elif _shapes(checkpoint.trainable) != _shapes(trainable) or _shapes(checkpoint.buffers) != _shapes(buffers):
        raise RunError(f"the checkpoint in {run.path} does not hold the arrays of model '{config.model}'")
    # A file keeps its arrays in an order of its own; on the wire they are in the model's.
    return replace(
        checkpoint,
        trainable={key: checkpoint.trainable[key] for key in trainable},
        buffers={key: checkpoint.buffers[key] for key in buffers},
    )


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {key: tuple(array.shape) for key, array in arrays.items()}


def _on_device(state: Checkpoint, device: str) -> Checkpoint:
    """The same state as tensors on the device, to be handed over instead of sent."""

    def move(arrays: Arrays) -> dict[str, Any]:
        return {key: torch.from_numpy(np.array(array)).to(device) for key, array in arrays.items()}

    return replace(state, trainable=move(state.trainable), buffers=move(state.buffers))


def _client_state_flusher(device: str) -> Callable[[], None]:
    """Write what clients keep in memory; of what is written, a quarter of the GPU's memory may stay there."""
    if device == "cpu":
        return write_kept_states
    return partial(write_kept_states, torch.cuda.mem_get_info()[1] // 4)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
