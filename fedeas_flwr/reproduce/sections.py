"""Make the sections of the page of `fedeas reproduce`: one per table or figure, each with its missing runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.interface import describe_generator
from fedeas_flwr.generators.opening import open_for_run
from fedeas_flwr.report import page
from fedeas_flwr.report.samples import draw_rows
from fedeas_flwr.reproduce import figures
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, cell
from fedeas_flwr.reproduce.items import ITEMS, Choice
from fedeas_flwr.reproduce.results import Results
from fedeas_flwr.reproduce.tables import Table, cell_table

FillCommand = Callable[[Sequence[str], Collection[str]], tuple[str, str]]
"""(items or cells to name, cells that lack runs) → command that runs what is missing, and a note on what it needs."""

IMAGES_PER_CLASS = 10
MAX_NAMED = 12
"""Maximum number of missing runs that a section names; it counts the others."""


@dataclass(frozen=True, kw_only=True)
class Section(page.Section):
    """A section of the page with at most one table or one picture, ``NAME.png``."""

    name: str
    tables: Sequence[Table] = ()
    missing: Sequence[str] = ()
    """Missing runs, ``COLUMN/METHOD seed N``."""
    note: str = ""
    """Why a figure could not be drawn."""


def make_sections(choice: Choice, results: Results, folder: Path, fill_command: FillCommand) -> list[Section]:
    """Return a section for every table and figure, and one for cells given by name; write pictures to the folder."""
    setting: figures.Setting | None = None
    sections = []
    for name in choice.items:
        item = ITEMS[name]
        tables, pictures, note = [], [], ""
        if item.table is not None:
            tables.append(item.table(results, choice.columns))
        else:
            setting = setting or figures.setting_of(results)
            drawn = _draw(item.draw, setting, choice.more)
            if isinstance(drawn, str):
                note = drawn
            else:
                pictures.append(page.Picture(name, drawn, item.caption))
                atomic_write(folder / f"{name}.png", page.as_png(drawn))
        missing = replace(choice, items=(name,), cells=()).missing(results)
        runs, lines = _missing_lines(missing, fill_command([name], missing))
        text = [*([] if pictures else [item.caption]), *([note] if note else []), *lines]
        sections.append(
            Section(name=name, title=item.title, text=text, tables=tables, pictures=pictures, missing=runs, note=note)
        )
    if choice.cells:
        missing = replace(choice, items=()).missing(results)
        runs, lines = _missing_lines(missing, fill_command(list(missing), missing))
        made = [cell_table(results, choice.cells)]
        sections.append(Section(name="cells", title="Cells by name", text=lines, tables=made, missing=runs))
    return sections


def _missing_lines(missing: Mapping[str, Sequence[int]], filling: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Return the missing runs, and lines that name them and the command that does them."""
    runs = [f"{name} seed {seed}" for name, seeds in missing.items() for seed in seeds]
    if not runs:
        return [], []
    more = f" and {len(runs) - MAX_NAMED} more" if len(runs) > MAX_NAMED else ""
    named = f"Missing, {counted(len(runs), 'run')}: {', '.join(runs[:MAX_NAMED])}{more}."
    command, note = filling
    return runs, [named, f"To do them: `{command}`", *([note] if note else [])]


def _draw(draw: str, setting: figures.Setting, more: Mapping[str, Any]) -> Figure | str:
    """Return a figure, or the reason why it cannot be drawn."""
    if draw == "draw_closed_form":
        return figures.draw_closed_form()
    if draw == "draw_samples":
        config = cell(f"{BETA_SWEEP_COLUMN}/fedeas").config(setting.results.scale, 1, more)
        if config.dataset != "digits" and "generator" not in more:
            return "missing: name the generator with --set generator=FOLDER"
        return draw_samples(config)
    drawn: Figure = getattr(figures, draw)(setting)
    return drawn


def draw_samples(config: RunConfig) -> Figure:
    """Draw the first images of each class that client 0 of a run gets, unselected, as in supplement C.

    They are read from the cache; those that it lacks are generated.
    """
    names = dataset_info(config.dataset).classes
    generator = open_for_run(config, configure_torch(config.device))
    images, _, _ = ImageCache().ensure(
        generator,
        seed=config.seed,
        client=0,
        wanted=[IMAGES_PER_CLASS] * len(names),
        about=describe_generator(config),
    )
    rows = images.reshape(len(names), IMAGES_PER_CLASS, *images.shape[1:])
    return draw_rows(list(zip(names, rows, strict=True)), IMAGES_PER_CLASS)
