"""How commands give their answers: a table or JSON, files where files can be."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from click.core import ParameterSource
from rich.console import Console

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import existing_part

console = Console(markup=False)
"""A path is printed as it is: brackets in it are no styles."""


def check_format(output: str) -> str:
    """Refuse a format that there is not."""
    if output not in ("table", "json"):
        raise ConfigError(f"format = '{output}': must be table or json")
    return output


FormatOption = Annotated[str, typer.Option("--format", help="table or json", callback=check_format)]


def can_be_folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a folder that cannot be written to, before hours are spent on what goes there; an option's callback."""
    if path is None:
        return path
    if not (there := existing_part(path.absolute())).is_dir():
        which = "" if there == path.absolute() else f"{there} "
        raise ConfigError(f"{option.opts[0]} '{path}': {which}is a file, must be a folder")
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{option.opts[0]} '{path}': cannot be written to, {error.strerror or error}") from None
    return path


def can_be_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a file to write that is a folder, or lies below a file; as the callback of an option."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{option.opts[0]} '{path}': is a folder, must be a file")
    if path is not None:
        can_be_folder(option, path.parent)
    return path


def refuse_given(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options of a command that were given and would be ignored."""
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(param.opts[0] for param in context.command.params if param.name == name)
            raise ConfigError(f"{option}: leave it out, {why}")
