"""The paper's comparisons as a table: claim, the paper's difference, ours, the seeds, a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, DEFAULT_COLUMN, column
from fedeas_flwr.reproduce.paper import COLUMNS
from fedeas_flwr.reproduce.paper_comparison import NONE, difference, last_20_of, show_seeds, signed
from fedeas_flwr.reproduce.results import Results, Value
from fedeas_flwr.reproduce.tables import Table

SEED_SD = 0.65
"""Smallest standard deviation of last-20 over seeds that a verdict assumes, in points: about the root mean square
(0.63) of the four policies of c10-k100-a0.1 that have three seeds. Other methods and columns may vary more."""
NEAR = 2.0
"""Points by which our difference may be off the paper's and still agree with it. Both numbers were chosen after the
runs."""

_POLICY_COLUMNS = (
    *("c10-k20-a0.05", BETA_SWEEP_COLUMN, "c10-k20-a0.3"),
    *("c10-k100-a0.05", DEFAULT_COLUMN, "c10-k100-a0.3", "c100-k100-a0.1"),
)
CLAIMS = (
    *(("FedEAS is above FedAvg", place, "fedeas", "fedavg") for place in (*_POLICY_COLUMNS, "c100-k20-a0.1")),
    *(("FedEAS is above Uniform at the same total", place, "fedeas", "uniform") for place in _POLICY_COLUMNS),
    *(("FedEAS is above Missing-only at the same total", place, "fedeas", "missing-only") for place in _POLICY_COLUMNS),
    ("Full-Balance is above FedEAS, for 17 times the images", BETA_SWEEP_COLUMN, "full-balance", "fedeas"),
    ("More images help: β = 20 is above β = 4", BETA_SWEEP_COLUMN, "fedeas-b20", "fedeas-b4"),
    ("The entropy factor helps", BETA_SWEEP_COLUMN, "fedeas-b8", "without-entropy"),
    ("The square root helps", BETA_SWEEP_COLUMN, "fedeas-b8", "linear"),
    ("SCAFFOLD is above FedAvg with 20 clients", BETA_SWEEP_COLUMN, "scaffold", "fedavg"),
    ("SCAFFOLD is below FedAvg at α = 0.05", "c10-k100-a0.05", "fedavg", "scaffold"),
)
"""Text, column, and the method whose last-20 accuracy is above that of the other."""
CELLS = list(dict.fromkeys(f"{place}/{method}" for _, place, *both in CLAIMS for method in both))


def claims_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """Return each claim with the paper's difference in points, ours, and whether ours agrees."""
    table = Table(["Claim", "Where", "Paper", "Ours", "Seeds", "Verdict"])
    for text, place, *both in CLAIMS:
        if place not in columns:
            continue
        above, below = (last_20_of(results, f"{place}/{method}") for method in both)
        published = None if above.paper is None or below.paper is None else above.paper - below.paper
        ours = difference(above, below)
        seeds = NONE if ours is None else f"{show_seeds(above)} vs {show_seeds(below)}"
        says = verdict(published if results.scale == "full" else None, ours, standard_error(above, below))
        table.add([text, column(place).title(results.scale), signed(published, 1), signed(ours, 1), seeds, says])
    return table


def standard_error(*values: Value) -> float:
    """Return the standard error of a difference of means over seeds, at least that of the assumed `SEED_SD`."""
    return math.sqrt(sum(max(value.sd or 0.0, SEED_SD) ** 2 / len(value.seeds) for value in values if value.seeds))


def verdict(published: float | None, ours: float | None, error: float) -> str:
    """Return how our difference compares with the paper's; within two standard errors of 0 nothing is decided."""
    if published is None or ours is None:
        return NONE if ours is not None else "to be run"
    if abs(ours) < 2 * error:
        return "not decided"
    if ours * published < 0:
        return "opposite"
    if abs(ours - published) <= NEAR:
        return "agrees"
    return "same sign, smaller" if abs(ours) < abs(published) else "same sign, larger"
