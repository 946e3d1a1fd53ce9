"""Reports: gains over what generates nothing, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_runs import FEDEAS_OF_FOUR, grouped, write_run
from runners import typed

from fedeas_flwr.report.groups import baseline_of, gain_and_efficiency
from fedeas_flwr.report.json_export import as_data
from fedeas_flwr.report.notes import no_gain_notes, notes_on
from fedeas_flwr.runs.metrics import efficiency


def test_efficiency_is_the_papers() -> None:
    # Its β sweep: FedAvg 55.52 %, β = 4 gives 66.11 % with 4,113 images, β = 20 74.05 % with 23,514.
    assert efficiency(66.11 - 55.52, 4_113) == pytest.approx(2.575, abs=5e-4)
    assert efficiency(74.05 - 55.52, 23_514) == pytest.approx(0.788, abs=5e-4)
    assert efficiency(1.0, 0) is None


def test_gain_is_over_the_same_run_without_images(tmp_path: Path) -> None:
    none = write_run(tmp_path / "none", [0.5], threshold=0.9, gamma_hat="all-state")  # both only measure
    other = write_run(tmp_path / "prox", [0.1], strategy="fedprox")
    fedeas = write_run(tmp_path / "fedeas", [0.7], images=400, policy="fedeas", beta=4.0)
    groups = grouped(none, other, fedeas)
    assert baseline_of(groups[-1], groups) is groups[0]
    assert gain_and_efficiency(groups[-1], groups) == pytest.approx((20.0, 50.0))
    assert gain_and_efficiency(groups[0], groups) is None
    alone = grouped(other, fedeas)
    assert gain_and_efficiency(alone[-1], alone) is None  # FedProx is no baseline of FedAvg


def test_of_two_baselines_that_only_measure_otherwise_the_nearer_is_taken(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [0.2], gamma_hat="all-state", seed=2)
    near = write_run(tmp_path / "near", [0.5])
    fedeas = write_run(tmp_path / "fedeas", [0.7], images=400, policy="fedeas", beta=4.0)
    for runs in ((other, near, fedeas), (near, other, fedeas)):
        groups = grouped(*runs)
        gains = [gain_and_efficiency(group, groups) for group in groups]
        assert gains[:2] == [None, None], "what generates nothing gains nothing over itself"
        assert gains[2] == pytest.approx((20.0, 50.0))
    same_seed = write_run(tmp_path / "seed", [0.6], gamma_hat="all-state")
    groups = grouped(write_run(tmp_path / "form", [0.2], seed=2), same_seed, fedeas)
    assert gain_and_efficiency(groups[2], groups) == pytest.approx((10.0, 25.0)), "seeds count, the form of Γ̂ does not"


def test_a_gain_that_cannot_be_told_says_which_key_is_in_the_way(tmp_path: Path) -> None:
    near = write_run(tmp_path / "near", [0.4, 0.4])
    far = write_run(tmp_path / "far", [0.4], strategy="fedprox")
    keys: dict[str, Any] = {"images": 400, "beta": 4.0, "rounds": 3, "finished": False}
    runs = [write_run(tmp_path / policy, [0.6], policy=policy, **keys) for policy in ("fedeas", "uniform")]
    note = "No gain of FedEAS, Uniform: the nearest group that generates nothing has rounds = 2, not 3"
    printed = typed("report", str(tmp_path), "--out", str(tmp_path / "out")).stdout
    assert note in printed.splitlines()
    assert f"{note}." in (tmp_path / "out" / "report.md").read_text().splitlines()
    data = as_data(grouped(near, far, *runs))
    assert [group["no_gain"] for group in data] == [None, None, *[note.partition(": ")[2]] * 2]
    alone = no_gain_notes(grouped(*runs))
    assert alone == ["No gain of FedEAS, Uniform: there is no group that generates nothing (policy = none)"]
    assert no_gain_notes(grouped(near, far)) == []
    same = write_run(tmp_path / "same", [0.7, 0.7], images=400, beta=4.0, policy="fedeas")
    assert no_gain_notes(grouped(near, far, same)) == []


def test_runs_that_came_to_different_rounds_have_no_gain(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "images": FEDEAS_OF_FOUR, "beta": 4.0, "finished": False}
    none = write_run(tmp_path / "none", [0.2, 0.4, 0.6])
    groups = grouped(none, write_run(tmp_path / "cut", [0.5], policy="fedeas", **keys))
    assert gain_and_efficiency(groups[1], groups) is None
    reason = "it has reached round 1, but the group that generates nothing round 3"
    assert no_gain_notes(groups) == [f"No gain of FedEAS: {reason}"]


def test_seeds_that_came_to_different_rounds_are_all_named_where_there_is_no_gain(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "images": FEDEAS_OF_FOUR, "beta": 4.0, "finished": False, "policy": "fedeas"}
    runs = [write_run(tmp_path / str(n), [0.5] * n, seed=n, **keys) for n in (1, 2)]
    groups = grouped(write_run(tmp_path / "none", [0.2, 0.4], rounds=3, finished=False), *runs)
    reason = "it has reached rounds 1 and 2, but the group that generates nothing round 2"
    assert no_gain_notes(groups) == [f"No gain of FedEAS: {reason}"]


def test_a_gain_over_other_seeds_says_so(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"images": FEDEAS_OF_FOUR, "beta": 4.0, "policy": "fedeas"}
    none = [write_run(tmp_path / f"none{seed}", [0.1 * seed], seed=seed) for seed in (1, 2)]
    some = [write_run(tmp_path / f"some{seed}", [0.1 * seed], seed=seed, **keys) for seed in (1, 2)]
    assert notes_on(grouped(*none, *some)) == []
    groups = grouped(none[1], *some)
    gain = gain_and_efficiency(groups[1], groups)
    assert gain is not None and gain[0] == pytest.approx(-5.0)  # of what made no difference
    assert notes_on(groups) == ["Gain of FedEAS: its seeds are 1, 2, but those of its baseline are 2"]
