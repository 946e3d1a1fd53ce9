"""SCAFFOLD's mean on digits, clients counted alike or by their samples: the page says what the records say."""

from __future__ import annotations

import json
import statistics

import pytest
from cifar_runs import PAGE, RESULTS, sweep_curves
from test_guidance_on_digits import apart, shown

HERE = RESULTS / "scaffold-on-digits"
RUNS = {name: json.loads((HERE / f"{name}.json").read_text())["runs"] for name in ("fedavg", "scaffold")}


def by_partition(strategy: str, policy: str, weighting: str = "", what: str = "last_20") -> list[float]:
    """In %."""
    found = [run for run in RUNS[strategy] if run["policy"] == policy]
    found = [run for run in found if not weighting or run["scaffold-weighting"] == weighting]
    return [100 * run[what] for run in sorted(found, key=lambda run: run["partition-seed"])]


@pytest.mark.parametrize(("policy", "label"), [("none", "nothing generated"), ("fedeas", "FedEAS")])
def test_the_table_of_weightings_is_what_the_sweeps_have(policy: str, label: str) -> None:
    plain = by_partition("fedavg", policy)
    alike, by_samples = (by_partition("scaffold", policy, how) for how in ("uniform", "examples"))
    between = apart(by_samples, alike)
    cells = [f"{statistics.mean(plain):.1f} ± {statistics.stdev(plain):.1f}", shown(apart(alike, plain))]
    cells += [shown(apart(by_samples, plain)), f"{sum(one > 0 for one in between)} of 12"]
    assert f"| {label} | {' | '.join(cells)} |" in PAGE


def test_where_the_weighting_counts_is_what_the_page_says() -> None:
    curves = sweep_curves("scaffold-on-digits")
    means = [
        100 * statistics.mean(curve[0] for name, curve in curves.items() if part in name)
        for part in ("weighting-uniform", "weighting-examples", "fedavg/")
    ]
    assert len(curves) == 72 and f"{means[1]:.1f}" == f"{means[2]:.1f}"
    assert "in round 1, {:.1f} for {:.1f},".format(*means[:2]) in PAGE
    peaks = [by_partition("scaffold", "fedeas", how, "peak") for how in ("examples", "uniform")]
    assert f"In their peaks, about {statistics.mean(peaks[0]):.0f} %, the two differ by {shown(apart(*peaks))}" in PAGE
    gains = [
        statistics.mean(apart(*(by_partition("scaffold", policy, how) for how in ("examples", "uniform"))))
        for policy in ("fedeas", "none")
    ]
    assert "By samples SCAFFOLD gains {:.1f} points with FedEAS and {:.1f} without images.".format(*gains) in PAGE
