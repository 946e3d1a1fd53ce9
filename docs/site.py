"""Hook of mkdocs.yml: the site has the repository's own tree, so that links between its pages work unchanged.

Pages of the commands and of the Python API are generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import fedeas_flwr
from fedeas_flwr.commands.app import app

ROOT = Path(__file__).parents[1]
SHOWN = ("*.md", "docs/*.md", "docs/*.css", "results/**/*.md", "results/**/*.png", "examples/*.ipynb", "LICENSE")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the theme's files, the repository's pages and pictures, and the generated pages."""
    kept = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")]
    paths = sorted(path for pattern in SHOWN for path in ROOT.glob(pattern))
    ours = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths]
    generated = {"docs/commands.md": commands_page(), "docs/api.md": api_page()}
    return Files([*kept, *ours, *(File.generated(config, name, content=text) for name, text in generated.items())])


def commands_page() -> str:
    """Return the help of every command, as Markdown."""
    return "# Commands\n\n" + "\n".join(_helps(typer.main.get_command(app), "fedeas"))


def _helps(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    context = click.Context(command, info_name=name.split()[-1], parent=parent, terminal_width=100)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            yield from _helps(command.commands[child], f"{name} {child}", context)
    else:
        formatter = context.make_formatter()
        click.Command.format_help(command, context, formatter)
        yield f"## {name}\n\n```text\n{formatter.getvalue()}```\n"


def api_page() -> str:
    """Return a page with the docstring of every public name."""
    names = (getattr(fedeas_flwr, name) for name in fedeas_flwr.__all__)
    return "# Python API\n\n" + "\n\n".join(f"::: {found.__module__}.{found.__name__}" for found in names)
