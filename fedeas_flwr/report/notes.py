"""Notes that a reader needs to interpret the metrics of groups, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from fedeas_flwr.common.text import MAX_NAMED, counted
from fedeas_flwr.report.groups import Group, Member, comparable_baseline, weak_gain, why_no_gain
from fedeas_flwr.runs.metrics import LOST

WEAK = "†"
"""Mark of a gain that says little."""


def notes_on(groups: Sequence[Group]) -> list[str]:
    """Return all notes."""
    gains = (generator_notes, no_gain_notes, seed_notes, weak_gain_notes)
    makers = (ending_notes, *gains, absence_notes, limit_notes, sharing_notes, startup_notes, cache_notes)
    return [note for make in makers for note in make(groups)]


def ending_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each run that is unfinished, stopped early, had gaps or lost the state of its strategy."""
    members = [member for group in groups for member in group.members]
    excluded = [member for group in groups for member in group.excluded]
    return [
        *(f"Not finished: {_progress(member)}, {member.run.state()}" for member in members if not member.is_finished),
        *(f"Not finished, so not counted: {_progress(member)}, {member.run.state()}" for member in excluded),
        *(
            f"Stopped early: {_progress(member)}, {member.summary['stopped']}"
            for member in members
            if "stopped" in member.summary
        ),
        *(
            f"{'Finished, with gaps' if member.is_finished else 'Gaps'}: {member.run.path.name}, "
            f"{member.summary['gaps']}"
            for member in members
            if "gaps" in member.summary
        ),
        *(
            f"Resumed without the state of its strategy: {member.run.path.name}, in round {record['round']}, "
            f"{', '.join(record[LOST])}"
            for member in members
            for record in member.rounds
            if LOST in record
        ),
    ]


def _progress(member: Member) -> str:
    return f"{member.run.path.name}, {len(member.rounds)} of {member.config.rounds} rounds"


def generator_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each warning of a generator: a gain from images of noise is no effect of the images."""
    members = [(member, group.name) for group in groups for member in group.members]
    warnings = [(member.run.generator_warning(), name) for member, name in members]
    return _group_by_reason("Images", [(warning, name) for warning, name in dict.fromkeys(warnings) if warning])


def no_gain_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each reason why groups have no gain."""
    reasons = [(reason, group.name) for group in groups if (reason := why_no_gain(group, groups))]
    return _group_by_reason("No gain", reasons)


def seed_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each gain over a baseline with other seeds."""
    found = []
    for group in groups:
        if (baseline := comparable_baseline(group, groups)) and baseline.seeds != group.seeds:
            own, other = (", ".join(map(str, seeds)) for seeds in (group.seeds, baseline.seeds))
            found.append((f"its seeds are {own}, but those of its baseline are {other}", group.name))
    return _group_by_reason("Gain", found)


def weak_gain_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each reason why marked gains say little."""
    reasons = [(reason, group.name) for group in groups if (reason := weak_gain(group, groups))]
    found = [(f"from {reason}, so differences of a few points may be chance", name) for reason, name in reasons]
    return _group_by_reason(f"{WEAK} Gain", found)


def absence_notes(groups: Sequence[Group]) -> list[str]:
    """Return lines on clients that a run never sampled, whose planned images were not generated."""
    runs = [(group.name, run) for group in groups if group.config.generates for run in group.members]
    reasons = [
        (_absence_reason(run.never_took_part, run.config.clients), f"{name}, seed {run.config.seed}")
        for name, run in runs
        if run.never_took_part
    ]
    return _group_by_reason("Images", reasons)


def _absence_reason(absent: Sequence[int], clients: int) -> str:
    if len(absent) == 1:
        return f"client {absent[0]} never took part, so it generated none"
    who = f"{len(absent):,} of {counted(clients, 'client')}"
    if len(absent) <= MAX_NAMED:
        who = f"clients {', '.join(map(str, absent))}"
    return f"{who} never took part, so they generated none"


def limit_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line for each run with nodes that limit their number of images."""
    found = []
    for member in (member for group in groups for member in group.members if member.not_made):
        planned = member.summary["total_generated"] + member.not_made
        where = [f"client {item['client']}: {item['images']:,}" for item in member.summary["not_made"]]
        names = ", ".join(where) if len(where) <= MAX_NAMED else counted(len(where), "client")
        numbers = f"{member.not_made:,} of {planned:,} planned, by the limits of nodes ({names})"
        found.append(f"Images not made: {member.run.path.name}, {numbers}")
    return found


def sharing_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line on shared images, which count once per client, as in the paper's η (Sec. 4.3 and Supp. F)."""
    reason = "an image that several clients hold counts once per client, also in η"
    sharing = [group for group in groups if group.config.generates and group.config.shared_images != "no"]
    return _group_by_reason("Images", [(reason, group.name) for group in sharing])


def startup_notes(groups: Sequence[Group]) -> list[str]:
    """Return a line on groups whose seconds lack start-up."""
    reason = "without start-up, which older versions did not record"
    return _group_by_reason("Seconds", [(reason, group.name) for group in groups if group.startup is None])


def cache_notes(groups: Sequence[Group]) -> list[str]:
    """Return lines on groups of which some runs generated images and others read theirs from the cache."""
    found = []
    for group in groups:
        made = {member.config.seed: sum(record.get("made", 0) for record in member.rounds) for member in group.members}
        cached = [str(seed) for seed, images in made.items() if not images]
        if group.config.generates and 0 < len(cached) < len(made):
            seeds = f"seed{'' if len(cached) == 1 else 's'} {', '.join(cached)}"
            found.append((f"{seeds} read all images from the cache, the others generated some", group.name))
    return _group_by_reason("Seconds", found)


def _group_by_reason(what: str, reasons: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each distinct reason, with all group names that it applies to."""
    names: dict[str, list[str]] = {}
    for reason, name in reasons:
        names.setdefault(reason, []).append(name)
    commas = {reason: "; " if any("," in name for name in found) else ", " for reason, found in names.items()}
    return [f"{what} of {commas[reason].join(found)}: {reason}" for reason, found in names.items()]
