"""Numbers inside the sentences of a document, written from records: ``72.4<!--= last-20 c10-k100-a0.1/fedeas -->``.

The comment, which Markdown does not show, directly follows its number and names it: a statistic of a cell, or of a
record named by its folder below --runs, and perhaps what is subtracted. A difference must be positive, so that no
sentence says "above" of what is below. The column of the second cell may be left out.

    last-20 c10-k100-a0.1/fedeas                   mean accuracy of the last 20 rounds over the seeds, %
    rounds-21-200 c10-k100-a0.1/fedeas             mean accuracy of these rounds over the seeds, %
    peak c10-k100-a0.1/fedeas                      mean of the seeds' best rounds, %
    sd c10-k100-a0.1/fedeas                        standard deviation of last-20 over the seeds, points
    paper, paper-peak c10-k100-a0.1/fedeas         the paper's last-20 and peak, %
    removed c10-k20-a0.1/fedeas                    label imbalance that the plan removes, %
    agreement, distance quality-cifar100/g1-n20    from the report on a generator's images
    last-20 c10-k100-a0.1/fedeas - uniform         ours minus ours
    last-20 c10-k100-a0.1/uniform - paper          ours minus the paper's; or paper … - ours
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fedeas_flwr.allocation import removed
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.reproduce.cells import all_cells, matching
from fedeas_flwr.reproduce.paper import COLUMNS
from fedeas_flwr.reproduce.paper_comparison import last_20_of, peak_of
from fedeas_flwr.reproduce.results import Measured, Results, find_results, measure
from fedeas_flwr.runs.directory import RunDirectory

NUMBER = re.compile(r"(?P<number>\d[\d,]*(?:\.\d+)?)(?P<comment><!--=\s*(?P<words>(?:(?!-->).)*?)\s*-->)", re.DOTALL)
"""A number and the comment that names it."""
_ROUNDS = re.compile(r"rounds-(\d+)-(\d+)")
_REPORT_MEASURES = {"agreement": ("class_agreement", 100.0), "distance": ("classifier_frechet_distance", 1.0)}


class InlineNumbers:
    """Computes the numbers of sentences from the records of some folders."""

    def __init__(self, scale: str, places: Sequence[Path], more: Mapping[str, Any]) -> None:
        self._scale, self._places, self._more = scale, places, more

    def fill(self, path: Path, text: str) -> str:
        """Return a document's text with all its numbers computed.

        Raises
        ------
        ConfigError
            One line with the document's line for a number that cannot be computed.
        """

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
        if statistic == "removed":
            config = matching(name)[0].config(self._scale, 1)
            counts = planned_counts(config, config.clients)
            return 100 * removed(counts, planned_allocation(config, counts))
        if statistic in ("paper", "paper-peak"):
            published = (last_20_of if statistic == "paper" else peak_of)(self._results, name).paper
            if published is None:
                raise ConfigError(f"the paper has no {statistic.replace('paper', 'number')} of {name}")
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
        raise ConfigError(
            f"'{statistic}' of {len(runs)} runs: fedeas_flwr/reproduce/inline_numbers.py lists what there is"
        )

    def _runs(self, name: str) -> list[Measured]:
        if name.partition("/")[0] not in COLUMNS:
            run = RunDirectory(self._folder(name))
            return [measure(run, run.config())]
        matching(name)  # raises if there is no such cell
        if not (found := self._results.of(name)):
            raise ConfigError(f"'{name}' has no finished run in {', '.join(map(str, self._places))}")
        return found

    def _folder(self, name: str) -> Path:
        found = next((place / name for place in self._places if (place / name).is_dir()), None)
        if found is None:
            raise ConfigError(f"'{name}': neither a cell nor a folder in {', '.join(map(str, self._places))}")
        return found

    @cached_property
    def _results(self) -> Results:
        return find_results(all_cells(), self._scale, self._places, self._more)


def _subtracted(statistic: str, name: str, other: str) -> tuple[str, str]:
    """Return the statistic and cell after the minus: the paper's number of the same cell, ours, or another cell's."""
    if other == "paper":
        return ("paper-peak" if statistic == "peak" else "paper"), name
    if other == "ours":
        return ("peak" if statistic == "paper-peak" else "last-20"), name
    return statistic, other if "/" in other else f"{name.partition('/')[0]}/{other}"
