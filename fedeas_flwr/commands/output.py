"""How commands give their answers: a table or JSON, and a table that no pipe squeezes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from fedeas_flwr.config import ConfigError

_WIDE = 160


def check_format(output: str) -> str:
    """Refuse a format that there is not."""
    if output not in ("table", "json"):
        raise ConfigError(f"format = '{output}': must be table or json")
    return output


FormatOption = Annotated[str, typer.Option("--format", help="table or json", callback=check_format)]


def table_console() -> Console:
    """A terminal as wide as it is; a file or a pipe wide enough for any of our tables."""
    return Console() if sys.stdout.isatty() else Console(width=max(Console().width, _WIDE))
