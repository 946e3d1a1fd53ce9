"""Several threads give bitwise the same as one, and none is left running."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from runners import start_interruptible
from waiting import LONG

from fedeas_flwr.common import cores
from fedeas_flwr.federation import dissimilarity
from fedeas_flwr.federation.dissimilarity import gradient_dissimilarity
from fedeas_flwr.strategies import averaging
from fedeas_flwr.strategies.averaging import weighted_average

State = dict[str, NDArray[Any]]


def with_threads(number: int, call: Any, *arguments: Any) -> Any:
    """Call with ``number`` threads on any machine; check that they ran and have ended; return the result."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (averaging, dissimilarity):
            patch.setattr(module, "threads_for", lambda *model, **where: number)
        made: list[int] = []
        pool = cores.ThreadPoolExecutor
        patch.setattr(cores, "ThreadPoolExecutor", lambda n, **named: made.append(n) or pool(n, **named))
        before = set(threading.enumerate())
        result = call(*arguments)
        assert set(threading.enumerate()) <= before  # a thread of an earlier test may have ended
    assert made == ([number] if number > 1 else [])
    return result


def average_in_one_thread(states: list[State], weights: list[float]) -> State:
    """Return the average of whole arrays in one thread."""
    shares, averaged = [weight / float(sum(weights)) for weight in weights], {}
    for key, first in states[0].items():
        whole = first.dtype.kind != "f"
        parts = [np.asarray(state[key], dtype=np.float64) if whole else state[key] for state in states]
        mean = parts[0] * shares[0]
        for part, share in zip(parts[1:], shares[1:], strict=True):
            mean = mean + part * share
        averaged[key] = np.asarray(np.rint(mean) if whole else mean, dtype=first.dtype)
    return averaged


def products_in_one_thread(start: State, ends: list[State]) -> NDArray[np.float64]:
    """Return the inner products in one thread, summed over blocks of 2**15 elements."""
    products, room = np.zeros((len(ends), len(ends))), np.empty((len(ends), 2**15))
    for key, array in start.items():
        base, rows = array.reshape(-1), [end[key].reshape(-1) for end in ends]
        for first in range(0, base.size, 2**15):
            block = base[first : first + 2**15]
            moved = room[:, : block.size]
            for row, into in zip(rows, moved, strict=True):
                np.subtract(block, row[first : first + 2**15], out=into, dtype=np.float64)
            products += moved @ moved.T
    return products


MODELS: dict[str, dict[str, tuple[type[np.generic], tuple[int, ...]]]] = {
    "odd shapes": {"a": (np.float32, (7, 3, 5)), "b": (np.float64, (1, 1, 13)), "c": (np.float16, (11,))},
    "one element": {"a": (np.float32, ()), "b": (np.float32, (1,)), "c": (np.int64, ())},
    "nothing": {"a": (np.float32, (0,)), "b": (np.float32, (3, 0))},
    "no arrays": {},
    "many tiny arrays": {str(i): (np.float32, (i % 5,)) for i in range(700)},
    "counters": {"n": (np.int64, ()), "m": (np.int32, (1000,)), "u": (np.uint8, (3, 3)), "w": (np.float32, (5,))},
    "across borders": {"a": (np.float32, (2**17 - 1,)), "b": (np.float32, (2**17 + 1,)), "c": (np.float32, (2**15,))},
    "large": {"a": (np.float32, (3, 100_003)), "n": (np.int64, ()), "b": (np.float32, (2**19,))},
}


def random_states(model: dict[str, tuple[type[np.generic], tuple[int, ...]]], number: int, seed: int) -> list[State]:
    rng = np.random.default_rng(seed)
    return [
        {key: np.abs(20 + 9 * rng.normal(size=s)).astype(kind) for key, (kind, s) in model.items()}
        for _ in range(number)
    ]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("model", MODELS)
def test_average_is_bitwise_equal_with_any_number_of_threads(model: str, threads: int) -> None:
    states, weights = random_states(MODELS[model], 5, 1), [3.0, 1.0, 411.0, 7.0, 2.0]
    expected = average_in_one_thread(states, weights)
    found = with_threads(threads, weighted_average, states, weights)
    assert list(found) == list(expected)
    for key, array in found.items():
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape) == (expected[key].dtype, expected[key].shape)
        assert array.tobytes() == expected[key].tobytes(), key


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("clients", [1, 2, 10])
@pytest.mark.parametrize("model", MODELS)
def test_inner_products_are_bitwise_equal_with_threads(model: str, clients: int, threads: int) -> None:
    start, *ends = random_states(MODELS[model], clients + 1, 2)
    found = with_threads(threads, dissimilarity._products, start, ends)
    assert found.tobytes() == products_in_one_thread(start, ends).tobytes()


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    block=st.integers(1, 9),
    clients=st.integers(1, 6),
    threads=st.integers(2, 5),
    kind=st.sampled_from([np.float32, np.float64, np.int64]),
)
@settings(max_examples=40)
def test_results_do_not_depend_on_sizes_blocks_or_threads(
    sizes: list[int], block: int, clients: int, threads: int, kind: type[np.generic]
) -> None:
    model = {str(i): (kind, (size,)) for i, size in enumerate(sizes)}
    start, *ends = random_states(model, clients + 1, block)
    weights = [float(k + 1) for k in range(clients)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "_BLOCK", block)
        patch.setattr(dissimilarity, "_BLOCK", block)
        averages = with_threads(threads, weighted_average, ends, weights)
        spread = with_threads(threads, gradient_dissimilarity, start, ends, weights)
        assert with_threads(1, gradient_dissimilarity, start, ends, weights) == spread
    for key, expected in average_in_one_thread(ends, weights).items():
        assert averages[key].tobytes() == expected.tobytes()


def test_tensors_are_averaged_without_threads() -> None:
    states = [{"w": torch.ones(2**12) * k} for k in (1, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "ELEMENTS_PER_THREAD", 1)
        patch.setattr(cores, "MIN_ARRAY", 1)
        patch.setattr(cores, "ThreadPoolExecutor", None)
        assert weighted_average(states, [1, 1])["w"][0] == 1.5
        assert gradient_dissimilarity({"w": torch.zeros(2**12)}, states, [1, 1]) == pytest.approx(0, abs=1e-12)


def test_small_model_gets_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 64)

    def threads(*sizes: int) -> int:
        return cores.threads_for({str(i): np.broadcast_to(np.float32(0), size) for i, size in enumerate(sizes)}, 8)

    assert [threads(size) for size in (0, 1, 2**19, 2**20 - 1)] == [1, 1, 1, 1]
    assert [threads(size) for size in (2**20, 3 * 2**19, 2**27)] == [2, 3, 8]
    assert threads(*[2**15 - 1] * 1000) == 1  # a large total, but of arrays that are too small
    assert threads(*[2**15] * 32) == 2
    monkeypatch.setattr(cores, "usable_cores", lambda: 1)
    assert threads(2**27) == 1


@pytest.mark.parametrize(("usable", "alone", "beside"), [(1, 1, 1), (2, 2, 1), (5, 5, 2), (16, 8, 8)])
def test_half_of_the_cores_stay_free_while_clients_train(
    monkeypatch: pytest.MonkeyPatch, usable: int, alone: int, beside: int
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: usable)
    model = {"w": np.broadcast_to(np.float32(0), 2**27)}
    assert (cores.threads_for(model, 8), cores.threads_for(model, 8, while_clients_train=True)) == (alone, beside)


def test_map_ordered_keeps_order_and_limits_the_queue() -> None:
    begun: list[int] = []

    def pieces() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            yield number

    def work(number: int) -> int:
        time.sleep(0.002 * (number % 3 == 0))
        return number

    for number, result in enumerate(cores.map_ordered(work, pieces(), 4)):
        assert result == number
        assert len(begun) <= number + 10


def test_map_ordered_raises_and_starts_nothing_more() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        done.append(number)
        if number == 3:
            raise ValueError("the third")

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="the third"):
        list(cores.map_ordered(work, range(1000), 2))
    assert set(threading.enumerate()) <= before and len(done) < 20


@pytest.mark.parametrize("threads", [1, 8])
def test_memory_depends_on_threads_and_not_on_model_size(threads: int) -> None:
    start = {"w": np.zeros(2**22, np.float32)}
    ends = [{"w": np.full(2**22, k, np.float32)} for k in (1, 2, 3)]
    tracemalloc.start()
    try:
        spread = with_threads(threads, gradient_dissimilarity, start, ends, [1, 1, 1])
        assert spread == pytest.approx(0, abs=1e-12)
        assert tracemalloc.get_traced_memory()[1] < threads * 2**20 + 2**20  # a model in float64 would be 2**25
        tracemalloc.reset_peak()
        average = with_threads(threads, weighted_average, ends, [1, 1, 1])
        assert tracemalloc.get_traced_memory()[1] < average["w"].nbytes + threads * 2**20 + 2**20
    finally:
        tracemalloc.stop()


def test_inner_products_of_many_clients_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    start, *ends = random_states({"w": (np.float32, (2**18,))}, 11, 3)
    threads: list[int] = []
    monkeypatch.setattr(dissimilarity, "threads_for", lambda *model, **where: 8)
    monkeypatch.setattr(dissimilarity, "map_ordered", lambda work, parts, number: threads.append(number) or [])
    for room in (2**27, 3 * 11 * 2**15 * 8, 1):
        monkeypatch.setattr(dissimilarity, "_MAX_BUFFER_BYTES", room)
        dissimilarity._products(start, ends)
    assert threads == [8, 3, 1]


INTERRUPTED = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
from fedeas_flwr.common import cores
let_go, most = threading.Event(), 2 * cores._AHEAD + 1
class Pool(ThreadPoolExecutor):
    submitted = 0
    def submit(self, *work):
        future = super().submit(*work)
        self.submitted += 1
        if self.submitted == most:
            os.write(1, b"waiting\\n")
        return future
    def shutdown(self, wait=True, *, cancel_futures=False):
        super().shutdown(False, cancel_futures=cancel_futures)
        let_go.set()  # starts whatever waits and was not cancelled
        super().shutdown(wait)
def work(number):
    os.write(1, b"begun\\n")  # at one go: two threads' prints may come out as one line
    let_go.wait()
cores.ThreadPoolExecutor = Pool
try:
    list(cores.map_ordered(work, range(1000), 2))
except KeyboardInterrupt:
    os.write(1, b"interrupted\\n")
"""


def test_ctrl_c_stops_map_ordered_and_the_process() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", INTERRUPTED]
    with start_interruptible(command, env=environment) as it:
        assert it.stdout is not None
        assert sorted(it.stdout.readline() for _ in range(3)) == ["begun\n", "begun\n", "waiting\n"]
        it.send_signal(signal.SIGINT)
        said, _ = it.communicate(timeout=LONG)
    assert it.returncode == 0 and said == "interrupted\n"  # nothing that waited was started
