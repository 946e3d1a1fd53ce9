"""The process tree of a launch: it holds all descendants, also of dead processes, and no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from fedeas_flwr.common.processes import MARK, ProcessTree, exit_after_block

CHAIN = """
import subprocess, sys, time
words = [sys.executable, "-S", "-c", sys.argv[1], sys.argv[1], str(int(sys.argv[2]) - 1)] if sys.argv[2] != "1" else []
children = [subprocess.Popen(words or ["sleep", "600"]) for _ in range(2)]
time.sleep(600)
"""


@pytest.fixture
def root() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with two children that have two children each."""
    process = subprocess.Popen([sys.executable, "-S", "-c", CHAIN, CHAIN, "2"])
    wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) == 6, "all processes have started")
    started = psutil.Process(process.pid).children(recursive=True)
    yield process
    for each in [*started, process]:
        with suppress(psutil.Error):
            each.kill()
    process.wait()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the processes whose descendants were read; each read lists all processes of the machine."""
    asked: list[int] = []
    children = psutil.Process.children

    def noted(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        asked.append(self.pid)
        return children(self, recursive)

    monkeypatch.setattr(psutil.Process, "children", noted)
    return asked


def test_process_tree_reads_descendants_once_per_update(root: subprocess.Popen[bytes], reads: list[int]) -> None:
    tree = ProcessTree(root, "mark")
    for _ in range(3):
        reads.clear()
        tree.note()
        assert len(tree._known) == 7 and reads == [root.pid]


def test_process_tree_keeps_descendants_of_dead_processes(root: subprocess.Popen[bytes], reads: list[int]) -> None:
    tree = ProcessTree(root, "mark")
    tree.note()
    between = psutil.Process(root.pid).children()[0]
    orphans = between.children()
    between.kill()
    wait_until(lambda: all(orphan.ppid() != between.pid for orphan in orphans), "they have another parent")
    reads.clear()
    tree.note()
    assert set(orphans) < tree._known
    assert sorted(reads) == sorted([root.pid, *(orphan.pid for orphan in orphans)])
    tree.end()
    assert not any(orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE for orphan in orphans)


REPLACING = """
import subprocess, sys, time
children = [subprocess.Popen(["sleep", "600"]) for _ in range(5)]
while True:
    children = [child if child.poll() is None else subprocess.Popen(["sleep", sys.argv[1]]) for child in children]
    time.sleep(0.01)
"""
"""A process that replaces its dead children, as Ray's raylet does; none of them has the mark in its environment."""


def test_process_tree_ends_parents_before_they_replace_children(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"600.{os.getpid()}"  # of the replacements
    root = subprocess.Popen([sys.executable, "-S", "-c", REPLACING, name])
    wait_until(lambda: len(psutil.Process(root.pid).children()) == 5, "all processes have started")
    kill = psutil.Process.kill

    def kill_and_wait(self: psutil.Process) -> None:
        kill(self)
        time.sleep(0.2)

    monkeypatch.setattr(psutil.Process, "kill", kill_and_wait)
    ProcessTree(root, "mark").end()
    left = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", name]]
    for process in left:
        kill(process)
    assert left == []


def test_process_tree_ends_what_starts_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    root, mark, late = subprocess.Popen(["sleep", "600"]), f"mark {os.getpid()}", []
    kill = psutil.Process.kill

    def kill_too_late(self: psutil.Process) -> None:
        if not late:  # orphaned at once, with the mark
            late.append(subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark}))
        kill(self)

    monkeypatch.setattr(psutil.Process, "kill", kill_too_late)
    ProcessTree(root, mark).end()
    ended = [process.poll() is not None for process in (root, *late)]
    for process in (root, *late):
        process.kill()
        process.wait()
    assert ended == [True, True], "it returned before all processes had ended"


def test_reused_pid_does_not_belong_to_the_process_tree(root: subprocess.Popen[bytes]) -> None:
    own = subprocess.Popen(["sleep", "600"])
    try:
        tree = ProcessTree(own, "mark")
        ended = psutil.Process(root.pid)
        ended._ident = (root.pid, -1.0)  # an earlier process with this pid
        ended._hash = None
        tree._known.add(ended)
        tree.note()
        assert tree._known == {psutil.Process(own.pid)}
    finally:
        own.kill()
        own.wait()


def test_process_tree_knows_which_commands_run(tmp_path: Path) -> None:
    command = tmp_path / "flwr-simulation"
    command.write_text("import time\ntime.sleep(600)\n")
    with subprocess.Popen([sys.executable, str(command)]) as process:
        tree = ProcessTree(process, "mark")
        wait_until(lambda: tree.runs("flwr-simulation"), "the command runs")
        assert not tree.runs("simulation")
        process.kill()
        process.wait()
        assert not tree.runs("flwr-simulation")


EXITS_AT_ONCE = """
import os, signal, sys
from fedeas_flwr.common.processes import exit_after_block

signal.signal(signal.SIGTERM, lambda *_: (print("handler", flush=True), os._exit(7)))
with exit_after_block():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        print("not stopped", flush=True)
    finally:
        print("saved", flush=True)
        if sys.argv[1:]:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                print("not ended", flush=True)
"""


@pytest.mark.parametrize("arguments", [[], ["again"]])
def test_signal_ends_the_block_before_its_handler_runs(arguments: list[str]) -> None:
    """Flower's handler ends the process after five seconds, whether the block has saved its work or not."""
    command = [sys.executable, "-c", EXITS_AT_ONCE, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.stdout.split(), ended.returncode) == (["saved", "handler"], 7), ended.stderr


def test_block_without_a_signal_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with exit_after_block():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_block_outside_the_main_thread_leaves_the_handlers() -> None:
    def handler_inside() -> object:
        with exit_after_block():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler_inside).result() is signal.getsignal(signal.SIGTERM)
