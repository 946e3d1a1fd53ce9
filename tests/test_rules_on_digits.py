"""FedEAS beside the exact minimiser on twelve partitions of digits: docs/reproduction.md says what the records say."""

from __future__ import annotations

import json
import statistics
from typing import Any

import numpy as np
import pytest
from cifar_runs import PAGE, README, RESULTS, sweep_curves

from fedeas_flwr.allocation import removed
from fedeas_flwr.config import parse_config
from fedeas_flwr.run_plan import planned_allocation, planned_counts

SWEEP: dict[str, Any] = json.loads((RESULTS / "rules-on-digits" / "sweep.json").read_text())
PARTITIONS, BUDGETS = SWEEP["grid"]["partition-seed"], SWEEP["grid"]["beta"]
RULES = {"fedeas": "FedEAS", "waterfill": "Waterfill", "uniform": "Uniform", "missing-only": "Missing-only"}


def last_20(policy: str, beta: float) -> list[float]:
    """By partition, in %."""
    found = {run["partition-seed"]: run for run in SWEEP["runs"] if (run["policy"], run["beta"]) == (policy, beta)}
    return [100 * found[partition]["last_20"] for partition in PARTITIONS]


def test_the_table_of_rules_is_what_the_sweep_has() -> None:
    assert SWEEP["grid"]["policy"] == list(RULES) and len(SWEEP["runs"]) == 8 * len(PARTITIONS)
    for beta in BUDGETS:
        base, images = last_20("fedeas", beta), [run["images"] for run in SWEEP["runs"] if run["beta"] == beta]
        for policy, label in RULES.items():
            ours, gone = last_20(policy, beta), []
            for partition in PARTITIONS:
                config = parse_config({**SWEEP["config"], "policy": policy, "beta": beta, "partition-seed": partition})
                counts = planned_counts(config, config.clients)
                gone.append(100 * removed(counts, planned_allocation(config, counts)))
            apart = [mine - theirs for mine, theirs in zip(ours, base, strict=True)]
            error = statistics.stdev(apart) / len(apart) ** 0.5
            beside = "– | –"
            if policy != "fedeas":
                better = sum(each > 0 for each in apart)
                beside = f"{statistics.mean(apart):+.1f} ± {error:.1f} | {better} of {len(apart)}".replace("-", "−")
            row = f"| {beta:g} | {label} | {statistics.mean(images):.0f} | {statistics.mean(gone):.1f} % |"
            assert f"{row} {statistics.mean(ours):.1f} ± {statistics.stdev(ours):.1f} | {beside} |" in PAGE


def test_the_sweeps_means_are_those_of_its_curves() -> None:
    curves = sweep_curves("rules-on-digits")
    assert set(curves) == {run["name"] for run in SWEEP["runs"]}
    for run in SWEEP["runs"]:
        assert statistics.mean(curves[run["name"]]) == pytest.approx(run["last_20"], abs=1e-5)
    last = {
        (beta, policy): statistics.mean(
            100 * curves[run["name"]][-1] for run in SWEEP["runs"] if (run["beta"], run["policy"]) == (beta, policy)
        )
        for beta in BUDGETS
        for policy in RULES
    }
    ends = [f"{min(found):.1f} to {max(found):.1f}" for found in ([last[b, p] for p in RULES] for b in BUDGETS)]
    assert f"In the last round the four are {ends[0]} and {ends[1]} %" in PAGE


def test_what_the_rules_leave_empty_is_what_the_page_says() -> None:
    def filled(keys: dict[str, Any], policy: str) -> tuple[float, float]:
        config = parse_config({**keys, "policy": policy})
        counts = planned_counts(config, config.clients)
        plan = planned_allocation(config, counts)
        return float((plan[counts == 0] > 0).mean()), float((plan.sum(axis=1) > 0).mean())

    low = [{**SWEEP["config"], "beta": 2.0, "partition-seed": partition} for partition in PARTITIONS]
    pairs, clients = (1 - np.mean([filled(keys, "waterfill") for keys in low], axis=0)) * 100
    assert f"Waterfill leaves {pairs:.0f} % of the classes that clients lack empty, and {clients:.0f} % of the" in PAGE
    assert all(filled(keys, "fedeas")[0] == 1 for keys in low)
    paper = {"dataset": "cifar10", "protocol": "paper", "clients": 100, "alpha": 0.1, "beta": 12.0, "generator": "any"}
    assert filled(paper, "waterfill")[0] == 1 and "On the paper's partition with 100 clients it leaves none" in PAGE


def test_what_the_readme_says_of_the_rules_is_what_the_sweep_has() -> None:
    least = [np.mean(np.subtract(last_20("fedeas", beta), last_20("uniform", beta))) for beta in BUDGETS]
    assert f"FedEAS is {least[0]:.1f} and {least[1]:.1f} points above Uniform with" in README
    apart = [np.mean(np.subtract(last_20("waterfill", beta), last_20("fedeas", beta))) for beta in BUDGETS]
    assert f"Waterfill, which removes the most imbalance, {-apart[0]:.1f} below it and {apart[1]:.1f} above." in README
    images = [np.mean([run["images"] for run in SWEEP["runs"] if run["beta"] == beta]) for beta in BUDGETS]
    assert "with some {:.0f} and {:.0f} images".format(*images) in README
