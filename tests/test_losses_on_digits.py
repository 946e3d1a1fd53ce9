"""The logit-adjusted loss with and without FedEAS on partitions of digits: the page says what the records say."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from cifar_runs import PAGE, RESULTS, sweep_curves

SWEEP: dict[str, Any] = json.loads((RESULTS / "losses-on-digits" / "sweep.json").read_text())


def last_20(policy: str, loss: str) -> list[float]:
    """By partition, in %."""
    found = {run["partition-seed"]: run for run in SWEEP["runs"] if (run["policy"], run["loss"]) == (policy, loss)}
    return [100 * found[partition]["last_20"] for partition in SWEEP["grid"]["partition-seed"]]


@pytest.mark.parametrize(("policy", "label"), [("none", "nothing generated"), ("fedeas", "FedEAS")])
def test_the_table_of_losses_is_what_the_sweep_has(policy: str, label: str) -> None:
    usual, adjusted = (last_20(policy, loss) for loss in ("cross-entropy", "logit-adjusted"))
    gains = [mine - theirs for mine, theirs in zip(adjusted, usual, strict=True)]
    assert len(gains) == 12 and len(SWEEP["runs"]) == 48
    error = statistics.stdev(gains) / len(gains) ** 0.5
    means = [f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in (usual, adjusted)]
    above = f"{statistics.mean(gains):+.1f} ± {error:.1f} | {sum(gain > 0 for gain in gains)} of 12"
    assert f"| {label} | {means[0]} | {means[1]} | {above} |" in PAGE


def test_the_sweeps_means_are_those_of_its_curves() -> None:
    curves = sweep_curves("losses-on-digits")
    assert set(curves) == {run["name"] for run in SWEEP["runs"]}
    for run in SWEEP["runs"]:
        assert statistics.mean(curves[run["name"]]) == pytest.approx(run["last_20"], abs=1e-5)
