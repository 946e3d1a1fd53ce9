"""Rounds whose accuracy drops, counted over all runs: by last batches of two images, and by label imbalance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from fedeas_flwr.allocation import FloatArray, normalised_entropy
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.policies.interface import PolicySettings
from fedeas_flwr.policies.registry import POLICIES
from fedeas_flwr.reproduce.cells import FULL, Method, all_cells
from fedeas_flwr.reproduce.paper_comparison import NONE
from fedeas_flwr.reproduce.results import Measured, Results
from fedeas_flwr.reproduce.tables import Table
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import accuracy_drops

SHARES = (0.0, 0.05, 0.08, 0.12)
"""Bounds on the weight, in a round's mean, of the clients whose epochs end with a batch of two images."""
ENTROPIES = (0.0, 0.75, 0.80, 0.85, 0.90, 1.01)
"""Bounds on the normalised entropy of the labels that a round trains on."""
HEAVY = 0.3
"""Weight in a round's mean from which one client counts as a large part of the round."""


def _is_counted(method: Method) -> bool:
    """Return whether a method is FedAvg, FedProx, MOON, or FedAvg where each client generates images of its own."""
    if method.name in ("fedavg", "fedprox", "moon"):
        return True
    changes = {"strategy", "shared-images", "min-batch"} & method.keys.keys()
    return not changes and POLICIES[method.keys["policy"]].generates(PolicySettings(FULL["beta"]))


CELLS = [one.name for one in all_cells() if _is_counted(one.method)]
"""Cells whose rounds are counted."""


def _rounds(runs: Sequence[Measured]) -> FloatArray:
    """Return a row per round from the 11th on.

    Columns: whether its accuracy dropped, the weight of clients whose epochs end with a batch of two images, the weight
    of the heaviest client, the entropy of the labels (real and generated, weighted as the models), and whether the run
    generates.
    """
    rows = []
    for run in runs:
        config, dropped = run.config, accuracy_drops(run.accuracies)
        counts = planned_counts(config)
        held, real = counts + planned_allocation(config, counts), counts.sum(axis=1)
        sizes = held.sum(axis=1)
        labels, ends_with_two = held / sizes[:, None], sizes % config.batch_size == 2
        for record in RunDirectory(run.path).rounds()[10:]:
            if not (clients := record["clients"]):  # a failed round
                continue
            weights = real[clients] / real[clients].sum()
            parts = np.round(1e9 * weights @ labels[clients]).astype(np.int64)
            share, entropy = weights[ends_with_two[clients]].sum(), normalised_entropy([parts])[0]
            rows.append((record["round"] in dropped, share, weights.max(), entropy, config.generates))
    return np.array(rows, dtype=np.float64).reshape(-1, 5)


def _runs(results: Results, columns: Sequence[str]) -> list[Measured]:
    return [run for name in CELLS if name.partition("/")[0] in columns for run in results.of(name)]


def last_batch_table(results: Results, columns: Sequence[str]) -> Table:
    """Count drops of runs that generate, by the weight of clients whose epochs end with a batch of two images."""
    runs = [run for run in _runs(results, columns) if run.config.generates]
    dropped, share, *_ = _rounds(runs).T
    places = np.searchsorted(SHARES, share)
    bounds = [f"{100 * bound:.0f} %" for bound in SHARES[1:]]
    table = Table(["Weight of these clients in the round", f"Drops, of the rounds of {len(runs)} runs"])
    for place, name in enumerate(("no such client", *(f"up to {bound}" for bound in bounds), f"over {bounds[-1]}")):
        table.add([name, _counted(dropped[places == place])])
    return table


def imbalance_table(results: Results, columns: Sequence[str]) -> Table:
    """Count drops in rounds without such a client, by the entropy of the round's labels."""
    rounds = _rounds(_runs(results, columns))
    dropped, _, heaviest, entropy, generates = rounds[rounds[:, 1] == 0].T
    groups = {
        f"Nothing generated, no client of {100 * HEAVY:.0f} %": (generates == 0) & (heaviest < HEAVY),
        f"Nothing generated, one client of {100 * HEAVY:.0f} % or more": (generates == 0) & (heaviest >= HEAVY),
        "Images generated": generates == 1,
    }
    table = Table(["Normalised entropy of the labels", *groups])
    for low, high in itertools.pairwise(ENTROPIES):
        there = (low <= entropy) & (entropy < high)
        name = f"{low:.2f} to {min(high, 1):.2f}"
        table.add([name, *(_counted(dropped[there & group]) for group in groups.values())])
    return table


def _counted(dropped: FloatArray) -> str:
    drops, rounds = int(dropped.sum()), len(dropped)
    return f"{drops} of {rounds:,} ({100 * drops / rounds:.1f} %)" if rounds else NONE
