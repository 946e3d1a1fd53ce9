"""A deployment over links that are slow and lose packets: network namespaces on this machine, one per node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deployments import Lab
from namespaces import add_host, connect, must, sh
from runners import finish, small, weights

pytestmark = pytest.mark.flower

LOSSY = ("netem", "delay", "50ms", "10ms", "loss", "3%")
NARROW = ("tbf", "rate", "2mbit", "burst", "4kb", "latency", "30ms")
"""Used if the kernel has no netem: a link of 2 Mbit/s that drops packets when its queue exceeds 30 ms."""


class Links:
    """Set up two hosts, each with its own link to this machine that is bad at both ends."""

    def __init__(self, stack: ExitStack) -> None:
        self.hosts, self.spaces, self._near = [], [], []
        for number in range(2):
            within = add_host(stack)
            near, far = connect(stack, (), within, f"10.213.{number}")
            for place, device in (((), near), (within, far)):
                if sh(*place, "tc", "qdisc", "add", "dev", device, "root", *LOSSY).returncode:
                    must(*place, "tc", "qdisc", "add", "dev", device, "root", *NARROW)
            self.hosts.append(f"10.213.{number}.1")
            self.spaces.append(within)
            self._near.append(near)

    def dropped(self) -> list[int]:
        """Return the number of packets lost so far on the way to each node."""
        said = [sh("tc", "-s", "qdisc", "show", "dev", device).stdout for device in self._near]
        return [int(re.search(r"dropped (\d+)", text)[1]) for text in said]  # type: ignore[index]


@pytest.fixture
def links() -> Iterator[Links]:
    with ExitStack() as stack:
        yield Links(stack)


@pytest.mark.slow
def test_run_over_lossy_links_gives_the_same_weights(
    tmp_path: Path, links: Links, digits_generator: Path, fresh_images: Any
) -> None:
    keys: dict[str, Any] = {"clients": 2, "rounds": 2, "participation": 1.0, "local_epochs": 1, "policy": "none"}
    with Lab(tmp_path, 2, digits_generator, hosts=("127.0.0.1", *links.hosts)) as lab:
        lab.register()
        for number, node in enumerate(lab.deployment.node_folders(lab.folder)):
            (node / "superlink-address").write_text(f"{links.hosts[number]}:{lab.deployment.port}\n")
            lab.start_node(number, *links.spaces[number])
        run = lab.follow(lab.submit(**keys, min_replies=1.0))
        lost = links.dropped()
    assert min(lost) > 0, "no packet was lost, so nothing was tested"
    fresh_images("simulated")
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **keys)))
