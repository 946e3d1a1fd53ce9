"""Rounds whose accuracy drops, counted over all runs: by last batches of two images, and by label imbalance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedeas_flwr.allocation import normalised_entropy
from fedeas_flwr.config import RunConfig
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.reproduce.cells import all_cells
from fedeas_flwr.reproduce.paper_comparison import NONE
from fedeas_flwr.reproduce.results import Measured, Results
from fedeas_flwr.reproduce.tables import Table
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import accuracy_drops

SHARES = (0.0, 0.05, 0.08, 0.12)
"""Bounds on the weight, in a round's mean, of the clients whose epochs end with a batch of two images."""
ENTROPIES = (0.75, 0.80, 0.85, 0.90)
"""Bounds on the normalised entropy of the labels that a round trains on."""
HEAVY = 0.3
"""Weight in a round's mean from which one client is a large part of the round."""
PLAIN = ("fedavg", "fedprox", "moon")
"""Methods without generated images whose rounds are counted."""


@dataclass(frozen=True)
class Round:
    """One round of one run, from the 11th on."""

    dropped: bool
    share_of_two: float
    """Weight of the clients whose epochs end with a batch of two images."""
    heaviest: float
    """Weight of the heaviest client."""
    entropy: float
    """Normalised entropy of the labels, real and generated, weighted as the clients' models are."""


def _rounds(run: Measured) -> Iterator[Round]:
    config, dropped = run.config, accuracy_drops(run.accuracies)
    counts = planned_counts(config, config.clients)
    held, real = counts + planned_allocation(config, counts), counts.sum(axis=1)
    labels, ends_with_two = held / held.sum(axis=1, keepdims=True), held.sum(axis=1) % config.batch_size == 2
    for record in RunDirectory(run.path).rounds()[10:]:
        clients = record["clients"]
        weights = real[clients] / real[clients].sum()
        parts = np.round(1e9 * weights @ labels[clients]).astype(np.int64)
        yield Round(
            record["round"] in dropped,
            float(weights[ends_with_two[clients]].sum()),
            float(weights.max()),
            float(normalised_entropy([parts])[0]),
        )


def drop_cells(columns: Sequence[str]) -> list[str]:
    """Name the cells whose rounds are counted: FedAvg, FedProx, MOON, and FedAvg with images of each client's own."""
    return [
        one.name
        for one in all_cells()
        if one.column.name in columns and (one.method.name in PLAIN or _generates(one.config("full", 1)))
    ]


def _generates(config: RunConfig) -> bool:
    return config.generates and config.strategy == "fedavg" and config.shared_images == "no" and config.min_batch == 2


def last_batch_table(results: Results, columns: Sequence[str]) -> Table:
    """Count drops of runs that generate, by the weight of clients whose epochs end with a batch of two images."""
    runs = [run for name in drop_cells(columns) for run in results.of(name) if run.config.generates]
    rounds = [one for run in runs for one in _rounds(run)]
    places = np.searchsorted(SHARES, [one.share_of_two for one in rounds])
    bounds = [f"{100 * share:.0f} %" for share in SHARES[1:]]
    names = ["no such client", *(f"up to {bound}" for bound in bounds), f"over {bounds[-1]}"]
    table = Table(["Weight of these clients in the round", f"Drops, of the rounds of {len(runs)} runs"])
    for place, name in enumerate(names):
        table.add([name, _counted([one for one, at in zip(rounds, places, strict=True) if at == place])])
    return table


def imbalance_table(results: Results, columns: Sequence[str]) -> Table:
    """Count drops in rounds without such a client, by the entropy of the round's labels."""
    runs = [run for name in drop_cells(columns) for run in results.of(name)]
    rounds = [(run.config.generates, one) for run in runs for one in _rounds(run) if not one.share_of_two]
    head = [
        "Normalised entropy of the labels",
        f"Nothing generated, no client of {100 * HEAVY:.0f} %",
        f"Nothing generated, one client of {100 * HEAVY:.0f} % or more",
        "Images generated",
    ]
    table = Table(head)
    for low, high in itertools.pairwise((0.0, *ENTROPIES, 1.01)):
        there = [(images, one) for images, one in rounds if low <= one.entropy < high]
        light, heavy = ([one for g, one in there if not g and (one.heaviest >= HEAVY) == big] for big in (False, True))
        name = f"{low:.2f} to {min(high, 1):.2f}"
        table.add([name, *map(_counted, (light, heavy, [one for images, one in there if images]))])
    return table


def _counted(rounds: Sequence[Round]) -> str:
    drops = sum(one.dropped for one in rounds)
    return f"{drops} of {len(rounds):,} ({100 * drops / len(rounds):.1f} %)" if rounds else NONE
