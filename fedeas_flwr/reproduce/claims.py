"""The paper's comparisons as a table: claim, the paper's difference, ours, the seeds, a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedeas_flwr.reproduce.cells import BETA_SWEEP_COLUMN, DEFAULT_COLUMN, column
from fedeas_flwr.reproduce.paper import COLUMNS
from fedeas_flwr.reproduce.paper_comparison import NONE, last_20_of, show_seeds, signed
from fedeas_flwr.reproduce.results import Results, Value
from fedeas_flwr.reproduce.tables import Table

SEED_SD = 0.65
"""Least standard deviation of last-20 over seeds that is assumed, in points: about the root mean square (0.63) of the
four policies of c10-k100-a0.1 that have three seeds. Other methods and columns may vary more; MOON does."""
NEAR = 2.0
"""Points by which our difference may be off the paper's and still agree with it. Chosen, as `SEED_SD`, after the
runs."""


@dataclass(frozen=True)
class Claim:
    """That one cell of a column has a higher last-20 accuracy than another."""

    text: str
    place: str
    above: str
    below: str


_OTHER_COLUMNS = (BETA_SWEEP_COLUMN, "c10-k100-a0.05", DEFAULT_COLUMN, "c10-k100-a0.3", "c100-k100-a0.1")
CLAIMS = (
    *(Claim("FedEAS is above FedAvg", place, "fedeas", "fedavg") for place in _OTHER_COLUMNS),
    *(Claim("FedEAS is above Uniform at the same total", place, "fedeas", "uniform") for place in _OTHER_COLUMNS),
    *(
        Claim("FedEAS is above Missing-only at the same total", place, "fedeas", "missing-only")
        for place in _OTHER_COLUMNS
    ),
    Claim("Full-Balance is above FedEAS, for 17 times the images", BETA_SWEEP_COLUMN, "full-balance", "fedeas"),
    Claim("More images help: β = 20 is above β = 4", BETA_SWEEP_COLUMN, "fedeas-b20", "fedeas-b4"),
    Claim("The entropy factor helps", BETA_SWEEP_COLUMN, "fedeas-b8", "without-entropy"),
    Claim("The square root helps", BETA_SWEEP_COLUMN, "fedeas-b8", "linear"),
    Claim("SCAFFOLD is above FedAvg with 20 clients", BETA_SWEEP_COLUMN, "scaffold", "fedavg"),
    Claim("SCAFFOLD is below FedAvg at α = 0.05", "c10-k100-a0.05", "fedavg", "scaffold"),
)


def claim_cells(columns: Sequence[str]) -> list[str]:
    """Name the cells that the claims compare."""
    return list(dict.fromkeys(f"{c.place}/{m}" for c in CLAIMS if c.place in columns for m in (c.above, c.below)))


def claims_table(results: Results, columns: Sequence[str] = COLUMNS) -> Table:
    """List each claim with the paper's difference in points, ours, and whether ours agrees."""
    table = Table(["Claim", "Where", "Paper", "Ours", "Seeds", "Verdict"])
    for claim in (claim for claim in CLAIMS if claim.place in columns):
        above, below = (last_20_of(results, f"{claim.place}/{method}") for method in (claim.above, claim.below))
        published = None if above.paper is None or below.paper is None else above.paper - below.paper
        ours = None if above.mean is None or below.mean is None else above.mean - below.mean
        seeds = NONE if ours is None else f"{show_seeds(above)} vs {show_seeds(below)}"
        shown = [NONE if number is None else signed(number, 1) for number in (published, ours)]
        comparable = published if results.scale == "full" else None
        table.add(
            [
                claim.text,
                column(claim.place).title(results.scale),
                *shown,
                seeds,
                verdict(comparable, ours, standard_error(above, below)),
            ]
        )
    return table


def standard_error(first: Value, second: Value) -> float:
    """Return the standard error of a difference of two means over seeds, at least that of the assumed `SEED_SD`."""
    return math.sqrt(
        sum(max(value.sd or 0.0, SEED_SD) ** 2 / len(value.seeds) for value in (first, second) if value.seeds)
    )


def verdict(published: float | None, ours: float | None, error: float) -> str:
    """Say how our difference stands to the paper's; within two standard errors of 0 it decides nothing."""
    if published is None or ours is None:
        return NONE if ours is not None else "to be run"
    if abs(ours) < 2 * error:
        return "not decided"
    if ours * published < 0:
        return "opposite"
    if abs(ours - published) <= NEAR:
        return "agrees"
    return "same sign, smaller" if abs(ours) < abs(published) else "same sign, larger"
