"""What a policy is, and its input: a client's label counts, the settings, its share of a total."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedeas_flwr.allocation import FloatArray, IntArray


@dataclass(frozen=True)
class PolicySettings:
    """Settings of a plan besides counts; ``strict_mean`` is the inverse of the key ``printed-rule``."""

    beta: float
    gamma: float = 0.5
    strict_mean: bool = True
    total: int | None = None
    """Number of images that a matched policy spends; None means FedEAS's total at β."""


@dataclass(frozen=True)
class Share:
    """A client's share of a matched total: (base, extra) of an even split, or (level, extra) of waterfill.

    Under an adaptive policy, base is the number of images that the client has bought so far, and extra the number by
    which FedEAS's plan exceeds the first part.
    """

    base: int = 0
    extra: int = 0
    level: float = 0.0


EMPTY_SHARE = Share(level=2.0)
"""A share without images under any policy: waterfill's level is a marginal gain, which never exceeds 1."""


@dataclass(frozen=True, eq=False)
class Progress:
    """A client's plan under an adaptive policy when it last evaluated the global model, and what it found."""

    bought: int
    """Number of images that it had bought by then."""
    planned: IntArray
    """Number of images of each class that its plan had by then, [C]."""
    scores: FloatArray
    """How much one more image of each class would help, at least 0, [C]."""


@dataclass(frozen=True, eq=False)
class ClientView:
    """Input of a policy: clients' label counts, the settings and, under a matched policy, the clients' shares."""

    counts: IntArray
    """Label counts, [K, C]; one row on a node."""
    settings: PolicySettings
    shares: Sequence[Share] = ()
    """One share per row, for the plan of a matched policy."""
    round: int = 1
    """First round of the current part of the plan, one of `Policy.parts`."""
    progress: Sequence[Progress] = ()
    """One per row, for an adaptive policy after the clients have evaluated the global model."""


Query = Callable[[str, float], Mapping[int, Sequence[int]]]
"""Sends a question and its argument, a β or a level, to all clients; returns each client's integers, by client id."""


@runtime_checkable
class Policy(Protocol):
    """Decides how many images of each class a client adds to its own. Pure and deterministic."""

    name: str = ""
    """Its name in reports; an imported policy without one has its import path."""
    settings: frozenset[str] = frozenset({"beta", "gamma", "strict_mean"})
    """Fields of `PolicySettings` that the plan depends on; a policy may get any value in the others."""
    repeats: bool = False
    """Whether the plan counts copies of the client's own images; nothing is generated then."""
    is_baseline: bool = False
    """Whether clients train on their own images only; reports compare other policies with this one."""
    parts: Sequence[int] = (1,)
    """Rounds, in ascending order from 1, in which a part of the plan begins. A client plans in its first round of each
    part; the plan has all images that it then uses, those of earlier parts included."""

    def plan(self, view: ClientView) -> IntArray:
        """Return the images of each class that each client adds, in the shape of the counts."""
        ...

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return the largest number of generated images that a client with ``samples`` real images may report.

        By default, as many as make the counts of a client equal that has a single class.
        """
        return (classes - 1) * samples

    def generates(self, settings: PolicySettings) -> bool:
        """Return whether any client can be asked to generate images."""
        return True

    def budget(self, view: ClientView) -> IntArray | None:
        """Return each client's budget b_k, the count up to which it fills its classes; None if the policy has none."""
        return None

    def settings_used(self, total_given: bool) -> frozenset[str]:
        """Return the names of the settings that the plan depends on, given whether there is a ``total``."""
        return self.settings

    def part(self, round: int) -> int:
        """Return the first round of the part of the plan that a round belongs to."""
        return max(first for first in self.parts if first <= round)
