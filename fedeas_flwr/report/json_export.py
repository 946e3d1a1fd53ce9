"""Export groups as JSON for `fedeas report --format json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedeas_flwr.report.groups import PHASES, Group, Spread, gain_and_efficiency, weak_gain, why_no_gain
from fedeas_flwr.report.paired import Differences, PairedRuns
from fedeas_flwr.runs.metrics import STARTUP


def as_data(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the metrics of the groups as JSON values."""
    return [_group_data(group, groups) for group in groups]


def paired_data(paired: PairedRuns) -> dict[str, Any]:
    """Return paired differences as JSON values."""
    return {
        "key": paired.key,
        "value": paired.value,
        "comparisons": [
            {
                "name": found.name,
                "reference": found.reference,
                "pairs": [
                    {
                        "seed": own.config.seed,
                        "partition_seed": own.config.partition_seed,
                        "runs": [str(own.run.path), str(other.run.path)],
                    }
                    for own, other in found.pairs
                ],
                "last_20_points": _differences_dict(found.differences("last_20")),
                "final_points": _differences_dict(found.differences("final")),
                "images": found.images,
            }
            for found in paired.comparisons
        ],
        "notes": paired.notes,
    }


def _differences_dict(found: Differences) -> dict[str, Any]:
    return {"mean": found.mean, "interval": found.interval, "above": found.above, "values": found.values}


def _group_data(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    gain = gain_and_efficiency(group, groups)
    worst_class, per_class = group.worst_class, group.per_class
    return {
        "name": group.name,
        "runs": [str(member.run.path) for member in group.members],
        "seeds": group.seeds,
        "rounds": [len(member.rounds) for member in group.members],
        "unfinished": _unfinished(group),
        "missing_replies": [member.summary["failures"] for member in group.members],
        "stopped": [member.summary.get("stopped", "") for member in group.members],
        "gaps": [member.summary.get("gaps", "") for member in group.members],
        "last_20": _spread_dict(group.spread("last_20")),
        "final": _spread_dict(group.spread("final")),
        "peak": _spread_dict(group.spread("peak")),
        "images": group.images,
        "generator_warning": [member.run.generator_warning() for member in group.members],
        "not_made": [member.summary.get("not_made", []) for member in group.members],
        "gain_points": gain[0] if gain else None,
        "eta": gain[1] if gain else None,
        "never_took_part": [member.never_took_part for member in group.members],
        "no_gain": why_no_gain(group, groups),
        "weak_gain": weak_gain(group, groups),
        "gamma_hat": _spread_dict(group.spread("gamma_hat")),
        "threshold": group.config.threshold,
        "rounds_to_threshold": [member.summary["rounds_to_threshold"] for member in group.members],
        "per_class_accuracy": None if per_class is None else [None if np.isnan(x) else float(x) for x in per_class],
        "worst_class": None if worst_class is None else {"class": worst_class[0], "accuracy": worst_class[1]},
        "worst_tenth_accuracy": _spread_dict(group.worst_tenth),
        "seconds": {STARTUP: group.startup} | {phase: group.seconds(phase) for phase in PHASES},
        "config": group.config.to_user_dict(),
        "environments": [member.run.environment() for member in group.members],
    }


def _unfinished(group: Group) -> list[dict[str, Any]]:
    """Return the unfinished runs of a group, and whether its metrics include them."""
    return [
        {
            "run": str(member.run.path),
            "seed": member.config.seed,
            "rounds": len(member.rounds),
            "of": member.config.rounds,
            "state": member.run.state(),
            "counted": member in group.members,
        }
        for member in group.all_members
        if not member.is_finished
    ]


def _spread_dict(spread: Spread | None) -> Mapping[str, Any] | None:
    return None if spread is None else {"mean": spread.mean, "sd": spread.sd, "values": list(spread.values)}
