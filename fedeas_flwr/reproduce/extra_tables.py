"""Tables that the paper does not have: the numbers of its text, and our questions to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fedeas_flwr.allocation import negative_gain_samples, removed
from fedeas_flwr.common.text import show_seconds
from fedeas_flwr.config import RunConfig
from fedeas_flwr.planning.run_plan import count_distinct_images, planned_allocation, planned_counts
from fedeas_flwr.reproduce import paper
from fedeas_flwr.reproduce.cells import (
    BATCHED,
    BETA_SWEEP_COLUMN,
    CLEAN,
    DEFAULT_COLUMN,
    DRAWN,
    METHODS,
    RULES,
    SAMPLER_VARIANTS,
    SHARED,
    cell,
    column,
    variants,
)
from fedeas_flwr.reproduce.paper import COLUMNS
from fedeas_flwr.reproduce.paper_comparison import (
    NONE,
    budget_of,
    last_20_of,
    peak_of,
    show_budget,
    show_difference,
    show_ours,
    show_paper,
    show_seeds,
    signed,
    value_of,
)
from fedeas_flwr.reproduce.results import Results, Value
from fedeas_flwr.reproduce.tables import Table
from fedeas_flwr.runs.metrics import accuracy_drops


def text_table(results: Results) -> Table:
    """What the paper's text says besides: rounds to 70 %, where Uniform does harm, another generator, hours …"""
    table = Table(["Quantity", "Where", "Ours", "Seeds", "Paper", "Difference"])

    def add(label: str, place: str, value: Value, show: Callable[[float], str] | None = None) -> None:
        write = show or (lambda number: f"{number:.{value.digits}f}")
        ours = write(value.mean) if show and value.mean is not None else show_ours(value)
        published = NONE if value.paper is None else write(value.paper)
        difference = NONE if show else show_difference(value)
        where = column(place).title(results.scale)
        table.add([label, where, ours, show_seeds(value), published, difference], value)

    threshold = 0.7 if results.scale == "full" else cell(f"{BETA_SWEEP_COLUMN}/fedeas").config("smoke", 1).threshold
    until = f"rounds to {100 * threshold:.0f} %"
    for place, published in paper.ROUNDS_TO_70.items():
        for method, rounds in published.items():
            value = value_of(results, f"{place}/{method}", until, lambda run: run.first_round_at(threshold), rounds, 0)
            add(f"{METHODS[method].label}: {until}", place, value)
    add("Uniform: images that make their client's labels less even", BETA_SWEEP_COLUMN, _negative_gain(results))
    peak = peak_of(results, paper.FEDEAS_AND_SCAFFOLD)
    add("FedEAS + SCAFFOLD: peak %", paper.FEDEAS_AND_SCAFFOLD.partition("/")[0], peak)
    for kind, lead in paper.PEAK_LEAD.items():
        ending = "" if kind == "ddpm" else "-sd-turbo"
        ours = _lead(results, f"{BETA_SWEEP_COLUMN}/fedeas{ending}", f"{BETA_SWEEP_COLUMN}/uniform{ending}", lead)
        add(f"FedEAS's lead over Uniform, peak, {kind}", BETA_SWEEP_COLUMN, ours)
    for method, seconds in paper.RUN_SECONDS.items():
        value = value_of(results, f"{BETA_SWEEP_COLUMN}/{method}", "seconds", lambda run: run.seconds, seconds, 0)
        add(f"{METHODS[method].label}: time, generation included", BETA_SWEEP_COLUMN, value, show_seconds)
    add("Full-Balance's time over FedEAS's", BETA_SWEEP_COLUMN, _ratio(results))
    return table


def _negative_gain(results: Results) -> Value:
    """Of Uniform's plan, which no run is needed for."""
    config = cell(f"{BETA_SWEEP_COLUMN}/uniform").config(results.scale, 1)
    counts = planned_counts(config, config.clients)
    ours = float(negative_gain_samples(counts, planned_allocation(config, counts)))
    comparable = results.scale == "full"
    return Value(
        f"{BETA_SWEEP_COLUMN}/uniform", "images of negative gain", (ours,), (), paper.NEGATIVE_GAIN, 0, comparable
    )


def _ratio(results: Results) -> Value:
    """How many times as long Full-Balance takes."""
    both = [results.of(f"{BETA_SWEEP_COLUMN}/{method}") for method in ("full-balance", "fedeas")]
    long, short = (sum(run.seconds for run in runs) / max(1, len(runs)) for runs in both)
    published = paper.RUN_SECONDS["full-balance"] / paper.RUN_SECONDS["fedeas"]
    ours = (long / short,) if long and short else ()
    seeds = tuple(run.seed for run in both[0]) if ours else ()
    return Value(
        f"{BETA_SWEEP_COLUMN}/full-balance", "time over FedEAS's", ours, seeds, published, 2, results.scale == "full"
    )


def _lead(results: Results, first: str, second: str, published: float) -> Value:
    ours, theirs = peak_of(results, first), peak_of(results, second)
    lead = () if ours.mean is None or theirs.mean is None else (ours.mean - theirs.mean,)
    return Value(first, "lead over Uniform, peak", lead, ours.seeds if lead else (), published, 2, ours.comparable)


def clean_table(results: Results) -> Table:
    """What the test set's leakage is worth, and what is to be had without a generator; not in the paper."""
    protocols = [word for name in ("paper", "clean") for word in (f"Protocol {name}, last-20 %", "Seeds")]
    table = Table(["Method", *protocols, "clean − paper", "Images"])
    for method in CLEAN:
        names = [f"{DEFAULT_COLUMN}/{method}", f"{DEFAULT_COLUMN}/{method}-clean"]
        leaky, clean = (last_20_of(results, name) for name in names)
        change = NONE if leaky.mean is None or clean.mean is None else signed(clean.mean - leaky.mean, 2)
        budgets = [budget_of(results, name) for name in names]
        images = "; ".join(map(show_budget, budgets)) if any(budgets) else NONE
        shown = [show_ours(leaky), show_seeds(leaky), show_ours(clean), show_seeds(clean)]
        table.add([METHODS[method].label, *shown, change, images], leaky, clean, *budgets)
    return table


SHARED_IMAGES_LABELS = {
    "no": "of each client's own",
    "by-class": "the same of a class on all clients",
    "one-seed": "one seed for all clients",
}

Describe = Callable[[RunConfig, str], str]
"""Writes a cell of a table from a variant's run-config and the end of its name."""


def variant_table(
    results: Results, rows: Iterable[tuple[str, str, str]], images: Describe, more: Mapping[str, Describe]
) -> Table:
    """List methods and their variants, each against the paper's number of the method itself.

    Parameters
    ----------
    results
        The runs that there are.
    rows
        Column, method and end of the variant's name.
    images
        Says which images a variant has.
    more
        Further columns, by their heads.
    """
    ours = ["Ours, last-20 %", "Seeds", "Difference"]
    table = Table(["Where", "Method", "Paper, last-20 %", "Images", *ours, *more])
    for place, method, end in rows:
        one = cell(f"{place}/{method}{end}")
        config, published = one.config(results.scale, 1), last_20_of(results, f"{place}/{method}").paper
        last = value_of(results, one.name, "last-20 %", lambda run: 100 * run.last_20, published)
        shown = ["" if end else show_paper(last), images(config, end)]
        shown += [show_ours(last), show_seeds(last), show_difference(last)]
        shown += [describe(config, end) for describe in more.values()]
        table.add([one.column.title(results.scale), METHODS[method].label, *shown], last, budget_of(results, one.name))
    return table


def shared_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """Whether clients have images of their own or the same ones; the paper does not say which it had."""
    return variant_table(
        results,
        variants(SHARED, columns),
        lambda config, _: SHARED_IMAGES_LABELS[config.shared_images],
        {
            "Different images": lambda config, _: (
                f"{count_distinct_images(config, planned_counts(config, config.clients)):,}"
            )
        },
    )


def drawn_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """Images of one generator drawn otherwise, at one budget; the paper does not say all of how its own were."""
    usual = "20 steps even in time, no guidance"
    return variant_table(
        results, variants(DRAWN, columns), lambda _, end: SAMPLER_VARIANTS[end][0] if end else usual, more={}
    )


def batches_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """What last batches of a few images do: BatchNorm makes steps many times the usual size of them."""
    ours = ["Ours, last-20 %", "Seeds", "Peak %", "Falls, by seed", "Deepest, points"]
    table = Table(["K", "α", "Method", "Last batches", *ours])
    for place, method, end in variants(BATCHED, columns):
        one = cell(f"{place}/{method}{end}")
        last, peak = last_20_of(results, one.name), peak_of(results, one.name)
        depths = [accuracy_drops(run.accuracies) for run in results.of(one.name)]
        counts = ", ".join(str(len(found)) for found in depths) or NONE
        deepest = max((depth for found in depths for depth in found.values()), default=None)
        config = one.config(results.scale, 1)
        label = METHODS[method].label + (f", β = {config.beta:g}" if "beta" in dict(one.method.keys) else "")
        depth = NONE if deepest is None else f"{100 * deepest:.1f}"
        which = [str(config.clients), f"{config.alpha:g}", label, f"from {config.min_batch} images"]
        table.add([*which, show_ours(last), show_seeds(last), show_ours(peak), counts, depth], last, peak)
    return table


def rule_table(results: Results) -> Table:
    """Other exponents and the exact minimiser of the paper's score, at FedEAS's total; not in the paper."""
    table = Table(["Rule", "β", "Images", "Imbalance removed", "Ours, last-20 %", "Seeds"])
    for method in RULES:
        one = cell(f"{DEFAULT_COLUMN}/{method}")
        config = one.config(results.scale, 1)
        counts = planned_counts(config, config.clients)
        plan = planned_allocation(config, counts)
        last, budget = last_20_of(results, one.name), budget_of(results, one.name)
        label = "FedEAS, γ = 0.5 (the paper's)" if method == "fedeas" else one.method.label
        beta = f"{config.beta:g}" if config.policy == "fedeas" else NONE
        images = show_budget(budget) if budget else f"{plan.sum():,} planned"
        share = f"{100 * removed(counts, plan):.1f} %"
        table.add([label, beta, images, share, show_ours(last), show_seeds(last)], last, budget)
    return table
