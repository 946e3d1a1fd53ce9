"""CUDA's Multi-Process Service (MPS) for a run or a sweep: processes share a GPU instead of taking turns on it."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedeas_flwr.common.processes import MARK, ignore_sigint, with_variable
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
TRIAL = [sys.executable, "-c", "import torch; print(float(torch.ones(2, device='cuda').sum()))"]
"""Command that computes on the GPU: in some containers a daemon starts but its clients cannot reach it."""
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable that limits a process's concurrent hardware queues; CUDA reads it when it starts."""
_POOL = 96
"""Queues for all clients of a daemon together. On an H200, three processes with 32 queues each work, and a fourth fails
with out of memory; NVIDIA's guide says that there is one pool, but not its size."""
_SECONDS = 60


def may_share_gpu(config: RunConfig) -> bool:
    """Return whether a run computes on this machine's GPU and allows MPS; a Ray cluster manages MPS itself."""
    from fedeas_flwr.common.devices import pick_device

    return not (config.mps == "off" or config.ray_address) and pick_device(config.device) == "cuda"


@contextmanager
def shared_gpu(folder: Path, environment: Mapping[str, str], processes: int) -> Iterator[dict[str, str]]:
    """Run an MPS daemon during the block, and yield the environment variables for its clients.

    If the variables of another daemon are set (the user's, or the sweep's that started this run), yield only this run's
    share of that daemon's queues. If MPS is missing, or does not work (logged as a warning), yield nothing: processes
    then take turns on the GPU.

    ``folder`` is for the daemon's sockets; its path must be short. ``environment`` is that of the processes that will
    use the GPU, and ``processes`` their number.
    """
    if environment.get(PIPE):
        given = environment.get(QUEUES, "")
        yield {QUEUES: _queues(int(given), processes)} if given.isdecimal() else {}
        return
    if shutil.which(CONTROL) is None:
        yield {}
        return
    own = {PIPE: str(folder / "mps"), LOG: str(folder / "mps-log")}
    for path in own.values():
        Path(path).mkdir()
    own[QUEUES] = _queues(_POOL, processes)
    # Without the mark: marked processes are killed at the end of a run, but the daemon must quit after its clients.
    inside = {name: value for name, value in {**environment, **own}.items() if name != MARK}
    try:
        problem = _run([CONTROL, "-d"], inside) or _run(TRIAL, inside)
        if problem:
            logger.warning("CUDA MPS does not work here, so processes take turns on the GPU: %s", problem)
        yield {} if problem else own
    finally:
        # All clients have ended by now. If the daemon never started, this fails without effect.
        with ignore_sigint():
            if _run([CONTROL], inside, stdin="quit\n"):
                for process in with_variable(PIPE, own[PIPE]):
                    with suppress(psutil.Error):
                        process.kill()


@contextmanager
def gpu_shared_by(configs: Sequence[RunConfig], at_once: int) -> Iterator[Callable[[RunConfig], dict[str, str]]]:
    """Run one MPS daemon for all runs of a sweep, and yield a function from a run's config to its variables.

    Also measure how many clients a run trains in parallel (resources.py) before the first run starts: measured while
    other runs use the GPU, the result would be wrong, and it is cached. Some of the runs may not use MPS or the GPU;
    if only one runs ``at_once``, it shares the GPU with nobody.
    """
    installed = at_once > 1 and shutil.which(CONTROL) is not None
    sharing = [config for config in configs if may_share_gpu(config)] if installed else []
    if len(sharing) < 2:
        yield lambda config: {}
        return
    from fedeas_flwr.launch.resources import clients_at_once

    # A short path: the daemon creates Unix sockets below it, whose paths may have at most 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="fe-", ignore_cleanup_errors=True) as folder,
        shared_gpu(Path(folder), os.environ, at_once) as own,
    ):
        for config in sharing:
            clients_at_once(config, on_gpu=True)
        yield lambda config: own if own and may_share_gpu(config) else {}


def _queues(pool: int, processes: int) -> str:
    """Return a process's share of the queues: at least 2, the default of MPS, and at most 32, CUDA's limit."""
    return str(min(max(pool // processes, 2), 32))


def _run(command: list[str], environment: Mapping[str, str], stdin: str = "") -> str:
    """Run a command with the given input; return its error as one line, or an empty string."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C must not end the daemon before its clients
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    words = (done.stderr or done.stdout).split()
    return "" if done.returncode == 0 else " ".join(words[-30:]) or f"code {done.returncode}"
