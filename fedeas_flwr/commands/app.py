"""The `fedeas` command: its subcommands, its exit codes, and errors as one line on stderr.

Commands import torch and flwr inside their functions, so that light ones such as `fedeas plan` start fast.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import click
import typer

from fedeas_flwr.commands.audit import audit
from fedeas_flwr.commands.deploy import deploy_app
from fedeas_flwr.commands.doctor import doctor
from fedeas_flwr.commands.help import CLICK_SUGGESTS, WORKFLOW_HELP, OrderedGroup
from fedeas_flwr.commands.images import cache_app, generate
from fedeas_flwr.commands.listings import keys, strategies
from fedeas_flwr.commands.plan import plan
from fedeas_flwr.commands.publish import publish
from fedeas_flwr.commands.quickstart import quickstart_command
from fedeas_flwr.commands.report import report
from fedeas_flwr.commands.reproduce import reproduce
from fedeas_flwr.commands.run import evaluate, export, resume, run
from fedeas_flwr.commands.runs import runs_app
from fedeas_flwr.commands.sweep import sweep
from fedeas_flwr.commands.train_generator import train_generator
from fedeas_flwr.common.errors import RunError, RunFailedError, is_out_of_memory
from fedeas_flwr.common.files import DISK_ERRORS, cache_hint
from fedeas_flwr.common.processes import ProcessTree
from fedeas_flwr.common.project import read_project
from fedeas_flwr.common.text import MAX_LINE, counted, one_line

app = typer.Typer(
    cls=OrderedGroup,
    help="Budget-aware synthetic augmentation for federated learning, on Flower.",
    epilog=WORKFLOW_HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    suggest_commands=not CLICK_SUGGESTS,
)
app.command("quickstart", short_help="Run and compare four policies on built-in data")(quickstart_command)
app.command(short_help="Plan how many images each client generates; choose β")(plan)
app.add_typer(cache_app, name="cache", short_help="Manage generated images: ls, verify, prune")
app.add_typer(runs_app, name="runs", short_help="Manage run directories: ls, show, csv, prune, rm")
app.command(short_help="Run a grid of experiments; repeat to finish the rest")(sweep)
app.command(short_help="Reproduce the paper's tables and figures")(reproduce)
app.command(short_help="Test whether a generator memorised its training images")(audit)
app.command(short_help="Generate images to view, measure or use as a bank")(generate)
app.command(short_help="Compare and plot runs: table, HTML page, Markdown")(report)
app.add_typer(deploy_app, name="deploy", short_help="Set up real machines: init, register, check")
app.command(short_help="Check whether this machine can run a config")(doctor)
app.command(short_help="List every run-config key")(keys)
app.command(short_help="List every strategy and what clients disclose")(strategies)
app.command("train-generator", short_help="Train a diffusion model as a generator")(train_generator)
app.command(short_help="Run one federated training")(run)
app.command(short_help="Resume an interrupted run")(resume)
app.command(short_help="Evaluate a run's saved model")(evaluate)
app.command(short_help="Copy a run's record without weights and paths")(export)
app.command(short_help="Write a folder for `flwr app publish`")(publish)
WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors that mean that the user gave a wrong path; a full disk raises other ones."""


def main() -> None:
    """Run the command line; print an expected error as one line and exit with its code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, _terminated)
    # At exit the interpreter would run the garbage collector several times over all objects of torch and diffusers.
    atexit.register(gc.freeze)
    sys.path.insert(0, os.getcwd())  # custom models (`model=MODULE:FUNCTION`) are imported from here
    try:
        code = app(standalone_mode=False)  # on Ctrl-C, typer returns an exit code
        if isinstance(code, int):
            sys.exit(code)
    except Exception as error:
        expected = (click.ClickException, RunError, ValueError, OSError, ModuleNotFoundError)
        if not (isinstance(error, expected) or is_out_of_memory(error)):
            raise
        print("error: " + one_line(_format_error(error), MAX_LINE), file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(one_line(note, MAX_LINE), file=sys.stderr)
        sys.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """Return 2 for invalid input (nothing was started) and 1 for a command that started and failed."""
    if isinstance(error, OSError):
        return 2 if isinstance(error, WRONG_PATHS) else 1
    return 1 if isinstance(error, RunFailedError) or is_out_of_memory(error) else 2


def _format_error(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, ModuleNotFoundError):  # installed with --no-deps, for planning alone
        return f"this command needs the package {error.name!r}: pip install fedeas-flwr, with its dependencies"
    if isinstance(error, OSError) and error.strerror:
        unnamed = "standard output or a temporary file: " if error.errno in DISK_ERRORS else ""
        place = f"{error.filename}: " if error.filename else unnamed
        return f"{place}{error.strerror}{cache_hint(error)}"
    return str(error) or type(error).__name__


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedeas {read_project().version}")
        raise typer.Exit


@app.callback()
def root_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Handle the options given before a command, and end what a killed run left; `doctor` only reports it."""
    if context.invoked_subcommand != "doctor":
        from fedeas_flwr.launch.watchdog import dead_launches, end_launch

        for mark, left in dead_launches().items():
            end_launch(ProcessTree(None, mark), Path(mark))
            if left:
                print(f"ended {counted(len(left), 'process', 'processes')} of a killed run", file=sys.stderr)
