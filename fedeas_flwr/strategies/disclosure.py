"""What an algorithm must know of the clients' data beyond FedAvg's: asked once, before training, and only if allowed.

The run-config's `disclose-…` key allows it. Without the key the run does not start, and a client that is asked all the
same refuses. What was told is kept in the checkpoint, so a resumed run does not ask again; who was not there to be
asked has no part in the run, resumed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedeas_flwr.checkpoints import Arrays
from fedeas_flwr.config import RunConfig
from fedeas_flwr.errors import ConfigError
from fedeas_flwr.local_data import Images, Labels


@dataclass(frozen=True)
class Disclosure:
    """One question that is answered with arrays."""

    question: str
    what: str
    """What every client gives away, as a table of strategies says it."""
    arrays: Callable[[RunConfig, Images, Labels], Arrays]
    """The answer, from the client's real images [N, H, W, C] and their labels."""
    wanted: Callable[[RunConfig], Arrays]
    """Arrays with the names, kinds and shapes of an answer."""

    @property
    def key(self) -> str:
        """The run-config key that allows it."""
        return f"disclose-{self.question}"

    def check_allowed(self, config: RunConfig) -> None:
        """Refuse in one line unless the key is set.

        Raises
        ------
        ConfigError
            It says what would be disclosed.
        """
        if not config.outside()[self.key]:
            raise ConfigError(
                f"{self.key} = false: strategy = '{config.strategy}' needs it to be true, "
                f"and then discloses of every client {self.what}"
            )

    def answer(self, config: RunConfig, images: Images, labels: Labels) -> Arrays:
        """What a client answers, or its refusal."""
        self.check_allowed(config)
        if len(labels) == 0:
            raise ValueError(f"{self.key} = true: this client holds 0 images, wanted 1 or more to tell anything of")
        return self.arrays(config, images, labels)


@runtime_checkable
class NeedsDisclosure(Protocol):
    """A strategy that must be told something of every client before the first round."""

    disclosure: Disclosure

    def told(self) -> Collection[int]:
        """The clients that told it, perhaps before an interrupt; empty before they were asked."""
        ...

    def be_told(self, told: Mapping[int, Arrays]) -> None:
        """Take what each client disclosed, by client id; a `MessageError` refuses it."""
        ...
