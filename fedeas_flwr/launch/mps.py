"""CUDA's MPS for the length of a run or a sweep: processes share a GPU at the same moment instead of taking turns."""

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
"""A process that computes on the GPU: a daemon may start where its clients cannot reach it, as in some containers."""
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many streams of a process may run side by side; to be set before CUDA starts in it."""
_POOL = 96
"""Such queues for all clients of a daemon together. On an H200 three processes with 32 each work, and a fourth is told
that it is out of memory; NVIDIA's guide says that there is one pool, and not how large it is."""
_SECONDS = 60


def may_share_gpu(config: RunConfig) -> bool:
    """Whether a run computes on this machine's GPU and allows MPS; on a cluster, MPS is its keeper's affair."""
    if config.mps == "off" or config.ray_address or config.device == "cpu":
        return False
    from fedeas_flwr.common.devices import pick_device

    try:
        return pick_device(config.device) == "cuda"
    except ValueError:  # there is no GPU, and the run itself will say so
        return False


@contextmanager
def shared_gpu(folder: Path, environment: Mapping[str, str], processes: int) -> Iterator[dict[str, str]]:
    """Run a daemon of our own for the block, and yield the variables that its clients need.

    Where somebody else's daemon is to be used (its variables are set: the user's, or that of the sweep that this run
    belongs to), only their parts of what this run was given. Nothing where there is no MPS, or where it does not work:
    processes then take turns, as they would have without it, and that is said.

    Parameters
    ----------
    folder
        Short: the daemon's sockets lie in it.
    environment
        Of the processes to come.
    processes
        How many there will be on the GPU.
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
    # Without the mark: at the end of a run all that carry it are killed, and the daemon is to end after its clients, by
    # being asked.
    inside = {name: value for name, value in {**environment, **own}.items() if name != MARK}
    try:
        problem = _run([CONTROL, "-d"], inside) or _run(TRIAL, inside)
        if problem:
            logger.warning("CUDA MPS does not work here, processes take turns on the GPU: %s", problem)
        yield {} if problem else own
    finally:
        # Its clients are gone by now. Where it never started, this fails and does nothing.
        with ignore_sigint():
            if _run([CONTROL], inside, say="quit\n"):
                for process in with_variable(PIPE, own[PIPE]):
                    with suppress(psutil.Error):
                        process.kill()


@contextmanager
def gpu_shared_by(configs: Sequence[RunConfig], at_once: int) -> Iterator[Callable[[RunConfig], dict[str, str]]]:
    """Run one daemon for all runs of a sweep, and yield what tells the variables that a run is to be given.

    How many clients a run has at once is measured here too (resources.py), before the first run starts: measured beside
    other runs it would be wrong, and kept.

    Parameters
    ----------
    configs
        Of the runs to come; some may not want MPS, or no GPU.
    full_batch_gradient
        How many of them: one alone has nobody to share with.
    """
    installed = at_once > 1 and shutil.which(CONTROL) is not None
    sharing = [config for config in configs if may_share_gpu(config)] if installed else []
    if len(sharing) < 2:
        yield lambda config: {}
        return
    from fedeas_flwr.launch.resources import max_parallel_clients

    # Short, because the daemon puts Unix sockets below it and their paths may have 107 characters.
    with (
        tempfile.TemporaryDirectory(prefix="fe-", ignore_cleanup_errors=True) as folder,
        shared_gpu(Path(folder), os.environ, at_once) as own,
    ):
        for config in sharing:
            if not config.actors:
                max_parallel_clients(config)
        yield lambda config: own if own and may_share_gpu(config) else {}


def _queues(pool: int, processes: int) -> str:
    """A process's part of a pool: two at least, which MPS gives unasked, and 32 at most, which is CUDA's limit."""
    return str(min(max(pool // processes, 2), 32))


def _run(command: list[str], environment: Mapping[str, str], say: str = "") -> str:
    """Run a command that is told something; return what went wrong in one line, or nothing."""
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            input=say,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            start_new_session=True,  # Ctrl-C is ours to handle: a daemon outlives its clients
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(error)
    words = (done.stderr or done.stdout).split()
    return "" if done.returncode == 0 else " ".join(words[-30:]) or f"code {done.returncode}"
