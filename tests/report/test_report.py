"""Reports: grouping of runs, and numbers by hand."""

from __future__ import annotations

import importlib
import io
import json
import linecache
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import FEDEAS_OF_FOUR, grouped, write_run
from matplotlib.figure import Figure
from ordinary_user import ordinary_user
from rich.console import Console
from runners import run_in_process

from fedeas_flwr.commands.app import app
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.config import parse_config
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.interface import SampleId, describe_generator
from fedeas_flwr.generators.opening import hash_own_inputs
from fedeas_flwr.partition import LEAKAGE_ELSEWHERE
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.report import samples
from fedeas_flwr.report.allocations import draw, maps_of
from fedeas_flwr.report.document import make_document, result_tables
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.json_export import as_data
from fedeas_flwr.report.notes import notes_on
from fedeas_flwr.report.page import as_html, as_markdown
from fedeas_flwr.report.run_figures import draw_accuracy, draw_classes
from fedeas_flwr.report.writing import print_comparison
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import export, portable_config

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "results" / "quickstart"


@pytest.mark.parametrize(("width", "terminal"), [(80, True), (100, True), (120, True), (80, False)])
def test_comparison_table_cuts_no_word_or_number(width: int, terminal: bool) -> None:
    groups = grouped(*(RunDirectory(QUICKSTART / name) for name in ("none", "fedeas", "uniform", "missing-only")))
    text = io.StringIO()
    print_comparison(groups, Console(file=text, width=width, force_terminal=terminal, color_system=None))
    found = text.getvalue()
    assert "…" not in found and "Missing-only" in found and "+18.2†" in found and "seconds" in found
    assert ("η" in found) == (width > 100 or not terminal), "η must be omitted only where it does not fit"


def test_short_runs_show_the_mean_of_all_rounds_and_the_final(tmp_path: Path) -> None:
    (short,) = result_tables(grouped(write_run(tmp_path / "short", [0.2, 0.5, 0.8])))
    assert list(short.head[2:4]) == ["mean of all rounds %", "final %"] and short.rows[0][2:4] == ["50.0", "80.0"]
    (twenty,) = result_tables(grouped(write_run(tmp_path / "20", [0.2, *[0.5] * 19])))
    assert twenty.head[2] == "mean of all rounds %"
    (longer,) = result_tables(grouped(write_run(tmp_path / "21", [0.2, *[0.5] * 20])))
    assert list(longer.head[2:4]) == ["last-20 %", "final %"] and longer.rows[0][2] == "50.0"


def test_runs_of_different_length_are_in_different_tables(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"images": FEDEAS_OF_FOUR, "beta": 4.0, "policy": "fedeas"}
    runs = [write_run(tmp_path / f"n{length}", [0.5] * length) for length in (3, 21)]
    runs += [write_run(tmp_path / f"f{length}", [0.7] * length, **keys) for length in (3, 21)]
    runs.append(write_run(tmp_path / "cut", [0.6], rounds=3, finished=False, **{**keys, "policy": "uniform"}))
    tables = result_tables(grouped(*runs))
    assert [table.head[0] for table in tables] == ["1 round", "3 rounds", "21 rounds"]
    assert [[len(table.rows), table.head[2]] for table in tables] == [
        [1, "mean of all rounds %"],
        [2, "mean of all rounds %"],
        [2, "last-20 %"],
    ]
    text = io.StringIO()
    print_comparison(grouped(*runs), Console(file=text, width=160))
    assert text.getvalue().count("final %") == 3


# ----------------------------------------------------------------------------------------------------------- groups


def test_runs_that_differ_only_in_seed_are_one_group(tmp_path: Path) -> None:
    scores = {1: [0.1, 0.5], 3: [0.3, 0.5], 2: [0.2, 0.2]}
    runs = [write_run(tmp_path / f"{s}", a, seed=s, backend="inline" if s == 1 else "ray") for s, a in scores.items()]
    (group,) = grouped(*runs)
    assert group.seeds == [1, 2, 3]
    score = group.spread("last_20")
    assert score is not None and score.values == pytest.approx((0.3, 0.2, 0.4))
    assert (score.mean, score.sd) == pytest.approx((0.3, 0.1))
    assert score.show(100) == "30.0 ± 10.0"
    assert group.wall_clock == pytest.approx(2.0 + 2 * 2.75)  # not the clients' work, which overlaps
    assert result_tables([group])[0].rows[0][-1] == "8 inline, ray"


def test_background_work_is_not_wall_clock_time(tmp_path: Path) -> None:
    seconds = {"seconds": {"clients": 2.0, "aggregate": 0.5, "gamma_hat": 0.75, "evaluate": 0.25, "end_wait": 0.125}}
    (group,) = grouped(write_run(tmp_path / "r", [0.5, 0.5], extra=[seconds, seconds]))
    assert group.wall_clock == pytest.approx(2 * 2.625)
    assert [group.seconds(phase) for phase in ("gamma_hat", "evaluate", "end_wait")] == [1.5, 0.5, 0.25]


def test_seconds_without_startup_are_named(tmp_path: Path) -> None:
    """Older versions did not record start-up."""
    older, now = {"seconds": {"clients": 2.0}}, {"seconds": {"clients": 2.0, "startup": 40.0}}
    runs = [write_run(tmp_path / "r", [0.5], extra=[older]), write_run(tmp_path / "s", [0.5], extra=[now], alpha=0.5)]
    groups = grouped(*runs)
    assert [row[-1] for row in result_tables(groups)[0].rows] == ["2 ray", "42 ray"]
    assert [note for note in notes_on(groups) if "start-up" in note] == [
        "Seconds of alpha = 0.1: without start-up, which older versions did not record"
    ]
    assert [group["seconds"]["startup"] for group in as_data(groups)] == [None, 40.0]
    (table,) = next(part for part in make_document(groups).sections if part.title == "Time by phase").tables
    assert table.head[1] == "start-up" and [row[1] for row in table.rows] == ["–", "40.0"]


def test_configuration_shows_keys_that_only_some_groups_use(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "none", [0.5])]
    for gamma in (0.5, 0.7):
        keys: dict[str, Any] = {"policy": "fedeas", "beta": 4.0, "gamma": gamma}
        runs.append(write_run(tmp_path / f"{gamma}", [0.6], images=FEDEAS_OF_FOUR, **keys))
    section = next(part for part in make_document(grouped(*runs)).sections if part.title == "Configuration")
    shared = dict(section.tables[-1].rows)
    assert {"beta": "4.0", "generator": "builtin", "guidance": "1.0", "alpha": "0.1"}.items() <= shared.items()
    assert not {"policy", "gamma"} & shared.keys() and [row[0] for row in section.tables[0].rows] == ["policy", "gamma"]


def test_images_that_differ_by_seed_show_their_spread(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"n{seed}", [0.5], seed=seed) for seed in (1, 2)]
    for seed, images in ((1, 1151), (2, 1179)):
        runs.append(write_run(tmp_path / f"f{seed}", [0.6], images=images, seed=seed, policy="fedeas", beta=4.0))
    groups = grouped(*runs)
    place = result_tables(groups)[0].head.index("images")
    assert [row[place] for row in result_tables(groups)[0].rows] == ["0", "1,165 ± 20"]
    axes = Figure().subplots()
    draw_accuracy(axes, groups)
    assert [label for label in axes.get_legend_handles_labels()[1] if "(1,165 ± 20 images)" in label]
    assert [group["images"] for group in as_data(groups)] == [0, 1165]


def test_any_other_key_makes_a_group_named_by_it(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{rate}", [0.5], learning_rate=rate) for rate in (0.05, 0.1)]
    assert [group.name for group in grouped(*runs)] == ["learning-rate = 0.05", "learning-rate = 0.1"]
    runs.append(write_run(tmp_path / "f", [0.6], images=FEDEAS_OF_FOUR, policy="fedeas", beta=4.0))
    names = [group.name for group in grouped(*runs)]
    assert names == [
        "FedAvg, nothing generated, learning-rate = 0.05",
        "FedAvg, nothing generated, learning-rate = 0.1",
        "FedEAS",
    ]
    assert len({group.style.colour for group in grouped(*runs)}) == 3


def test_another_strategy_is_not_called_fedavg(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [0.5], strategy=name) for name in ("fedavg", "scaffold")]
    runs.append(write_run(tmp_path / "f", [0.6], images=FEDEAS_OF_FOUR, policy="fedeas", beta=4.0))
    assert [group.name for group in grouped(*runs)] == [
        "FedAvg, nothing generated, strategy = fedavg",
        "Nothing generated, strategy = scaffold",
        "FedEAS",
    ]


def test_group_names_state_strategies_other_than_fedavg(tmp_path: Path) -> None:
    ways = {"oversample": "krum", "full-balance": "fedadam", "fedeas": "fedavg"}
    runs = [
        write_run(tmp_path / policy, [0.5], images=place, policy=policy, strategy=strategy)
        for place, (policy, strategy) in enumerate(ways.items())
    ]
    names = ["Oversampling, nothing generated, strategy = krum", "Full-Balance, strategy = fedadam", "FedEAS"]
    assert [group.name for group in grouped(*runs)] == names
    assert [group.name for group in grouped(runs[0])] == ["Oversampling, nothing generated"]


def test_own_strategy_is_named_by_the_last_part_of_its_path(tmp_path: Path) -> None:
    ways = {"fedavg": "", "mine.first:Slow": "rate=0.5", "mine.second:build": "", "mine.third:build": ""}
    runs = [
        write_run(tmp_path / str(place), [0.5], strategy=strategy, strategy_args=arguments)
        for place, (strategy, arguments) in enumerate(ways.items())
    ]
    names = [group.name for group in grouped(*runs[:3])]
    assert sorted(names) == ["strategy = Slow, strategy-args = rate=0.5", "strategy = build", "strategy = fedavg"]
    names = [group.name for group in grouped(*runs[2:])]
    assert sorted(names) == ["strategy = mine.second:build", "strategy = mine.third:build"]


@pytest.mark.parametrize(
    ("keys", "unread"),
    [
        ({"policy": "none"}, {"beta": 1.0, "guidance": 2.0}),
        ({"policy": "full-balance"}, {"beta": 12.0, "gamma": 1.0}),
        ({"policy": "linear"}, {"gamma": 1.0}),
        ({"policy": "uniform", "total": 40}, {"beta": 12.0, "printed_rule": True}),
        ({"policy": "fedeas"}, {"moon_mu": 1.0, "logit_adjustment_tau": 2.0, "dp_delta": 0.1, "sampler_steps": 20}),
    ],
)
def test_keys_that_a_run_ignores_do_not_split_groups(
    tmp_path: Path, keys: dict[str, Any], unread: dict[str, Any]
) -> None:
    runs = [write_run(tmp_path / "one", [0.5], seed=1, **keys)]
    runs.append(write_run(tmp_path / "other", [0.5], seed=2, **keys, **unread))
    assert len(grouped(*runs)) == 1


def test_strategy_keys_name_only_groups_of_that_strategy(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"moon-{mu}", [0.5], strategy="moon", moon_mu=mu) for mu in (1.0, 5.0)]
    groups = grouped(write_run(tmp_path / "fedavg", [0.5]), *runs)
    assert [group.name for group in groups] == [
        "strategy = fedavg", "strategy = moon, moon-mu = 1", "strategy = moon, moon-mu = 5"
    ]  # fmt: skip
    assert "moon-mu" in as_html(make_document(groups, []))


def test_bank_and_model_of_one_name_are_different_groups(tmp_path: Path) -> None:
    specs = {"bank": "bank:/images/flowers", "model": "/models/flowers"}
    runs = [write_run(tmp_path / name, [0.5], policy="fedeas", generator=spec) for name, spec in specs.items()]
    assert {group.name for group in grouped(*runs)} == {"generator = bank:flowers", "generator = flowers"}


def test_duplicate_run_counts_once_and_is_named(tmp_path: Path) -> None:
    """As after Ctrl-C and a restart: the run with most rounds counts; among equals, the one written last."""
    cut, whole, same = (
        write_run(tmp_path / name, curve, seed=1, rounds=3, finished=len(curve) == 3)
        for name, curve in (("cut", [0.2, 0.4]), ("whole", [0.2, 0.4, 0.6]), ("same", [0.2, 0.4, 0.6]))
    )
    os.utime(whole.path / "rounds.jsonl", (1e9, 1e9))
    other = write_run(tmp_path / "other", [0.1, 0.4], seed=2, rounds=3, finished=False)
    twin = write_run(tmp_path / "twin", [0.1, 0.3, 0.5], seed=2, rounds=3)
    groups, left_out = group_runs([cut, whole, other, same, twin])
    assert [member.run.path for group in groups for member in group.members] == [same.path, twin.path]
    assert left_out == [
        f"{cut.path} repeats {same.path} (same config and seed)",
        f"{whole.path} repeats {same.path} (same config and seed)",
        f"{other.path} repeats {twin.path} (same config and seed), with other accuracies",
    ]


def test_run_and_its_exported_record_count_once(tmp_path: Path) -> None:
    started = {"generator": "federated", "generator_training.start": "/models/public"}
    for number, keys in enumerate([{"generator": "builtin"}, started]):
        run = write_run(tmp_path / f"{number}", [0.5], policy="fedeas", **keys)
        export(run, tmp_path / f"record-{number}")
        groups, left_out = group_runs([run, RunDirectory(tmp_path / f"record-{number}")])
        assert [len(group.members) for group in groups] == [1] and len(left_out) == 1 and " repeats " in left_out[0]


def test_hf_datasets_with_other_options_are_other_groups(tmp_path: Path) -> None:
    datasets = ("hf:/a/trees size=8", "hf:/b/trees size=8", "hf:/b/trees size=16", "hf:user/trees")
    runs = [write_run(tmp_path / str(seed), [0.5], dataset=name, seed=seed) for seed, name in enumerate(datasets)]
    assert [len(group.members) for group in group_runs(runs)[0]] == [2, 1, 1]
    assert portable_config(runs[0].config())["dataset"] == "hf:trees size=8"
    assert portable_config(runs[3].config())["dataset"] == "hf:user/trees"


def test_interrupted_run_is_shown_up_to_its_last_round(tmp_path: Path) -> None:
    long = write_run(tmp_path / "long", [0.2, 0.4, 0.6], seed=1, rounds=4, finished=False)
    short = write_run(tmp_path / "short", [0.3, 0.5], seed=2, rounds=4, finished=False)
    empty = write_run(tmp_path / "empty", [], seed=3, rounds=4, finished=False)
    groups, left_out = group_runs([long, short, empty])
    assert np.allclose(groups[0].curve("accuracy"), [[0.2, 0.4, 0.6], [0.3, 0.5, np.nan]], equal_nan=True)
    assert left_out == [f"{empty.path} has no finished round (interrupted)"]
    page = as_html(make_document(groups, left_out))
    assert "Not finished: short, 2 of 4 rounds, interrupted." in page and "has no finished round" in page
    with pytest.raises(RunError, match=r"nothing to report: .*empty has no finished round"):
        group_runs([empty])


def test_unfinished_seed_is_excluded_and_named_in_all_outputs(tmp_path: Path) -> None:
    write_run(tmp_path / "a1", [0.2, 0.4], seed=1)
    write_run(tmp_path / "a2", [0.4, 0.6], seed=2)
    write_run(tmp_path / "a3", [0.1], seed=3, rounds=2, finished=False)
    write_run(tmp_path / "b1", [0.7, 0.9], seed=1, images=50, policy="fedeas")
    write_run(tmp_path / "empty", [], seed=4, rounds=2, finished=False)
    printed = run_in_process("report", str(tmp_path), "--out", str(tmp_path / "out")).stdout
    note = "Not finished, so not counted: a3, 1 of 2 rounds, interrupted"
    assert note in printed.splitlines() and f"Left out: {tmp_path}/empty has no finished round" in printed
    assert "40.0 ± 14.1" in printed and "+40.0" in printed
    assert note in (tmp_path / "out" / "report.md").read_text()
    data = json.loads(run_in_process("report", str(tmp_path), "--format", "json").stdout)
    none = data["groups"][0]
    assert none["seeds"] == [1, 2] and none["last_20"]["mean"] == pytest.approx(0.4)
    about = {"run": f"{tmp_path}/a3", "seed": 3, "rounds": 1, "of": 2, "state": "interrupted", "counted": False}
    assert none["unfinished"] == [about] and "empty" in data["left_out"][0]


def test_lost_replies_are_reported_with_the_results(tmp_path: Path) -> None:
    failure = {"client": 3, "reason": "its node is offline"}
    extra = [{"clients": [0], "failures": [failure] * 2}, {}, {"clients": [0, 1], "failures": [failure]}]
    write_run(tmp_path / "a1", [0.2, 0.4, 0.6], seed=1)
    write_run(tmp_path / "a2", [0.4, 0.6, 0.8], seed=2, extra=extra)
    printed = run_in_process("report", str(tmp_path), "--out", str(tmp_path / "out")).stdout
    gaps = "3 replies missing in 2 of 3 rounds (client 3 in rounds 1, 3)"
    note = f"Finished, with gaps: a2, {gaps}"
    assert [line for line in printed.splitlines() if "gaps" in line] == [note]
    assert f"{note}." in (tmp_path / "out" / "report.md").read_text()
    data = json.loads(run_in_process("report", str(tmp_path), "--format", "json").stdout)
    assert data["groups"][0]["missing_replies"] == [0, 3]
    assert data["groups"][0]["gaps"] == ["", gaps]
    rows = json.loads(run_in_process("runs", "ls", str(tmp_path), "--format", "json").stdout)
    assert [(row["missing_replies"], row["gaps"]) for row in rows] == [(0, ""), (3, gaps)]
    assert [row["state"] for row in rows] == ["finished"] * 2
    head, *lines = run_in_process("runs", "ls", ".", cwd=tmp_path).stdout.splitlines()  # a long path would be folded
    assert head.split()[-3] == "missing" and [line.split()[-5] for line in lines[:2]] == ["0", "3"]
    assert [", with gaps" in line for line in lines[:2]] == [False, True]
    assert lines[-1] == "missing: client replies that the run continued without"
    shown = run_in_process("runs", "show", str(tmp_path / "a2")).stdout
    assert shown.startswith(f"{tmp_path / 'a2'}: finished, with gaps: {gaps}\n")
    both = ["runs", "show", str(tmp_path / "a1"), str(tmp_path / "a2")]
    lines = run_in_process(*both).stdout.splitlines()
    assert [line for line in lines if line.startswith(str(tmp_path))] == [
        f"{tmp_path / 'a1'}: finished",
        shown.splitlines()[0],
    ]
    assert [run["gaps"] for run in json.loads(run_in_process(*both, "--format", "json").stdout)] == ["", gaps]
    assert "missing" not in run_in_process("runs", "ls", str(tmp_path / "a1")).stdout, (
        "reported although no reply is missing"
    )


def test_run_with_damaged_config_is_named_in_all_outputs(tmp_path: Path) -> None:
    write_run(tmp_path / "whole", [0.5], seed=1)
    damaged = write_run(tmp_path / "damaged", [0.5], seed=2)
    (damaged.path / "config.json").write_text('{"config": {"see')
    listed = json.loads(run_in_process("runs", "ls", str(tmp_path), "--format", "json").stdout)
    assert {Path(row["path"]).name: row["state"] for row in listed} == {"damaged": "damaged", "whole": "finished"}
    assert f"Left out: {damaged.path}/config.json is not JSON" in run_in_process("report", str(tmp_path)).stdout
    alone = run_in_process("report", str(damaged.path))
    assert alone.returncode == 2 and f"nothing to report: {damaged.path}/config.json is not JSON" in alone.stderr
    refused = run_in_process("runs", "rm", str(damaged.path), "--yes")
    assert (
        refused.returncode == 2 and "damaged is damaged" in refused.stderr and (damaged.path / "rounds.jsonl").exists()
    )


DAMAGES = {
    "lost": "holds 1 valid record, but summary.json counts 2 rounds: fix line 2",
    "folder": "cannot be read: Is a directory",
    "locked": "cannot be read: Permission denied",
    "strange": "holds 0 valid records, but summary.json counts 2 rounds: fix line 1 "
    "(accuracy = null, must be from 0 to 1)",
    "other": "holds an invalid round record: KeyError('seconds')",
    "vast": "holds 1 valid record, but summary.json counts 2 rounds: fix line 2 "
    f"(accuracy = 1{'0' * 39}…, must be from 0 to 1)",
}


def test_damaged_runs_are_named_and_the_others_shown(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, [0.2, 0.4], seed=i) for i, name in enumerate(("whole", *DAMAGES, "shut"))}
    records = {name: run.path / "rounds.jsonl" for name, run in runs.items()}
    records["lost"].write_text(records["lost"].read_text().splitlines(keepends=True)[0] + '{"round": 2, "acc')
    records["folder"].unlink()
    records["folder"].mkdir()
    records["strange"].write_text('{"round": 1}\n' * 2)
    records["other"].write_text("".join(f'{{"round": {number}, "accuracy": 0.5}}\n' for number in (1, 2)))
    records["vast"].write_text(records["vast"].read_text().replace("0.4", str(10**400)))
    records["locked"].chmod(0)
    runs["shut"].path.chmod(0)
    with ordinary_user():
        table, rows, report, data = (
            run_in_process(*words, str(tmp_path), "--format", kind)
            for words in (("runs", "ls"), ("report",))
            for kind in ("table", "json")
        )
        shown = run_in_process("runs", "show", str(runs["lost"].path))
        rounds = {name: run_in_process("runs", "csv", str(runs[name].path)) for name in DAMAGES}
        alone = run_in_process("report", str(runs["shut"].path))
        pruned = run_in_process("runs", "prune", str(tmp_path))
    runs["shut"].path.chmod(0o700)  # so that pytest can remove it
    why = {f"{records[name]} {reason}" for name, reason in DAMAGES.items()} | {f"{tmp_path}/shut: Permission denied"}
    assert {done.returncode for done in (table, rows, report, data)} == {0}
    assert {line.removeprefix("Left out: ") for line in report.stdout.splitlines() if "Left out" in line} == why
    found = json.loads(data.stdout)
    assert set(found["left_out"]) == why and [group["seeds"] for group in found["groups"]] == [[0]]
    assert set(table.stderr.splitlines()) == why and table.stdout.splitlines()[-1].startswith("7 runs, ")
    assert rows.stderr == f"{tmp_path}/shut: Permission denied\n"
    listed = {Path(row["path"]).name: row for row in json.loads(rows.stdout)}
    states = {"whole": "finished", "lost": "damaged", "strange": "damaged", "other": "damaged", "vast": "damaged"}
    states |= {"folder": "unreadable", "locked": "unreadable"}
    assert {name: row["state"] for name, row in listed.items()} == states
    assert listed["lost"]["error"].endswith(DAMAGES["lost"]) and listed["lost"]["last_20"] is None
    assert shown.stdout.splitlines()[0].endswith(f"lost: damaged: {records['lost']} {DAMAGES['lost']}")
    assert {name: (done.returncode, done.stdout, done.stderr) for name, done in rounds.items()} == {
        name: (2, "", f"error: {records[name]} {reason}\n") for name, reason in DAMAGES.items()
    }
    assert alone.returncode == 2 and alone.stderr.endswith(f"; {tmp_path}/shut: Permission denied\n")
    assert (pruned.returncode, pruned.stdout) == (2, ""), "pruned although one run is unreadable"


# ---------------------------------------------------------------------------------------------------------- figures


def test_worst_class_and_clients_by_hand(tmp_path: Path) -> None:
    per_class = [[0.9, 0.2] + [1.0] * 8, [0.5, 0.4] + [1.0] * 8]
    extra = [
        {"per_class_accuracy": row, "worst_tenth_accuracy": w} for row, w in zip(per_class, (0.1, 0.3), strict=True)
    ]
    (group,) = grouped(write_run(tmp_path / "a", [0.8, 0.8], extra=extra))
    assert group.per_class is not None and group.per_class[:2] == pytest.approx([0.7, 0.3])
    assert group.worst_class == pytest.approx((1, 0.3))
    assert group.worst_tenth is not None and group.worst_tenth.mean == pytest.approx(0.2)
    text = as_markdown(make_document([group]))
    assert "| FedAvg, nothing generated | 1 | 30.0 | – | 90.0 |" in text and "## The worst tenth of clients" in text


def test_class_tables_are_separate_per_dataset(tmp_path: Path) -> None:
    """Classes of different datasets are not mixed, whether their number or only their names differ."""
    worst_of = {"cifar100": 4, "cifar10": 3, "digits": 7}
    sizes = {"cifar100": 100, "cifar10": 10, "digits": 10}
    runs = []
    for dataset, worst in worst_of.items():
        values = [1.0] * sizes[dataset]
        values[worst] = 0.5
        runs.append(write_run(tmp_path / dataset, [0.8], dataset=dataset, extra=[{"per_class_accuracy": values}]))
    document = make_document(grouped(*runs))
    found = [section for section in document.sections if section.title.startswith("Classes before and after filling")]
    names = ("cifar100, 100 classes", "cifar10, 10 classes", "digits, 10 classes")
    assert [section.title for section in found] == [f"Classes before and after filling: {name}" for name in names]
    assert [[row[:2] for row in section.tables[0].rows] for section in found] == [
        [["dataset = cifar100", "beaver"]], [["dataset = cifar10", "cat"]], [["dataset = digits", "7"]]
    ]  # fmt: skip
    assert [picture.name for section in found for picture in section.pictures] == [
        "classes-1", "classes-2", "classes-3"
    ]  # fmt: skip
    labels = [[mark.get_text() for mark in s.pictures[0].figure.axes[0].get_xticklabels()] for s in found]
    assert labels[0] == [] and labels[1][0] == "cat" and labels[2][0] == "7"
    (alone,) = (s for s in make_document(grouped(runs[1])).sections if s.title == "Classes before and after filling")
    assert [picture.name for picture in alone.pictures] == ["classes"]


def test_class_without_test_images_is_not_the_worst_class(tmp_path: Path) -> None:
    extra = [{"per_class_accuracy": [None, 0.4] + [1.0] * 8}]
    (group,) = grouped(write_run(tmp_path / "a", [0.8], extra=extra))
    assert group.worst_class == pytest.approx((1, 0.4))
    assert as_data([group])[0]["per_class_accuracy"][0] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_classes(Figure().subplots(), [group], list("0123456789"), None)


def test_heat_map_needs_a_plan_that_matches_the_run(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"policy": "fedeas", "beta": 4.0}
    ran = write_run(tmp_path / "a", [0.5], images=FEDEAS_OF_FOUR, **keys)
    (maps,), notes = maps_of(grouped(ran))
    assert not notes and maps.generated[0][1].sum() == FEDEAS_OF_FOUR
    early = write_run(tmp_path / "b", [0.5], images=FEDEAS_OF_FOUR, extra=[{"clients": [0, 1]}], **keys)
    assert (
        "would give 115 images, but the run has 115" in maps_of(grouped(early))[1][0]
    )  # two clients cannot have generated all images
    other = write_run(tmp_path / "c", [0.5], images=999, **keys)
    (maps,), notes = maps_of(grouped(other))
    assert not maps.generated and "the run has 999" in notes[0]


def test_heat_map_needs_the_policy_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_source(tmp_path / "mapped_rule.py", "def rule(counts): return (5 - counts).clip(0)")
    config = parse_config({"policy": "mapped_rule:rule", "clients": 4})
    images = int(planned_allocation(config, planned_counts(config)).sum())
    ran = write_run(tmp_path / "a", [0.5], images=images, policy="mapped_rule:rule")
    ran.record_inputs("digits", ran.classes(), hash_own_inputs(config))
    (maps,), notes = maps_of(grouped(ran))
    assert not notes and maps.generated[0][1].sum() == images
    write_source(tmp_path / "mapped_rule.py", "def rule(counts): return (5 - counts).clip(0)[::-1]")
    found, notes = maps_of(grouped(ran))
    assert not found and "'mapped_rule:rule': its source changed" in notes[0]


def write_source(path: Path, text: str) -> None:
    """Write a module, and forget its earlier version."""
    path.write_text(f"{text}\n")
    sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()
    linecache.clearcache()


def test_heat_map_names_clients_that_never_took_part(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"policy": "fedeas", "beta": 4.0}
    (maps,), _ = maps_of(grouped(write_run(tmp_path / "all", [0.5], images=FEDEAS_OF_FOUR, **keys)))
    fewer = int(maps.generated[0][1][:3].sum())
    write_run(tmp_path / "some", [0.5], seed=2, images=fewer, extra=[{"clients": [0, 1, 2]}], **keys)
    write_run(tmp_path / "none", [0.4], extra=[{"clients": [0, 1, 2]}])
    printed = run_in_process("report", str(tmp_path), "--out", str(tmp_path / "out")).stdout
    note = "Images of FedEAS, seed 2: client 3 never took part, so it generated none"
    text = (tmp_path / "out" / "report.md").read_text()
    assert [line for line in printed.splitlines() if line.startswith("Images of")] == [note] and f"{note}." in text
    plan = f"FedEAS: the map is the plan, {FEDEAS_OF_FOUR} images; the runs have {FEDEAS_OF_FOUR}, {fewer}, because"
    assert f"{plan} clients that never took part generate none." in text
    data = json.loads(run_in_process("report", str(tmp_path), "--format", "json").stdout)
    assert [group["never_took_part"] for group in data["groups"]] == [[[3]], [[], [3]]]


def test_report_states_that_shared_images_count_per_client(tmp_path: Path) -> None:
    """The paper's η uses the total number of images that clients hold, shared or not."""
    keys: dict[str, Any] = {"policy": "fedeas", "beta": 4.0, "images": FEDEAS_OF_FOUR}
    groups = grouped(
        write_run(tmp_path / "none", [0.5]),
        write_run(tmp_path / "shared", [0.7], shared_images="by-class", **keys),
        write_run(tmp_path / "own", [0.7], **keys),
    )
    held = "an image that several clients hold counts once per client, also in η"
    note = f"Images of FedEAS, shared-images = by-class: {held}"
    weak = "from one seed, so differences of a few points may be chance"
    assert notes_on(groups) == [f"† Gain of FedEAS, shared-images = by-class; FedEAS, shared-images = no: {weak}", note]
    assert notes_on([groups[0], groups[2]]) == [f"† Gain of FedEAS, shared-images = no: {weak}"]
    (maps,), notes = maps_of(groups)
    plan = dict(maps.generated)["FedEAS, shared-images = by-class"]
    different = int(plan.max(axis=0).sum())  # image i of a class is the same on all clients
    assert notes == [
        f"FedEAS, shared-images = by-class: {different} of the plan's {FEDEAS_OF_FOUR} images are distinct."
    ]


@pytest.mark.parametrize(
    ("lengths", "last", "mean"),
    [((3, 20), False, True), ((25, 30), True, False), ((25, 3), True, True)],
)
def test_mean_of_at_most_20_rounds_is_labelled_so(
    tmp_path: Path, lengths: tuple[int, int], last: bool, mean: bool
) -> None:
    extra = {"per_class_accuracy": [0.5] * 10, "worst_tenth_accuracy": 0.5}
    runs = [
        write_run(tmp_path / policy, [0.5] * n, images=i * FEDEAS_OF_FOUR, policy=policy, beta=4.0, extra=[extra] * n)
        for i, (n, policy) in enumerate(zip(lengths, ("none", "fedeas"), strict=True))
    ]
    document = make_document(grouped(*runs))
    text = as_markdown(document)
    axes = " ".join(p.figure.axes[0].get_ylabel() for section in document.sections for p in section.pictures)
    assert set(re.findall(r"[Ll]ast[ -](\d+)", text)) == ({"20"} if last else set())
    assert [("last-20" in found, "mean of all rounds" in found) for found in (text, axes)] == [(last, mean)] * 2


def test_runs_of_one_plan_share_one_heat_map(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"policy": "fedeas", "beta": 4.0, "images": FEDEAS_OF_FOUR, "protocol": "clean"}
    runs = [write_run(tmp_path / way, [0.7], shared_images=way, **keys) for way in ("no", "by-class", "one-seed")]
    (maps,), _ = maps_of(groups := grouped(*runs))
    titles = [axes.get_title().replace("\n", " ") for axes in draw(maps).axes if axes.get_visible()]
    names = [f"shared-images = {way}" for way in ("no", "by-class", "one-seed")]
    assert titles[1:] == [f"{'; '.join(names)} ({FEDEAS_OF_FOUR})"]
    assert [note.partition(":")[0] for note in notes_on(groups)][1:] == [f"Images of {names[1]}, {names[2]}"]


def test_leakage_note_on_digits_does_not_mention_cifar(tmp_path: Path) -> None:
    opening = make_document(grouped(write_run(tmp_path / "digits", [0.5], protocol="paper"))).text
    assert LEAKAGE_ELSEWHERE in opening and "CIFAR" not in " ".join(opening)


class Flat:
    """A generator whose images encode their client and class."""

    fingerprint, image_shape, num_classes = "flat", (8, 8, 1), 10

    def sample(self, samples: Sequence[SampleId]) -> Any:
        values = [100 * s.client + s.label for s in samples]
        return np.array(values, np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 1), np.uint8)


def test_samples_come_from_the_runs_generator_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    keys: dict[str, Any] = {"policy": "fedeas", "beta": 4.0, "images": FEDEAS_OF_FOUR}
    runs = [
        write_run(tmp_path / f"{s}", [0.5], seed=s, generator=f"/models/g{s}", dataset="cifar10", **keys)
        for s in (1, 2)
    ]
    about = describe_generator(runs[1].config())
    for client, wanted in ((0, 3), (1, 20)):
        ImageCache().ensure(Flat(), seed=2, client=client, wanted=[wanted] * 5 + [0] * 5, about=about)
    (grid,) = samples.grids_of(grouped(*runs))  # the first run's generator has no images
    assert grid.title == "Generator g2, dpm++, seed 2"
    assert [name for name, _ in grid.rows] == ["airplane", "automobile", "bird", "cat", "deer"]
    assert grid.rows[3][1][:, 0, 0, 0].tolist() == [3] * 3 + [103] * 9
    (damaged,) = (tmp_path / "cache").glob("images/*/client-00000/class-003/*.npy")
    damaged.write_bytes(b"damaged")
    assert samples.grids_of(grouped(*runs))[0].rows[3][1][:, 0, 0, 0].tolist() == [103] * 12
    export(runs[1], tmp_path / "record")  # a record keeps only the generator's name
    assert len(samples.grids_of(grouped(RunDirectory(tmp_path / "record")))) == 1
    assert "Generated images" in as_markdown(make_document(grouped(runs[1])))


# ---------------------------------------------------------------------------------------------------------- command


def fedeas(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(list(words), standalone_mode=False)
    return capsys.readouterr().out


def test_report_command_on_committed_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = fedeas(capsys, "report", str(QUICKSTART))
    assert re.search(r"FedEAS +1 +92\.7 +96\.9 +98\.3 +893 +\+18\.2† +20 +3 +0\.630 +46 ray", printed)
    data = json.loads(fedeas(capsys, "report", str(QUICKSTART), "--format", "json"))
    fedeas_group = next(group for group in data["groups"] if group["name"] == "FedEAS")
    assert fedeas_group["last_20"]["mean"] == pytest.approx(0.92744, abs=1e-5) and fedeas_group["last_20"]["sd"] is None
    assert fedeas_group["final"]["mean"] == pytest.approx(0.96936, abs=1e-5)
    assert fedeas_group["eta"] == pytest.approx(20.416, abs=1e-3)
    assert fedeas_group["rounds_to_threshold"] == [3] and fedeas_group["worst_class"]["class"] == 8


def test_report_command_rejects_folders_without_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"nothing to report: no run directory was found in or below {tmp_path}$"):
        fedeas(capsys, "report", str(tmp_path))
    with pytest.raises(RunError, match="nowhere is not a folder"):
        fedeas(capsys, "report", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="format = 'xml': must be table or json"):
        fedeas(capsys, "report", str(QUICKSTART), "--format", "xml")
