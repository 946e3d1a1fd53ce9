"""Write sections as a page, JSON, CSV or terminal output, and update the tables and numbers of a document."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.tables import as_csv, print_table
from fedeas_flwr.common.text import counted, show_seconds
from fedeas_flwr.partition import LEAKAGE
from fedeas_flwr.report.page import Document, table_markdown
from fedeas_flwr.reproduce.cells import cell
from fedeas_flwr.reproduce.inline_numbers import InlineNumbers
from fedeas_flwr.reproduce.items import ITEMS, choose
from fedeas_flwr.reproduce.page import Block, find_blocks, page_section, with_blocks
from fedeas_flwr.reproduce.results import Budget, Results
from fedeas_flwr.reproduce.sections import Section
from fedeas_flwr.reproduce.sweep_tables import sweep_table
from fedeas_flwr.reproduce.tables import Table, cell_table

SMOKE_NOTE = (
    "**Smoke scale.** Every run takes a few seconds on scikit-learn's 8×8 digits, with 6 or 10 clients instead of 20 "
    "or 100, 10 rounds (so last-20 is the mean of all rounds), a third of the paper's β, and one seed (two where "
    "marked). Another partition of the digits stands in for CIFAR-100. The page shows that everything runs and what it "
    "looks like. The paper's numbers are for other datasets: no difference is computed."
)


def make_page(results: Results, sections: list[Section], given: Sequence[str] = ()) -> Document:
    """Return the page of the sections; its head names the run-config keys ``given`` for all runs."""
    runs = [run for found in results.cells.values() for run in found]
    time = f", {show_seconds(sum(run.seconds for run in runs))} in total" if runs else ""
    filled = sum(bool(found) for found in results.cells.values())
    notes = [SMOKE_NOTE if results.scale == "smoke" else LEAKAGE]
    if given:
        notes.append(f"Set in all runs: {', '.join(f'`{word}`' for word in given)}.")
    notes.append(
        f"{filled} of {len(results.cells)} cells have runs, {counted(len(runs), 'run')}{time}. Ours: mean ± sample "
        "standard deviation over the seeds. ✓: as many images as in the paper or, without a number there, as planned."
    )
    notes += _budget_notes(sections)
    if results.doubles:
        notes.append(f"Only the first run of each cell, seed and form of Γ̂ counts; left out: {len(results.doubles)}.")
    notes += [f"Unreadable: {line}" for line in results.unreadable]
    title = "The paper's tables and figures" + (" at smoke scale" if results.scale == "smoke" else "")
    return Document(title, notes, [page_section(section) for section in sections])


def missing_runs_command(
    scale: str, options: Mapping[str, Sequence[str]], words: Sequence[str], cells: Collection[str]
) -> tuple[str, str]:
    """Return the command that does the missing runs, and a note on its generators or "".

    Parameters
    ----------
    scale
        The cells' scale.
    options
        The command's other options with their values; ``--set`` is one of them.
    words
        The items or cells of the command.
    cells
        Names of the cells that lack runs.
    """
    keys = {word.partition("=")[0].strip() for word in options["--set"]}
    placeholders, note = [], ""
    if scale == "full":
        configs = [cell(name).config(scale, 1) for name in cells]
        needed = {config.generator for config in configs if config.generates and config.generator != "sd-turbo"}
        # A generator is for one dataset. Without --set generator=, each cell uses its dataset's folder.
        placeholders = ["data-dir=DIR", *(["generator=DIR"] if len(needed) == 1 else []), "backend=inline"]
        if len(needed) > 1 and "generator" not in keys:
            folders = " and ".join(sorted(needed))
            note = f"The runs use the generators in {folders}; `fedeas train-generator` trains them."
    given = [(name, value) for name, values in options.items() for value in values]
    given += [("--set", word) for word in placeholders if word.partition("=")[0] not in keys]
    return shlex.join(["fedeas", "reproduce", *words, "--scale", scale, "--run", *itertools.chain(*given)]), note


def all_budgets(sections: Sequence[Section]) -> list[Budget]:
    """Return the budgets in the sections' tables, one per cell."""
    found = {b.cell: b for section in sections if section.table for b in section.table.budgets}
    return list(found.values())


def _budget_notes(sections: Sequence[Section]) -> list[str]:
    budgets = all_budgets(sections)
    wrong = [b for b in budgets if not b.met]
    notes = [
        f"Matched budgets: {len(budgets) - len(wrong)} of {len(budgets)} cells generated the expected number of images."
    ]
    notes += [
        f"{b.cell} generated {', '.join(map(str, b.images))} images, not the {b.by}'s {b.wanted:,}." for b in wrong
    ]
    return notes if budgets else []


def as_json(results: Results, sections: Sequence[Section]) -> dict[str, Any]:
    """Return the content of the page as JSON values; a picture is given by its file name in the page's folder."""
    parts = []
    for section in sections:
        table = section.table
        parts.append(
            {
                "name": section.name,
                "title": section.title,
                "picture": section.picture.name if section.picture else None,
                "head": table.head if table else [],
                "rows": table.rows if table else [],
                "values": [value.as_json() for value in table.values] if table else [],
                "missing": list(section.missing),
                "note": section.note,
            }
        )
    budgets = [{**vars(b), "images": list(b.images), "met": b.met} for b in all_budgets(sections)]
    runs = {name: [str(run.path) for run in found] for name, found in results.cells.items()}
    return {"scale": results.scale, "items": parts, "budgets": budgets, "runs": runs, "unreadable": results.unreadable}


def values_csv(sections: Sequence[Section]) -> str:
    """Return the numbers of all tables as CSV, one line per cell and measure."""
    rows = {}
    for section in sections:
        for value in section.table.values if section.table else ():
            row = value.as_json() | {"seeds": " ".join(map(str, value.seeds))}
            rows[value.cell, value.measure] = row
    return as_csv(list(rows.values()))


def print_tables(sections: Sequence[Section], notes: Sequence[str], console: Console) -> None:
    """Print every table, the path of every picture, and the notes."""
    if not console.is_terminal:  # make a file or a pipe wide enough for every table
        console = Console(width=200, stderr=console.stderr, markup=False)
    for section in sections:
        console.print(f"\n{section.title}", style="bold", highlight=False)
        if section.table:
            head, *rows = ([_plain(cell) for cell in row] for row in (section.table.head, *section.table.rows))
            print_table(console, head, rows, fold=head, right=head[1:])
        if section.picture or section.note:
            console.print(str(section.picture or section.note), highlight=False, soft_wrap=True)
    for note in notes:
        console.print(_plain(note), highlight=False, markup=False)


def _plain(text: str) -> str:
    for mark, instead in (("<br>", "\n"), ("<ins>", ""), ("</ins>", ""), ("**", ""), ("`", "")):
        text = text.replace(mark, instead)
    return text


def filled_document(
    path: Path, text: str, scale: str, folders: Sequence[Path], more: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Return a document with updated ``<!-- reproduce WORDS -->`` blocks and updated numbers in its sentences.

    WORDS are tables, columns and cells, or ``sweep FOLDER KEY=VALUE`` for a recorded sweep. ``folders`` hold the runs;
    ``more`` are run-config keys of all runs.

    Returns
    -------
    text, unreadable : str, list of str
        The document, and a line for every record that could not be read.
    """
    found = find_blocks(path, text)
    contents = [_content(block, scale, folders, more) for block in found]
    filled = with_blocks(text, found, [content for content, _ in contents])
    unreadable = dict.fromkeys(line for _, lines in contents for line in lines)
    return InlineNumbers(scale, folders, more).fill(path, filled), list(unreadable)


def _content(block: Block, scale: str, folders: Sequence[Path], more: Mapping[str, Any]) -> tuple[str, list[str]]:
    try:
        if block.words[:1] == ["sweep"]:
            return table_markdown(_sweep(block.words[1:], folders)) + "\n", []
        choice = choose(block.words, [], scale, more=more)
    except ConfigError as error:
        raise ConfigError(f"{block.where}: {error}") from None
    for word in block.words:
        if word in ITEMS and ITEMS[word].table is None:
            raise ConfigError(f"{block.where}: '{word}' is a figure; must be a table, column or cell")
    results = choice.find(folders)
    made = [make(results, choice.columns) for name in choice.items if (make := ITEMS[name].table)]
    made += [cell_table(results, choice.cells)] if choice.cells else []
    return "\n".join(table_markdown(table) + "\n" for table in made), results.unreadable


def _sweep(words: Sequence[str], folders: Sequence[Path]) -> Table:
    match words:
        case [name, base] if "=" in base and (
            found := [folder / name for folder in folders if (folder / name).is_dir()]
        ):
            return sweep_table(found[0], base)
    raise ConfigError(
        f"'sweep {' '.join(words)}': must be sweep FOLDER KEY=VALUE, with FOLDER inside a folder of --runs"
    )
