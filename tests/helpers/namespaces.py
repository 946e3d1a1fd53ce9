"""Hosts for tests: network namespaces of this machine, linked in pairs."""

from __future__ import annotations

import subprocess
import uuid
from contextlib import ExitStack

import pytest

Within = tuple[str, ...]
"""Command prefix that runs a command on a host; empty for this machine's own namespace."""


def sh(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def must(*words: str) -> None:
    """Run a command, or skip the test if the system does not permit it."""
    try:
        done = sh(*words)
    except FileNotFoundError as error:
        pytest.skip(f"this system has no {error.filename}")
    if done.returncode:
        pytest.skip(f"this system does not permit `{' '.join(words[:4])} …`: {done.stderr.strip()[:120]}")


def add_host(stack: ExitStack) -> Within:
    """Add a host with only a loopback interface; the stack removes it."""
    name = f"fe{uuid.uuid4().hex[:6]}"
    must("ip", "netns", "add", name)
    stack.callback(sh, "ip", "netns", "del", name)
    within = ("ip", "netns", "exec", name)
    must(*within, "ip", "link", "set", "lo", "up")
    return within


def connect(stack: ExitStack, one: Within, other: Within, network: str) -> tuple[str, str]:
    """Link two hosts, which become ``network``.1 and ``network``.2; return the names of the link's ends."""
    name = f"fe{uuid.uuid4().hex[:6]}"
    ends = f"{name}a", f"{name}b"
    must("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    stack.callback(sh, *one, "ip", "link", "del", ends[0])
    for number, (within, end) in enumerate(zip((one, other), ends, strict=True), start=1):
        if within:
            must("ip", "link", "set", end, "netns", within[-1])
        must(*within, "ip", "addr", "add", f"{network}.{number}/30", "dev", end)
        must(*within, "ip", "link", "set", end, "up")
    return ends
