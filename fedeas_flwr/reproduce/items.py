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
    all_cells,
    column,
    matching,
    variant_names,
)
from fedeas_flwr.reproduce.results import Results, find_results
from fedeas_flwr.reproduce.tables import Table


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, or one of ours."""

    title: str
    caption: str
    names: Sequence[str] = ()
    """Cells that it needs, ``COLUMN/METHOD``."""
    table: Callable[[Results, Sequence[str]], Table] | None = None
    draw: str = ""
    """Name of the function in figures.py, for a figure."""
    in_smoke: bool = True
    """Whether ``all`` includes it at smoke scale, which must finish within minutes."""
    form: str = ""
    """For a table of Γ̂, the form of Γ̂ (`gamma-hat`) that its runs must have measured."""

    def cells(self, columns: Sequence[str]) -> list[str]:
        """Return the names of the cells that it needs in some columns."""
        return [name for name in self.names if name.partition("/")[0] in columns]


def _on(place: str, *methods: str) -> list[str]:
    return [f"{place}/{method}" for method in methods]


_CONVERGENCE = [*_on(BETA_SWEEP_COLUMN, "fedeas", "missing-only"), *_on(DEFAULT_COLUMN, "fedeas", "missing-only")]


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
        "Differences of last-20 accuracy in points. Not decided: the difference is less than two standard errors "
        "from 0; the standard deviation over seeds is taken to be at least 0.65 points. Agrees: within 2 points of the "
        "paper's difference. We chose the claims and thresholds after the runs.",
        claims.CELLS,
        claims.claims_table,
        in_smoke=False,
    ),
    "fig1": Item(
        "Fig. 1: how much, and where",
        "(a) The images that every client would need for full class balance (hatched) and its FedEAS budget (solid). "
        "(b) Last-20 accuracy without synthetic data, and with the same total placed by three policies.",
        _on(BETA_SWEEP_COLUMN, "fedavg", "uniform", "missing-only", "fedeas"),
        draw="draw_motivation",
    ),
    "fig2": Item(
        "Fig. 2: imbalance concentration and reduction",
        "(a) Cumulative share of the imbalance score and of the FedEAS budget, the most imbalanced clients first. (b) "
        "Imbalance removed as the total grows; waterfill is ours.",
        draw="draw_surrogate",
    ),
    "fig3": Item(
        "Fig. 3: the rule, on real counts",
        "Entropy and budget of every client, and where four policies put images at one client.",
        draw="draw_overview",
    ),
    "table1": Item(
        "Table 1: accuracy (%, last-20-round mean)",
        "One seed where no number of seeds is given. Bold and underlined: our best and second best of a complete "
        "column, excluding Full-Balance.",
        tables.large_cells(paper.COLUMNS),
        partial(_large, paper_comparison.last_20_of),
    ),
    "fig4": Item(
        "Fig. 4: convergence at matched budgets",
        "Mean over seeds, with their range shaded. Dotted lines mark where the threshold (dashed) is first reached.",
        _CONVERGENCE,
        draw="draw_convergence",
    ),
    "fig5": Item(
        "Fig. 5: budget sensitivity and selection",
        "(a) Last-20 accuracy as the total grows. (b) The values of β that remove at least half of the imbalance "
        "with at most a quarter of synthetic images.",
        _on(BETA_SWEEP_COLUMN, *tables.swept_methods("fedeas"), *tables.swept_methods("uniform")),
        draw="draw_sensitivity",
    ),
    "ablation": Item(
        "Table 2: budget-factor ablation",
        "Each row uses the β that gives the paper's total: 8, 6 and 0.6 at full scale.",
        _on(BETA_SWEEP_COLUMN, *paper.ABLATION),
        _fixed(tables.ablation_table),
    ),
    "text": Item(
        "Numbers of the text",
        "Rounds to the threshold (Fig. 4), the lead with another generator (4.2), FedEAS with SCAFFOLD (supplement, "
        "D), and time. The paper's times are from one RTX 4090. Ours exclude start-up; each run's config.json names "
        "its device.",
        [
            *_CONVERGENCE,
            *_on(BETA_SWEEP_COLUMN, "uniform", "full-balance"),
            "c10-k20-a0.3/fedeas+scaffold",
            *_on(BETA_SWEEP_COLUMN, "fedeas-sd-turbo", "uniform-sd-turbo"),
        ],
        _fixed(extra_tables.text_table),
    ),
    "gamma": Item(
        "Supplement, A: gradient dissimilarity Γ̂",
        "Median over all rounds. The paper's 1e-4 results if BatchNorm's step counters are treated as parameters.",
        _on(BETA_SWEEP_COLUMN, *paper.GAMMA_HAT),
        _fixed(tables.gamma_table),
        form="all-state",
    ),
    "closed-form": Item(
        "Supplement, B: the closed form h(r)",
        "The share of heterogeneity that remains between two clients with one class each, by generation ratio.",
        draw="draw_closed_form",
    ),
    "samples": Item(
        "Supplement, C: uncurated samples",
        "The first ten images of each class that the generator makes for client 0 with seed 1.",
        draw="draw_samples",
    ),
    "peak": Item(
        "Supplement, E: peak accuracy (%)",
        "Best of all rounds; one seed where no number of seeds is given.",
        tables.large_cells(paper.COLUMNS),
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
        "Protocol paper tests on images, 5/6 of which the generator has seen. Protocol clean tests on the official "
        "test set.",
        _on(DEFAULT_COLUMN, *CLEAN, *(f"{name}-clean" for name in CLEAN)),
        _fixed(extra_tables.clean_table),
        in_smoke=False,
    ),
    "shared": Item(
        "Beyond the paper: each client's own images, or the same images for all clients",
        "Budgets are exactly the same; the rows differ only in which images the clients share.",
        variant_names(SHARED),
        extra_tables.shared_table,
        in_smoke=False,
    ),
    "drawn": Item(
        "Beyond the paper: images sampled in other ways",
        "Steps uniform in log SNR keep the contrast that steps uniform in time lose. Guidance moves an image away from "
        "what the generator would make without a class. The paper cites guidance but gives no scale. Public code "
        "with the paper's generator settings uses a scale of 6 and a rescaling of 0.7 by default.",
        variant_names(DRAWN),
        extra_tables.drawn_table,
        in_smoke=False,
    ),
    "batches": Item(
        "Beyond the paper: small last batches",
        "An accuracy drop: a round after the tenth whose accuracy is more than 5 points below the median of the 13 "
        "rounds around it.",
        variant_names(BATCHED),
        extra_tables.batches_table,
        in_smoke=False,
    ),
    "last-batches": Item(
        "Beyond the paper: accuracy drops by last batches of two images",
        "Rounds from the 11th on, of runs that generate images for each client separately. A drop: accuracy is more "
        "than 5 points below the median of the 13 rounds around it.",
        drops.CELLS,
        drops.last_batch_table,
        in_smoke=False,
    ),
    "imbalanced-rounds": Item(
        "Beyond the paper: accuracy drops by the labels of a round",
        "Rounds without a last batch of two images. Labels are the real and generated labels of the round's "
        "clients, with the same weights as their models.",
        drops.CELLS,
        drops.imbalance_table,
        in_smoke=False,
    ),
    "rule": Item(
        "Beyond the paper: other exponents, and the least imbalance that a total can reach",
        "Every rule spends FedEAS's total, or the nearest smaller number that whole images allow.",
        _on(DEFAULT_COLUMN, *RULES),
        _fixed(extra_tables.rule_table),
        in_smoke=False,
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
    """Seeds to use instead of each cell's own; empty: use each cell's own."""
    more: Mapping[str, Any]
    """Run-config keys for all runs, such as `data-dir`."""

    def needed(self) -> list[Cell]:
        """Return all cells that are needed, most useful to run first."""
        names = {name for item in self.items for name in ITEMS[item].cells(self.columns)}
        names |= {one.name for one in self.cells}
        return [one for one in all_cells() if one.name in names and can_run(one, self.scale)]

    def find(self, folders: Sequence[Path]) -> Results:
        """Find the runs of all cells that are needed."""
        return find_results(self.needed(), self.scale, folders, self.more)

    def missing(self, results: Results) -> dict[str, list[int]]:
        """Return the seeds without a finished run for each cell, in the order in which to run them.

        For a table of Γ̂, only runs that measured the table's form of Γ̂ count.
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
    """Return whether a cell can be run at a scale; SD-Turbo cannot generate digits, which smoke scale uses."""
    return scale == "full" or not one.method.name.endswith("-sd-turbo")


def choose(
    words: Sequence[str],
    columns: Sequence[str],
    scale: str,
    seeds: Sequence[int] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Choice:
    """Return the choice that ``words`` name: items, ``all``, columns, or cells such as ``c10-k100-a0.1/*``.

    Raise `ConfigError` if a name is unknown, or has no cell in the columns or at the scale.
    """
    places = [column(word).name for word in (*columns, *words) if word in paper.COLUMNS or word in columns]
    chosen = tuple(place for place in paper.COLUMNS if place in places) or paper.COLUMNS
    items: list[str] = []
    cells: list[Cell] = []
    for word in (word for word in words if word not in paper.COLUMNS):
        if word == "all":
            items += [name for name in ITEMS if _concerns(name, chosen) and (scale == "full" or ITEMS[name].in_smoke)]
        elif word in ITEMS:
            if not _concerns(word, chosen):
                has = dict.fromkeys(name.partition("/")[0] for name in ITEMS[word].names)
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
            instead = f"add an item, such as table1, or give '{words[0]}/*' for its cells"
            raise ConfigError(f"'{words[0]}' is a column: {instead}")
        raise ConfigError("name what to reproduce: all, table1, fig2 … (see `fedeas reproduce --help`)")
    choice = Choice(tuple(dict.fromkeys(items)), tuple(dict.fromkeys(cells)), chosen, scale, tuple(seeds), more)
    for one in choice.needed():
        if taken := [key for key in one.own_keys() if key in more]:
            instead = "choose cells that do not set it (see --list)"
            raise ConfigError(f"--set {taken[0]}={more[taken[0]]}: {one.name} sets its own; {instead}")
    return choice


def _concerns(name: str, columns: Sequence[str]) -> bool:
    """Return whether an item shows any of these columns; True for an item without runs."""
    return not ITEMS[name].names or bool(ITEMS[name].cells(columns))


def _cells(word: str, columns: Sequence[str], scale: str) -> list[Cell]:
    """Return the cells of some columns that match a pattern; a pattern without a slash matches columns."""
    found = [one for one in matching(word if "/" in word else f"{word}/*") if one.column.name in columns]
    if not found:
        raise ConfigError(f"'{word}' has no cell in {', '.join(columns)}")
    if not any(can_run(one, scale) for one in found):
        raise ConfigError(f"'{word}' has no cell at scale {scale}: SD-Turbo cannot generate digits")
    return [one for one in found if can_run(one, scale)]
