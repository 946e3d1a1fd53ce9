"""Guidance on partitions of digits, where images are good without it: the pages say what the records say."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from cifar_runs import PAGE, RESULTS, sweep_curves

SWEEP: dict[str, Any] = json.loads((RESULTS / "guidance-on-digits" / "sweep.json").read_text())
LABELS = {"fedeas": "FedEAS", "uniform": "Uniform", "missing-only": "Missing-only"}


def last_20(policy: str, guidance: float) -> list[float]:
    """By partition, in %."""
    runs = {
        run["partition-seed"]: run for run in SWEEP["runs"] if (run["policy"], run["guidance"]) == (policy, guidance)
    }
    return [100 * runs[partition]["last_20"] for partition in SWEEP["grid"]["partition-seed"]]


def shown(differences: list[float]) -> str:
    """Mean ± standard error."""
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.1f} ± {error:.1f}".replace("-", "−")


def apart(first: list[float], second: list[float]) -> list[float]:
    assert len(first) == len(second) == 12
    return [mine - theirs for mine, theirs in zip(first, second, strict=True)]


@pytest.mark.parametrize("policy", LABELS)
def test_the_table_of_guidance_is_what_the_sweep_has(policy: str) -> None:
    assert len(SWEEP["runs"]) == 108
    none, little, much = (last_20(policy, guidance) for guidance in (1.0, 1.5, 3.0))
    cells = [f"{statistics.mean(none):.1f} ± {statistics.stdev(none):.1f}", shown(apart(little, none))]
    assert f"| {LABELS[policy]} | {' | '.join([*cells, shown(apart(much, none))])} |" in PAGE


def test_fedeas_leads_as_much_with_guidance_as_the_page_says() -> None:
    leads = [shown(apart(last_20("fedeas", g), last_20("uniform", g))).removeprefix("+") for g in (1.0, 3.0)]
    assert "FedEAS's lead over Uniform is {} points without and {} with a guidance of 3.".format(*leads) in PAGE


def test_what_the_images_are_by_a_classifier_is_what_the_pages_say() -> None:
    names = ("report", "report-g1.5", "report-g3")
    reports = [json.loads((RESULTS / "quality-digits" / f"{name}.json").read_text()) for name in names]
    agreement = [f"{100 * report['class_agreement']:.1f}" for report in reports]
    distance = [f"{report['classifier_frechet_distance']:.0f}" for report in reports]
    assert "finds {}, {} and {} % of 300 images to be of their class".format(*agreement) in PAGE
    assert "but their distance to the training images grows, from {} to {} and {}".format(*distance) in PAGE
    generators = " ".join((RESULTS.parent / "docs" / "generators.md").read_text().split())
    assert "(digits: a distance of {}, {} and {} at a guidance of 1, 1.5 and 3".format(*distance) in generators


def test_the_sweeps_means_are_those_of_its_curves() -> None:
    curves = sweep_curves("guidance-on-digits")
    assert set(curves) == {run["name"] for run in SWEEP["runs"]}
    for run in SWEEP["runs"]:
        assert statistics.mean(curves[run["name"]]) == pytest.approx(run["last_20"], abs=1e-5)
