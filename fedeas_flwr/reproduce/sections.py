"""Make the sections of the page of `fedeas reproduce`: one per table or figure, each with its missing runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.opening import open_for_run
from fedeas_flwr.report.page import as_png
from fedeas_flwr.report.samples import draw_rows
from fedeas_flwr.reproduce import tables
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, cell
from fedeas_flwr.reproduce.items import ITEMS, Choice, Item
from fedeas_flwr.reproduce.results import Results
from fedeas_flwr.reproduce.tables import Table

if TYPE_CHECKING:
    from fedeas_flwr.reproduce.figures import Setting


FillCommand = Callable[[Sequence[str], Collection[str]], tuple[str, str]]
"""(items or cells to name, cells that lack runs) → command that runs what is missing, and a note on what it needs."""

IMAGES_PER_CLASS = 10


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    name: str
    title: str
    caption: str
    table: Table | None
    picture: Path | None
    missing: tuple[str, ...]
    """Missing runs, ``COLUMN/METHOD seed N``."""
    note: str = ""
    figure: Figure | None = None
    """The figure that the picture shows."""
    command: str = ""
    """Command that runs what is missing."""
    command_note: str = ""
    """What else the command needs."""


def make_sections(choice: Choice, results: Results, folder: Path, fill_command: FillCommand) -> list[Section]:
    """Return a section for every table and figure, and one for cells given by name.

    Parameters
    ----------
    choice
        The tables, figures and cells.
    results
        The runs.
    folder
        Where pictures are written.
    fill_command
        Returns the command that runs what is missing.
    """
    setting: Setting | None = None
    sections = []
    for name in choice.items:
        item = ITEMS[name]
        table, picture, figure, note = None, None, None, ""
        if item.table is not None:
            table = item.table(results, choice.columns)
        else:
            from fedeas_flwr.reproduce import figures

            setting = setting or figures.setting_of(results)
            drawn = _draw(item, setting, choice.more)
            if isinstance(drawn, str):
                note = drawn
            else:
                picture, figure = folder / f"{name}.png", drawn
                atomic_write(picture, as_png(drawn))
        missing = replace(choice, items=(name,), cells=()).missing(results)
        runs, command = _runs(missing), fill_command([name], missing)
        sections.append(Section(name, item.title, item.caption, table, picture, runs, note, figure, *command))
    if choice.cells:
        table = tables.cell_table(results, choice.cells)
        missing = replace(choice, items=()).missing(results)
        command = fill_command(list(missing), missing)
        sections.append(Section("cells", "Cells by name", "", table, None, _runs(missing), "", None, *command))
    return sections


def _runs(missing: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    return tuple(f"{name} seed {seed}" for name, seeds in missing.items() for seed in seeds)


def _draw(item: Item, setting: Setting, more: Mapping[str, Any]) -> Figure | str:
    """Return a figure, or the reason why it cannot be drawn."""
    from fedeas_flwr.reproduce import figures

    if item.draw == "draw_closed_form":
        return figures.draw_closed_form()
    if item.draw == "draw_samples":
        config = cell(f"{BETA_SWEEP_COLUMN}/fedeas").config(setting.results.scale, 1, more)
        if config.dataset != "digits" and "generator" not in more:
            return "missing: name the generator with --set generator=FOLDER"
        return draw_samples(config)
    drawn: Figure = getattr(figures, item.draw)(setting)
    return drawn


def draw_samples(config: RunConfig) -> Figure:
    """Draw the first images of each class that client 0 of a run gets, unselected, as in supplement C.

    They are read from the cache; those that it lacks are generated.
    """
    names = dataset_info(config.dataset).classes
    generator = open_for_run(config, configure_torch(config.device))
    images, _, _ = ImageCache().ensure(generator, seed=config.seed, client=0, wanted=[IMAGES_PER_CLASS] * len(names))
    rows = images.reshape(len(names), IMAGES_PER_CLASS, *images.shape[1:])
    return draw_rows(list(zip(names, rows, strict=True)), IMAGES_PER_CLASS)
