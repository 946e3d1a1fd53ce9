"""CUDA's MPS for the length of a run: client processes share a GPU at the same moment instead of taking turns."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
TRIAL = [sys.executable, "-c", "import torch; print(float(torch.ones(2, device='cuda').sum()))"]
"""A process that computes on the GPU: a daemon may start where its clients cannot reach it, as in some containers."""
_SECONDS = 60


@contextmanager
def shared_gpu(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run a daemon of our own for the block, and yield the variables that its clients need.

    None where a daemon of the user's is to be used (its variables are set), where there is no MPS, or where it does not
    work: processes then take turns, as they would have without it, and that is said.

    Parameters
    ----------
    folder
        Short: the daemon's sockets lie in it.
    environment
        Of the processes to come.
    """
    if environment.get(PIPE) or shutil.which(CONTROL) is None:
        yield {}
        return
    own = {PIPE: str(folder / "mps"), LOG: str(folder / "mps-log")}
    for path in own.values():
        Path(path).mkdir()
    inside = {**environment, **own}
    problem = _started([CONTROL, "-d"], inside) or _started(TRIAL, inside)
    try:
        if problem:
            logger.warning("CUDA MPS does not work here, clients take turns on the GPU: %s", problem)
        yield {} if problem else own
    finally:
        # Its clients are gone by now. Where it never started, this fails and does nothing.
        subprocess.run([CONTROL], input="quit\n", text=True, env=inside, capture_output=True, check=False)


def _started(command: list[str], environment: Mapping[str, str]) -> str:
    """Run a command; return what went wrong in one line, or nothing."""
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())[:200]
    words = (done.stderr or done.stdout).split()
    return "" if done.returncode == 0 else " ".join(words[-30:]) or f"code {done.returncode}"
