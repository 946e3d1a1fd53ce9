"""The audit of one generator: tests on all images, and the same per class and per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedeas_flwr.common.randomness import stream
from fedeas_flwr.data.datasets import Labels
from fedeas_flwr.generators.audit.membership import ATTACKS, membership_errors
from fedeas_flwr.generators.audit.neighbours import (
    LabelledImages,
    Neighbours,
    find_neighbours,
    match_classes,
    member_preference,
)
from fedeas_flwr.generators.audit.statistics import Floats, auc, joint_confidence, true_positives

Pair = tuple[Labels, Labels]
"""Positions of the members and of the non-members that a test compares."""


class Audit:
    """Compares a generator's samples, and its model if there is one, with members and non-members.

    Members are images that the generator was trained on. Every test compares as many members as non-members of each
    class, drawn at random; classes without ``samples`` are left out. ``clients`` are the positions of each client's
    members. With ``mirrored``, an image and its mirror image count as one. ``seed`` determines which images are
    compared, the noise of the attacks and the resampling.
    """

    def __init__(
        self,
        samples: LabelledImages,
        members: LabelledImages,
        non_members: LabelledImages,
        *,
        clients: Sequence[Labels] = (),
        mirrored: bool = False,
        seed: int = 0,
    ) -> None:
        self.samples, self.sides = samples, (members, non_members)
        self._mirrored, self._seed = mirrored, seed
        self._errors: dict[str, tuple[Floats, Floats]] = {}
        pairs, sampled = [], np.isin(members.labels, samples.labels)
        for number, given in enumerate((np.arange(len(members.labels)), *clients)):
            own = given[sampled[given]]
            mine, others = match_classes(members.labels[own], non_members.labels, stream(seed, "audit images", number))
            pairs.append((own[mine], others))
        self._all, self._clients = pairs[0], pairs[1:]

    def attack(self, model: Path, num_classes: int, device: str = "cpu") -> None:
        """Apply the attacks of membership.py to a diffusion model in a folder; `results` then includes them."""
        used = [np.unique(np.concatenate(rows)) for rows in zip(self._all, *self._clients, strict=True)]
        both = [side.at(rows) for side, rows in zip(self.sides, used, strict=True)]
        images, labels = (np.concatenate(parts) for parts in zip(*both, strict=True))
        for name, values in membership_errors(model, images, labels, num_classes, self._seed, device).items():
            found = [np.full(len(side.labels), np.nan) for side in self.sides]
            found[0][used[0]], found[1][used[1]] = np.split(values, [len(used[0])])
            self._errors[name] = found[0], found[1]

    def results(self, classes: Sequence[str]) -> dict[str, Any]:
        """Return all tests as plain values.

        The intervals of ``tests`` hold together with 95 %, as do those of ``classes`` and those of ``clients``. The
        intervals of ``auc_by_timestep`` hold one by one, and ``detected`` ignores them.
        """
        attacks = ATTACKS if self._errors else ()
        confidence = joint_confidence(1 + 2 * len(attacks))
        found = self._row(self._all, confidence)
        for number, attack in enumerate(attacks):
            random = stream(self._seed, "audit resampling", number)
            rates = true_positives(*self._errors_of(attack, self._all), random, confidence)
            found["tests"][f"{attack}_true_positives"] = rates | {"detected": rates["p"] < (1 - confidence) / 2}
        members, non_members = (side.labels[rows] for side, rows in zip(self.sides, self._all, strict=True))
        by_class = {
            name: (self._all[0][members == label], self._all[1][non_members == label])
            for label, name in enumerate(classes)
        }
        single = [name for name in self._errors if name not in ATTACKS]
        tables = {
            "classes": self._table(by_class),
            "clients": self._table({str(number): pair for number, pair in enumerate(self._clients)}),
        }
        rows = [found, *tables["classes"], *tables["clients"]]
        return {
            "detected": any(test["detected"] for row in rows for test in row["tests"].values()),
            **found,
            "auc_by_timestep": {name: auc(*self._errors_of(name, self._all))._asdict() for name in single},
            **tables,
        }

    def neighbours(self, pair: Pair | None = None) -> tuple[Labels, Neighbours]:
        """Return the samples of the classes of a pair, default all, and their neighbours, both by position."""
        pair = pair or self._all
        known = np.flatnonzero(np.isin(self.samples.labels, self.sides[0].labels[pair[0]]))
        members, non_members = (side.at(rows) for side, rows in zip(self.sides, pair, strict=True))
        found = find_neighbours(self.samples.at(known), members, non_members, self._mirrored)
        positions = np.stack([rows[place] for rows, place in zip(pair, found.positions, strict=True)])
        return known, Neighbours(positions, found.distances)

    def _table(self, pairs: Mapping[str, Pair]) -> list[dict[str, Any]]:
        """Return a row for each pair that holds images."""
        present = {name: pair for name, pair in pairs.items() if len(pair[0])}
        confidence = joint_confidence(max(1, len(present)) * (1 + len(ATTACKS) if self._errors else 1))
        return [{"name": name, **self._row(pair, confidence)} for name, pair in present.items()]

    def _row(self, pair: Pair, confidence: float) -> dict[str, Any]:
        known, found = self.neighbours(pair)
        members = self.sides[0].labels[pair[0]]
        estimates = {"nearest": member_preference(found, self.samples.labels[known], members, confidence)}
        for attack in ATTACKS if self._errors else ():
            estimates[f"{attack}_auc"] = auc(*self._errors_of(attack, pair), confidence)
        tests = {
            name: {**estimate._asdict(), "expected": 0.5, "detected": estimate.low > 0.5}
            for name, estimate in estimates.items()
        }
        return {"samples": len(known), "compared": len(members), "tests": tests}

    def _errors_of(self, name: str, pair: Pair) -> tuple[Floats, Floats]:
        members, non_members = self._errors[name]
        return members[pair[0]], non_members[pair[1]]
