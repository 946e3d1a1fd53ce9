"""The `fedeas` command: its subcommands, its exit codes, and errors as one line on stderr.

Heavy imports (torch, flwr) happen inside the commands that need them: `fedeas plan` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import click
import typer

from fedeas_flwr.commands.deploy import deploy_app
from fedeas_flwr.commands.doctor import doctor
from fedeas_flwr.commands.help import CLICK_SUGGESTS, WORKFLOW_HELP, OrderedGroup
from fedeas_flwr.commands.images import cache_app, generate
from fedeas_flwr.commands.listings import keys, strategies
from fedeas_flwr.commands.plan import plan
from fedeas_flwr.commands.quickstart import quickstart_command
from fedeas_flwr.commands.report import report
from fedeas_flwr.commands.reproduce import reproduce
from fedeas_flwr.commands.run import evaluate, export, resume, run
from fedeas_flwr.commands.runs import runs_app
from fedeas_flwr.commands.sweep import sweep
from fedeas_flwr.commands.train_generator import train_generator
from fedeas_flwr.common.errors import RunError, RunFailedError, is_out_of_memory
from fedeas_flwr.common.files import DISK_ERRORS, cache_hint
from fedeas_flwr.common.project import read_project
from fedeas_flwr.common.text import one_line

app = typer.Typer(
    cls=OrderedGroup,
    help="Budget-aware synthetic augmentation for federated learning, on Flower.",
    epilog=WORKFLOW_HELP,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    suggest_commands=not CLICK_SUGGESTS,
)
app.command("quickstart", short_help="Four runs on built-in data, a table and a page")(quickstart_command)
app.command(short_help="Who would generate how much; choose β from limits")(plan)
app.add_typer(cache_app, name="cache", short_help="Look after generated images: ls, verify, prune")
app.add_typer(runs_app, name="runs", short_help="Look after runs: ls, show, csv, prune, rm")
app.command(short_help="Do a grid of runs; started again, what is left of it")(sweep)
app.command(short_help="The paper's tables and figures, its numbers beside ours")(reproduce)
app.command(short_help="Make images to look at, to measure, to use as a bank")(generate)
app.command(short_help="Compare and plot runs: a table, a page, Markdown")(report)
app.add_typer(deploy_app, name="deploy", short_help="A federation of real machines: init, register, check")
app.command(short_help="What this machine can do for a run, and what to mend")(doctor)
app.command(short_help="List every run-config key")(keys)
app.command(short_help="List every strategy, and what it discloses")(strategies)
app.command("train-generator", short_help="Train a diffusion model to generate with")(train_generator)
app.command(short_help="Run one federated training")(run)
app.command(short_help="Go on with an interrupted run")(resume)
app.command(short_help="Test a run's saved model")(evaluate)
app.command(short_help="Copy a run's record, without weights and paths")(export)
WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What an operating system says to a path that should have been another; a full disk it says otherwise."""


def main() -> None:
    """Run the command line; every foreseeable failure is one line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, _terminated)
    # On its way out the interpreter would look through all that torch and diffusers have made, several times.
    atexit.register(gc.freeze)
    sys.path.insert(0, os.getcwd())  # where models of the user's own are looked for
    try:
        code = app(standalone_mode=False)  # typer turns Ctrl-C into a code of its own, and returns it
        if isinstance(code, int):
            sys.exit(code)
    except Exception as error:
        if not (isinstance(error, (click.ClickException, RunError, ValueError, OSError)) or is_out_of_memory(error)):
            raise
        print("error: " + one_line(_format_error(error), None), file=sys.stderr)
        sys.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """2 where what was given is wrong, so that nothing was begun; 1 where what was begun has failed."""
    if isinstance(error, OSError):
        return 2 if isinstance(error, WRONG_PATHS) else 1
    return 1 if isinstance(error, RunFailedError) or is_out_of_memory(error) else 2


def _format_error(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
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
def of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before any command."""
