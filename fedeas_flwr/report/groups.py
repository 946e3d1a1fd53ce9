"""Group runs that differ only in their seed, with mean and standard deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedeas_flwr.common import import_path
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.hf_spec import HfSpec
from fedeas_flwr.common.text import counted, one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.config_keys import GENERATION_KEYS, PATH_KEYS, identity
from fedeas_flwr.data.datasets import readable_info, short_name
from fedeas_flwr.policies.registry import POLICIES
from fedeas_flwr.report.style import LineStyle, assign_styles, label_of
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import summarise_so_far, without_folder
from fedeas_flwr.runs.metrics import BACKGROUND_PHASES, STARTUP, WALL_CLOCK, efficiency, last_20, score_name

FloatArray = npt.NDArray[np.float64]

CLIENT_WORK = ("generating", "training")
"""Phases whose seconds are summed over clients, which may work in parallel."""
PHASES = (*WALL_CLOCK, *BACKGROUND_PHASES, *CLIENT_WORK)
MIN_TEST_IMAGES = 300
"""Number of test images below which a gain is marked: the standard error of an accuracy can exceed 2.9 points."""


@dataclass(frozen=True)
class Spread:
    """A metric over seeds: its mean and sample standard deviation (n − 1), which is ``None`` for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Return the standard deviation over seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def show(self, scale: float = 1.0, digits: int = 1) -> str:
        """Return text such as ``92.7 ± 0.4``."""
        spread = "" if self.sd is None else f" ± {scale * self.sd:,.{digits}f}"
        return f"{scale * self.mean:,.{digits}f}{spread}"


@dataclass(frozen=True)
class Member:
    """One run of a group."""

    run: RunDirectory
    config: RunConfig
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    """Summary of the recorded rounds, also for a run that has not finished."""

    @property
    def never_took_part(self) -> list[int]:
        """Return the clients that trained in no round; empty if clients are not numbered from 0 to K − 1."""
        trained, known = {client for record in self.rounds for client in record["clients"]}, range(self.config.clients)
        return sorted(set(known) - trained) if trained <= set(known) else []

    @property
    def not_made(self) -> int:
        """Return the number of planned images that nodes' limits exclude."""
        return sum(item["images"] for item in self.summary.get("not_made", []))

    @property
    def is_finished(self) -> bool:
        """Return whether all rounds of the config are recorded, or a callback stopped the run before."""
        return len(self.rounds) >= self.config.rounds or "stopped" in self.summary


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    members: tuple[Member, ...]
    """The runs that the metrics are computed from."""
    style: LineStyle
    """Line style in every picture and table."""
    excluded: tuple[Member, ...] = ()
    """Unfinished runs of a group with finished ones: in a mean they would look like worse seeds."""

    @property
    def all_members(self) -> tuple[Member, ...]:
        """Return included and excluded runs."""
        return (*self.members, *self.excluded)

    @property
    def config(self) -> RunConfig:
        """Return the config of the first seed; the others differ only in the seed."""
        return self.members[0].config

    @cached_property
    def key_without_images(self) -> dict[str, Any]:
        """Return the keys and values that the group has in common with its baseline."""
        return group_key(self.config, (*GENERATION_KEYS, "threshold", "gamma-hat"))

    @property
    def seeds(self) -> list[int]:
        """Return the seeds in ascending order."""
        return [member.config.seed for member in self.members]

    @property
    def lengths(self) -> list[int]:
        """Return the distinct numbers of rounds of the runs, in ascending order."""
        return sorted({len(member.rounds) for member in self.members})

    def spread(self, measure: str) -> Spread | None:
        """Return a metric of the summaries over seeds; ``None`` if a seed has no value."""
        values = [member.summary.get(measure) for member in self.members]
        return None if any(value is None for value in values) else Spread(tuple(map(float, values)))  # type: ignore[arg-type]

    def curve(self, measure: str) -> FloatArray:
        """Return a metric of the rounds, [seeds, rounds]; NaN if a round has no value or a run is shorter."""
        found = np.full((len(self.members), self.lengths[-1]), np.nan)
        for row, member in zip(found, self.members, strict=True):
            values = [record.get(measure) for record in member.rounds]
            row[: len(values)] = [np.nan if value is None else value for value in values]
        return found

    @cached_property
    def per_class(self) -> FloatArray | None:
        """Return the accuracy per class, mean over the last 20 rounds and over seeds; ``None`` if not recorded."""
        found = []
        for member in self.members:
            rows = [record.get("per_class_accuracy") for record in member.rounds[-20:]]
            if not all(rows):
                return None
            found.append(np.array(rows, dtype=float).mean(axis=0))  # a class without test images stays NaN
        return np.asarray(np.mean(found, axis=0))

    @cached_property
    def worst_class(self) -> tuple[int, float] | None:
        """Return the class with the lowest `per_class` accuracy, and that accuracy."""
        if self.per_class is None or np.isnan(self.per_class).all():
            return None
        worst = int(np.nanargmin(self.per_class))
        return worst, float(self.per_class[worst])

    @cached_property
    def worst_tenth(self) -> Spread | None:
        """Return the accuracy of the worst tenth of clients, mean over the last 20 rounds (protocol ``paper`` only)."""
        rows = [[record.get("worst_tenth_accuracy") for record in member.rounds] for member in self.members]
        return None if any(None in row for row in rows) else Spread(tuple(last_20(row) for row in rows))  # type: ignore[arg-type]

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase, mean over seeds."""
        return statistics.fmean(member.summary["seconds"].get(phase, 0.0) for member in self.members)

    @property
    def wall_clock(self) -> float:
        """Return the wall-clock seconds of a run of the group, with start-up if it is recorded."""
        return sum(self.seconds(phase) for phase in WALL_CLOCK) + (self.startup or 0.0)

    @property
    def startup(self) -> float | None:
        """Return the seconds of start-up, mean over seeds; ``None`` if a run has not recorded them."""
        recorded = all(STARTUP in member.summary["seconds"] for member in self.members)
        return self.seconds(STARTUP) if recorded else None

    @property
    def images(self) -> float:
        """Return the total number of generated images, mean over seeds."""
        return statistics.fmean(member.summary["total_generated"] for member in self.members)

    @property
    def images_shown(self) -> str:
        """Return `images` as text, with the standard deviation if seeds differ."""
        spread = self.spread("total_generated")
        return spread.show(digits=0) if spread and spread.sd else f"{self.images:,.0f}"


def group_runs(runs: Sequence[RunDirectory]) -> tuple[list[Group], list[str]]:
    """Group runs that differ only in their seed; return the groups, and a line for every run that is left out.

    Groups are sorted by number of images, and baselines come first among equals; seeds ascend.
    """
    members, left_out = [], []
    for run in runs:
        try:
            config = run.config()
            run.environment()  # raises here, so that one damaged run does not fail the whole page
            summary = summarise_so_far(run, config)
        except RunError as error:
            left_out.append(str(error))
            continue
        if summary is None:
            left_out.append(f"{run.path} has no finished round ({run.state()})")
        elif config.task == "generator":
            left_out.append(f"{run.path} trained a generator: it has a loss and no accuracy")
        else:
            members.append(Member(run, config, run.rounds(), summary))
    if not members:
        raise RunError(f"nothing to report: {'; '.join(left_out)}")
    together: dict[str, list[Member]] = {}
    for member in members:
        together.setdefault(repr(group_key(member.config)), []).append(member)
    found = [_one_per_seed(group, left_out) for group in together.values()]
    found.sort(key=lambda group: (group[0].summary["total_generated"], not _is_baseline(group[0].config)))
    configs = [group[0].config for group in found]
    named = zip(group_names(configs), found, assign_styles([config.policy for config in configs]), strict=True)
    return [_make_group(name, group, style) for name, group, style in named], left_out


def _make_group(name: str, runs: Sequence[Member], style: LineStyle) -> Group:
    finished = tuple(member for member in runs if member.is_finished)
    if not finished:  # no run has more to show
        return Group(name, tuple(runs), style)
    return Group(name, finished, style, tuple(member for member in runs if not member.is_finished))


def score_of(groups: Sequence[Group]) -> str:
    """Return the name of `last_20` for these groups."""
    return score_name(length for group in groups for length in group.lengths)


def group_key(config: RunConfig, free: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys and values that the runs of one group share: all that identify a run, except its seed.

    Folders count by name: an exported record has no paths, and a run and its record are the same run.
    """
    values = identity(config, ("seed", "data-dir", *free))
    dataset = {"dataset": short_name(config.dataset) + HfSpec.parse(config.dataset).written}
    return values | dataset | {key: without_folder(str(values[key])) for key in PATH_KEYS if key in values}


def _one_per_seed(group: Sequence[Member], left_out: list[str]) -> list[Member]:
    """Return one run per seed: of duplicates the longest, and of equally long ones the last written."""
    kept: dict[int, Member] = {}
    for member in sorted(group, key=lambda one: (len(one.rounds), (one.run.path / "rounds.jsonl").stat().st_mtime)):
        kept[member.config.seed] = member
    for member in group:
        if (other := kept[member.config.seed]) is not member:
            same = all(a["accuracy"] == b["accuracy"] for a, b in zip(member.rounds, other.rounds, strict=False))
            figures = "" if same else ", with other accuracies"
            left_out.append(f"{member.run.path} repeats {other.run.path} (same config and seed){figures}")
    return [kept[seed] for seed in sorted(kept)]


def differences(configs: Sequence[RunConfig], free: Sequence[str] = ()) -> list[str]:
    """Return the keys in which configs differ, without seeds, ``free`` keys and keys that do not identify a run."""
    seen = [group_key(config, free) for config in configs]
    keys = list(dict.fromkeys(key for values in seen for key in values))
    return [key for key in keys if len({repr(values[key]) for values in seen if key in values}) > 1]


def group_names(configs: Sequence[RunConfig], free: Sequence[str] = ()) -> list[str]:
    """Return group names: the policy if it varies, and the keys but ``free`` that distinguish groups of one policy.

    If strategies vary, a strategy other than the default is always named, so that the comparison is not read as one of
    policies only. An import path is shown by its last part, unless several end in the same.
    """
    policies, strategies = {config.policy for config in configs}, {config.strategy for config in configs}
    short = {strategy: import_path.short_name(strategy) for strategy in strategies}
    names = []
    for config in configs:
        values = group_key(config, free)
        if len(set(short.values())) == len(short):
            values["strategy"] = short[config.strategy]
        differing = differences([other for other in configs if other.policy == config.policy], free)
        if "strategy" not in differing and len(strategies) > 1 and not _has_default_strategy(config):
            differing.insert(0, "strategy")
        more = [f"{key} = {show_value(values[key])}" for key in differing if values.get(key, "") != ""]
        words = [_policy(config)] if len(policies) > 1 or not more else []
        names.append(", ".join([*words, *more]))
    return names


def _policy(config: RunConfig) -> str:
    if _is_baseline(config) and not _has_default_strategy(config):
        return "Nothing generated"
    return label_of(config.policy)


def _has_default_strategy(config: RunConfig) -> bool:
    return bool(config.strategy == RunConfig.model_fields["strategy"].default)


def _is_baseline(config: RunConfig) -> bool:
    policy = POLICIES.get(config.policy)
    return policy is not None and policy.is_baseline


def show_value(value: Any) -> str:
    """Return a key's value as text."""
    return f"{value:g}" if isinstance(value, float) else one_line(value)


def baseline_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """Return the group that differs only in generating nothing; of several, one with the same seeds and `gamma-hat`."""
    if _is_baseline(group.config):
        return None
    own = group.key_without_images
    fitting = [other for other in _without_images(group, groups) if not differing_keys(own, other.key_without_images)]
    seeds, form = group.seeds, group.config.gamma_hat
    return min(
        fitting,
        key=lambda other: (not _as_far(group, other), other.seeds != seeds, other.config.gamma_hat != form),
        default=None,
    )


def why_no_gain(group: Group, groups: Sequence[Group]) -> str | None:
    """Return why a group has no baseline to compare with; ``None`` if it has one, or is a baseline."""
    if _is_baseline(group.config):
        return None
    if baseline := baseline_of(group, groups):
        unequal = f"it has reached {_ends(group)}, but the group that generates nothing {_ends(baseline)}"
        return None if _as_far(group, baseline) else unequal
    others = [other.key_without_images for other in _without_images(group, groups)]
    if not others:
        return "there is no group that generates nothing (policy = none)"
    return f"the nearest group that generates nothing has {nearest_differences(group.key_without_images, others)}"


def _ends(group: Group) -> str:
    """Return the last rounds of a group's runs as text."""
    return f"round{'s' if len(group.lengths) > 1 else ''} {' and '.join(map(str, group.lengths))}"


def _as_far(group: Group, other: Group) -> bool:
    """Return whether all runs of two groups reached the same round; otherwise they cannot be compared."""
    return len({*group.lengths, *other.lengths}) == 1


def _without_images(group: Group, groups: Sequence[Group]) -> list[Group]:
    return [other for other in groups if other is not group and _is_baseline(other.config)]


def differing_keys(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the keys with different values, of those that both have."""
    return [key for key in mine if mine[key] != theirs.get(key, mine[key])]


def nearest_differences(mine: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Return as text the keys in which the nearest of other settings differs, with both values."""
    theirs = min(others, key=lambda other: len(differing_keys(mine, other)))
    keys = differing_keys(mine, theirs)
    return "; ".join(f"{key} = {show_value(theirs[key])}, not {show_value(mine[key])}" for key in keys)


def comparable_baseline(group: Group, groups: Sequence[Group]) -> Group | None:
    """Return the baseline if all runs of both groups reached the same round."""
    baseline = baseline_of(group, groups)
    return baseline if baseline and _as_far(group, baseline) else None


def gain_and_efficiency(group: Group, groups: Sequence[Group]) -> tuple[float, float | None] | None:
    """Return the gain over the baseline in percentage points, and η; ``None`` without a comparable baseline."""
    if (baseline := comparable_baseline(group, groups)) is None:
        return None
    mine, theirs = group.spread("last_20"), baseline.spread("last_20")
    assert mine is not None and theirs is not None  # every round has an accuracy
    gain = 100 * (mine.mean - theirs.mean)
    return gain, efficiency(gain, group.images)


def show_efficiency(group: Group, groups: Sequence[Group]) -> str | None:
    """Return η up to the first digit of its standard error over seeds, or with two significant digits if that is 0 or
    a group has one seed; ``None`` without η."""
    gain, baseline = gain_and_efficiency(group, groups), comparable_baseline(group, groups)
    if gain is None or gain[1] is None or baseline is None:
        return None
    error = 0.0
    if min(len(group.seeds), len(baseline.seeds)) > 1:
        spreads = [one.spread("last_20") for one in (group, baseline)]
        error = 1e5 * math.hypot(*(s.sd / len(s.values) ** 0.5 for s in spreads if s and s.sd)) / group.images
    eta = gain[1]
    place = math.floor(math.log10(error)) if error > 1e-9 else math.floor(math.log10(abs(eta) or 1.0)) - 1
    return f"{round(eta, -place):,.{max(0, -place)}f}"


def weak_gain(group: Group, groups: Sequence[Group]) -> str | None:
    """Return why a gain says little (one seed, few test images); ``None`` if neither holds or there is no gain."""
    if (baseline := comparable_baseline(group, groups)) is None:
        return None
    reasons = ["one seed"] if min(len(group.seeds), len(baseline.seeds)) == 1 else []
    info = readable_info(group.config.dataset)
    if info and info.num_test < MIN_TEST_IMAGES:
        reasons.append(counted(info.num_test, "test image"))
    return " and ".join(reasons) or None
