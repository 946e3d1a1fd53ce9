"""A deployment over links that are slow and lose packets: network namespaces on this machine, one a node."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deployments import Lab
from runners import finish, small, weights

LOSSY = ("netem", "delay", "50ms", "10ms", "loss", "3%")
NARROW = ("tbf", "rate", "2mbit", "burst", "4kb", "latency", "30ms")
"""Where the kernel has no netem: a link of 2 Mbit/s whose queue is full after 30 ms, and then drops what comes."""


def sh(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def must(*words: str) -> None:
    done = sh(*words)
    if done.returncode:
        pytest.skip(f"this system does not permit `{' '.join(words[:4])} …`: {done.stderr.strip()[:120]}")


class Links:
    """Two namespaces, each with a link of its own to this one; both ends of a link are bad."""

    def __init__(self, stack: ExitStack) -> None:
        name, self.hosts, self.spaces, self._near = f"fe{uuid.uuid4().hex[:6]}", [], [], []
        for number in range(2):
            space, near, far = (f"{name}{letter}{number}" for letter in "nab")
            must("ip", "netns", "add", space)
            stack.callback(sh, "ip", "netns", "del", space)
            must("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
            stack.callback(sh, "ip", "link", "del", near)
            host = f"10.213.{number}.1"
            must("ip", "addr", "add", f"{host}/30", "dev", near)
            must("ip", "link", "set", near, "up")
            within = ("ip", "netns", "exec", space)
            for words in (f"addr add 10.213.{number}.2/30 dev {far}", f"link set {far} up", "link set lo up"):
                must(*within, "ip", *words.split())
            for place, device in (((), near), (within, far)):
                if sh(*place, "tc", "qdisc", "add", "dev", device, "root", *LOSSY).returncode:
                    must(*place, "tc", "qdisc", "add", "dev", device, "root", *NARROW)
            self.hosts.append(host)
            self.spaces.append(within)
            self._near.append(near)

    def dropped(self) -> list[int]:
        """Packets lost so far on the way to each node."""
        said = [sh("tc", "-s", "qdisc", "show", "dev", device).stdout for device in self._near]
        return [int(re.search(r"dropped (\d+)", text)[1]) for text in said]  # type: ignore[index]


@pytest.fixture
def links() -> Iterator[Links]:
    with ExitStack() as stack:
        try:
            yield Links(stack)
        except FileNotFoundError as error:
            pytest.skip(f"this system has no {error.filename}")


@pytest.mark.slow
def test_a_run_over_bad_links_ends_with_the_same_model(
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
    assert min(lost) > 0, "the links lost nothing, so nothing was tried"
    fresh_images("simulated")
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **keys)))
