"""Tables and numbers inside another document, written from records.

Tables go between ``<!-- reproduce WORDS -->`` and ``<!-- end -->``. WORDS are tables, columns and cells,
``sweep FOLDER KEY=VALUE`` for a recorded sweep, ``records FOLDER`` for records of a changed strategy, or ``policies
FOLDER`` for records of several policies and seeds. A number has a comment, which Markdown does not show, directly after
it: ``72.4<!--= last-20 c10-k100-a0.1/fedeas -->``. The comment names a statistic of a cell, or of a record named by its
folder below --runs, and perhaps what is subtracted. A difference must be positive, so that no sentence says "above" of
what is below. The column of the second cell may be left out.

    last-20 c10-k100-a0.1/fedeas                   mean accuracy of the last 20 rounds over the seeds, %
    rounds-21-200 c10-k100-a0.1/fedeas             mean accuracy of these rounds over the seeds, %
    peak c10-k100-a0.1/fedeas                      mean of the seeds' best rounds, %
    sd c10-k100-a0.1/fedeas                        standard deviation of last-20 over the seeds, points
    paper, paper-peak c10-k100-a0.1/fedeas         the paper's last-20 and peak, %
    agreement, distance quality-cifar100/g1-n20    from the report on a generator's images
    last-20 c10-k100-a0.1/fedeas - uniform         ours minus ours
    last-20 c10-k100-a0.1/uniform - paper          ours minus the paper's; or paper … - ours
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.report.page import table_markdown
from fedeas_flwr.reproduce.cells import all_cells, matching
from fedeas_flwr.reproduce.extra_tables import policies_table, records_table, sweep_table
from fedeas_flwr.reproduce.items import ITEMS, choose
from fedeas_flwr.reproduce.paper import COLUMNS
from fedeas_flwr.reproduce.paper_comparison import last_20_of, peak_of
from fedeas_flwr.reproduce.results import Measured, Results, find_results, measure
from fedeas_flwr.reproduce.tables import Table, cell_table
from fedeas_flwr.runs.directory import RunDirectory

_MARK = re.compile(r"<!-- (?:reproduce\b(?P<words>(?:(?!-->).)*)-->[ \t]*(?P<newline>\r?\n|\Z)|end -->)")
NUMBER = re.compile(r"(?P<number>\d[\d,]*(?:\.\d+)?)(?P<comment><!--=\s*(?P<words>(?:(?!-->).)*?)\s*-->)", re.DOTALL)
"""A number and the comment that names it."""
_ROUNDS = re.compile(r"rounds-(\d+)-(\d+)")
_REPORT_MEASURES = {"agreement": ("class_agreement", 100.0), "distance": ("classifier_frechet_distance", 1.0)}


def filled_document(
    path: Path, text: str, scale: str, folders: Sequence[Path], more: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Return a document with its tables and numbers written again, and a line for every unreadable record.

    Raise `ConfigError` if there is neither a place nor a number to write, or for a place without an end of its own,
    since filling it would overwrite other text.
    """
    places = []
    marks = list(_MARK.finditer(text))
    for mark, following in itertools.zip_longest(marks, marks[1:]):
        if mark["words"] is None:
            continue
        line = text.count("\n", 0, mark.start()) + 1
        where = f"{path}, line {line}"
        if following is None or following["words"] is not None:
            raise ConfigError(f"{where}: '{mark[0].strip()}' has no '<!-- end -->' of its own")
        places.append((where, mark, following.start()))
    if not places and not NUMBER.search(text):
        raise ConfigError(f"{path} has no lines '<!-- reproduce table1 COLUMN -->' and '<!-- end -->' to write between")
    filled, copied, unreadable = "", 0, list[str]()
    for where, mark, end in places:
        content, lines = _content(where, mark["words"].split(), scale, folders, more)
        filled += text[copied : mark.end()] + f"\n{content}\n".replace("\n", mark["newline"])
        copied = end
        unreadable += lines
    numbers = InlineNumbers(scale, folders, more)
    return numbers.fill(path, filled + text[copied:]), list(dict.fromkeys(unreadable))


# ---------------------------------------------------------------------------------------------------------- tables


def _content(
    where: str, words: Sequence[str], scale: str, folders: Sequence[Path], more: Mapping[str, Any]
) -> tuple[str, list[str]]:
    """Return the tables between the marks at a place of the document, and a line for every unreadable record."""
    try:
        if words and words[0] in ("sweep", "records", "policies"):
            table, unreadable = _folder_table(words, scale, folders, more)
            return table_markdown(table) + "\n", unreadable
        choice = choose(words, [], scale, more=more)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for word in words:
        if word in ITEMS and ITEMS[word].table is None:
            raise ConfigError(f"{where}: '{word}' is a figure; must be a table, column or cell")
    results = choice.find(folders)
    made = [make(results, choice.columns) for name in choice.items if (make := ITEMS[name].table)]
    made += [cell_table(results, choice.cells)] if choice.cells else []
    return "\n".join(table_markdown(table) + "\n" for table in made), results.unreadable


def _folder_table(
    words: Sequence[str], scale: str, folders: Sequence[Path], more: Mapping[str, Any]
) -> tuple[Table, list[str]]:
    """Return the table of a folder, and a line for every unreadable record."""
    match words:
        case ["sweep", name, base] if "=" in base and (found := _folder_inside(folders, name)):
            return sweep_table(found, base), []
        case ["policies", name] if found := _folder_inside(folders, name):
            return policies_table(found), []
        case ["records", name] if found := _folder_inside(folders, name):
            results = find_results(all_cells(), scale, folders, more)
            return records_table(results, found), results.unreadable
    wanted = f"{words[0]} FOLDER{' KEY=VALUE' if words[0] == 'sweep' else ''}"
    raise ConfigError(f"'{' '.join(words)}': must be {wanted}, with FOLDER inside a folder of --runs")


def _folder_inside(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_dir()), None)


# --------------------------------------------------------------------------------------------------------- numbers


class InlineNumbers:
    """Computes the numbers of sentences from the records of some folders."""

    def __init__(self, scale: str, folders: Sequence[Path], more: Mapping[str, Any]) -> None:
        self._scale, self._folders, self._more = scale, folders, more

    def fill(self, path: Path, text: str) -> str:
        """Return a document's text with all its numbers computed, or raise `ConfigError` with the number's line."""

        def write(found: re.Match[str]) -> str:
            try:
                return f"{self.compute(found['words']):.1f}{found['comment']}"
            except ConfigError as error:
                line = text.count("\n", 0, found.start()) + 1
                raise ConfigError(f"{path}, line {line}: {error}") from None

        return NUMBER.sub(write, text)

    def compute(self, words: str) -> float:
        """Return the number that a comment names."""
        match words.split():
            case [statistic, name]:
                return self._value(statistic, name)
            case [statistic, name, "-", other]:
                number = self._value(statistic, name) - self._value(*_subtracted(statistic, name, other))
                if number < 0:
                    raise ConfigError(f"'{words}' is {number:.2f}: must be positive, swap the two and the sentence")
                return number
        raise ConfigError(f"'{words}': must be STATISTIC CELL or STATISTIC CELL - CELL")

    def _value(self, statistic: str, name: str) -> float:
        if statistic in _REPORT_MEASURES:
            key, factor = _REPORT_MEASURES[statistic]
            return factor * float(json.loads((self._folder(name) / "report.json").read_text())[key])
        if statistic in ("paper", "paper-peak"):
            published = (last_20_of if statistic == "paper" else peak_of)(self._results, name).paper
            if published is None:
                raise ConfigError(f"the paper has no {'number' if statistic == 'paper' else 'peak'} of {name}")
            return published
        runs = self._runs(name)
        last_20s = [run.last_20 for run in runs]
        if statistic == "last-20":
            return 100 * statistics.fmean(last_20s)
        if statistic == "peak":
            return 100 * statistics.fmean(run.peak for run in runs)
        if statistic == "sd" and len(runs) > 1:
            return 100 * statistics.stdev(last_20s)
        if rounds := _ROUNDS.fullmatch(statistic):
            first, last = map(int, rounds.groups())
            return 100 * statistics.fmean(accuracy for run in runs for accuracy in run.accuracies[first - 1 : last])
        raise ConfigError(f"'{statistic}' of {len(runs)} runs: fedeas_flwr/reproduce/documents.py lists what there is")

    def _runs(self, name: str) -> list[Measured]:
        if name.partition("/")[0] not in COLUMNS:
            run = RunDirectory(self._folder(name))
            return [measure(run, run.config())]
        matching(name)  # raises if there is no such cell
        if not (found := self._results.of(name)):
            raise ConfigError(f"'{name}' has no finished run in {', '.join(map(str, self._folders))}")
        return found

    def _folder(self, name: str) -> Path:
        if found := _folder_inside(self._folders, name):
            return found
        raise ConfigError(f"'{name}': neither a cell nor a folder in {', '.join(map(str, self._folders))}")

    @cached_property
    def _results(self) -> Results:
        return find_results(all_cells(), self._scale, self._folders, self._more)


def _subtracted(statistic: str, name: str, other: str) -> tuple[str, str]:
    """Return the statistic and cell after the minus: the paper's number of the same cell, ours, or another cell's."""
    if other == "paper":
        return ("paper-peak" if statistic == "peak" else "paper"), name
    if other == "ours":
        return ("peak" if statistic == "paper-peak" else "last-20"), name
    return statistic, other if "/" in other else f"{name.partition('/')[0]}/{other}"
