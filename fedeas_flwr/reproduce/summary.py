"""Make a page, JSON, CSV or terminal output of sections, and the command that does the missing runs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedeas_flwr.common.tables import as_csv, print_table
from fedeas_flwr.common.text import counted, show_seconds
from fedeas_flwr.partition import LEAKAGE
from fedeas_flwr.report.page import Document
from fedeas_flwr.reproduce.cells import cell
from fedeas_flwr.reproduce.results import Budget, Results
from fedeas_flwr.reproduce.sections import Section

SMOKE_NOTE = (
    "**Smoke scale.** Every run takes a few seconds on scikit-learn's 8×8 digits, with 6 or 10 clients instead of 20 "
    "or 100, 10 rounds (so last-20 is the mean of all rounds), a third of the paper's β, and one seed (two where "
    "marked). Another partition of the digits stands in for CIFAR-100. The page shows that everything runs and what it "
    "looks like. The paper's numbers are for other datasets: no difference is computed."
)


def make_page(results: Results, sections: Sequence[Section], given: Sequence[str] = ()) -> Document:
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
    if left_out := len(results.repeated):
        notes.append(f"Only the first run of each cell, seed and form of Γ̂ counts; left out: {left_out}.")
    notes += [f"Unreadable: {line}" for line in results.unreadable]
    title = "The paper's tables and figures" + (" at smoke scale" if results.scale == "smoke" else "")
    return Document(title, notes, sections)


def missing_runs_command(
    scale: str, options: Mapping[str, Sequence[str]], words: Sequence[str], cells: Collection[str]
) -> tuple[str, str]:
    """Return the command that does the missing runs, and a note on its generators or "".

    ``options`` are the command's options with their values, ``--set`` among them; ``words`` its items or cells, and
    ``cells`` those that lack runs.
    """
    keys = {word.partition("=")[0].strip() for word in options["--set"]}
    placeholders, note = [], ""
    if scale == "full":
        configs = [cell(name).config(scale, 1) for name in cells]
        needed = {config.generator for config in configs if config.generates and config.generator_spec.is_diffusion}
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
    return list({b.cell: b for section in sections for table in section.tables for b in table.budgets}.values())


def _budget_notes(sections: Sequence[Section]) -> list[str]:
    budgets = all_budgets(sections)
    wrong = [b for b in budgets if not b.met]
    right = f"{len(budgets) - len(wrong)} of {len(budgets)} cells"
    return [
        *([f"Matched budgets: {right} generated the expected number of images."] if budgets else []),
        *(f"{b.cell} generated {', '.join(map(str, b.images))} images, not the {b.by}'s {b.wanted:,}." for b in wrong),
    ]


def as_json(results: Results, sections: Sequence[Section]) -> dict[str, Any]:
    """Return the content of the page as JSON values; a picture is given by its file name in the page's folder."""
    parts = [
        {
            "name": section.name,
            "title": section.title,
            "picture": f"{section.name}.png" if section.pictures else None,
            "head": [head for table in section.tables for head in table.head],
            "rows": [row for table in section.tables for row in table.rows],
            "values": [value.as_json() for table in section.tables for value in table.values],
            "missing": list(section.missing),
            "note": section.note,
        }
        for section in sections
    ]
    budgets = [{**vars(b), "images": list(b.images), "met": b.met} for b in all_budgets(sections)]
    runs = {name: [str(run.path) for run in found] for name, found in results.cells.items()}
    return {"scale": results.scale, "items": parts, "budgets": budgets, "runs": runs, "unreadable": results.unreadable}


def values_csv(sections: Sequence[Section]) -> str:
    """Return the numbers of all tables as CSV, one line per cell and measure."""
    values = [value for section in sections for table in section.tables for value in table.values]
    rows = {(v.cell, v.measure): v.as_json() | {"seeds": " ".join(map(str, v.seeds))} for v in values}
    return as_csv(list(rows.values()))


def print_tables(sections: Sequence[Section], notes: Sequence[str], folder: Path, console: Console) -> None:
    """Print every table, the path of every picture in ``folder``, and the notes."""
    if not console.is_terminal:  # make a file or a pipe wide enough for every table
        console = Console(width=200, stderr=console.stderr, markup=False)
    for section in sections:
        console.print(f"\n{section.title}", style="bold", highlight=False)
        for table in section.tables:
            head, *rows = ([_plain(cell) for cell in row] for row in (table.head, *table.rows))
            print_table(console, head, rows, fold=head, right=head[1:])
        for line in [*(str(folder / f"{picture.name}.png") for picture in section.pictures), section.note]:
            if line:
                console.print(line, highlight=False, soft_wrap=True)
    for note in notes:
        console.print(_plain(note), highlight=False, markup=False)


def _plain(text: str) -> str:
    for mark, instead in (("<br>", "\n"), ("<ins>", ""), ("</ins>", ""), ("**", ""), ("`", "")):
        text = text.replace(mark, instead)
    return text
