"""One thread launches kernels for many clients: in order, in turns, and errors reach only their caller."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from waiting import LONG, wait_until

from fedeas_flwr.common.launcher import MAX_DIRECT, MAX_QUEUED_PER_STREAM, SWITCH, Launcher, launch


class Stream(str):
    """A named stream that finishes its work at once, or only after ``let_go`` is set."""

    def __new__(cls, name: str, let_go: threading.Event | None = None) -> Stream:
        stream = super().__new__(cls, name)
        stream.let_go = let_go or threading.Event()
        if let_go is None:
            stream.let_go.set()
        return stream

    let_go: threading.Event

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return self.let_go.is_set()


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that holds the name of the current stream, without a GPU."""
    now = [""]
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.__setitem__(0, stream))
    return now


def test_launcher_runs_jobs_in_order_and_in_turns(current: list[str]) -> None:
    launcher, launched, let_go = Launcher(), [], threading.Event()

    def work(name: str) -> None:
        def launch(number: int) -> None:
            assert current[0] == name
            launched.append((name, number))

        launcher.run(Stream(name, let_go), [lambda n=n: launch(n) for n in range(200)])

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(work, name) for name in "abc"]
        wait_until(lambda: len(launched) == 3 * MAX_QUEUED_PER_STREAM, "all three streams are full")
        let_go.set()
        for job in jobs:
            job.result(timeout=LONG)
    for name in "abc":
        assert [number for owner, number in launched if owner == name] == list(range(200))
    switches = sum(one[0] != other[0] for one, other in itertools.pairwise(launched[3 * MAX_QUEUED_PER_STREAM :]))
    assert switches >= 3 * (200 - MAX_QUEUED_PER_STREAM) - 3, "a job was launched completely before the next one"


def test_failing_launch_raises_in_its_caller_only(current: list[str]) -> None:
    launcher, done = Launcher(), []

    def fail() -> None:
        raise ValueError("no such kernel")

    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(launcher.run, Stream("bad"), [lambda: None, fail, lambda: done.append("after the failure")])
        good = pool.submit(launcher.run, Stream("good"), [lambda: done.append("good")] * 5)
        with pytest.raises(ValueError, match="no such kernel"):
            bad.result(timeout=LONG)
        good.result(timeout=LONG)
    launcher.run(Stream("again"), [lambda: done.append("again")])
    assert done == ["good"] * 5 + ["again"]
    launcher.run(Stream("empty"), [])


def test_full_stream_does_not_block_other_streams(current: list[str]) -> None:
    launcher, stuck, launched = Launcher(), Stream("stuck", threading.Event()), []
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(launcher.run, stuck, [lambda: launched.append("stuck")] * (MAX_QUEUED_PER_STREAM + 3))
        wait_until(lambda: launched.count("stuck") == MAX_QUEUED_PER_STREAM, "the stream is full")
        launcher.run(Stream("free"), [lambda: launched.append("free")] * 100)
        assert launched.count("free") == 100
        assert launched.count("stuck") == MAX_QUEUED_PER_STREAM and not job.done()
        stuck.let_go.set()
        job.result(timeout=LONG)
    assert launched.count("stuck") == MAX_QUEUED_PER_STREAM + 3


def test_run_shortens_the_switch_interval_until_its_last_job_ends(current: list[str]) -> None:
    launcher, before, stuck, seen = Launcher(), sys.getswitchinterval(), Stream("stuck", threading.Event()), []
    assert before != pytest.approx(SWITCH)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(launcher.run, stuck, [lambda: seen.append("stuck")] * (MAX_QUEUED_PER_STREAM + 1))
        wait_until(lambda: len(seen) == MAX_QUEUED_PER_STREAM, "the stream is full")
        launcher.run(Stream("free"), [lambda: None])
        assert sys.getswitchinterval() == pytest.approx(SWITCH), "restored although a job is left"
        stuck.let_go.set()
        job.result(timeout=LONG)
    assert sys.getswitchinterval() == before


class Broken(Stream):
    """A stream of a failed GPU: every query raises."""

    def query(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_gpu_error_reaches_callers_and_thread_survives(current: list[str]) -> None:
    launcher, said = Launcher(), []

    def work() -> None:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            launcher.run(Broken("broken"), [lambda: None] * 5)
        launcher.run(Stream("another"), [lambda: said.append("another")] * 3)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=LONG)
    assert said == ["another"] * 3, "the launcher thread still waits"


def test_launcher_drops_references_to_finished_jobs(current: list[str]) -> None:
    class Graph:
        def replay(self) -> None:
            pass

    launcher, graph = Launcher(), Graph()
    launcher.run(Stream("a"), [graph.replay] * 3)
    alive = weakref.ref(graph)
    del graph
    assert alive() is None


def test_few_launches_stay_in_their_thread(current: list[str]) -> None:
    threads: list[int] = []
    for steps, own in ((MAX_DIRECT, True), (MAX_DIRECT + 1, False)):
        threads.clear()
        launch(Stream("one"), [lambda: threads.append(threading.get_ident())] * steps)
        assert len(threads) == steps
        assert (set(threads) == {threading.get_ident()}) is own
