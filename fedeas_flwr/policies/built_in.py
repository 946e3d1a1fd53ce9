"""Policies that need a client's label counts only."""

from __future__ import annotations

from fedeas_flwr import allocation
from fedeas_flwr.allocation import MAX_COUNT, IntArray
from fedeas_flwr.policies.interface import ClientView, Policy, PolicySettings, Share


class _GeneratesNothing(Policy):
    """Base of the policies under which no image is generated."""

    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return 0."""
        return 0

    def generates(self, settings: PolicySettings) -> bool:
        """Return False."""
        return False


class NoImages(_GeneratesNothing):
    """Add nothing."""

    name = "none"
    settings = frozenset()
    is_baseline = True

    def plan(self, view: ClientView) -> IntArray:
        """Return zeros."""
        return allocation.none(view.counts)


class FillToBudget(Policy):
    """Fill every client's scarce classes up to its b_k: FedEAS, and the paper's ablations of b_k."""

    def __init__(self, name: str, gamma: float | None = None, use_entropy: bool = True) -> None:
        self.name, self._own_gamma, self._use_entropy = name, gamma, use_entropy
        self.settings = frozenset({"beta", "strict_mean"} | ({"gamma"} if gamma is None else set()))

    def plan(self, view: ClientView) -> IntArray:
        """Return the samples that fill the scarce classes."""
        return allocation.fill_to(view.counts, self.budget(view), view.settings.strict_mean)

    def budget(self, view: ClientView) -> IntArray:
        """Return b_k."""
        return allocation.budget(view.counts, view.settings.beta, self._gamma(view.settings), self._use_entropy)

    # Eq. (cap): b_k = ⌊β n̄_k^γ (1 − H̃_k)⌋ is largest where all samples are of one class, H̃_k = 0
    def max_total(self, samples: int, classes: int, settings: PolicySettings, share: Share) -> int:
        """Return C times the largest b_k that any label counts with a sum of ``samples`` can have."""
        budget = settings.beta * (samples / classes) ** self._gamma(settings)
        return classes * int(min(MAX_COUNT, budget * (1 + 1e-9)))

    def generates(self, settings: PolicySettings) -> bool:
        """Return whether budgets can be above 0."""
        return settings.beta > 0

    def _gamma(self, settings: PolicySettings) -> float:
        return settings.gamma if self._own_gamma is None else self._own_gamma


class Oversample(_GeneratesNothing):
    """Repeat a client's own images up to FedEAS's budget: the alternative without a generator."""

    name = "oversample"
    settings = frozenset({"beta", "gamma", "strict_mean"})
    repeats = True

    def plan(self, view: ClientView) -> IntArray:
        """Return the number of copies per class; 0 for absent classes."""
        settings = view.settings
        return allocation.oversample(view.counts, settings.beta, settings.gamma, settings.strict_mean)

    def budget(self, view: ClientView) -> IntArray:
        """Return FedEAS's b_k."""
        return FEDEAS.budget(view)


class FullBalance(Policy):
    """Fill every class up to the client's largest class."""

    name = "full-balance"
    settings = frozenset()

    def plan(self, view: ClientView) -> IntArray:
        """Return the samples that make the counts equal."""
        return allocation.full_balance(view.counts)


FEDEAS = FillToBudget("fedeas")
