"""What `fedeas --help` shows: commands in the order of use, the way of an experiment, and every argument explained."""

from __future__ import annotations

import sys
import typing
from typing import Any

import click
import typer.core
from typer.core import TyperArgument, TyperGroup
from typer.models import ArgumentInfo

# Help is plain text here. Typer still escapes "[required]" for rich where rich is installed, and shows the backslash.
typer.core.HAS_RICH = False

CLICK_SUGGESTS = hasattr(click.exceptions, "NoSuchCommand")
"""Whether click says itself which command was meant, as since 8.4; typer would say it once more."""
_ORDER = (
    *("quickstart", "doctor", "plan", "run", "resume", "sweep", "report", "reproduce", "runs", "evaluate", "export"),
    *("train-generator", "generate", "cache", "deploy", "keys", "strategies"),
)
WORKFLOW_HELP = """
The way of an experiment:

\b
  try it            fedeas quickstart
  can it run here?  fedeas doctor CONF
  how many, where?  fedeas plan --clients 20 --alpha 0.1 --beta 12
  which β?          fedeas plan --min-removed 0.5 --max-synthetic 0.25
  one run           fedeas run CONF policy=fedeas seed=1
  after Ctrl-C      fedeas resume RUN
  a grid of runs    fedeas sweep CONF --grid policy=none,fedeas --grid seed=1,2
  compare and plot  fedeas report runs --html report.html

CONF is a TOML file of run-config keys, such as conf/quickstart.toml; `fedeas keys` lists them, and key=value behind it
changes one. `fedeas COMMAND --help` has the options of a command.

Exit codes: 2 what was given is wrong, nothing was begun; 1 it failed, or the answer is no; 130 Ctrl-C.
"""


class OrderedGroup(TyperGroup):
    """Lists commands as a newcomer needs them, others behind, and explains their arguments; alone it is its help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands' names."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the words behind the group; where there are none, its help is what was meant."""
        return super().parse_args(ctx, args or ["--help"])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; if Ctrl-C stops it, say so in the words that came with it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            if ctx.parent is None:
                print(str(stopped) or "stopped", file=sys.stderr)
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command by its name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _restore_help(command)
        return command


def _restore_help(command: click.Command) -> None:
    """Give arguments the help they were declared with: click 8.5 forgets it in the typer that Flower 1.41 needs.

    Once they have it, click 8.5 and typer would each list them: typer alone may.
    """
    if command.callback is None:
        return
    setattr(command, "format_arguments", lambda ctx, formatter: None)  # noqa: B010 - click before 8.5 has no such method
    hints = typing.get_type_hints(command.callback, include_extras=True)
    for parameter in command.params:
        if isinstance(parameter, TyperArgument) and not parameter.help:
            declared = getattr(hints.get(str(parameter.name)), "__metadata__", ())
            parameter.help = next((info.help for info in declared if isinstance(info, ArgumentInfo)), None)
