"""Define options and checks that several commands share: output format, output paths, options without effect."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from click.core import ParameterSource
from rich.console import Console

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import existing_part
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import parse_overrides, read_values
from fedeas_flwr.config_keys import unused_keys

console = Console(markup=False)
"""Console without markup: brackets in a path are printed as they are."""
DATASETS = "digits, cifar10, cifar100, fashion-mnist, own:PATH or hf:PATH"
GENERATORS = "builtin, FOLDER in diffusers' format, bank:DIR, sd-turbo[:DIR], package.module:name"
"""The help of options that name a dataset or a generator."""


def print_line(console: Console, text: str) -> None:
    """Print a text without colours; only the terminal wraps it, so that paths and commands can be copied."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def print_unused(config: RunConfig, conf: Path | None, overrides: Sequence[str]) -> None:
    """Warn on stderr of each key that was given, differs from its default and has no effect on the run.

    A key of the file is named only if it has no effect by the file alone either: runs of other policies and strategies
    may share the file.
    """
    given = {*parse_overrides(overrides)}
    with suppress(ConfigError):  # a file may be valid only together with overrides
        given |= read_values(conf).keys() & unused_keys(parse_config(read_values(conf))).keys()
    values, defaults = config.to_user_dict(), parse_config({}).to_user_dict()
    for key, need in unused_keys(config).items():
        if key in given and values[key] != defaults[key]:
            print(f"warning: {key} = {values[key]!r} has no effect: it needs {need}", file=sys.stderr)


def check_format(output: str) -> str:
    """Return the format, or raise `ConfigError` if it is unknown."""
    if output not in ("table", "json"):
        raise ConfigError(f"format = '{output}': must be table or json")
    return output


FormatOption = Annotated[str, typer.Option("--format", help="table or json", callback=check_format)]


def check_folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return an option's path, or raise `ConfigError` if no folder can be written there.

    Typer calls this before the command runs, because the command may compute for hours before it writes.
    """
    if path is None:
        return path
    if not (there := existing_part(path.absolute())).is_dir():
        which = "" if there == path.absolute() else f"{there} "
        raise ConfigError(f"{option.opts[0]} '{path}': {which}is a file, must be a folder")
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{option.opts[0]} '{path}': cannot be written to: {error.strerror or error}") from None
    return path


def check_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Return an option's path, or raise `ConfigError` if no file can be written there. See `check_folder`."""
    if path is not None and path.is_dir():
        raise ConfigError(f"{option.opts[0]} '{path}': is a folder, must be a file")
    if path is not None:
        check_folder(option, path.parent)
    return path


def reject_options(context: typer.Context, names: Collection[str], why: str) -> None:
    """Raise `ConfigError` for an option that was given on the command line but would be ignored."""
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(param.opts[0] for param in context.command.params if param.name == name)
            raise ConfigError(f"{option}: remove the option, since {why}")
