"""Reports: gains over runs without generated images, and the reason where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runs import FEDEAS_OF_FOUR, grouped, write_run
from runners import run_in_process

from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.report.document import _opening, result_tables
from fedeas_flwr.report.groups import Group, baseline_of, gain_and_efficiency, weak_gain
from fedeas_flwr.report.json_export import as_data
from fedeas_flwr.report.notes import no_gain_notes, notes_on
from fedeas_flwr.runs.metrics import efficiency


def test_efficiency_equals_the_papers_numbers() -> None:
    # Its β sweep: FedAvg 55.52 %, β = 4 gives 66.11 % with 4,113 images, β = 20 74.05 % with 23,514.
    assert efficiency(66.11 - 55.52, 4_113) == pytest.approx(2.575, abs=5e-4)
    assert efficiency(74.05 - 55.52, 23_514) == pytest.approx(0.788, abs=5e-4)
    assert efficiency(1.0, 0) is None


def test_gain_is_relative_to_the_same_run_without_images(tmp_path: Path) -> None:
    none = write_run(
        tmp_path / "none", [0.5], threshold=0.9, gamma_hat="all-state"
    )  # both keys change only what is measured
    other = write_run(tmp_path / "prox", [0.1], strategy="fedprox")
    fedeas = write_run(tmp_path / "fedeas", [0.7], images=400, policy="fedeas", beta=4.0)
    groups = grouped(none, other, fedeas)
    assert baseline_of(groups[-1], groups) is groups[0]
    assert gain_and_efficiency(groups[-1], groups) == pytest.approx((20.0, 50.0))
    assert gain_and_efficiency(groups[0], groups) is None
    alone = grouped(other, fedeas)
    assert gain_and_efficiency(alone[-1], alone) is None  # FedProx is not a baseline for FedAvg


def test_baseline_of_a_trained_generator_has_no_such_keys(tmp_path: Path) -> None:
    none = write_run(tmp_path / "none", [0.5])
    fedeas = write_run(tmp_path / "fedeas", [0.7], images=400, policy="fedeas", generator="federated")
    groups = grouped(none, fedeas)
    assert gain_and_efficiency(groups[-1], groups) == pytest.approx((20.0, 50.0))


def test_gain_uses_the_baseline_with_the_closest_config(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [0.2], gamma_hat="all-state", seed=2)
    near = write_run(tmp_path / "near", [0.5])
    fedeas = write_run(tmp_path / "fedeas", [0.7], images=400, policy="fedeas", beta=4.0)
    for runs in ((other, near, fedeas), (near, other, fedeas)):
        groups = grouped(*runs)
        gains = [gain_and_efficiency(group, groups) for group in groups]
        assert gains[:2] == [None, None], "a baseline has no gain over itself"
        assert gains[2] == pytest.approx((20.0, 50.0))
    same_seed = write_run(tmp_path / "seed", [0.6], gamma_hat="all-state")
    groups = grouped(write_run(tmp_path / "form", [0.2], seed=2), same_seed, fedeas)
    assert gain_and_efficiency(groups[2], groups) == pytest.approx((10.0, 25.0)), (
        "equal seeds matter more than the form of Γ̂"
    )


def test_missing_gain_names_the_key_that_differs(tmp_path: Path) -> None:
    near = write_run(tmp_path / "near", [0.4, 0.4])
    far = write_run(tmp_path / "far", [0.4], strategy="fedprox")
    keys: dict[str, Any] = {"images": 400, "beta": 4.0, "rounds": 3, "finished": False}
    runs = [write_run(tmp_path / policy, [0.6], policy=policy, **keys) for policy in ("fedeas", "uniform")]
    note = "No gain of FedEAS, Uniform: the nearest group that generates nothing has rounds = 2, not 3"
    printed = run_in_process("report", str(tmp_path), "--out", str(tmp_path / "out")).stdout
    assert note in printed.splitlines()
    assert f"{note}." in (tmp_path / "out" / "report.md").read_text().splitlines()
    data = as_data(grouped(near, far, *runs))
    assert [group["no_gain"] for group in data] == [None, None, *[note.partition(": ")[2]] * 2]
    alone = no_gain_notes(grouped(*runs))
    assert alone == ["No gain of FedEAS, Uniform: there is no group that generates nothing (policy = none)"]
    assert no_gain_notes(grouped(near, far)) == []
    same = write_run(tmp_path / "same", [0.7, 0.7], images=400, beta=4.0, policy="fedeas")
    assert no_gain_notes(grouped(near, far, same)) == []


def test_runs_with_different_last_rounds_have_no_gain(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "images": FEDEAS_OF_FOUR, "beta": 4.0, "finished": False}
    none = write_run(tmp_path / "none", [0.2, 0.4, 0.6])
    groups = grouped(none, write_run(tmp_path / "cut", [0.5], policy="fedeas", **keys))
    assert gain_and_efficiency(groups[1], groups) is None
    reason = "it has reached round 1, but the group that generates nothing round 3"
    assert no_gain_notes(groups) == [f"No gain of FedEAS: {reason}"]


def test_missing_gain_names_the_rounds_of_all_seeds(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 3, "images": FEDEAS_OF_FOUR, "beta": 4.0, "finished": False, "policy": "fedeas"}
    runs = [write_run(tmp_path / str(n), [0.5] * n, seed=n, **keys) for n in (1, 2)]
    groups = grouped(write_run(tmp_path / "none", [0.2, 0.4], rounds=3, finished=False), *runs)
    reason = "it has reached rounds 1 and 2, but the group that generates nothing round 2"
    assert no_gain_notes(groups) == [f"No gain of FedEAS: {reason}"]


def test_gain_over_other_seeds_is_marked(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"images": FEDEAS_OF_FOUR, "beta": 4.0, "policy": "fedeas"}
    none = [write_run(tmp_path / f"none{seed}", [0.1 * seed], seed=seed) for seed in (1, 2)]
    some = [write_run(tmp_path / f"some{seed}", [0.1 * seed], seed=seed, **keys) for seed in (1, 2)]
    assert notes_on(grouped(*none, *some)) == []
    groups = grouped(none[1], *some)
    gain = gain_and_efficiency(groups[1], groups)
    assert gain is not None and gain[0] == pytest.approx(-5.0)  # although generation made no difference
    assert notes_on(groups) == [
        "Gain of FedEAS: its seeds are 1, 2, but those of its baseline are 2",
        "† Gain of FedEAS: from one seed, so differences of a few points may be chance",  # the baseline has one
    ]


def test_seconds_of_cached_and_generated_images_are_noted(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"images": FEDEAS_OF_FOUR, "beta": 4.0, "policy": "fedeas"}
    runs = [
        write_run(tmp_path / f"some{seed}", [0.2, 0.3], seed=seed, extra=[{"made": made}, {"made": 0}], **keys)
        for seed, made in ((1, 0), (2, 0), (3, FEDEAS_OF_FOUR))
    ]
    noted = "Seconds of FedEAS: seeds 1, 2 read all images from the cache, the others generated some"
    assert noted in notes_on(grouped(*runs))
    for part in (runs[:2], runs[2:]):
        assert not any(note.startswith("Seconds") for note in notes_on(grouped(*part)))


def test_report_names_another_partition_instead_of_alpha(tmp_path: Path) -> None:
    drawn = write_run(tmp_path / "drawn", [0.2], alpha=0.3)
    named = write_run(tmp_path / "named", [0.2], partition="pathological", partition_args="num_classes_per_partition=2")
    drawn_text, named_text = (_opening(grouped(run))[0] for run in (drawn, named))
    assert "α = 0.3" in drawn_text and "partition" not in drawn_text
    assert "partition pathological, partition-args num_classes_per_partition=2" in named_text and "α" not in named_text


def cells(groups: list[Group], column: str) -> list[str]:
    """Return a column of the first table of results."""
    table = result_tables(groups)[0]
    return [row[list(table.head).index(column)] for row in table.rows]


def test_gains_from_one_seed_or_few_test_images_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"images": 400, "beta": 4.0, "policy": "fedeas"}
    none = [write_run(tmp_path / f"none{seed}", [0.5], seed=seed) for seed in (1, 2)]
    some = [write_run(tmp_path / f"some{seed}", [0.7], seed=seed, **keys) for seed in (1, 2)]
    one, two = grouped(none[0], some[0]), grouped(*none, *some)
    assert cells(one, "gain") == ["–", "+20.0†"] and cells(two, "gain") == ["–", "+20.0"]
    assert [note.startswith("†") and "one seed" in note for note in notes_on(one)] == [True]
    assert notes_on(two) == []
    assert [group["weak_gain"] for group in as_data(one)] == [None, weak_gain(one[1], one)]
    monkeypatch.setattr(
        "fedeas_flwr.report.groups.readable_info", lambda name: replace(dataset_info(name), num_test=36)
    )
    assert cells(two, "gain") == ["–", "+20.0†"]
    assert "36 test images" in str(weak_gain(two[1], two)) and "seed" not in str(weak_gain(two[1], two))
    assert "36 test images" in str(weak_gain(one[1], one)) and "one seed" in str(weak_gain(one[1], one))


@pytest.mark.parametrize(
    ("scores", "images", "shown"),
    [
        ([0.7], 893, "22"),  # 22.396
        ([0.6], 18, "560"),  # 555.556
        ([0.7], 13_437, "1.5"),  # 1.488
        ([0.4], 893, "-11"),
        ([0.70, 0.72], 1_000, "21"),  # 21 ± 1, the standard error
        ([0.700, 0.702], 1_000, "20.1"),  # 20.1 ± 0.1
        ([0.7, 0.7], 13_437, "1.5"),  # two equal seeds show no error
    ],
)
def test_efficiency_has_the_digits_that_its_seeds_allow(
    scores: list[float], images: int, shown: str, tmp_path: Path
) -> None:
    runs = [write_run(tmp_path / f"none{seed}", [0.5], seed=seed) for seed in range(len(scores))]
    for seed, score in enumerate(scores):
        runs.append(write_run(tmp_path / f"s{seed}", [score], images=images, beta=4.0, policy="fedeas", seed=seed))
    assert cells(grouped(*runs), "η") == ["–", shown]
