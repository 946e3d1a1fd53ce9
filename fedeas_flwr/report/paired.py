"""Compare runs pairwise with those of a reference, such as policy = fedeas, over seeds and partition seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.text import MAX_NAMED, counted, with_sign
from fedeas_flwr.config import RunConfig, unknown_key
from fedeas_flwr.config_files import parse_overrides
from fedeas_flwr.config_keys import run_keys
from fedeas_flwr.report.groups import (
    Group,
    Member,
    Spread,
    differences,
    differing_keys,
    group_key,
    group_names,
    nearest_differences,
    show_value,
)
from fedeas_flwr.report.page import Table
from fedeas_flwr.runs.metrics import score_name

_CONFIDENCE = 0.95
_PAIRED_BY = ("seed", "partition-seed")
"""Keys that are equal in a pair, and that differences are pooled over."""
_ONLY_MEASURED = ("threshold", "gamma-hat")
"""Keys that change what is measured, but not the model."""


# ------------------------------------------------------------------------------------------------------- differences


class Differences(Spread):
    """Differences between the runs of pairs: their mean, its standard error and interval, and how many are positive."""

    @property
    def standard_error(self) -> float | None:
        """Return the standard error of the mean; ``None`` for one pair."""
        return None if self.sd is None else self.sd / math.sqrt(len(self.values))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % t interval of the mean; ``None`` for one pair."""
        if self.standard_error is None:
            return None
        half = _t_quantile(len(self.values) - 1) * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def above(self) -> str:
        """Return how many differences are above 0, such as ``3 of 4``."""
        return f"{sum(value > 0 for value in self.values)} of {len(self.values)}"

    def show_error(self, digits: int) -> str:
        """Return the mean with its standard error, such as ``+1.2 ± 0.4``."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.{digits}f}"
        return f"{with_sign(self.mean, digits)}{error}"

    def show_interval(self, digits: int) -> str:
        """Return the mean with its interval, such as ``+1.2 (+0.4 to +2.0)``."""
        ends = "" if self.interval is None else f" ({' to '.join(with_sign(end, digits) for end in self.interval)})"
        return f"{with_sign(self.mean, digits)}{ends}"


def _t_quantile(freedom: int) -> float:
    """Return the t that a value of Student's t distribution exceeds in magnitude with probability 0.05."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_probability(middle, freedom) < _CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _t_probability(angle: float, freedom: int) -> float:
    """Return the probability that |t| is below √freedom · tan(angle): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    is_odd = freedom % 2
    total, term = 0.0, math.cos(angle) if is_odd else 1.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total


# ------------------------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Comparison:
    """The pairs of one setting and of one setting with the reference's value."""

    name: str
    reference: str
    pairs: tuple[tuple[Member, Member], ...]
    """Runs of the setting, each with the reference's run, in the order of seed and partition seed."""

    def differences(self, measure: str) -> Differences:
        """Return the differences of an accuracy of the summaries, in percentage points."""
        return Differences(tuple(100 * (own.summary[measure] - other.summary[measure]) for own, other in self.pairs))

    @property
    def images(self) -> tuple[float, float]:
        """Return the mean number of generated images of the setting's and of the reference's runs."""
        totals = [(own.summary["total_generated"], other.summary["total_generated"]) for own, other in self.pairs]
        own, other = map(statistics.fmean, zip(*totals, strict=True))
        return own, other


@dataclass(frozen=True)
class PairedRuns:
    """All comparisons with a reference, and a line for runs without a partner and settings that are not compared."""

    key: str
    value: Any
    comparisons: Sequence[Comparison]
    notes: Sequence[str]

    @property
    def text(self) -> list[str]:
        """Return what the table shows, as sentences."""
        return [
            f"A pair is two runs with equal seed and partition-seed that differ only in {self.key}; "
            "few pairs say little. Differences are means over pairs, in percentage points; their 95 % t interval is in "
            "brackets.",
            *(f"{note}." for note in self.notes),
        ]

    def table(self) -> Table:
        """Return the differences, one row per comparison; they name their reference if there are several."""
        one_reference = len({found.reference for found in self.comparisons}) == 1
        score = score_name(len(own.rounds) for found in self.comparisons for own, _ in found.pairs)
        head = [
            f"against {self.key} = {show_value(self.value)}",
            *([] if one_reference else ["compared with"]),
            "pairs",
        ]
        head += [f"{score}, points", "pairs above", "final, points", "pairs above", "images", "reference's images"]
        rows = []
        for found in self.comparisons:
            row = [found.name, *([] if one_reference else [found.reference]), str(len(found.pairs))]
            for measure in ("last_20", "final"):
                row += [found.differences(measure).show_interval(1), found.differences(measure).above]
            rows.append([*row, *(f"{images:,.0f}" for images in found.images)])
        return Table(head, rows)


@dataclass(frozen=True)
class _Setting:
    """Runs that differ only in seed and partition seed."""

    name: str
    config: RunConfig
    runs: dict[tuple[int, int], Member]


def parse_reference(text: str) -> tuple[str, Any]:
    """Return the key and the value of KEY=VALUE; raise `ConfigError` for a key that cannot be compared."""
    if "=" not in text:
        raise ConfigError(f"--against {text}: '{text}' is not KEY=VALUE, such as policy=fedeas")
    ((key, value),) = parse_overrides([text]).items()
    known = [one.name for one in run_keys()]
    if key not in known:
        raise ConfigError(f"--against {text}: {unknown_key(key, value, known)}")
    if key in _PAIRED_BY:
        paired = " and ".join(_PAIRED_BY)
        raise ConfigError(f"--against {text}: {key} cannot be the key: runs with equal {paired} are paired")
    return key, value


def pair_runs(groups: Sequence[Group], key: str, value: Any) -> PairedRuns:
    """Compare every setting with each one that has this value and the same other keys, as far as both use them.

    Runs are paired by seed and partition seed, if both have the same number of rounds. Keys that change only what is
    measured, and the arguments of the key (``policy-args`` of ``policy``), may differ. Raise `ConfigError` if there is
    no pair.
    """
    settings = _settings(groups)
    using = [setting for setting in settings if key in group_key(setting.config)]
    # A path may be given by its name.
    references = [one for one in using if value in (group_key(one.config)[key], one.config.to_user_dict()[key])]
    given = f"--against {key}={show_value(value)}"
    if not using:
        keys = ", ".join(differences([setting.config for setting in settings], _PAIRED_BY)) or "nothing else than seeds"
        raise ConfigError(f"{given}: {key} does not distinguish runs; they differ in {keys}")
    if not references:
        values = dict.fromkeys(f"{key} = {show_value(group_key(setting.config)[key])}" for setting in using)
        raise ConfigError(f"{given}: no run has this value; there are {', '.join(values)}")
    if len(references) == len(using):
        raise ConfigError(f"{given}: all runs that use {key} have this value; give another key or more runs")
    comparisons, notes = [], []
    free = (*_PAIRED_BY, *_ONLY_MEASURED, key, f"{key}-args")
    theirs = [group_key(reference.config, free) for reference in references]
    for setting in settings:
        if setting in references:
            continue
        fitting, why = [], f"it does not use {key}"
        if setting in using:
            mine = group_key(setting.config, free)
            fitting = [one for one, keys in zip(references, theirs, strict=True) if not differing_keys(mine, keys)]
            why = nearest_differences(mine, theirs)
        if not fitting:
            notes.append(f"Not compared with {key} = {show_value(value)}: {setting.name}: {why}")
        for reference in fitting:
            own, others = setting.runs, reference.runs
            seeds = [at for at in sorted(own) if at in others and len(own[at].rounds) == len(others[at].rounds)]
            notes += [*_unpaired(setting, reference, seeds), *_unpaired(reference, setting, seeds)]
            if seeds:
                pairs = tuple((own[at], others[at]) for at in seeds)
                comparisons.append(Comparison(setting.name, reference.name, pairs))
    if not comparisons:
        raise ConfigError(f"{given}: there is no pair. {'. '.join(notes)}")
    return PairedRuns(key, value, comparisons, notes)


def _settings(groups: Sequence[Group]) -> list[_Setting]:
    """Return groups pooled over partition seeds; as in a group, an unfinished run counts only if no other has ended."""
    pooled: dict[str, list[Member]] = {}
    for group in groups:
        pooled.setdefault(repr(group_key(group.config, _PAIRED_BY)), []).extend(group.members)
    names = group_names([members[0].config for members in pooled.values()], _PAIRED_BY)
    settings = []
    for name, members in zip(names, pooled.values(), strict=True):
        counted_runs = [member for member in members if member.is_finished] or members
        runs = {(member.config.seed, member.config.partition_seed): member for member in counted_runs}
        settings.append(_Setting(name, members[0].config, runs))
    return settings


def _unpaired(setting: _Setting, other: _Setting, paired: Sequence[tuple[int, int]]) -> list[str]:
    """Return a line that names a setting's runs without a partner, if there are any."""
    alone = [f"{setting.name}, seed {at[0]}, partition-seed {at[1]}" for at in sorted(setting.runs) if at not in paired]
    if not alone:
        return []
    shown = "; ".join(alone) if len(alone) <= MAX_NAMED else f"{counted(len(alone), 'run')} of {setting.name}"
    return [f"Not paired with {other.name}, no run with the same seeds and number of rounds: {shown}"]
