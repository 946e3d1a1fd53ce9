"""Each client's declared number of real samples, and the bounds that it sets on the client's later messages.

A client's number of real samples N_k is its weight in every average, and a matched budget is split by it. So a client
declares it once, before the first round, and at most `max-examples`. A reply with another weight is rejected, and so is
a plan that no client with N_k samples can have.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedeas_flwr.common.errors import MessageError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation.messages import TrainReport
from fedeas_flwr.policies.interface import Share
from fedeas_flwr.policies.matched import MatchedPolicy


class DeclaredSampleCounts:
    """Records the clients' numbers of real samples, and checks later messages against them."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._classes = config, len(dataset_info(config.dataset).classes)
        self._examples: dict[int, int] = {}

    def note(self, client: int, examples: int) -> None:
        """Record a client's first declaration; later ones, after it rejoins, are ignored."""
        self._examples.setdefault(client, examples)

    def check_report(self, report: TrainReport, share: Share) -> None:
        """Raise `MessageError` if a train reply's numbers do not match the declaration."""
        declared, limit = self._examples[report.client], self._config.max_examples
        if max(declared, report.examples) > limit:
            raise MessageError(f"num-examples = {max(declared, report.examples)}, but max-examples = {limit}")
        if report.examples != declared and self._config.data_change == "refuse":
            raise MessageError(f"num-examples = {report.examples}, but the client first declared {declared}")
        images = self._max_images(max(declared, report.examples), share)
        if report.generated + report.not_made > images:
            more = f" and not-made = {report.not_made}" if report.not_made else ""
            raise MessageError(f"generated = {report.generated}{more}, but its plan cannot exceed {images}")

    def max_images(self, client: int, share: Share) -> int:
        """Return the largest number of images that a client's plan can have, by its declared number of samples."""
        return self._max_images(self._examples[client], share)

    def _max_images(self, samples: int, share: Share) -> int:
        policy, settings = self._config.find_policy(), self._config.policy_settings
        return policy.max_total(samples, self._classes, settings, share)

    def check_reply(self, client: int, policy: MatchedPolicy, question: str, at: float, numbers: Sequence[int]) -> None:
        """Raise `MessageError` if no label counts with the declared number of samples give this reply to a question."""
        samples, settings = self._examples[client], self._config.policy_settings
        bounds = policy.max_reply(samples, self._classes, settings, question, at)
        for key, number, limit in zip(policy.questions[question], numbers, bounds, strict=True):
            if number > limit:
                raise MessageError(f"{key} = {number}, but it is at most {limit} with {counted(samples, 'sample')}")
