"""What each client said of itself once, and the bounds that follow for all it says later.

A client's number of real samples N_k is its weight in every average, and what a matched budget is shared out by. So it
is declared once, before the first round, under a ceiling (`max-examples`); a reply that weighs itself otherwise is
refused, and so is a plan that N_k samples cannot ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedeas_flwr.common.errors import MessageError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation.messages import TrainReport
from fedeas_flwr.policies import POLICIES, MatchedPolicy, Share


class DeclaredSampleCounts:
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
        policy, settings = POLICIES[self._config.policy], self._config.policy_settings
        images = policy.max_total(max(declared, report.examples), self._classes, settings, share)
        if report.generated > images:
            raise MessageError(f"generated = {report.generated}, but its plan cannot exceed {images}")

    def check_reply(self, client: int, policy: MatchedPolicy, question: str, at: float, numbers: Sequence[int]) -> None:
        """Refuse a reply to a matched policy's question that no label counts of so many samples give.

        Raises
        ------
        MessageError
        """
        samples, settings = self._examples[client], self._config.policy_settings
        bounds = policy.max_reply(samples, self._classes, settings, question, at)
        for key, number, most in zip(policy.questions[question], numbers, bounds, strict=True):
            if number > most:
                raise MessageError(f"{key} = {number}, but it is at most {most} with {counted(samples, 'sample')}")
