"""Reports: paired differences to a reference, with numbers by hand."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_runs import FEDEAS_OF_FOUR, grouped, write_run
from rich.console import Console
from runners import run_in_process

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.report import document
from fedeas_flwr.report.groups import Group
from fedeas_flwr.report.paired import Differences, PairedRuns, pair_runs, parse_reference
from fedeas_flwr.report.writing import print_comparison
from fedeas_flwr.runs.directory import RunDirectory

FEDEAS: dict[str, Any] = {"policy": "fedeas", "beta": 4.0, "images": FEDEAS_OF_FOUR}
NONE = "FedAvg, nothing generated"


def write_runs(
    folder: Path, name: str, accuracies: Mapping[tuple[int, int], Sequence[float]], **keys: Any
) -> list[RunDirectory]:
    """Write a run for each (seed, partition seed)."""
    return [
        write_run(folder / f"{name}-{seed}-{partition}", curve, seed=seed, partition_seed=partition, **keys)
        for (seed, partition), curve in accuracies.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs of two policies, over two seeds and two partition seeds.

    FedEAS is 1, 2, 3 and 6 points above the other in the mean of all rounds, and 2.5 points less in the last round.
    """
    folder = tmp_path_factory.mktemp("paired") / "runs"
    none = {(1, 42): (0.2, 0.5), (2, 42): (0.4, 0.6), (1, 43): (0.3, 0.3), (2, 43): (0.1, 0.7)}
    more = {(1, 42): 0.01, (2, 42): 0.02, (1, 43): 0.03, (2, 43): 0.06}
    write_runs(folder, "none", none)
    fedeas = {seeds: (first + more[seeds] + 0.025, last + more[seeds] - 0.025) for seeds, (first, last) in none.items()}
    write_runs(folder, "fedeas", fedeas, **FEDEAS)
    return folder


def paired(groups: Sequence[Group], against: str) -> PairedRuns:
    return pair_runs(groups, *parse_reference(against))


# ------------------------------------------------------------------------------------------------------ differences


@pytest.mark.parametrize(
    ("pairs", "quantile"),  # from a table of Student's t, two-sided 95 %
    [
        (2, 12.7062),
        (3, 4.30265),
        (4, 3.18245),
        (6, 2.57058),
        (11, 2.22814),
        (12, 2.20099),
        (31, 2.04227),
        (121, 1.97993),
    ],
)
def test_interval_is_the_t_interval_of_the_table(pairs: int, quantile: float) -> None:
    values = tuple(50.0 + number % 5 for number in range(pairs))
    found = Differences(values)
    assert found.interval is not None and found.sd is not None
    half = quantile * found.sd / pairs**0.5
    assert found.interval == pytest.approx((found.mean - half, found.mean + half), abs=1e-5 * half)


def test_interval_and_number_above_by_hand() -> None:
    # mean 3, variance (4 + 1 + 0 + 9) / 3, standard error 1.0801; t = 3.18245 with 3 degrees of freedom
    found = Differences((1.0, 2.0, 3.0, 6.0))
    assert found.mean == 3.0 and found.standard_error == pytest.approx(1.080123)
    assert found.interval == pytest.approx((3 - 3.437437, 3 + 3.437437), abs=1e-5)
    assert found.show_interval(1) == "+3.0 (−0.4 to +6.4)"
    assert Differences((-1.0, 0.0, 2.0)).above == "1 of 3", "an equal pair is not above"


def test_one_pair_has_no_interval() -> None:
    found = Differences((-2.5,))
    assert found.interval is None and found.standard_error is None and found.show_interval(1) == "−2.5"


# ------------------------------------------------------------------------------------------------------------ pairs


def test_pairs_are_pooled_over_seeds_and_partition_seeds(folder: Path) -> None:
    groups = grouped(*(RunDirectory(path) for path in sorted(folder.iterdir())))
    assert len(groups) == 4
    (found,) = paired(groups, "policy=none").comparisons
    assert (found.name, found.reference, found.images) == ("FedEAS", NONE, (FEDEAS_OF_FOUR, 0))
    seeds = [(own.config.seed, own.config.partition_seed) for own, _ in found.pairs]
    assert seeds == [(1, 42), (1, 43), (2, 42), (2, 43)]
    assert [(other.config.seed, other.config.partition_seed) for _, other in found.pairs] == seeds
    assert found.differences("last_20").values == pytest.approx((1.0, 3.0, 2.0, 6.0))
    assert found.differences("final").values == pytest.approx((-1.5, 0.5, -0.5, 3.5))
    (found,) = paired(groups, "policy=fedeas").comparisons
    assert found.differences("final").values == pytest.approx((1.5, -0.5, 0.5, -3.5))


def test_runs_without_a_partner_are_named(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, "none", {(1, 42): [0.5], (2, 42): [0.5], (3, 43): [0.5]})
    runs += write_runs(tmp_path, "fedeas", {(1, 42): [0.7], (2, 42): [0.6], (3, 42): [0.9]}, **FEDEAS)
    found = paired(grouped(*runs), "policy=none")
    (comparison,) = found.comparisons
    assert comparison.differences("last_20").values == pytest.approx((20.0, 10.0))
    same = "no run with the same seeds and number of rounds"
    assert found.notes == [
        f"Not paired with {NONE}, {same}: FedEAS, seed 3, partition-seed 42",
        f"Not paired with FedEAS, {same}: {NONE}, seed 3, partition-seed 43",
    ]


def test_unequal_numbers_of_rounds_and_unfinished_runs_are_no_pairs(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, "none", {(1, 42): [0.5, 0.5], (2, 42): [0.5, 0.5], (1, 43): [0.5, 0.5]})
    runs += write_runs(tmp_path, "fedeas", {(1, 42): [0.5, 0.9]}, **FEDEAS)
    runs += write_runs(tmp_path, "fedeas", {(2, 42): [0.1]}, **FEDEAS, rounds=2, finished=False)
    runs += write_runs(tmp_path, "fedeas", {(1, 43): [0.1]}, **FEDEAS, rounds=2, finished=False)
    found = paired(grouped(*runs), "policy=none")
    assert [len(comparison.pairs) for comparison in found.comparisons] == [1]
    assert found.notes[-1].endswith(f": {NONE}, seed 1, partition-seed 43; {NONE}, seed 2, partition-seed 42")


def test_settings_that_differ_in_another_key_are_not_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"none-{rate}", [0.5], learning_rate=rate) for rate in (0.05, 0.1)]
    runs.append(write_run(tmp_path / "fedeas", [0.7], **FEDEAS, learning_rate=0.1))
    runs.append(write_run(tmp_path / "uniform", [0.7], **{**FEDEAS, "policy": "uniform"}, learning_rate=0.2))
    found = paired(grouped(*runs), "policy=fedeas")
    assert [(one.name, len(one.pairs)) for one in found.comparisons] == [(f"{NONE}, learning-rate = 0.1", 1)]
    assert found.notes == [
        f"Not compared with policy = fedeas: {NONE}, learning-rate = 0.05: learning-rate = 0.1, not 0.05",
        "Not compared with policy = fedeas: Uniform: learning-rate = 0.1, not 0.2",
    ]


def test_several_references_are_compared_each_with_its_own(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "none", [0.5], threshold=0.8, gamma_hat="off")]  # both change only what is measured
    for beta, points in ((2.0, 0.1), (6.0, 0.2)):
        runs.append(write_run(tmp_path / f"f{beta}", [0.5 + points], images=int(beta), policy="fedeas", beta=beta))
        runs.append(write_run(tmp_path / f"u{beta}", [0.4], images=int(beta), policy="uniform", beta=beta))
    found = paired(grouped(*runs), "policy=fedeas")
    assert [(c.name, c.reference, c.differences("final").show_interval(1)) for c in found.comparisons] == [
        (NONE, "FedEAS, beta = 2", "−10.0"),
        (NONE, "FedEAS, beta = 6", "−20.0"),
        ("Uniform, beta = 2", "FedEAS, beta = 2", "−20.0"),
        ("Uniform, beta = 6", "FedEAS, beta = 6", "−30.0"),
    ]
    assert found.table().head[1] == "compared with" and found.notes == []


@pytest.mark.parametrize(
    ("against", "key", "values"),
    [
        ("strategy=fedavg", "strategy", ("fedavg", "fedprox")),
        ("beta=4", "beta", (4.0, 8.0)),
        ("printed-rule=true", "printed_rule", (True, False)),
    ],
)
def test_reference_may_be_any_key_that_runs_use(
    tmp_path: Path, against: str, key: str, values: tuple[Any, Any]
) -> None:
    for number, value in enumerate(values):
        write_run(tmp_path / str(number), [0.5 + 0.1 * number], **{**FEDEAS, key: value})
    write_run(tmp_path / "none", [0.1])
    groups = grouped(*(RunDirectory(path) for path in sorted(tmp_path.iterdir())))
    found = paired(groups, against).comparisons[-1]
    assert found.differences("final").values == pytest.approx((10.0,))


def test_arguments_of_the_key_may_differ(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", [0.5])]
    runs.append(write_run(tmp_path / "b", [0.6], strategy="fedadam", strategy_args="eta=0.1"))
    assert len(paired(grouped(*runs), "strategy=fedavg").comparisons) == 1


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("against", "says"),
    [
        ("policy", "'policy' is not KEY=VALUE, such as policy=fedeas"),
        ("polcy=none", "unknown key 'polcy' = 'none'; did you mean 'policy'?"),
        ("seed=1", "seed cannot be the key: runs with equal seed and partition-seed are paired"),
        ("partition-seed=42", "partition-seed cannot be the key: runs with equal seed and partition-seed are paired"),
        ("policy=fedaes", "no run has this value; there are policy = none, policy = uniform"),
        ("alpha=0.1", "all runs that use alpha have this value; give another key or more runs"),
        ("beta=4", "all runs that use beta have this value"),
        ("backend=ray", "backend does not distinguish runs; they differ in policy"),
    ],
)
def test_invalid_reference_is_one_line(tmp_path: Path, against: str, says: str) -> None:
    write_run(tmp_path / "none", [0.5])
    write_run(tmp_path / "uniform", [0.6], **{**FEDEAS, "policy": "uniform"})
    done = run_in_process("report", str(tmp_path), "--against", against, "--html", str(tmp_path / "page.html"))
    assert (done.returncode, done.stdout) == (2, "") and not (tmp_path / "page.html").exists()
    assert done.stderr.startswith(f"error: --against {against}: {says}") and done.stderr.count("\n") == 1


def test_no_pair_at_all_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    runs = [*write_runs(tmp_path, "none", {(1, 42): [0.5]}), *write_runs(tmp_path, "f", {(2, 42): [0.5]}, **FEDEAS)]
    runs += write_runs(tmp_path, "u", {(2, 42): [0.5, 0.5]}, **{**FEDEAS, "policy": "uniform"})
    with pytest.raises(ConfigError) as error:
        paired(grouped(*runs), "policy=fedeas")
    same = "no run with the same seeds and number of rounds"
    assert str(error.value) == (
        "--against policy=fedeas: there is no pair. "
        f"Not paired with FedEAS, {same}: {NONE}, seed 1, partition-seed 42. "
        f"Not paired with {NONE}, {same}: FedEAS, seed 2, partition-seed 42. "
        "Not compared with policy = fedeas: Uniform: rounds = 1, not 2"
    )


# ---------------------------------------------------------------------------------------------------------- formats


HEAD = (
    "against policy = none",
    *(
        "pairs",
        "mean of all rounds, points",
        "pairs above",
        "final, points",
        "pairs above",
        "images",
        "reference's images",
    ),
)
ROW = ("FedEAS", "4", "+3.0 (−0.4 to +6.4)", "4 of 4", "+0.5 (−2.9 to +3.9)", "2 of 4", "115", "0")
PAIR = "A pair is two runs with equal seed and partition-seed that differ only in policy; few pairs say little."


def test_table_is_printed_and_written_in_every_format(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "_picture", lambda *_: ())  # slow
    monkeypatch.setattr(document, "allocation_section", lambda _: None)
    page, out = tmp_path / "page.html", tmp_path / "out"
    done = run_in_process("report", str(folder), "--against", "policy=none", "--html", str(page), "--out", str(out))
    assert done.returncode == 0, done.stderr
    lines = [re.sub(r" {2,}", " | ", line.strip()) for line in done.stdout.splitlines()]
    place = lines.index(" | ".join(ROW))
    assert lines[place - 1] == " | ".join(HEAD) and lines[place + 1].startswith(PAIR)
    markdown = (out / "report.md").read_text()
    section = markdown.partition("## Paired differences\n\n")[2].partition("\n## ")[0].splitlines()
    assert section[0] == f"| {' | '.join(HEAD)} |" and section[2] == f"| {' | '.join(ROW)} |"
    assert section[4].startswith(PAIR)
    text = html.unescape(re.sub(r"<[^>]+>", " ", page.read_text().partition('id="paired-differences">')[2]))
    words = " ".join(text.partition("Accuracy")[0].split())
    assert words.startswith("Paired differences against policy = none pairs") and f"{' '.join(ROW)} {PAIR}" in words


def test_json_has_the_pairs(folder: Path) -> None:
    done = run_in_process("report", str(folder), "--against", "policy=none", "--format", "json")
    data = json.loads(done.stdout)["paired"]
    assert (data["key"], data["value"], data["notes"]) == ("policy", "none", [])
    (found,) = data["comparisons"]
    assert found["name"] == "FedEAS" and found["reference"] == NONE and found["images"] == [115, 0]
    assert [(pair["seed"], pair["partition_seed"]) for pair in found["pairs"]] == [(1, 42), (1, 43), (2, 42), (2, 43)]
    assert [Path(path).name for path in found["pairs"][1]["runs"]] == ["fedeas-1-43", "none-1-43"]
    points = found["last_20_points"]
    assert points["values"] == pytest.approx([1.0, 3.0, 2.0, 6.0]) and points["mean"] == pytest.approx(3.0)
    assert points["interval"] == pytest.approx([3 - 3.437437, 3 + 3.437437], abs=1e-5)
    assert "paired" not in json.loads(run_in_process("report", str(folder), "--format", "json").stdout)


def test_narrow_terminal_cuts_no_number(folder: Path) -> None:
    text, groups = io.StringIO(), grouped(*(RunDirectory(path) for path in sorted(folder.iterdir())))
    console = Console(file=text, width=80, force_terminal=True, color_system=None)
    print_comparison(groups, console, paired(groups, "policy=none"))
    found = text.getvalue()
    assert "…" not in found and "−0.4 to" in found and all(len(line) <= 80 for line in found.splitlines())
