"""Images that clients bought during a run under an adaptive policy: when, how many, and of which classes.

The server knows the numbers; the classes are computed from the scores that clients of a simulation leave in the run
directory. Of a group, only the run of the first seed is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.planning.run_plan import planned_counts
from fedeas_flwr.policies.adaptive import Adaptive
from fedeas_flwr.policies.interface import ClientView, Share
from fedeas_flwr.policies.registry import checked_plan
from fedeas_flwr.report.groups import Group, Member
from fedeas_flwr.report.run_figures import draw_heat_map
from fedeas_flwr.runs.class_scores import ClassScores


@dataclass(frozen=True)
class Purchases:
    """The purchases of one run."""

    group: Group
    records: list[dict[str, Any]]
    """The records of the rounds before which images were bought."""
    by_class: IntArray | None
    """Images of each class, [1 + purchases, C]: the first part, then each purchase; None if the classes are unknown."""

    def rows(self) -> list[list[str]]:
        """Return a table's row for each purchase: the group, the round, images, clients that bought some, the level."""
        return [
            [
                self.group.name,
                str(record["round"]),
                f"{record['bought']['images']:,}",
                str(sum(images > 0 for images in record["bought"]["clients"].values())),
                f"{record['bought']['level']:.4f}",
            ]
            for record in self.records
        ]

    def draw(self) -> Figure:
        """Draw the images by class over the rounds."""
        assert self.by_class is not None
        rounds = ["1", *(str(record["round"]) for record in self.records)]
        figure = Figure(figsize=(8.6, 1.4 + 0.4 * len(rounds)), layout="constrained")
        axes = figure.subplots()
        classes = dataset_info(self.group.config.dataset).classes
        draw_heat_map(axes, self.by_class, classes, f"{self.group.name} ({self.by_class.sum():,})", "Reds")
        axes.set_yticks(range(len(rounds)), rounds)
        axes.set_ylabel("before round")
        return figure


def purchases_of(groups: Sequence[Group]) -> list[Purchases]:
    """Return the purchases of the groups whose clients bought images."""
    found = []
    for group in groups:
        member = group.members[0]
        records = [record for record in member.rounds if "bought" in record]
        if records:
            found.append(Purchases(group, records, _by_class(member, records)))
    return found


def _by_class(member: Member, records: Sequence[dict[str, Any]]) -> IntArray | None:
    """Return the images that were added by class, [1 + purchases, C]; None if the scores or the data are not here."""
    config, policy = member.config, member.config.find_policy()
    assert isinstance(policy, Adaptive)
    try:
        owner = member.run.owner()
        counts = planned_counts(config)
        bought, totals = Counter[int](), []
        for number, record in [(1, {}), *((record["round"], record["bought"]["clients"]) for record in records)]:
            bought.update({int(client): images for client, images in record.items()})
            whole = np.zeros(counts.shape[1], dtype=np.int64)
            for client, row in enumerate(counts):
                scores = ClassScores(member.run.path / "clients" / str(client), f"{owner}/{client}").latest(number)
                if bought[client] and scores is None:
                    return None
                progress, share = [scores.progress] if scores else [], Share(base=bought[client])
                view = ClientView(row[None], config.policy_settings, [share], policy.part(number), progress)
                whole += checked_plan(policy, view)[0]
            totals.append(whole)
    except (OSError, ValueError):
        return None
    return np.diff(totals, axis=0, prepend=0)
