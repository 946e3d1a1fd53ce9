"""The README says what is so: every key, every file it names, every command it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedeas_flwr.config import KEYS, read_config
from fedeas_flwr.keys import run_keys
from fedeas_flwr.local_data import planned_allocation, planned_counts
from fedeas_flwr.metrics import WALL_CLOCK, falls, seconds_of
from fedeas_flwr.reproduce.measured import meaning
from fedeas_flwr.reproduce.paper import LAST_20, PEAK, at
from fedeas_flwr.runs import RunDirectory
from fedeas_flwr.strategies import ALGORITHMS, TABLE_HEAD, table_rows
from fedeas_flwr.training import recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def parameter_table() -> list[str]:
    """The rows of README's parameter table, made from the code."""
    cells = ((f"`{key.name}`", f"`{json.dumps(key.default)}`", key.allowed_shown(), key.meaning) for key in run_keys())
    return [f"| {' | '.join(row)} |" for row in cells]


def test_the_parameter_table_is_the_codes() -> None:
    rows = [line for line in README.splitlines() if re.match(r"\| `[a-z0-9-]+` \| `", line)]
    assert rows == parameter_table()


def test_the_strategies_table_is_the_codes() -> None:
    lines = (ROOT / "docs" / "strategies.md").read_text().splitlines()
    rows = ["| " + " | ".join(cells) + " |" for cells in (TABLE_HEAD, *table_rows())]
    assert [line for line in lines if line.startswith("| ")][: len(rows)] == rows


def test_the_strategies_seconds_are_the_committed_ones() -> None:
    measured = json.loads((ROOT / "results" / "strategies" / "cpu.json").read_text())["seconds"]
    text = (ROOT / "docs" / "strategies.md").read_text()
    assert all(f"| {name} | {taken / measured['fedavg']:.1f} × |" in text for name, taken in measured.items())


def test_an_algorithms_keys_are_keys() -> None:
    assert all(key in KEYS for algorithm in ALGORITHMS.values() for key in algorithm.keys)


def test_every_module_is_in_the_tree() -> None:
    tree = README.split("```\nserver_app.py")[1].split("```")[0]
    for path in (ROOT / "fedeas_flwr").iterdir():
        if path.name.startswith("__") or path.name in SMALL_MODULES:
            continue
        assert (f"{path.name}/" if path.is_dir() else path.name) in tree, path.name


SMALL_MODULES = {
    "one_line.py",
    "cores.py",
    "counts.py",
    "environment.py",
    "npy.py",
    "paths.py",
    "streams.py",
    "metrics.py",
    "augment.py",
    "prepare.py",
    "project.py",
    "quickstart.py",
    "sizes.py",
}
"""Helpers that the tree leaves out so that it stays readable."""


def test_the_readmes_quickstart_table_is_the_committed_runs() -> None:
    for policy in ("none", "fedeas", "uniform", "missing-only"):
        summary = RunDirectory(ROOT / "results" / "quickstart" / policy).summary()
        row = next(line for line in README.splitlines() if line.startswith(f" {LABEL[policy]} "))
        cells = row.removeprefix(f" {LABEL[policy]} ").split()
        assert cells[1] == f"{100 * summary['last_20']:.1f}"
        assert cells[2] == f"{100 * summary['peak']:.1f}"
        assert cells[3] == f"{summary['total_generated']:,}"


LABEL = {"none": "FedAvg, nothing generated", "fedeas": "FedEAS", "uniform": "Uniform", "missing-only": "Missing-only"}


@pytest.mark.parametrize("policy", ["none", "fedeas", "uniform", "missing-only"])
def test_the_committed_runs_are_of_todays_quickstart(policy: str) -> None:
    """A changed default must not leave old numbers standing."""
    ran = RunDirectory(ROOT / "results" / "quickstart" / policy).config()
    today = read_config(ROOT / "conf" / "quickstart.toml", [f"policy={policy}"])
    free = {"run-dir", "backend"}
    assert {k: v for k, v in ran.outside().items() if k not in free} == {
        k: v for k, v in today.outside().items() if k not in free
    }


SEEDS = ("s1", "s2", "s3")


@pytest.mark.parametrize(
    ("place", "label", "method", "seeds"),
    [
        ("k100", "FedAvg, nothing generated", "none", SEEDS),
        ("k100", "FedEAS, β = 12", "fedeas", SEEDS),
        ("k100", "Missing-only, matched", "missing-only", SEEDS),
        ("k100", "Uniform, matched", "uniform", SEEDS),
        ("k100", "Full-Balance", "full-balance", SEEDS[:1]),
        ("k100", "FedProx", "fedprox", SEEDS[:1]),
        ("k100", "SCAFFOLD", "scaffold", SEEDS[:1]),
        ("k100", "MOON", "moon", SEEDS[:1]),
        *(
            ("k20", f"{label}, K = 20", method, SEEDS[:1])
            for label, method in (
                ("FedAvg", "fedavg"),
                ("FedEAS", "fedeas"),
                ("Missing-only", "missing-only"),
                ("Uniform", "uniform"),
                ("FedProx", "fedprox"),
                ("SCAFFOLD", "scaffold"),
            )
        ),
    ],
)
def test_the_readmes_cifar_numbers_are_the_committed_runs(
    place: str, label: str, method: str, seeds: tuple[str, ...]
) -> None:
    folder = ROOT / "results" / f"cifar10-{place}-a0.1"
    found = [RunDirectory(folder / f"{method}-{seed}").summary() for seed in seeds]
    last_20, peak = (", ".join(f"{100 * one[key]:.1f}" for one in found) for key in ("last_20", "peak"))
    column, row = f"c10-{place}-a0.1", "fedavg" if method == "none" else method
    theirs = f"{at(LAST_20, row, column):.2f} (peak {at(PEAK, row, column):.2f})"
    ends = f" | {len(seeds)} |" if place == "k100" else " |"
    images = f"{found[0]['total_generated']:,}"
    assert f"\n| {label} | {images} | {last_20} (peak {peak}) | {theirs}{ends}\n" in README


@pytest.mark.parametrize(
    ("row", "records"),
    [
        ("FedAvg, K = 100 (`results/precision`) | bf16", ["precision/none-s2-bf16"]),
        ("FedEAS, K = 20, with its 13,437 images | bf16", ["cifar10-k20-a0.1/fedeas-s1"]),
        ("FedAvg, K = 100, seed 3 | bf16", ["cifar10-k100-a0.1/none-s3"]),
        (
            "Missing-only and Uniform, K = 100, seed 1, with their 33,650 images | bf16",
            ["cifar10-k100-a0.1/missing-only-s1", "cifar10-k100-a0.1/uniform-s1"],
        ),
        ("FedAvg and FedEAS, K = 100, seed 1 | tf32", ["cifar10-k100-a0.1/none-s1", "cifar10-k100-a0.1/fedeas-s1"]),
    ],
)
def test_the_seconds_of_runs_alone_are_the_committed_ones(row: str, records: list[str]) -> None:
    runs = [RunDirectory(ROOT / "results" / name) for name in records]
    assert all(row.endswith(run.config().precision) for run in runs)
    seconds = [sum(seconds_of(phase, run.summary()["seconds"]) for phase in WALL_CLOCK) for run in runs]
    assert f"{row} | {' and '.join(f'{each:.0f}' for each in seconds)} |" in (ROOT / "docs/reproduction.md").read_text()


def test_the_gpu_minutes_are_those_of_the_committed_runs() -> None:
    found = [RunDirectory(path).summary()["seconds"] for path in sorted((ROOT / "results").glob("cifar10-k*/*/"))]
    total = sum(seconds_of(phase, seconds) for seconds in found for phase in WALL_CLOCK)
    page = (ROOT / "docs" / "reproduction.md").read_text()
    assert f"`results/cifar10-*` come to {total / 60:.0f} minutes of one GPU" in page


def test_what_shared_images_cost_uniform_is_what_the_records_say() -> None:
    """And the runs are the cell's but for the images: a bank that holds no more than a client asks for, or the key."""
    results = ROOT / "results"
    shared = RunDirectory(results / "shared-images" / "uniform-s1")
    keyed = RunDirectory(results / "cifar10-k100-a0.1" / "uniform-shared-s1")
    own = [RunDirectory(results / "cifar10-k100-a0.1" / f"uniform-s{seed}") for seed in (1, 2, 3)]
    fedeas = [RunDirectory(results / "cifar10-k100-a0.1" / f"fedeas-s{seed}") for seed in (1, 2, 3)]
    theirs, ours = meaning(shared.config()), meaning(own[0].config())
    assert {key for key in ours if ours[key] != theirs[key]} == {"generator"}
    assert theirs["generator"] == "bank"
    by_key = meaning(keyed.config())
    assert {key for key in ours if ours[key] != by_key[key]} == {"shared-images"}
    for run in (shared, keyed):
        assert [r["clients"] for r in run.rounds()] == [r["clients"] for r in own[0].rounds()]

    def mean(key: str, *runs: RunDirectory) -> str:
        return f"{100 * np.mean([run.summary()[key] for run in runs]):.1f}"

    page = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())
    assert f"last-20 {mean('last_20', shared)}, peak {mean('peak', shared)}; and one with the key" in page
    assert f"(`uniform-shared-s1`): {mean('last_20', keyed)} and {mean('peak', keyed)}. The paper has 58.81" in page
    assert f"images of one's own give {mean('last_20', *own)} and {mean('peak', *own)}" in page
    lead = np.mean([run.summary()["last_20"] for run in fedeas]) - np.mean([run.summary()["last_20"] for run in own])
    text = " ".join(README.split())
    assert f"its lead over Uniform is {100 * lead:.1f} points here and 13.7 in the paper" in text
    assert f"our Uniform comes to {mean('last_20', shared)}, the paper's number" in text


def accuracies(run: RunDirectory) -> list[float]:
    return [float(record["accuracy"]) for record in run.rounds()]


def record(name: str) -> RunDirectory:
    return RunDirectory(ROOT / "results" / name)


def test_rounds_fall_where_clients_with_a_last_batch_of_two_weigh_much() -> None:
    large = [f"{policy}-s{seed}" for policy in ("fedeas", "missing-only", "uniform") for seed in (1, 2, 3)]
    runs = [record(f"cifar10-k100-a0.1/{name}") for name in (*large, "full-balance-s1")]
    runs += [record(f"cifar10-k20-a0.1/{policy}-s1") for policy in ("fedeas", "missing-only", "uniform")]
    seen, fallen, after, deepest = [0] * 5, [0] * 5, 0, 0.0
    for run in runs:
        config, depths = run.config(), falls(accuracies(run))
        counts = planned_counts(config, config.clients)
        real, held = counts.sum(axis=1), (counts + planned_allocation(config, counts)).sum(axis=1)
        deepest = max([deepest, *depths.values()])
        for one in run.rounds()[10:]:
            number, clients = one["round"], np.array(one["clients"])
            share = real[clients[held[clients] % config.batch_size == 2]].sum() / real[clients].sum()
            kind = 0 if not share else int(np.digitize(share, [0.05, 0.08, 0.12])) + 1
            seen[kind] += 1
            fallen[kind] += number in depths
            after += not share and number in depths and any(before in depths for before in range(number - 3, number))
    page = (ROOT / "docs" / "reproduction.md").read_text()
    names = ("no such client", "up to 5 %", "5 to 8 %", "8 to 12 %", "over 12 %")
    notes = (f", of which {after} within three rounds after a fall", "", "", "", "")
    for name, rounds, number, more in zip(names, seen, fallen, notes, strict=True):
        assert f"| {name} | {rounds:,} | {number}{more} |" in page
    assert f"of the {len(runs)} runs of FedEAS, Missing-only, Uniform and Full-Balance" in page
    assert f"have rounds that do, by up to {100 * deepest:.0f} points" in " ".join(page.split())


def test_what_is_said_of_scaffold_at_20_clients_is_what_the_records_say() -> None:
    run, plain = record("cifar10-k20-a0.1/scaffold-s1"), record("cifar10-k20-a0.1/fedavg-s1")
    config, rounds = run.config(), run.rounds()
    held = planned_counts(config, config.clients).sum(axis=1)
    assert (held[2], held[7], held[17], held[2] % config.batch_size) == (130, 431, 595, 2)
    steps = [recipe(config).steps(int(each)) for each in held]
    measured = json.loads((ROOT / "results" / "short-batches" / "controls-cpu.json").read_text())
    length = {(row["client"], row["last"]): f"{row['length']:.1f}" for row in measured["rows"]}
    ours, theirs = np.array(accuracies(run)), np.array(accuracies(plain))
    assert [one["clients"] for one in rounds] == [one["clients"] for one in plain.rounds()]
    page = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())
    assert f"The paper has 60.2, ours {100 * run.summary()['last_20']:.1f}." in page
    assert f"below FedAvg in {(ours < theirs).sum()} of 200 rounds, by {100 * (theirs - ours)[1]:.1f} points" in page
    assert min(one["round"] for one in rounds if 2 in one["clients"]) == 3
    for number in (60, 83, 184):
        assert 2 in rounds[number - 1]["clients"]
        assert rounds[number - 1]["gamma_hat"] > 10 * rounds[number - 2]["gamma_hat"]
    assert 2 not in rounds[174]["clients"]
    assert f"the {100 * (ours[173] - ours[174]):.0f} points of round 175" in page
    assert f"clients take from {min(steps)} to {max(steps)} steps a round" in page
    assert f"its control variate is {length[2, 2]} long, {length[2, 0]} without the batches of two" in page
    assert f"with 431 and 595 images, are {length[7, 47]} and {length[17, 19]} (" in page


def test_images_lower_the_dissimilarity_by_its_counters_alone() -> None:
    page = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())
    fedavg, uniform = (record(f"cifar10-k20-a0.1/{name}-s1").summary()["gamma_hat"] for name in ("fedavg", "uniform"))
    assert (
        f"is {fedavg:.2e} for FedAvg and {uniform:.2e} for Uniform, {100 * (1 - uniform / fedavg):.1f} % less" in page
    )

    def shown(*names: str) -> set[str]:
        return {f"{record(f'cifar10-k100-a0.1/{name}').summary()['gamma_hat']:.2f}" for name in names}

    assert shown("none-s3") == {"0.81"} and shown("full-balance-s1") == {"0.82"}
    seeds = [f"{name}-s{seed}" for name in ("uniform", "missing-only", "fedeas") for seed in (2, 3)]
    assert shown(*seeds, "uniform-s1", "missing-only-s1") == {"0.80", "0.81"}
    assert "0.81 for FedAvg, 0.80 to 0.81 for Uniform, Missing-only and FedEAS, and 0.82 for Full-Balance" in page


def test_fedeas_and_missing_only_at_20_clients_differ_as_the_page_says() -> None:
    ours, theirs = (100 * np.array(accuracies(record(f"cifar10-k20-a0.1/{n}-s1"))) for n in ("fedeas", "missing-only"))
    page = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())
    assert f"FedEAS is ahead by {ours[-20:].mean() - theirs[-20:].mean():.1f} points in the mean" in page
    assert f"Missing-only by {np.median(theirs[-20:]) - np.median(ours[-20:]):.1f} in their median" in page
    first = [int(np.argmax(one >= 70)) + 1 for one in (ours, theirs)]
    assert first[0] == first[1] and f"both first have 70 % in round {first[0]}" in page
    assert f"FedEAS has 69 % in round {int(np.argmax(ours >= 69)) + 1}" in page


def test_fedavg_falls_as_often_as_the_page_says() -> None:
    runs = [RunDirectory(ROOT / "results" / "cifar10-k100-a0.1" / f"none-s{seed}") for seed in (1, 2, 3)]
    counts = [len(falls([float(record["accuracy"]) for record in run.rounds()])) for run in runs]
    page = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())
    assert f"falls in {counts[0]}, {counts[1]} and {counts[2]} rounds of its three seeds" in page


def test_the_lengths_of_gradients_are_the_committed_ones() -> None:
    rows = json.loads((ROOT / "results" / "short-batches" / "cpu.json").read_text())["rows"]
    two, usual = rows[0], rows[-1]
    assert (two["size"], two["draws"], usual["size"]) == (2, 40, 64)
    page = " ".join((ROOT / "docs" / "reproduction.md").read_text().split())
    assert (
        f"the gradient is {two['median'] / usual['median']:.0f} times as long as that of 64 in the median of 40" in page
    )
    assert f"and up to {two['largest'] / usual['median']:.0f} times" in page


def test_the_readmes_speeds_are_the_committed_ones() -> None:
    text = " ".join(README.split())
    rates = json.loads((ROOT / "results" / "engine" / "engine-h200.json").read_text())["images_per_second"]
    names = (
        "(a) quickstart",
        "    graphed, tf32",
        "    graphed, bf16",
        "(b) 10 clients at once",
        "(b) 10 processes, by MPS",
    )
    for name in names:
        for found in (rate for key, rate in rates.items() if key.startswith(name)):
            assert f"{found:,.0f}" in text
    rows = json.loads((ROOT / "results" / "generation" / "generation.json").read_text())["rows"]
    service, plain, strict = (
        next(r["images_per_second"] for r in rows if r["name"].startswith(name) and r["sampler"] == "dpm++")
        for name in ("the service", "plain, torch", "plain, strict")
    )
    assert f"{service:,.0f} images/s with 20" in text
    assert f"{service / strict:.0f} times" in text and f"{service / plain:.1f} times" in text
    summary = RunDirectory(ROOT / "results" / "cifar10-k20-a0.1" / "fedeas-s1").summary()
    seconds = {phase: seconds_of(phase, summary["seconds"]) for phase in WALL_CLOCK}
    total = sum(seconds.values())
    assert f"took {total:.0f} s in bf16" in text and "296 s" in (ROOT / "results/cifar10-k20-a0.1/wall.txt").read_text()
    assert f"{100 * (total - seconds['clients']) / total:.0f} % were not the clients'" in text
    inline, ray = (
        " ".join((ROOT / "results" / name / "wall.txt").read_text().split()) for name in ("precision", "framework")
    )
    assert "82 s by the shell's clock" in inline and "212 s by the shell's clock" in ray
    assert "FedAvg at K = 100 82 s with starting up, and 212 s under Ray" in text


def test_the_table_of_all_strategies_is_the_committed_one() -> None:
    table = (ROOT / "results" / "strategies-on-digits" / "table.md").read_text()
    text = (ROOT / "docs" / "strategies.md").read_text()
    assert table in text
    found = json.loads((ROOT / "results" / "strategies-on-digits" / "results.json").read_text())["rows"]
    assert {row["strategy"] for row in found} == set(ALGORITHMS)
    mean = {(row["strategy"], row["against_skew"]): sum(row["last_20"]) / len(row["last_20"]) for row in found}
    gains = [100 * (mean[name, "fedeas"] - mean[name, "nothing"]) for name in ALGORITHMS]
    assert f"by {min(gains):.0f} to {max(gains):.0f} points" in text
