"""Tables that the paper does not have: the numbers of its text, our own comparisons, and recorded sweeps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedeas_flwr.allocation import negative_gain_samples, removed
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.text import show_seconds
from fedeas_flwr.config import RunConfig
from fedeas_flwr.planning.run_plan import count_distinct_images, planned_allocation, planned_counts
from fedeas_flwr.report.paired import Differences
from fedeas_flwr.reproduce import cells, paper
from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, DEFAULT_COLUMN, METHODS, cell, column, variants
from fedeas_flwr.reproduce.paper import COLUMNS
from fedeas_flwr.reproduce.paper_comparison import (
    NONE,
    budget_of,
    compared,
    derived,
    difference,
    last_20_of,
    peak_of,
    show_budget,
    show_ours,
    show_seeds,
    signed,
    value_of,
)
from fedeas_flwr.reproduce.results import Measured, Results, Value, measure
from fedeas_flwr.reproduce.tables import Table
from fedeas_flwr.runs.listing import find_runs
from fedeas_flwr.runs.metrics import accuracy_drops


def text_table(results: Results) -> Table:
    """Return the numbers of the paper's text: rounds to 70 %, images of negative gain, another generator, hours."""
    table = Table(["Quantity", "Where", "Ours", "Seeds", "Paper", "Difference"])

    def add(label: str, place: str, value: Value, show: Callable[[float], str] | None = None) -> None:
        shown = compared(value)
        if show is not None:
            ours, published = (NONE if number is None else show(number) for number in (value.mean, value.paper))
            shown = [ours, show_seeds(value), published, NONE]
        table.add([label, column(place).title(results.scale), *shown], value)

    threshold = 0.7 if results.scale == "full" else cell(f"{BETA_SWEEP_COLUMN}/fedeas").config("smoke", 1).threshold
    until = f"rounds to {100 * threshold:.0f} %"
    for place, published in paper.ROUNDS_TO_70.items():
        for method, rounds in published.items():
            value = value_of(results, f"{place}/{method}", until, lambda run: run.first_round_at(threshold), rounds, 0)
            add(f"{METHODS[method].label}: {until}", place, value)
    add("Uniform: images that make their client's labels less even", BETA_SWEEP_COLUMN, _negative_gain(results))
    peak = peak_of(results, paper.FEDEAS_AND_SCAFFOLD)
    add("FedEAS + SCAFFOLD: peak %", paper.FEDEAS_AND_SCAFFOLD.partition("/")[0], peak)
    for kind, published_lead in paper.PEAK_LEAD.items():
        end = "" if kind == "ddpm" else "-sd-turbo"
        fedeas, uniform = (peak_of(results, f"{BETA_SWEEP_COLUMN}/{name}{end}") for name in ("fedeas", "uniform"))
        lead = derived(fedeas, "lead over Uniform, peak", difference(fedeas, uniform), published_lead)
        add(f"FedEAS's lead over Uniform, peak, {kind}", BETA_SWEEP_COLUMN, lead)
    seconds = {}
    for method, published_seconds in paper.RUN_SECONDS.items():
        name = f"{BETA_SWEEP_COLUMN}/{method}"
        seconds[method] = value_of(results, name, "seconds", lambda run: run.seconds, published_seconds, 0)
        add(f"{METHODS[method].label}: time, generation included", BETA_SWEEP_COLUMN, seconds[method], show_seconds)
    full, fedeas = seconds["full-balance"], seconds["fedeas"]
    ratio = full.mean / fedeas.mean if full.mean and fedeas.mean else None
    published_ratio = paper.RUN_SECONDS["full-balance"] / paper.RUN_SECONDS["fedeas"]
    over = derived(full, "time over FedEAS's", ratio, published_ratio)
    add("Full-Balance's time over FedEAS's", BETA_SWEEP_COLUMN, over)
    return table


def _negative_gain(results: Results) -> Value:
    """Count Uniform's images of negative gain, from its plan alone."""
    name = f"{BETA_SWEEP_COLUMN}/uniform"
    config = cell(name).config(results.scale, 1)
    counts = planned_counts(config)
    ours = float(negative_gain_samples(counts, planned_allocation(config, counts)))
    return Value(name, "images of negative gain", (ours,), (), paper.NEGATIVE_GAIN, 0, results.scale == "full")


def clean_table(results: Results) -> Table:
    """Return what the test set's leakage is worth, and what is gained without a generator."""
    protocols = [word for name in ("paper", "clean") for word in (f"Protocol {name}, last-20 %", "Seeds")]
    table = Table(["Method", *protocols, "clean − paper", "Images"])
    for method in cells.CLEAN:
        names = [f"{DEFAULT_COLUMN}/{method}", f"{DEFAULT_COLUMN}/{method}-clean"]
        leaky, clean = (last_20_of(results, name) for name in names)
        budgets = [budget_of(results, name) for name in names]
        images = "; ".join(map(show_budget, budgets)) if any(budgets) else NONE
        shown = [show_ours(leaky), show_seeds(leaky), show_ours(clean), show_seeds(clean)]
        shown += [signed(difference(clean, leaky), 2), images]
        table.add([METHODS[method].label, *shown], leaky, clean, *budgets)
    return table


Describe = Callable[[RunConfig, str], str]
"""Writes a cell of a table from a variant's run-config and the suffix of its name."""


def variant_table(
    results: Results, rows: Sequence[tuple[str, str, str]], images: Describe, more: Mapping[str, Describe]
) -> Table:
    """Return methods and their variants, each next to the paper's number of the method itself.

    Rows are from `variants`; ``images`` describes a variant's images, and ``more`` are further columns by their heads.
    """
    head = ["Where", "Method", "Paper, last-20 %", "Images", "Ours, last-20 %", "Seeds", "Difference"]
    table = Table([*head, *more])
    for place, method, end in rows:
        one = cell(f"{place}/{method}{end}")
        config, published = one.config(results.scale, 1), last_20_of(results, f"{place}/{method}").paper
        last = value_of(results, one.name, "last-20 %", lambda run: 100 * run.last_20, published)
        ours, seeds, paper_shown, apart = compared(last)
        shown = ["" if end else paper_shown, images(config, end), ours, seeds, apart]
        shown += [describe(config, end) for describe in more.values()]
        table.add([one.column.title(results.scale), METHODS[method].label, *shown], last, budget_of(results, one.name))
    return table


def shared_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """Return clients with images of their own and with the same ones; the paper does not say which it had."""

    def distinct(config: RunConfig, end: str) -> str:
        return f"{count_distinct_images(config, planned_counts(config)):,}"

    labels = {
        "no": "of each client's own",
        "by-class": "the same of a class on all clients",
        "one-seed": "one seed for all clients",
    }
    rows = variants(cells.SHARED, columns)
    return variant_table(
        results, rows, lambda config, end: labels[config.shared_images], {"Different images": distinct}
    )


def drawn_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """Return the same budget with images of one generator sampled in other ways."""
    labels = {"": "20 steps uniform in time, no guidance"} | {end: words for end, (words, _) in cells.VARIANTS.items()}
    return variant_table(results, variants(cells.DRAWN, columns), lambda config, end: labels[end], more={})


def batches_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """Return runs with and without small last batches, which BatchNorm turns into very large steps."""
    ours = ["Ours, last-20 %", "Seeds", "Peak %", "Accuracy drops, by seed", "Deepest, points"]
    table = Table(["K", "α", "Method", "Last batches", *ours])
    for place, method, end in variants(cells.BATCHED, columns):
        one = cell(f"{place}/{method}{end}")
        config, last, peak = one.config(results.scale, 1), last_20_of(results, one.name), peak_of(results, one.name)
        drops = [accuracy_drops(run.accuracies) for run in results.of(one.name)]
        deepest = max((100 * depth for found in drops for depth in found.values()), default=None)
        label = METHODS[method].label + (f", β = {config.beta:g}" if "beta" in one.method.keys else "")
        shown = [str(config.clients), f"{config.alpha:g}", label, f"from {config.min_batch} images"]
        shown += [show_ours(last), show_seeds(last), show_ours(peak)]
        shown += [", ".join(str(len(found)) for found in drops) or NONE, NONE if deepest is None else f"{deepest:.1f}"]
        table.add(shown, last, peak)
    return table


def rule_table(results: Results) -> Table:
    """Return other exponents, and the exact minimiser of the paper's score, at FedEAS's total."""
    table = Table(["Rule", "β", "Images", "Imbalance removed", "Ours, last-20 %", "Seeds"])
    for method in cells.RULES:
        one = cell(f"{DEFAULT_COLUMN}/{method}")
        config, last, budget = one.config(results.scale, 1), last_20_of(results, one.name), budget_of(results, one.name)
        counts = planned_counts(config)
        plan = planned_allocation(config, counts)
        label = "FedEAS, γ = 0.5 (the paper's)" if method == "fedeas" else one.method.label
        beta = f"{config.beta:g}" if config.policy == "fedeas" else NONE
        images = show_budget(budget) if budget else f"{plan.sum():,} planned"
        shown = [label, beta, images, f"{100 * removed(counts, plan):.1f} %", show_ours(last), show_seeds(last)]
        table.add(shown, last, budget)
    return table


def records_table(results: Results, folder: Path) -> Table:
    """Return the records of a folder, made with a changed strategy, next to the unchanged one and the paper's.

    Accuracies are means over a record's last 20 rounds and the same rounds of its cell's runs. A record with fewer
    rounds than the paper's is not compared with the paper.
    """
    head = ["Record", "Where", "Rounds", "Changed, %", "Unchanged, %", "Seeds", "Paper, last-20 %", "Changed − paper"]
    table = Table(head)
    for run in find_runs([folder]):
        config = run.config()
        place = column(f"c{config.dataset.removeprefix('cifar')}-k{config.clients}-a{config.alpha:g}")
        name, window = f"{place.name}/{config.strategy}", slice(config.rounds - 20, config.rounds)
        published = last_20_of(results, name).paper if config.rounds == cells.FULL["rounds"] else None
        rounds = f"{window.start + 1} to {window.stop}"
        ours = {one.seed: 100 * statistics.fmean(one.accuracies[window]) for one in results.of(name)}
        unchanged = Value(name, rounds, tuple(ours.values()), tuple(ours), None)
        changed = Value(run.path.name, rounds, (100 * measure(run, config).last_20,), (config.seed,), published)
        shown = [show_ours(changed), show_ours(unchanged), show_seeds(unchanged), *compared(changed)[2:]]
        table.add([f"`{run.path.name}`", place.title(results.scale), rounds, *shown], changed, unchanged)
    return table


def policies_table(folder: Path) -> Table:
    """Return the policies of a folder's records over their seeds, each compared with policy none on equal seeds.

    Raise `ConfigError` if two records have the same policy and seed.
    """
    found: dict[str, dict[int, Measured]] = {}
    for run in find_runs([folder]):
        config = run.config()
        seeds = found.setdefault(config.policy, {})
        if config.seed in seeds:
            raise ConfigError(f"{folder} has two records with policy = '{config.policy}' and seed = {config.seed}")
        seeds[config.seed] = measure(run, config)
    base = found.get("none", {})
    table = Table(["Policy", "Seeds", "Images, mean", "Last-20 %", "Peak %", "vs none", "Seeds above it"])
    for policy in sorted(found, key=lambda name: (name != "none", name)):
        runs = dict(sorted(found[policy].items()))
        last = Value(policy, "last-20 %", tuple(100 * run.last_20 for run in runs.values()), tuple(runs), None)
        peak = Value(policy, "peak %", tuple(100 * run.peak for run in runs.values()), tuple(runs), None)
        shown = [show_seeds(last), f"{statistics.fmean(run.images for run in runs.values()):,.0f}"]
        shown += [show_ours(last), show_ours(peak), NONE, NONE]
        apart = Differences(
            tuple(100 * (run.last_20 - base[seed].last_20) for seed, run in runs.items() if seed in base)
        )
        if policy != "none" and apart.values:
            shown[-2:] = [apart.show_error(2), apart.above]
        table.add([policy, *shown], last, peak)
    return table


PARTITION = "partition-seed"


def sweep_table(folder: Path, base: str) -> Table:
    """Return a sweep's settings, each compared with the setting that has ``base``, KEY=VALUE, and the same other keys.

    The folder holds what `fedeas sweep` writes as sweep.json, of one sweep or of several under different names. A
    setting with a partition that the other one lacks is not compared. Raise `ConfigError` if there is no such file, or
    if no run has ``base``.
    """
    sweeps = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    sweeps = [sweep for sweep in sweeps if "runs" in sweep]
    if not sweeps:
        raise ConfigError(
            f"{folder} has no sweep.json, which `fedeas sweep` writes; to compare records: "
            f"fedeas report {folder} --against {base}"
        )
    key, _, value = base.partition("=")
    keys = dict.fromkeys(name for sweep in sweeps for name in (*sweep["grid"], key) if name != PARTITION)
    found: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for sweep in sweeps:
        for run in sweep["runs"]:
            own = {name: run.get(name, sweep["config"].get(name)) for name in (*sweep["grid"], key)}
            setting = tuple(_shown(own.get(name, "")) for name in keys)
            found.setdefault(setting, {})[run.get(PARTITION, sweep["config"].get(PARTITION))] = run
    at = list(keys).index(key)
    if not any(setting[at] == value for setting in found):
        raise ConfigError(f"{folder} has no run with {base}")
    table = Table([*keys, "Partitions", "Images, mean", "Last-20 %", f"To {base}", "Partitions above it"])
    for setting in sorted(found, key=lambda setting: setting[:at] + setting[at + 1 :]):
        runs = found[setting]
        last = Value("", "last-20 %", tuple(100 * run["last_20"] for run in runs.values()), (), None, 1)
        shown = [str(len(runs)), f"{statistics.mean(run['images'] for run in runs.values()):,.0f}"]
        shown += [show_ours(last), NONE, NONE]
        if setting[at] != value:
            base_setting = (*setting[:at], value, *setting[at + 1 :])  # which may lack a key that only others have
            others = [
                o for one, o in found.items() if all(b in ("", s) for b, s in zip(one, base_setting, strict=True))
            ]
            if len(others) == 1 and runs.keys() <= others[0].keys():
                scores = {seed: run["last_20"] for seed, run in others[0].items()}
                apart = Differences(tuple(100 * (run["last_20"] - scores[seed]) for seed, run in runs.items()))
                shown[-2:] = [apart.show_error(1), apart.above]
        table.add([*setting, *shown])
    return table


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
