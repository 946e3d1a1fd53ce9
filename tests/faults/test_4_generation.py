"""Row 4: faults of the generator and of its cache. No image is lost, duplicated or partly written.

test_cache.py has damaged, truncated and lost shards, stale keys and failing generators; test_run_ray.py a generator
killed under Ray; test_cache_maintenance.py eight writers at once.
"""

from __future__ import annotations

import errno
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from runners import finish, small, weights
from small_disks import remount, tiny_disk
from test_5_killed_server import STEPS, die_at, forked
from test_cache import Fake, ids

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.cache_maintenance import verify
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.runs.directory import RunDirectory

WANTED = [40, 0, 25]


class Slow(Fake):
    batch_size = 2

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        time.sleep(0.005)
        return super().sample(samples)


def make_and_die(root: Path, step: str) -> None:
    die_at("0000", step, 2)
    ImageCache(root).ensure(Slow(), seed=0, client=0, wanted=WANTED)


@pytest.mark.parametrize("step", STEPS)
def test_killed_writer_leaves_no_partial_shard(tmp_path: Path, step: str) -> None:
    writer = forked(make_and_die, tmp_path, step)
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    cache, generator = ImageCache(tmp_path), Slow()
    assert verify(cache)[1] == []
    images, _, count = cache.ensure(generator, seed=0, client=0, wanted=WANTED)
    assert sum(WANTED) - 16 <= count <= sum(WANTED) - 8
    assert np.array_equal(images, Fake().sample(ids(0, 0, WANTED)))
    assert not list(tmp_path.rglob(".*.tmp"))


def test_full_disk_keeps_complete_shards_and_generation_resumes(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "size=24k") as disk:
        cache, slow = ImageCache(disk / "images"), Slow()
        with pytest.raises(OSError, match="No space left") as full:
            cache.ensure(slow, seed=0, client=0, wanted=WANTED)
        assert full.value.errno == errno.ENOSPC
        checked, damaged = verify(cache)
        assert checked > 0 and damaged == []
        assert not list(disk.rglob(".*.tmp")), "a partly written file keeps the disk full"
        there = sum(WANTED) - cache.missing(slow, seed=0, client=0, wanted=WANTED)
        remount(disk, "size=1m")
        images, _, count = cache.ensure(slow, seed=0, client=0, wanted=WANTED)
        assert 0 < there == sum(WANTED) - count
        assert np.array_equal(images, Fake().sample(ids(0, 0, WANTED)))


@pytest.mark.slow
def test_run_with_a_full_cache_disk_fails_and_resumes(
    tmp_path: Path, digits_generator: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"participation": 1.0, "rounds": 2, "generation_batch": 8}
    whole = finish(small(tmp_path / "whole", **keys))
    with tiny_disk(tmp_path / "disk", "size=100k") as disk:
        for name in ("generators", "data", "partitions"):
            if (session_cache / name).exists():
                (disk / name).symlink_to(session_cache / name)
        monkeypatch.setenv("FEDEAS_CACHE", str(disk))
        with pytest.raises(RunError, match=r"OSError: \[Errno 28\] No space left on device"):
            finish(small(tmp_path / "r", **keys))
        assert RunDirectory(tmp_path / "r").status()[0] == "failed"
        remount(disk, "size=10m")
        resumed = finish(small(tmp_path / "r", resume=True, **keys))
    assert weights(resumed) == weights(whole)
