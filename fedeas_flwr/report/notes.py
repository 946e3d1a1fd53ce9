"""What has to be known to read the figures of groups rightly: a line each, and none where there is nothing to say."""

from __future__ import annotations

from collections.abc import Sequence

from fedeas_flwr.common.text import counted
from fedeas_flwr.report.groups import Group, baseline_of, gain_and_efficiency, why_no_gain

_MAX_NAMED = 6
"""Clients; of more the number is given."""


def notes_on(groups: Sequence[Group]) -> list[str]:
    """All of them."""
    kinds = (unfinished_notes, missing_notes, no_gain_notes, seed_notes, absence_notes, sharing_notes)
    return [note for notes in kinds for note in notes(groups)]


def unfinished_notes(groups: Sequence[Group]) -> list[str]:
    """What a reader of the figures has to know: runs that have not come to their end, and whether they count."""
    included = [
        f"Not finished: {member.unfinished}" for group in groups for member in group.members if member.unfinished
    ]
    aside = [f"Not finished, so not counted: {member.unfinished}" for group in groups for member in group.excluded]
    return [*included, *aside]


def missing_notes(groups: Sequence[Group]) -> list[str]:
    """A line for each run that went on without replies of some of its clients."""
    return [
        f"Replies missing: {member.run.path.name}, {member.summary['failures']:,} in {len(rounds)} of "
        f"{counted(len(member.rounds), 'round')}"
        for group in groups
        for member in group.members
        if (rounds := [record for record in member.rounds if record["failures"]])
    ]


def no_gain_notes(groups: Sequence[Group]) -> list[str]:
    """A line for each reason why groups have no gain."""
    return _together("No gain", [(reason, group.name) for group in groups if (reason := why_no_gain(group, groups))])


def seed_notes(groups: Sequence[Group]) -> list[str]:
    """A line for each gain over runs of other seeds, which differ by their seeds too."""
    found = []
    for group in groups:
        baseline = baseline_of(group, groups) if gain_and_efficiency(group, groups) else None
        if baseline and baseline.seeds != group.seeds:
            mine, theirs = (", ".join(map(str, one.seeds)) for one in (group, baseline))
            found.append((f"its seeds are {mine}, those of the group that generates nothing {theirs}", group.name))
    return _together("Gain", found)


def absence_notes(groups: Sequence[Group]) -> list[str]:
    """Name the clients that a run never drew: what its plan has for them was not generated."""
    generating = [group for group in groups if group.config.generates]
    found = [(group, member) for group in generating for member in group.members if member.never_took_part]
    return _together(
        "Images",
        [(_told(one.never_took_part, one.config.clients), f"{g.name}, seed {one.config.seed}") for g, one in found],
    )


def _told(absent: Sequence[int], clients: int) -> str:
    if len(absent) == 1:
        return f"client {absent[0]} never took part, so it has generated none"
    who = f"{len(absent):,} of {counted(clients, 'client')}"
    if len(absent) <= _MAX_NAMED:
        who = f"clients {', '.join(map(str, absent))}"
    return f"{who} never took part, so they have generated none"


# Sec. 4.3 and Supp. F of the paper: η is by the total of what clients hold.
def sharing_notes(groups: Sequence[Group]) -> list[str]:
    """Say of shared images that they count for every client that holds them."""
    reason = "one that several clients hold counts, in η too, for each of them"
    sharing = [group for group in groups if group.config.generates and group.config.shared_images != "no"]
    return _together("Images", [(reason, group.name) for group in sharing])


def _together(what: str, told: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each thing told, with all names that it is told of."""
    names: dict[str, list[str]] = {}
    for reason, name in told:
        names.setdefault(reason, []).append(name)
    return [f"{what} of {_listed(found)}: {reason}" for reason, found in names.items()]


def _listed(names: Sequence[str]) -> str:
    return ("; " if any("," in name for name in names) else ", ").join(names)
