"""What each client said of itself once, and the bounds that follow for all it says later.

A client's number of real samples N_k is its weight in every average, and what a matched budget is shared out by. So it
is declared once, before the first round, under a ceiling (`max-examples`); a reply that weighs itself otherwise is
refused, and so is a plan that N_k samples cannot ask for.
"""

from __future__ import annotations

from fedeas_flwr.allocation import OWN_GAMMA
from fedeas_flwr.config import RunConfig
from fedeas_flwr.counts import LARGEST
from fedeas_flwr.data import dataset_info
from fedeas_flwr.errors import MessageError
from fedeas_flwr.messages import Share, TrainReport
from fedeas_flwr.sizes import counted


class Declarations:
    """The clients' numbers of real samples, and checks of what they say by them.

    Parameters
    ----------
    config
        Of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config, self._classes = config, len(dataset_info(config.dataset).classes)
        self._examples: dict[int, int] = {}

    def note(self, client: int, examples: int) -> None:
        """Keep what a client declared first, whatever it says when it comes back."""
        self._examples.setdefault(client, examples)

    def check_report(self, report: TrainReport, share: Share) -> None:
        """Refuse a train reply's numbers that do not fit the declaration.

        Raises
        ------
        MessageError
        """
        declared, most = self._examples[report.client], self._config.max_examples
        if max(declared, report.examples) > most:
            raise MessageError(f"num-examples = {max(declared, report.examples)}, but max-examples = {most}")
        if report.examples != declared and self._config.data_change == "refuse":
            raise MessageError(f"num-examples = {report.examples}, but the client declared {declared} at first")
        images = self._most_images(max(declared, report.examples), share)
        if report.generated > images:
            raise MessageError(f"generated = {report.generated}, but its plan cannot exceed {images}")

    def check_plan(self, client: int, total: int, absent: int) -> None:
        """Refuse a plan that no label counts of so many samples give.

        Raises
        ------
        MessageError
        """
        most = self._most_fedeas(self._examples[client])
        if total > most:
            raise MessageError(
                f"total = {total}, but {counted(self._examples[client], 'sample')} can ask for {most} at most"
            )
        if absent > self._classes:
            raise MessageError(f"absent = {absent}, but there are {self._classes} classes")

    def check_count(self, client: int, count: int, level: float) -> None:
        """Refuse a count at a water level that no label counts of so many samples give.

        Raises
        ------
        MessageError
        """
        most = self._most_balanced(self._examples[client]) + int(max(0.0, -level))
        if count > most:
            raise MessageError(
                f"count = {count}, but {counted(self._examples[client], 'sample')} can take {most} at most"
            )

    # Eq. (cap): b_k = ⌊β n̄_k^γ (1 − H̃_k)⌋ is largest where all samples are of one class, H̃_k = 0
    def _most_fedeas(self, examples: int, gamma: float | None = None) -> int:
        mean = examples / self._classes
        budget = self._config.beta * mean ** (self._config.gamma if gamma is None else gamma)
        return self._classes * int(min(LARGEST, budget * (1 + 1e-9)))

    def _most_balanced(self, examples: int) -> int:
        return (self._classes - 1) * examples

    def _most_images(self, examples: int, share: Share) -> int:
        policy = self._config.policy
        if policy in ("none", "oversample"):
            return 0
        if policy in ("uniform", "missing-only"):
            return self._classes * share.base + share.extra
        if policy == "full-balance":
            return self._most_balanced(examples)
        if policy == "waterfill":
            return self._most_balanced(examples) + int(max(0.0, -share.level)) + share.extra
        if policy == "greedy":  # spends one total wherever it helps most, on one client if need be
            return self._config.total or sum(map(self._most_fedeas, self._examples.values()))
        return self._most_fedeas(examples, OWN_GAMMA.get(policy))
