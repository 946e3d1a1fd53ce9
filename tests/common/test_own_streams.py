"""Two users never share a stream, although torch returns the same streams repeatedly."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from requires_gpu import on_a_gpu

from fedeas_flwr.common.cuda import LAST, own_stream


class PooledStream:
    """Streams as torch returns them: 32 per priority, in turn; weak references to them do not work."""

    __slots__ = ("__dict__",)
    given: Counter[int]

    def __init__(self, priority: int = 0) -> None:
        if priority > 0 or priority < -3:
            raise ValueError(priority)
        self.priority = priority
        self.cuda_stream = 1000 * -priority + self.given[priority] % 32 + 1
        self.given[priority] += 1


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PooledStream, "given", Counter(), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", PooledStream)


def handles(streams: list[Any]) -> set[int]:
    return {stream.cuda_stream for stream in streams}


def test_streams_in_use_are_never_shared(pool: None) -> None:
    held = [own_stream() for _ in range(20)]
    for _ in range(3):  # engines that are created and dropped, as in one run after another
        passing = [own_stream() for _ in range(11)]
        assert len(handles(held + passing)) == 31
        assert {stream.priority for stream in passing} == {0}
        del passing


def test_ranks_map_to_priorities_and_full_ones_overflow(pool: None) -> None:
    ranked = [own_stream(rank) for rank in (0, 1, 2, LAST, LAST + 5)]
    assert [stream.priority for stream in ranked] == [-3, -2, -1, 0, 0]
    rest = [own_stream(LAST) for _ in range(4 * 32 - 5)]
    assert len(handles(ranked + rest)) == 128
    assert Counter(stream.priority for stream in rest) == {0: 30, -1: 31, -2: 31, -3: 31}
    with pytest.raises(RuntimeError, match="all 128 CUDA streams"):
        own_stream()
    del rest[7]
    assert own_stream().cuda_stream not in handles(ranked + rest)


@on_a_gpu
def test_repeatedly_released_streams_do_not_crash() -> None:
    script = """
import gc
from fedeas_flwr.common.cuda import own_stream
for count in (5, 10, 20, 10, 5, 20):
    held = [own_stream() for _ in range(count)]
    assert len({stream.cuda_stream for stream in held}) == count
    del held
    gc.collect()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
