"""Runs as a reader compares them: those that differ in their seed alone are one group, with a mean and a spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.config import RunConfig
from fedeas_flwr.config_keys import GENERATION_KEYS, identity
from fedeas_flwr.data.datasets import short_name
from fedeas_flwr.policies import POLICIES
from fedeas_flwr.report.style import LABELS, LineStyle, assign_styles
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import summarise_so_far, without_folder
from fedeas_flwr.runs.metrics import WALL_CLOCK, efficiency, last_20, seconds_of

FloatArray = npt.NDArray[np.float64]

CLIENT_WORK = ("generating", "training")
"""Seconds summed over clients, which may have worked at the same time."""
_PATHS = ("generator", "weights")


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: mean and the sample's standard deviation (n − 1), ``None`` for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Over the seeds."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def show(self, scale: float = 1.0, digits: int = 1) -> str:
        """As ``92.7 ± 0.4``."""
        spread = "" if self.sd is None else f" ± {scale * self.sd:.{digits}f}"
        return f"{scale * self.mean:.{digits}f}{spread}"


@dataclass(frozen=True)
class Member:
    """One run of a group."""

    run: RunDirectory
    config: RunConfig
    rounds: list[dict[str, Any]]
    summary: dict[str, Any]
    """From the rounds there are: a run that has not finished has one too."""

    @property
    def never_took_part(self) -> list[int]:
        """The clients that trained in no round; none can be told where clients have numbers of their own."""
        trained, known = {client for record in self.rounds for client in record["clients"]}, range(self.config.clients)
        return sorted(set(known) - trained) if trained <= set(known) else []

    @property
    def unfinished(self) -> str:
        """How far it came if that is not the end, else nothing."""
        done, wanted = len(self.rounds), self.config.rounds
        return "" if done >= wanted else f"{self.run.path.name}, {done} of {wanted} rounds, {self.run.state()}"


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    name: str
    members: tuple[Member, ...]
    """Those that all figures are of."""
    style: LineStyle
    """In every picture and table."""
    excluded: tuple[Member, ...] = ()
    """Those that have not finished while others have: in a mean they would pass for worse seeds."""

    @property
    def all_members(self) -> tuple[Member, ...]:
        """Those that count, and those that do not."""
        return (*self.members, *self.excluded)

    @property
    def config(self) -> RunConfig:
        """The first seed's; the others are the same but for it."""
        return self.members[0].config

    @property
    def seeds(self) -> list[int]:
        """In ascending order."""
        return [member.config.seed for member in self.members]

    @property
    def colour(self) -> str:
        """Of its look."""
        return self.style.colour

    @property
    def last_round(self) -> int:
        """The last round of the run that came furthest."""
        return max(len(member.rounds) for member in self.members)

    def spread(self, measure: str) -> Spread | None:
        """A figure of the summaries; ``None`` where a seed has none."""
        values = [member.summary.get(measure) for member in self.members]
        return None if any(value is None for value in values) else Spread(tuple(map(float, values)))  # type: ignore[arg-type]

    def curve(self, measure: str) -> FloatArray:
        """A figure of the rounds, [seeds, rounds]; NaN where a round has none or a run is shorter."""
        found = np.full((len(self.members), self.last_round), np.nan)
        for row, member in zip(found, self.members, strict=True):
            values = [record.get(measure) for record in member.rounds]
            row[: len(values)] = [np.nan if value is None else value for value in values]
        return found

    @cached_property
    def per_class(self) -> FloatArray | None:
        """Accuracy of each class, the mean of the last 20 rounds and of the seeds; ``None`` if it was not recorded."""
        found = []
        for member in self.members:
            rows = [record.get("per_class_accuracy") for record in member.rounds[-20:]]
            if not all(rows):
                return None
            found.append(np.array(rows, dtype=float).mean(axis=0))  # a class without test images stays NaN
        return np.asarray(np.mean(found, axis=0))

    @cached_property
    def worst_class(self) -> tuple[int, float] | None:
        """The class that ends worst, and its accuracy."""
        if self.per_class is None or np.isnan(self.per_class).all():
            return None
        worst = int(np.nanargmin(self.per_class))
        return worst, float(self.per_class[worst])

    @cached_property
    def worst_client(self) -> Spread | None:
        """The worst client's accuracy, mean of the last 20 rounds (``evaluation = "federated"`` records it)."""
        rows = [[record.get("worst_client_accuracy") for record in member.rounds] for member in self.members]
        return None if any(None in row for row in rows) else Spread(tuple(last_20(row) for row in rows))  # type: ignore[arg-type]

    def seconds(self, phase: str) -> float:
        """Of a phase, mean over the seeds."""
        return statistics.fmean(seconds_of(phase, member.summary["seconds"]) for member in self.members)

    @property
    def wall_clock(self) -> float:
        """Seconds that a run of the group took, without starting up."""
        return sum(self.seconds(phase) for phase in WALL_CLOCK)

    @property
    def images(self) -> float:
        """Images generated in all, mean over the seeds."""
        return statistics.fmean(member.summary["total_generated"] for member in self.members)


def group_runs(runs: Sequence[RunDirectory]) -> tuple[list[Group], list[str]]:
    """Put runs that differ in their seed alone together; return the groups, and what was left out and why.

    Groups without generated images come first, then by images; seeds ascend.
    """
    members, left_out = [], []
    for run in runs:
        try:
            config = run.config()
            run.environment()  # a page shows it, and would fail as a whole
            summary = summarise_so_far(run, config)
        except RunError as error:
            left_out.append(str(error))
            continue
        if summary is None:
            left_out.append(f"{run.path} has no finished round ({run.state()})")
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
    told = zip(_names(configs), found, assign_styles([config.policy for config in configs]), strict=True)
    return [_make_group(name, group, look) for name, group, look in told], left_out


def _make_group(name: str, runs: Sequence[Member], style: LineStyle) -> Group:
    finished = tuple(member for member in runs if not member.unfinished)
    if not finished:  # as far as they came is all there is
        return Group(name, tuple(runs), style)
    return Group(name, finished, style, tuple(member for member in runs if member.unfinished))


def mean_window(groups: Sequence[Group]) -> int:
    """Of how many rounds at most the last-20 mean of these groups is."""
    return max(min(20, group.last_round) for group in groups)


def group_key(config: RunConfig, free: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys and values that the runs of one group share: all that identify a run, except its seed.

    Folders count by name: an exported record has no paths, and a run and its record are the same run.
    """
    values = identity(config, ("seed", "data-dir", *free))
    dataset = {"dataset": short_name(config.dataset)}
    return values | dataset | {key: without_folder(str(values[key])) for key in _PATHS if key in values}


def _one_per_seed(group: Sequence[Member], left_out: list[str]) -> list[Member]:
    """By seed; of a run that is there twice, the one that came furthest and of these the last written counts."""
    kept: dict[int, Member] = {}
    for member in sorted(group, key=lambda one: (len(one.rounds), (one.run.path / "rounds.jsonl").stat().st_mtime)):
        kept[member.config.seed] = member
    for member in group:
        if (other := kept[member.config.seed]) is not member:
            same = all(a["accuracy"] == b["accuracy"] for a, b in zip(member.rounds, other.rounds, strict=False))
            figures = "" if same else ", with other figures"
            left_out.append(f"{member.run.path} is {other.run.path} once more (config and seed){figures}")
    return [kept[seed] for seed in sorted(kept)]


def differences(configs: Sequence[RunConfig]) -> list[str]:
    """The keys in which some configs differ, seeds and what is no part of a run aside."""
    seen = [group_key(config) for config in configs]
    keys = list(dict.fromkeys(key for values in seen for key in values))
    return [key for key in keys if len({repr(values[key]) for values in seen if key in values}) > 1]


def _names(configs: Sequence[RunConfig]) -> list[str]:
    """Call a group by its policy where that varies, and by what tells it from other groups of its policy.

    Where strategies vary, one other than FedAvg is named in any case: else policies alone would seem to be compared.
    """
    policies, strategies = {config.policy for config in configs}, {config.strategy for config in configs}
    names = []
    for config in configs:
        values = group_key(config)
        differing = differences([other for other in configs if other.policy == config.policy])
        if "strategy" not in differing and len(strategies) > 1 and config.strategy != "fedavg":
            differing.insert(0, "strategy")
        more = [f"{key} = {_show(values[key])}" for key in differing if key in values]
        words = [_policy(config)] if len(policies) > 1 or not more else []
        names.append(", ".join([*words, *more]))
    return names


def _policy(config: RunConfig) -> str:
    if _is_baseline(config) and config.strategy != "fedavg":
        return "Nothing generated"
    return LABELS.get(config.policy, config.policy)


def _is_baseline(config: RunConfig) -> bool:
    return POLICIES[config.policy].is_baseline


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def baseline_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """The group that is the same but for generating nothing; of several, that of its own seeds and form of Γ̂."""
    if _is_baseline(group.config):
        return None
    fitting = [other for other in _without_images(group, groups) if not _differing_keys(group, other)]
    return min(
        fitting,
        key=lambda other: (
            not _as_far(group, other),
            other.seeds != group.seeds,
            other.config.gamma_hat != group.config.gamma_hat,
        ),
        default=None,
    )


def why_no_gain(group: Group, groups: Sequence[Group]) -> str | None:
    """What keeps a group from being compared with one that generates nothing; ``None`` if it is, or is one itself."""
    if _is_baseline(group.config):
        return None
    if baseline := baseline_of(group, groups):
        came = f"it has come to {_ends(group)}, the group that generates nothing to {_ends(baseline)}"
        return None if _as_far(group, baseline) else came
    others = _without_images(group, groups)
    if not others:
        return "there is no group that generates nothing (policy = none)"
    nearest = min(others, key=lambda other: len(_differing_keys(group, other)))
    mine, theirs = group_key(group.config), group_key(nearest.config)
    keys = [f"{key} = {_show(theirs[key])}, not {_show(mine[key])}" for key in _differing_keys(group, nearest)]
    return f"the nearest group that generates nothing has {'; '.join(keys)}"


def _ends(group: Group) -> str:
    """The rounds that a group's runs came to."""
    ends = sorted({len(member.rounds) for member in group.members})
    return f"round{'s' if len(ends) > 1 else ''} {' and '.join(map(str, ends))}"


def _as_far(group: Group, other: Group) -> bool:
    """Whether all runs of two groups came to the same round: early rounds are no match for late ones."""
    return len({len(member.rounds) for member in (*group.members, *other.members)}) == 1


def _without_images(group: Group, groups: Sequence[Group]) -> list[Group]:
    return [other for other in groups if other is not group and _is_baseline(other.config)]


def _differing_keys(group: Group, other: Group) -> list[str]:
    """The keys in which two groups differ, what is generated aside; of one strategy's keys the strategy is enough."""
    mine, theirs = (group_key(one.config, (*GENERATION_KEYS, "threshold", "gamma-hat")) for one in (group, other))
    return [key for key in mine if mine[key] != theirs.get(key, mine[key])]


def gain_and_efficiency(group: Group, groups: Sequence[Group]) -> tuple[float, float | None] | None:
    """Percentage points over the baseline, and η; ``None`` without a baseline that came as far."""
    baseline = baseline_of(group, groups)
    if baseline is None or not _as_far(group, baseline):
        return None
    mine, theirs = group.spread("last_20"), baseline.spread("last_20")
    assert mine is not None and theirs is not None  # every round has an accuracy
    gain = 100 * (mine.mean - theirs.mean)
    return gain, efficiency(gain, group.images)
