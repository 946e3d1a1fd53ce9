"""The output of `fedeas --help`: commands in order of use, a typical workflow, and help for every argument."""

from __future__ import annotations

import sys
import typing
from typing import Any

import click
import typer.core
from typer.core import TyperArgument, TyperGroup
from typer.models import ArgumentInfo

# Our help is plain text, but where rich is installed typer escapes "[required]" for it and prints the backslash.
typer.core.HAS_RICH = False

CLICK_SUGGESTS = hasattr(click.exceptions, "NoSuchCommand")
"""Whether click suggests a similar command itself (since 8.4); typer would then suggest it a second time."""
_ORDER = (
    *("quickstart", "doctor", "plan", "run", "resume", "sweep", "report", "reproduce", "runs", "evaluate", "export"),
    *("train-generator", "generate", "audit", "cache", "deploy", "publish", "keys", "strategies"),
)
WORKFLOW_HELP = """
Typical workflow:

\b
  try it            fedeas quickstart
  can it run here?  fedeas doctor CONF
  how many, where?  fedeas plan CONF beta=12
  which β?          fedeas plan CONF --min-removed 0.5 --max-synthetic 0.25
  one run           fedeas run CONF policy=fedeas seed=1
  after Ctrl-C      fedeas resume RUN
  a grid of runs    fedeas sweep CONF --grid policy=none,fedeas --grid seed=1,2
  compare and plot  fedeas report runs --html report.html

CONF is a TOML file of run-config keys, such as conf/quickstart.toml; `fedeas keys` lists all keys, and key=value after
CONF overrides one. `fedeas COMMAND --help` lists the options of a command.

Exit codes: 2 invalid input, nothing was started; 1 the command failed, or a check found a problem; 130 Ctrl-C.
"""


class OrderedGroup(TyperGroup):
    """Command group that lists its commands in order of use and prints its help if no command is given."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in order of use."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; without any, print the help."""
        return super().parse_args(ctx, args or ["--help"])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; if Ctrl-C stops it, print the message of the KeyboardInterrupt."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            if ctx.parent is None:
                print(str(stopped) or "stopped", file=sys.stderr)
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, with the help of its arguments."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _restore_help(command)
        return command


def _restore_help(command: click.Command) -> None:
    """Set the declared help of arguments, which click 8.5 drops with the typer version that Flower 1.41 needs.

    Click 8.5 and typer would then both list the arguments, so click's listing is switched off.
    """
    if command.callback is None:
        return
    setattr(command, "format_arguments", lambda ctx, formatter: None)  # noqa: B010 - click before 8.5 has no such method
    hints = typing.get_type_hints(command.callback, include_extras=True)
    for parameter in command.params:
        if isinstance(parameter, TyperArgument) and not parameter.help:
            declared = getattr(hints.get(str(parameter.name)), "__metadata__", ())
            parameter.help = next((info.help for info in declared if isinstance(info, ArgumentInfo)), None)
