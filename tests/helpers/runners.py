"""Small runs on the built-in digits, and the `fedeas` command, for tests."""

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
"""Cheap images for tests that ignore their quality: a tenth of the generator's steps, and little padding."""

NEEDS: dict[str, dict[str, Any]] = {
    "fedgen": {"disclose_label_counts": True, "fedgen_steps": 2},
    "fedmix": {"disclose_mean_images": True},
    **{name: {"clients": 8, "strategy_args": "num_malicious_nodes=1"} for name in ("krum", "multikrum", "bulyan")},
}
"""Keys that some strategies need, with this number of clients."""


def small(folder: Path, **changes: Any) -> RunConfig:
    """Return the config of a run that takes seconds; ``changes`` are snake_case keys."""
    values = {**SMALL, "run-dir": str(folder), **{k.replace("_", "-"): v for k, v in changes.items()}}
    return parse_config(values)


def quick(folder: Path, **changes: Any) -> RunConfig:
    """Return a config like `small` with a tiny network, for tests of what a run does around its training steps.

    Other processes find that network only with this folder on their path; use `small` for them.
    """
    return small(folder, **{"model": "users_models:tiny", **changes})


def black_bank(path: Path, counts: Sequence[int]) -> str:
    """Write a bank with ``counts`` black images per class; return its run-config value."""
    np.savez(path, x=np.zeros((sum(counts), 8, 8, 1), np.uint8), y=np.repeat(np.arange(len(counts)), counts))
    return f"bank:{path}"


def finish(config: RunConfig) -> RunDirectory:
    """Run to the end without terminal output."""
    return launch(config, Console(file=io.StringIO()))


def with_fixed_noise_key(folder: Path) -> Path:
    """Write a fixed noise key into a future run's folder, so that runs with `dp` can be compared; return the folder."""
    folder.mkdir(parents=True)
    (folder / "noise-key").write_text("0f" * 32)
    return folder


def pass_models_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let inline runs pass models by reference, as on a GPU, with two clients in parallel."""

    class ByReference(InlineGrid):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args[:3], workers=2, by_reference=True)

    monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", ByReference)


def client_state(run: RunDirectory, client: int, number: int) -> ClientState:
    """Return the state that a simulated client wrote after a round."""
    return ClientStore(run.path / "clients" / str(client), f"{run.identity()}/{client}").load(number)


def weights(run: RunDirectory) -> str:
    """Return a hash of the final model; equal hashes mean bitwise equal models."""
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
    """Return the command line of `fedeas` from this source tree."""
    return [sys.executable, "-m", "fedeas_flwr", *words]


def fedeas(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command offline in a new process; ``environment`` overrides variables of this process.

    `run_in_process` is faster.
    """
    path = {"PYTHONPATH": str(Path(__file__).parents[2]), "FEDEAS_OFFLINE": "1"}
    inside = {**os.environ, **path, **environment}
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=600, cwd=cwd, env=inside)


def run_in_process(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process and return its output and exit code, without importing Python and torch again."""
    out, errors, code, path = io.StringIO(), io.StringIO(), 0, sys.path[:]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    log = logging.getLogger("fedeas_flwr")  # a command that prints the log does so until its process ends
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
