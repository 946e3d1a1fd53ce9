"""Every table and figure by name, and the cells it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.reproduce import claims, drops, extra_tables, paper, paper_comparison, tables
from fedeas_flwr.reproduce.cells import (
    BATCHED,
    BETA_SWEEP_COLUMN,
    CLEAN,
    DEFAULT_COLUMN,
    DRAWN,
    RULES,
    SHARED,
    Cell,
    Variants,
    all_cells,
    column,
    matching,
    variants,
)
from fedeas_flwr.reproduce.results import Results, find_results
from fedeas_flwr.reproduce.tables import Table


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, or one of ours."""

    title: str
    caption: str
    cells: Callable[[Sequence[str]], list[str]]
    table: Callable[[Results, Sequence[str]], Table] | None = None
    draw: str = ""
    """Name of the function in figures.py, for a figure."""
    only_by_name: bool = False
    """Whether ``all`` leaves it out at smoke scale, which must finish within minutes."""
    form: str = ""
    """Form of Γ̂ that its runs must have measured, for a table of Γ̂."""


def _with_variants(methods: Variants) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that names the cells of some columns and their variants."""
    return lambda columns: [f"{place}/{name}{end}" for place, name, end in variants(methods, columns)]


def _on(place: str, *methods: str) -> Callable[[Sequence[str]], list[str]]:
    names = [f"{place}/{method}" for method in methods]
    return lambda columns: names if place in columns else []


def _none(columns: Sequence[str]) -> list[str]:
    return []


def _convergence(columns: Sequence[str]) -> list[str]:
    return [
        f"{place}/{method}"
        for place in (BETA_SWEEP_COLUMN, DEFAULT_COLUMN)
        if place in columns
        for method in ("fedeas", "missing-only")
    ]


def _text(columns: Sequence[str]) -> list[str]:
    names = [*_convergence(columns), *_on(BETA_SWEEP_COLUMN, "uniform", "full-balance")(columns)]
    names += _on("c10-k20-a0.3", "fedeas+scaffold")(columns)
    return [*names, *_on(BETA_SWEEP_COLUMN, "fedeas-sd-turbo", "uniform-sd-turbo")(columns)]


def _large(of: tables.Of, results: Results, columns: Sequence[str]) -> Table:
    """Return several columns as the paper shows them, or one column in full."""
    if len(columns) == 1:
        return tables.column_table(results, columns[0])
    return tables.large_table(results, columns, of)


def _fixed(make: Callable[[Results], Table]) -> Callable[[Results, Sequence[str]], Table]:
    return lambda results, columns: make(results)


ITEMS: dict[str, Item] = {
    "claims": Item(
        "The paper's claims",
        "Differences of last-20 accuracy in points. Not decided: less than two standard errors from 0, with a standard "
        "deviation over seeds of at least 0.65 points. Agrees: within 2 points of the paper's difference. Claims and "
        "thresholds are our choice, made after the runs.",
        claims.claim_cells,
        claims.claims_table,
        only_by_name=True,
    ),
    "fig1": Item(
        "Fig. 1: how much, and where",
        "(a) The images that every client would need for full class balance (hatched) and its FedEAS budget (solid). "
        "(b) Last-20 accuracy without synthetic data and with one total in three places.",
        _on(BETA_SWEEP_COLUMN, "fedavg", "uniform", "missing-only", "fedeas"),
        draw="draw_motivation",
    ),
    "fig2": Item(
        "Fig. 2: imbalance concentration and reduction",
        "(a) Cumulative share of the imbalance score and of the FedEAS budget, the most imbalanced clients first. (b) "
        "Imbalance removed as the total grows; waterfill is ours.",
        _none,
        draw="draw_surrogate",
    ),
    "fig3": Item(
        "Fig. 3: the rule, on real counts",
        "Entropy and budget of every client, and where four policies put images at one client.",
        _none,
        draw="draw_overview",
    ),
    "table1": Item(
        "Table 1: accuracy (%, last-20-round mean)",
        "One seed where no number of seeds is given. Bold and underlined: our best and second best of a complete "
        "column, without Full-Balance.",
        tables.large_cells,
        partial(_large, paper_comparison.last_20_of),
    ),
    "fig4": Item(
        "Fig. 4: convergence at matched budgets",
        "Mean over seeds, their range shaded; dotted lines where the threshold (dashed) is first reached.",
        _convergence,
        draw="draw_convergence",
    ),
    "fig5": Item(
        "Fig. 5: budget sensitivity and selection",
        "(a) Last-20 accuracy as the total grows. (b) The β that remove half of the imbalance with a quarter of "
        "synthetic images.",
        _on(BETA_SWEEP_COLUMN, *tables.swept_methods("fedeas"), *tables.swept_methods("uniform")),
        draw="draw_sensitivity",
    ),
    "ablation": Item(
        "Table 2: budget-factor ablation",
        "The rows' β are those that give the paper's totals: 8, 6 and 0.6 at full scale.",
        _on(BETA_SWEEP_COLUMN, *paper.ABLATION),
        _fixed(tables.ablation_table),
    ),
    "text": Item(
        "Numbers of the text",
        "Rounds to the threshold (Fig. 4), the lead under another generator (4.2), FedEAS with SCAFFOLD (supplement, "
        "D), and time: the paper's on one RTX 4090, ours without starting up, on the device in each run's config.json.",
        _text,
        _fixed(extra_tables.text_table),
    ),
    "gamma": Item(
        "Supplement, A: gradient dissimilarity Γ̂",
        "Median over all rounds. The paper's 1e-4 comes out when BatchNorm's step counters count as parameters.",
        _on(BETA_SWEEP_COLUMN, *paper.GAMMA_HAT),
        _fixed(tables.gamma_table),
        form="all-state",
    ),
    "closed-form": Item(
        "Supplement, B: the closed form h(r)",
        "Two clients with one class each: the share of their heterogeneity that is left, by generation ratio.",
        _none,
        draw="draw_closed_form",
    ),
    "samples": Item(
        "Supplement, C: uncurated samples",
        "The first ten images of each class that the generator makes for client 0 with seed 1.",
        _none,
        draw="draw_samples",
    ),
    "peak": Item(
        "Supplement, E: peak accuracy (%)",
        "Best of all rounds; one seed where no number of seeds is given.",
        tables.large_cells,
        partial(_large, paper_comparison.peak_of),
    ),
    "beta": Item(
        "Supplement, F: β sweep with efficiency η",
        "η = ΔFedAvg (%) × 10³ / total. FedEAS and Uniform share their total at each β.",
        _on(BETA_SWEEP_COLUMN, *paper.BETA_SWEEP),
        _fixed(tables.beta_table),
    ),
    "clean": Item(
        "Beyond the paper: without leakage, and without a generator",
        "Protocol paper tests on images of which the generator has seen 5/6, protocol clean on the official test set.",
        _on(DEFAULT_COLUMN, *CLEAN, *(f"{name}-clean" for name in CLEAN)),
        _fixed(extra_tables.clean_table),
        only_by_name=True,
    ),
    "shared": Item(
        "Beyond the paper: images of each client's own, or the same for all clients",
        "Budgets are the same to the image; only the images that clients have in common differ.",
        _with_variants(SHARED),
        extra_tables.shared_table,
        only_by_name=True,
    ),
    "drawn": Item(
        "Beyond the paper: images sampled in other ways",
        "Steps uniform in log SNR keep the contrast that steps uniform in time lose. Guidance moves an image away from "
        "what the generator would make without a class. The paper cites it and gives no scale; public code with the "
        "paper's generator settings uses 6, rescaled by 0.7, by default.",
        _with_variants(DRAWN),
        extra_tables.drawn_table,
        only_by_name=True,
    ),
    "batches": Item(
        "Beyond the paper: last batches of a few images",
        "An accuracy drop: a round after the tenth that is more than 5 points below the median of the 13 around it.",
        _with_variants(BATCHED),
        extra_tables.batches_table,
        only_by_name=True,
    ),
    "last-batches": Item(
        "Beyond the paper: accuracy drops by last batches of two images",
        "Rounds from the 11th on of runs that generate, each client with images of its own. A drop: more than 5 points "
        "below the median of the 13 rounds around it.",
        drops.drop_cells,
        drops.last_batch_table,
        only_by_name=True,
    ),
    "imbalanced-rounds": Item(
        "Beyond the paper: accuracy drops by the labels of a round",
        "Rounds without a last batch of two images. The labels are those of the round's clients, real and generated, "
        "weighted as their models are.",
        drops.drop_cells,
        drops.imbalance_table,
        only_by_name=True,
    ),
    "rule": Item(
        "Beyond the paper: other exponents, and the least imbalance that a total can reach",
        "Every rule spends FedEAS's total, or as little less as whole images allow.",
        _on(DEFAULT_COLUMN, *RULES),
        _fixed(extra_tables.rule_table),
        only_by_name=True,
    ),
}
"""Items in the order of the paper and its supplement, then ours."""


@dataclass(frozen=True)
class Choice:
    """The items, cells, columns, scale and seeds of one command."""

    items: tuple[str, ...]
    cells: tuple[Cell, ...]
    """Cells given by name."""
    columns: tuple[str, ...]
    scale: str
    seeds: tuple[int, ...]
    """Seeds that replace each cell's own; empty: each cell's own."""
    more: Mapping[str, Any]
    """Keys of all runs, such as where the data is."""

    def needed(self) -> list[Cell]:
        """Return all cells that are needed, most useful to run first."""
        names = {name for item in self.items for name in ITEMS[item].cells(self.columns)}
        names |= {one.name for one in self.cells}
        return [one for one in all_cells() if one.name in names and can_run(one, self.scale)]

    def find(self, folders: Sequence[Path]) -> Results:
        """Find the runs of all cells that are needed."""
        return find_results(self.needed(), self.scale, folders, self.more)

    def missing(self, results: Results) -> dict[str, list[int]]:
        """Return cell → seeds without a finished run, in the order in which to run them.

        For a table of Γ̂, runs with another form of it do not count.
        """
        about = [ITEMS[item] for item in self.items if ITEMS[item].form]
        forms = {name: self.more.get("gamma-hat", item.form) for item in about for name in item.cells(self.columns)}
        left = {}
        for one in self.needed():
            there = {run.seed for run in results.of(one.name, forms.get(one.name, ""))}
            if absent := [seed for seed in self.seeds or one.seeds(self.scale) if seed not in there]:
                left[one.name] = absent
        return left


def can_run(one: Cell, scale: str) -> bool:
    """Return whether a cell can be run at a scale; SD-Turbo makes no digits."""
    return scale == "full" or not one.method.name.endswith("-sd-turbo")


def choose(
    words: Sequence[str],
    columns: Sequence[str],
    scale: str,
    seeds: Sequence[int] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Choice:
    """Read names of items, ``all``, columns, or cells such as ``c10-k100-a0.1/*``.

    Raises
    ------
    ConfigError
        One line for an unknown name, or one that has nothing in the columns or at the scale.
    """
    places = [column(word).name for word in (*columns, *words) if word in paper.COLUMNS or word in columns]
    chosen = tuple(place for place in paper.COLUMNS if place in places) or paper.COLUMNS
    items: list[str] = []
    cells: list[Cell] = []
    for word in (word for word in words if word not in paper.COLUMNS):
        if word == "all":
            items += [
                name for name in ITEMS if _concerns(name, chosen) and (scale == "full" or not ITEMS[name].only_by_name)
            ]
        elif word in ITEMS:
            if not _concerns(word, chosen):
                has = dict.fromkeys(name.partition("/")[0] for name in ITEMS[word].cells(paper.COLUMNS))
                raise ConfigError(f"'{word}' has nothing in {', '.join(chosen)}, only in {', '.join(has)}")
            items.append(word)
        elif word == "table2":  # the former name of `peak`; the paper's Table 2 is `ablation`
            raise ConfigError("'table2': say ablation (the paper's Table 2) or peak (supplement, E)")
        elif "/" in word or "*" in word:
            cells += _cells(word, chosen, scale)
        else:
            raise ConfigError(f"'{word}': must be all, {', '.join(ITEMS)}, or cells such as '{DEFAULT_COLUMN}/*'")
    if not items and not cells:
        if words:
            raise ConfigError(
                f"'{words[0]}' is a column: say what of it, such as table1, or '{words[0]}/*' for its cells"
            )
        raise ConfigError("say what: `fedeas reproduce all`, or table1, fig2 … (`fedeas reproduce --help`)")
    choice = Choice(tuple(dict.fromkeys(items)), tuple(dict.fromkeys(cells)), chosen, scale, tuple(seeds), more)
    for one in choice.needed():
        if taken := [key for key in one.own_keys() if key in more]:
            instead = "choose cells, which --list names"
            raise ConfigError(f"--set {taken[0]}={more[taken[0]]}: {one.name} sets its own; {instead}")
    return choice


def _concerns(name: str, columns: Sequence[str]) -> bool:
    """Return whether an item shows anything of some columns; an item without runs always does."""
    return not ITEMS[name].cells(paper.COLUMNS) or bool(ITEMS[name].cells(columns))


def _cells(word: str, columns: Sequence[str], scale: str) -> list[Cell]:
    """Return the cells of some columns that match a pattern; a pattern without a slash matches columns."""
    found = [one for one in matching(word if "/" in word else f"{word}/*") if one.column.name in columns]
    if not found:
        raise ConfigError(f"'{word}' has no cell in {', '.join(columns)}")
    if not any(can_run(one, scale) for one in found):
        raise ConfigError(f"'{word}' has no cell at scale {scale}: SD-Turbo makes no digits")
    return [one for one in found if can_run(one, scale)]
