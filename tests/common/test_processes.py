"""The processes of a launch: all descendants are known, whoever dies between, and strangers are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from waiting import wait_until

from fedeas_flwr.common.processes import ProcessTree

CHAIN = """
import subprocess, sys, time
words = [sys.executable, "-S", "-c", sys.argv[1], sys.argv[1], str(int(sys.argv[2]) - 1)] if sys.argv[2] != "1" else []
children = [subprocess.Popen(words or ["sleep", "600"]) for _ in range(2)]
time.sleep(600)
"""


@pytest.fixture
def root() -> Iterator[subprocess.Popen[bytes]]:
    """A process with two children that have two each."""
    process = subprocess.Popen([sys.executable, "-S", "-c", CHAIN, CHAIN, "2"])
    wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 6, "all of them are there")
    started = psutil.Process(process.pid).children(recursive=True)
    yield process
    for each in [*started, process]:
        with suppress(psutil.Error):
            each.kill()
    process.wait()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Who was asked for its descendants: each time all processes of the machine are read."""
    asked: list[int] = []
    children = psutil.Process.children

    def noted(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        asked.append(self.pid)
        return children(self, recursive)

    monkeypatch.setattr(psutil.Process, "children", noted)
    return asked


def test_one_look_finds_all_descendants_however_many_are_known(root: subprocess.Popen[bytes], looks: list[int]) -> None:
    tree = ProcessTree(root, "mark")
    for _ in range(3):
        looks.clear()
        tree.note()
        assert len(tree._known) == 7 and looks == [root.pid]


def test_descendants_of_a_process_that_died_stay_known_and_their_children_are_found(
    root: subprocess.Popen[bytes], looks: list[int]
) -> None:
    tree = ProcessTree(root, "mark")
    tree.note()
    between = psutil.Process(root.pid).children()[0]
    orphans = between.children()
    between.kill()
    wait_until(lambda: all(orphan.ppid() != between.pid for orphan in orphans), "they have another parent")
    looks.clear()
    tree.note()
    assert set(orphans) < tree._known
    assert sorted(looks) == sorted([root.pid, *(orphan.pid for orphan in orphans)])
    tree.end()
    assert not any(orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE for orphan in orphans)


def test_whoever_has_the_number_of_a_process_that_ended_is_a_stranger(root: subprocess.Popen[bytes]) -> None:
    own = subprocess.Popen(["sleep", "600"])
    try:
        tree = ProcessTree(own, "mark")
        ended = psutil.Process(root.pid)
        ended._ident = (root.pid, -1.0)  # another began with this number before
        ended._hash = None
        tree._known.add(ended)
        tree.note()
        assert tree._known == {psutil.Process(own.pid)}
    finally:
        own.kill()
        own.wait()
