"""How tests start runs: small ones, on the built-in digits."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedeas_flwr.commands import app
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.federation.client_state import ClientState, ClientStore
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.launch.run import launch
from fedeas_flwr.runs.directory import RunDirectory

SMALL: dict[str, Any] = {"clients": 4, "rounds": 3, "local-epochs": 1, "backend": "inline", "beta": 4.0, "alpha": 0.1}

CHEAP: dict[str, Any] = {"sampler_steps": 2, "generation_batch": 16}
"""Images that cost little, where nobody looks at them: a tenth of the generator's steps, and little padding."""

NEEDS: dict[str, dict[str, Any]] = {
    "fedgen": {"disclose_label_counts": True, "fedgen_steps": 2},
    "fedmix": {"disclose_mean_images": True},
    **{name: {"clients": 8, "malicious_clients": 1} for name in ("krum", "multikrum", "bulyan")},
}
"""What some strategies need to be said before they start, of so few clients."""


def small(folder: Path, **changes: Any) -> RunConfig:
    """A run of seconds; ``changes`` are snake_case keys."""
    values = {**SMALL, "run-dir": str(folder), **{k.replace("_", "-"): v for k, v in changes.items()}}
    return parse_config(values)


def quick(folder: Path, **changes: Any) -> RunConfig:
    """As `small`, of a network with little to compute: for what a run does around its training steps.

    Other processes find that network only with this folder on their path: what they run is `small`.
    """
    return small(folder, **{"model": "users_models:tiny", **changes})


def black_digits(path: Path, counts: Sequence[int]) -> str:
    """A bank with so many images of each class, none worth looking at; named as a run-config names it."""
    np.savez(path, x=np.zeros((sum(counts), 8, 8, 1), np.uint8), y=np.repeat(np.arange(len(counts)), counts))
    return f"bank:{path}"


def finish(config: RunConfig) -> RunDirectory:
    """Run to the end without a terminal."""
    return launch(config, Console(file=io.StringIO()))


def with_known_noise(folder: Path) -> Path:
    """Give a run to come a key of its noise that everybody knows: runs with `dp` can be compared then."""
    folder.mkdir(parents=True)
    (folder / "noise-key").write_text("0f" * 32)
    return folder


def hand_models_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let inline runs pass models by reference, as on a GPU, with two clients in parallel."""

    class ByReference(InlineGrid):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args[:3], workers=2, by_reference=True)

    monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", ByReference)


def client_state(run: RunDirectory, client: int, number: int) -> ClientState:
    """Return the state that a simulated client wrote after a round."""
    return ClientStore(run.path / "clients" / str(client), f"{run.identity()}/{client}").load(number)


def weights(run: RunDirectory) -> str:
    """A hash of the final model: equal means equal bit for bit."""
    return hashlib.sha256((run.path / "model.safetensors").read_bytes()).hexdigest()


def start_interruptible(command: list[str], **more: Any) -> subprocess.Popen[str]:
    """Start a command that Ctrl-C reaches: a shell's background jobs inherit an ignored SIGINT."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **more,
    )


def command(*words: str) -> list[str]:
    """The command `fedeas` of this very tree."""
    return [sys.executable, "-m", "fedeas_flwr", *words]


def fedeas(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, offline; ``environment`` is what differs from this process's.

    `typed` is the quick way to all that the command says.
    """
    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "FEDEAS_OFFLINE": "1"}
    inside = {**os.environ, **path, **environment}
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=600, cwd=cwd, env=inside)


def typed(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process: what a shell would see of it, without waiting for Python and torch."""
    out, errors, code, path = io.StringIO(), io.StringIO(), 0, sys.path[:]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    log = logging.getLogger("fedeas_flwr")  # a command that shows it does so to the end of its process
    shown_by, level, propagates = log.handlers[:], log.level, log.propagate
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["fedeas", *words])
        for key, value in {"FEDEAS_OFFLINE": "1", **environment}.items():
            patch.setenv(key, value)
        if cwd:
            patch.chdir(cwd)
        try:
            app.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            sys.path[:] = path
            for number, handler in handlers.items():
                signal.signal(number, handler)
            log.handlers[:], log.propagate = shown_by, propagates
            log.setLevel(level)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())
