"""Find the runs of each cell by their configs, not by folder names, and read their measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.text import MAX_LINE, one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.config_keys import identity
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.reproduce.cells import Cell
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import find_runs, invalid_rounds_as_run_error
from fedeas_flwr.runs.metrics import WALL_CLOCK, rounds_to_threshold, summarise

FREE_KEYS = (
    "seed",
    "data-dir",
    "precision",
    "engine",
    "generation-batch",
    "generation-precision",
    "gamma-hat",
    "threshold",
    "min-replies",
)
"""Keys that may differ between runs of one cell: the seed, how they ran, their precision and what they measured."""


def experiment_key(config: RunConfig) -> dict[str, Any]:
    """Return the keys and values that define an experiment; runs with equal ones belong to the same cell.

    Keys of `FREE_KEYS` and unused keys are left out. Folder names differ between machines, so paths are replaced:
    ``weights`` and ``generator-training.start`` by whether any are given, ``generator`` by its kind.
    """
    values = identity(config, FREE_KEYS)
    values["weights"] = "none" if config.weights == "none" else "given"
    if "generator" in values:
        spec = config.generator_spec
        values["generator"] = "diffusion" if spec.is_diffusion else spec.kind
    if "generator-training.start" in values:
        values["generator-training.start"] = "given" if config.generator_training.start else ""
    return values


@dataclass(frozen=True)
class Measured:
    """A finished run and its measurements."""

    path: Path
    config: RunConfig
    accuracies: list[float]
    """Test accuracy after every round, from 0 to 1."""
    last_20: float
    peak: float
    images: int
    gamma_hat: float | None
    seconds: float
    """Seconds of clients, aggregation and evaluation, excluding start-up."""
    clients: frozenset[int]
    """Clients that trained, and therefore generated, at least once."""

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return self.config.seed

    def first_round_at(self, threshold: float) -> int | None:
        """Return the first round (from 1) whose accuracy reached the threshold; None if none did."""
        return rounds_to_threshold(self.accuracies, threshold)

    def planned_images(self) -> int:
        """Return the number of images that the policy plans for the clients that took part."""
        plan = planned_allocation(self.config, planned_counts(self.config))
        return int(plan[sorted(self.clients)].sum())


def measure(run: RunDirectory, config: RunConfig) -> Measured:
    """Return the measurements of a finished run."""
    rounds = run.checked_rounds()
    with invalid_rounds_as_run_error(run):
        summary = summarise(rounds, config.threshold)
        spent = summary["seconds"]
        return Measured(
            path=run.path,
            config=config,
            accuracies=[float(record["accuracy"]) for record in rounds],
            last_20=summary["last_20"],
            peak=summary["peak"],
            images=summary["total_generated"],
            gamma_hat=summary["gamma_hat"],
            seconds=float(sum(spent.get(phase, 0.0) for phase in WALL_CLOCK)),
            clients=frozenset(_client(one, config) for record in rounds for one in record["clients"]),
        )


def _client(number: Any, config: RunConfig) -> int:
    """Return a client's number if the run has such a client, or raise ValueError."""
    if type(number) is not int or not 0 <= number < config.clients:
        raise ValueError(f"client {number!r}: must be from 0 to {config.clients - 1}")
    return number


@dataclass(frozen=True)
class Results:
    """The runs of every cell, and those that could not be used."""

    scale: str
    cells: dict[str, list[Measured]]
    """Finished runs of each cell, by the cell's name and sorted by seed; one per seed and form of Γ̂."""
    repeated: list[Path] = field(default_factory=list)
    """Runs left out: an earlier run has the same seed and form of Γ̂, but other accuracies. Copies are not listed."""
    unreadable: list[str] = field(default_factory=list)

    def of(self, name: str, form: str = "") -> list[Measured]:
        """Return the first run found for each seed of a cell; with ``form``, consider only runs with that form of Γ̂."""
        first: dict[int, Measured] = {}
        for run in self.cells.get(name, ()):
            if form in ("", run.config.gamma_hat):
                first.setdefault(run.seed, run)
        return list(first.values())


def find_results(cells: Sequence[Cell], scale: str, folders: Sequence[Path], more: Mapping[str, Any]) -> Results:
    """Return the finished runs of some cells, found in folders.

    Of two runs with the same seed and form of Γ̂, the first one found counts. Of ``more``, run-config keys for all runs,
    those in `experiment_key` must also match.
    """
    wanted = {frozenset(experiment_key(one.config(scale, 1, more)).items()): one.name for one in cells}
    found: dict[str, dict[tuple[int, str], Measured]] = {one.name: {} for one in cells}
    repeated: list[Path] = []
    unreadable: list[str] = []
    for run in find_runs([folder for folder in folders if folder.exists()], unreadable=unreadable):
        try:
            config = run.config()
            name = wanted.get(frozenset(experiment_key(config).items()))
            if name is None or run.state() != "finished":
                continue
            measured = measure(run, config)
            if len(measured.accuracies) != config.rounds:
                continue
        except RunError as error:
            unreadable.append(f"{run.path}: {one_line(error, MAX_LINE)}")
            continue
        first = found[name].setdefault((config.seed, config.gamma_hat), measured)
        if first.accuracies != measured.accuracies:
            repeated.append(run.path)
    by_seed = {name: sorted(runs.values(), key=lambda run: run.seed) for name, runs in found.items()}
    return Results(scale, by_seed, repeated, unreadable)


@dataclass(frozen=True)
class Value:
    """One number of the paper, and ours for every seed."""

    cell: str
    measure: str
    ours: tuple[float, ...]
    """One per seed."""
    seeds: tuple[int, ...]
    paper: float | None
    digits: int = 2
    comparable: bool = True
    """Whether the paper's number belongs to the same experiment; at smoke scale it does not."""

    @property
    def mean(self) -> float | None:
        """Return the mean over the seeds."""
        return statistics.fmean(self.ours) if self.ours else None

    @property
    def sd(self) -> float | None:
        """Return the sample standard deviation (n − 1); None with fewer than two seeds."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        """Return ours minus the paper's, None if the two cannot be compared."""
        if self.mean is None or self.paper is None or not self.comparable:
            return None
        return self.mean - self.paper

    def as_json(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON."""
        return {
            "cell": self.cell,
            "measure": self.measure,
            "ours": self.mean,
            "sd": self.sd,
            "seeds": list(self.seeds),
            "paper": self.paper,
            "difference": self.difference,
        }


@dataclass(frozen=True)
class Budget:
    """The number of images that a cell's runs generated, and the number that they should have generated."""

    cell: str
    images: tuple[int, ...]
    """One per seed."""
    wanted: int
    by: str
    """Where ``wanted`` comes from: "paper", or "plan" (made from label counts)."""

    @property
    def met(self) -> bool:
        """Return whether every run generated exactly ``wanted`` images."""
        return all(images == self.wanted for images in self.images)
