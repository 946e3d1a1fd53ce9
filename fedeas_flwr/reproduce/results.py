"""The runs of a cell, whatever their folders are called, and what they measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.config_keys import identity
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.reproduce.cells import Cell
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import find_runs, invalid_rounds_as_run_error
from fedeas_flwr.runs.metrics import WALL_CLOCK, rounds_to_threshold, seconds_of, summarise

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
"""Keys in which runs of one cell may differ: where and how exactly it was computed, and what was looked at besides."""


def experiment_key(config: RunConfig) -> dict[str, Any]:
    """Give the keys that decide what an experiment is, each in one form: equal meanings are the same cell.

    Left out are the keys of `FREE_KEYS` and those that are not in use. A path says no more than that there is a start
    or a diffusion model, since folders have other names elsewhere.
    """
    values = identity(config, FREE_KEYS)
    values["weights"] = "none" if config.weights == "none" else "given"
    if "generator" in values:
        kind = config.generator.partition(":")[0]
        values["generator"] = kind if kind in ("sd-turbo", "bank") else "diffusion"
    return values


# ---------------------------------------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Measured:
    """A finished run and what it came to."""

    path: Path
    config: RunConfig
    accuracies: list[float]
    """After every round, from 0 to 1."""
    last_20: float
    peak: float
    images: int
    gamma_hat: float | None
    seconds: float
    """On clients, merging and testing; without starting up."""
    clients: frozenset[int]
    """Those that trained at least once, and hence generated."""

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    def first_round_at(self, threshold: float) -> int | None:
        """The first round (from 1) that reached an accuracy."""
        return rounds_to_threshold(self.accuracies, threshold)

    def planned_images(self) -> int:
        """What the policy allots to the clients that took part, from label counts."""
        plan = planned_allocation(self.config, planned_counts(self.config, self.config.clients))
        return int(plan[sorted(self.clients)].sum())


def measure(run: RunDirectory, config: RunConfig) -> Measured:
    """Work a finished run's rounds out."""
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
            seconds=float(sum(seconds_of(phase, spent) for phase in WALL_CLOCK)),
            clients=frozenset(_client(one, config) for record in rounds for one in record["clients"]),
        )


def _client(number: Any, config: RunConfig) -> int:
    """One that the run's plan has."""
    if type(number) is not int or not 0 <= number < config.clients:
        raise ValueError(f"client {number!r}: must be from 0 to {config.clients - 1}")
    return number


# --------------------------------------------------------------------------------------------------------- all runs


@dataclass(frozen=True)
class Results:
    """What there is of every cell, and what could not be used."""

    scale: str
    cells: dict[str, list[Measured]]
    """Cell's name → its finished runs by seed, one for each form of Γ̂."""
    doubles: list[Path] = field(default_factory=list)
    """Runs of a seed and a form of Γ̂ that another run has already, with other accuracies: not its copies."""
    unreadable: list[str] = field(default_factory=list)

    def of(self, name: str, form: str = "") -> list[Measured]:
        """The runs of a cell, one a seed, perhaps none: the first found, or that of a form of Γ̂."""
        first: dict[int, Measured] = {}
        for run in self.cells.get(name, ()):
            if form in ("", run.config.gamma_hat):
                first.setdefault(run.seed, run)
        return list(first.values())


def find_results(cells: Sequence[Cell], scale: str, folders: Sequence[Path], more: Mapping[str, Any]) -> Results:
    """Look through folders for the finished runs of some cells.

    Parameters
    ----------
    cells
        What is looked for.
    scale
        Of the cells.
    folders
        Where to look; of two runs of one seed, and one form of Γ̂, the first found counts.
    more
        Keys that hold for all runs; those that change what a cell means are looked for too.
    """
    wanted: dict[tuple[tuple[str, Any], ...], str] = {}
    for one in cells:
        wanted[_key(experiment_key(one.config(scale, 1, more)))] = one.name
    found: dict[str, dict[tuple[int, str], Measured]] = {one.name: {} for one in cells}
    doubles: list[Path] = []
    unreadable: list[str] = []
    for run in find_runs([folder for folder in folders if folder.exists()], unreadable=unreadable):
        try:
            config = run.config()
            name = wanted.get(_key(experiment_key(config)))
            if name is None or run.state() != "finished":
                continue
            measured = measure(run, config)
            if len(measured.accuracies) != config.rounds:
                continue
        except RunError as error:
            unreadable.append(f"{run.path}: {one_line(error, None)}")
            continue
        first = found[name].setdefault((config.seed, config.gamma_hat), measured)
        if first.accuracies != measured.accuracies:
            doubles.append(run.path)
    by_seed = {name: sorted(runs.values(), key=lambda run: run.seed) for name, runs in found.items()}
    return Results(scale, by_seed, doubles, unreadable)


def _key(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


# ---------------------------------------------------------------------------------------------- mean and deviation


@dataclass(frozen=True)
class Value:
    """One number of the paper, and ours."""

    cell: str
    measure: str
    ours: tuple[float, ...]
    """One a seed."""
    seeds: tuple[int, ...]
    paper: float | None
    digits: int = 2
    comparable: bool = True
    """Whether the paper's number is of the same experiment; at smoke scale it is not."""

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.fmean(self.ours) if self.ours else None

    @property
    def sd(self) -> float | None:
        """The sample's deviation (n − 1); one seed has none."""
        return statistics.stdev(self.ours) if len(self.ours) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        if self.mean is None or self.paper is None or not self.comparable:
            return None
        return self.mean - self.paper

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
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
    """Whether a cell's runs generated what they should have."""

    cell: str
    images: tuple[int, ...]
    """One a seed."""
    wanted: int
    by: str
    """Who says so: the paper, or the plan made from label counts."""

    @property
    def met(self) -> bool:
        """Whether every run generated exactly that."""
        return all(images == self.wanted for images in self.images)


def check_budget(name: str, runs: Sequence[Measured], published: int | None) -> Budget | None:
    """Hold the images of a cell's runs against the paper's total, or else against the plan; None without runs."""
    if not runs:
        return None
    images = tuple(run.images for run in runs)
    if published is not None:
        return Budget(name, images, published, "paper")
    planned = {run.planned_images() for run in runs}
    return Budget(name, images, int(np.max(list(planned))), "plan")
