"""Matching run directories to cells: by config, only if complete; all others are reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from records import found_in, record

from fedeas_flwr.reproduce import tables
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, DEFAULT_COLUMN, all_cells
from fedeas_flwr.reproduce.items import choose
from fedeas_flwr.reproduce.missing_runs import archive_finished_runs, make_missing_sweep, record_folder
from fedeas_flwr.reproduce.results import find_results
from fedeas_flwr.reproduce.sections import make_sections
from fedeas_flwr.runs.directory import RunDirectory


def test_runs_are_matched_by_config_and_not_by_folder_name(tmp_path: Path) -> None:
    elsewhere = {"precision": "bf16", "backend": "inline", "generator": "/models/x", "weights": "/w.safetensors"}
    same = {**elsewhere, "data-dir": "/data", "generation-batch": 512, "checkpoint-every": 50, "sampler-steps": 20}
    record(tmp_path / "deep" / "er" / "some name", f"{DEFAULT_COLUMN}/uniform", 7, keys=same)
    record(
        tmp_path / "none", f"{DEFAULT_COLUMN}/fedavg", 1, keys={"beta": 6.0, "guidance": 3.0}
    )  # nothing is generated
    others: list[dict[str, Any]] = [
        {"sampler": "ddim"},
        {"guidance": 2.0},
        {"partition-seed": 43},
        {"weights": "none"},
        {"local-epochs": 5},
        {"beta": 11.0},
        {"protocol": "clean", "loss": "class-weighted"},
        {"generator": "bank:/images"},
    ]
    for number, keys in enumerate(others):
        record(tmp_path / f"other-{number}", f"{DEFAULT_COLUMN}/missing-only", 1, keys=keys)
    record(tmp_path / "short", f"{DEFAULT_COLUMN}/scaffold", 1, [0.5] * 100, keys={"rounds": 100})
    results = found_in(tmp_path)
    assert {name: [run.seed for run in runs] for name, runs in results.cells.items() if runs} == {
        f"{DEFAULT_COLUMN}/uniform": [7],
        f"{DEFAULT_COLUMN}/fedavg": [1],
    }
    assert [run.seed for run in found_in(tmp_path, sampler="ddim").of(f"{DEFAULT_COLUMN}/missing-only")] == [1]


def test_unfinished_duplicate_and_damaged_runs_do_not_count(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{DEFAULT_COLUMN}/fedavg", 1, [0.5] * 200)
    record(tmp_path / "b", f"{DEFAULT_COLUMN}/fedavg", 1, [0.9] * 200)
    record(tmp_path / "c", f"{DEFAULT_COLUMN}/fedavg", 2, [0.9] * 199)
    unfinished = record(tmp_path / "d", f"{DEFAULT_COLUMN}/fedavg", 3)
    (unfinished / "summary.json").unlink()
    damaged = record(tmp_path / "e", f"{DEFAULT_COLUMN}/fedavg", 4)
    (damaged / "rounds.jsonl").write_text('{"round": 1}\n' * 200)
    unknown = record(tmp_path / ("f" * 150), f"{DEFAULT_COLUMN}/fedavg", 5)
    text = (unknown / "config.json").read_text().replace('"alpha"', '"alfa"')
    (unknown / "config.json").write_text(text)
    results = found_in(tmp_path)
    assert [(run.seed, run.path.name) for run in results.of(f"{DEFAULT_COLUMN}/fedavg")] == [(1, "a")]
    assert [path.name for path in results.repeated] == ["b"]
    shutil.copytree(tmp_path / "a", tmp_path / "copy-of-a")
    assert [path.name for path in found_in(tmp_path).repeated] == ["b"], "a run and its exported record count once"
    assert [line.partition(": ")[0] for line in results.unreadable] == [str(damaged), str(unknown)]
    assert results.unreadable[1].endswith("did you mean 'alpha'?"), "the hint at the end was cut off"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"clients": [100]}, "client 100: must be from 0 to 99"),
        ({"clients": [-1]}, "client -1: must be from 0 to 99"),
        ({"clients": ["3"]}, "client '3': must be from 0 to 99"),
        ({"clients": [[3]]}, "client [3]: must be from 0 to 99"),
        ({"clients": None}, "TypeError("),
        ({"seconds": {"clients": 10**400}}, "OverflowError("),
    ],
)
def test_invalid_round_record_is_listed_with_file_and_reason(tmp_path: Path, spoil: dict[str, Any], says: str) -> None:
    damaged = record(tmp_path / "a", f"{DEFAULT_COLUMN}/fedavg", 1) / "rounds.jsonl"
    first, *others = damaged.read_text().splitlines(keepends=True)
    damaged.write_text("".join([json.dumps(json.loads(first) | spoil) + "\n", *others]))
    results = found_in(tmp_path)
    (line,) = results.unreadable
    assert results.of(f"{DEFAULT_COLUMN}/fedavg") == [] and says in line
    assert line.startswith(f"{damaged.parent}: {damaged} holds an invalid round record: ")


def test_record_with_lost_rounds_is_listed_as_unreadable(tmp_path: Path) -> None:
    lost = record(tmp_path / "a", f"{DEFAULT_COLUMN}/fedavg", 1) / "rounds.jsonl"
    lines = lost.read_text().splitlines(keepends=True)
    lost.write_text("".join([*lines[:99], lines[99][:-20], *lines[100:]]))
    assert found_in(tmp_path).unreadable == [
        f"{lost.parent}: {lost} holds 99 valid records, but summary.json counts 200 rounds: fix line 100"
    ]
    (lost.parent / "summary.json").write_text('{"rounds": Infinity}')
    (line,) = found_in(tmp_path).unreadable
    assert "summary.json is not a run's summary: cannot convert float infinity" in line


def test_run_found_by_two_paths_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "out" / "runs" / "a", f"{DEFAULT_COLUMN}/fedavg", 1)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    places = [Path("out"), Path("link"), tmp_path / "out" / "runs"]
    results = find_results(all_cells(), "full", places, {})
    assert [run.seed for run in results.of(f"{DEFAULT_COLUMN}/fedavg")] == [1] and results.repeated == []
    archive_finished_runs(results, tmp_path / "link" / "runs", tmp_path / "records")
    assert RunDirectory(tmp_path / "records" / "cifar10-k100-a0.1" / "fedavg-s1").has_rounds()


def test_missing_runs_become_an_ordered_sweep(tmp_path: Path) -> None:
    record(tmp_path / "a", f"{DEFAULT_COLUMN}/fedavg", 2)
    choice = choose(["table1"], [DEFAULT_COLUMN], "full", more={"precision": "bf16", "generator": "/m"})
    missing = choice.missing(found_in(tmp_path))
    assert missing[f"{DEFAULT_COLUMN}/fedavg"] == [1, 3]
    assert missing[f"{DEFAULT_COLUMN}/fedeas"] == [1, 2, 3]
    filling = make_missing_sweep(choice, missing, tmp_path / "runs")
    assert [one.name for one in filling.cells][:3] == [
        f"{DEFAULT_COLUMN}_fedavg_s1",
        f"{DEFAULT_COLUMN}_fedavg_s3",
        f"{DEFAULT_COLUMN}_fedeas_s1",
    ]
    assert all(one.config.precision == "bf16" and one.config.generator == "/m" for one in filling.cells)
    assert len(filling.cells) == 2 + 3 * 3 + 6
    records = [record_folder(tmp_path, one.values["cell"], one.config) for one in filling.cells]
    assert records[0] == tmp_path / "cifar10-k100-a0.1" / "fedavg-s1" and len(set(records)) == len(records)
    assert f"{DEFAULT_COLUMN}/fedavg" not in choose(["table1"], [DEFAULT_COLUMN], "full", [2]).missing(
        found_in(tmp_path)
    )


def test_gamma_item_needs_runs_with_its_form_of_gamma_hat(tmp_path: Path) -> None:
    records = tmp_path / "records"
    other = {"gamma-hat": "trainable"}
    place = records / "cifar10-k20-a0.1"
    record(place / "fedeas-s1", f"{BETA_SWEEP_COLUMN}/fedeas", 1, [0.7] * 200, gamma_hat=0.8, keys=other)
    for method in ("fedavg", "uniform", "full-balance"):
        record(place / f"{method}-s1", f"{BETA_SWEEP_COLUMN}/{method}", 1, gamma_hat=2e-4)
    both = choose(["ablation", "beta", "gamma"], [], "full")
    before = found_in(records)
    beta, gamma = make_sections(both, before, tmp_path, lambda words, cells: (" ".join(words), ""))[1:]
    assert gamma.missing == [f"{BETA_SWEEP_COLUMN}/fedeas seed 1"] and "To do them: `gamma`" in gamma.text
    assert f"{BETA_SWEEP_COLUMN}/fedeas seed 1" not in beta.missing, "this item accepts any form"
    assert both.missing(before)[f"{BETA_SWEEP_COLUMN}/fedeas"] == [1]
    assert choose(["gamma"], [], "full", more=other).missing(before)[f"{BETA_SWEEP_COLUMN}/fedavg"] == [1]

    run = record(tmp_path / "runs" / "new", f"{BETA_SWEEP_COLUMN}/fedeas", 1, [0.6] * 200, gamma_hat=1e-4)
    results = find_results(all_cells(), "full", [records, tmp_path / "runs"], {})
    assert choose(["gamma"], [], "full").missing(results) == {} and results.repeated == []
    rows = tables.gamma_table(results).rows
    assert rows[0][3].startswith("70.00<br>"), "other items use the first run"
    assert rows[2][3].startswith("0.0001<br>") and rows[4][3] == "0.8"
    archive_finished_runs(results, run.parent, records)
    assert sorted(path.name for path in place.glob("fedeas-*")) == ["fedeas-s1", "fedeas-s1-all-state"]
    later = tables.gamma_table(found_in(records)).rows
    assert later == rows
    archive_finished_runs(results, run.parent, records)
    assert len(list(place.iterdir())) == 5
