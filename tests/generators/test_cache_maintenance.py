"""Listing, verifying and pruning the image cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from test_cache import Fake
from waiting import LONG

from fedeas_flwr.common.text import parse_age, parse_bytes, show_bytes
from fedeas_flwr.data.datasets import Images
from fedeas_flwr.generators import cache as cache_module
from fedeas_flwr.generators import cache_maintenance
from fedeas_flwr.generators.cache import ImageCache, read_shard
from fedeas_flwr.generators.cache_maintenance import cache_limit, ensure_space, entries, prune, verify
from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.policies.registry import allocate


def filled(root: Path, names: str = "abc") -> ImageCache:
    """Return a cache with one entry per letter; the first is the least recently used."""
    cache = ImageCache(root)
    for age, name in enumerate(reversed(names)):
        cache.ensure(Fake(name), seed=1, client=0, wanted=[2, 0, 3], about={"generator": name, "dataset": "toy"})
        manifest = root / cache.key(Fake(name), 1) / "manifest.json"
        then = manifest.stat().st_mtime - 100 - 1000 * age  # all of them before the test
        os.utime(manifest, (then, then))
    return cache


def names(found: list[cache_maintenance.Entry]) -> str:
    return "".join(entry.manifest["generator"] for entry in found)


def test_entries_are_listed_by_last_use_with_their_manifests(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    assert entries(ImageCache(tmp_path / "nowhere")) == []
    assert names(entries(cache)) == "abc"
    first = entries(cache)[0]
    assert first.images == 5 and first.bytes > 5 * 40
    assert first.manifest == {
        "generator": "a", "dataset": "toy", "seed": 1, "image-shape": [4, 5, 2], "fingerprint": "a"
    }  # fmt: skip
    cache.ensure(Fake("a"), seed=1, client=0, wanted=[1, 0, 0])
    assert names(entries(cache)) == "bca", "reading did not update the last use"


def test_an_entry_that_another_process_removes_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, size = filled(tmp_path), cache_maintenance._size
    removed = entries(cache)[1].path

    def size_after_removal(path: Path) -> int:
        if removed in path.parents and removed.exists():
            removed.rename(tmp_path / ".pruned-1")
        return size(path)

    monkeypatch.setattr(cache_maintenance, "_size", size_after_removal)
    assert names(entries(cache)) == "ac"


def test_verify_finds_a_flipped_byte_and_changes_nothing(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    assert verify(cache) == (6, [])
    shard = sorted(tmp_path.rglob("*.npy"))[2]
    content = bytearray(shard.read_bytes())
    content[150] ^= 1
    shard.write_bytes(content)
    assert verify(cache) == verify(cache) == (6, [shard])


def test_verify_and_peek_skip_shards_that_another_process_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with `cache-limit` prunes while a large cache is read."""
    cache = filled(tmp_path)

    def read_after_removal(path: Path) -> Images | None:
        if path.parts[-2] == "class-000":
            path.unlink()
        return read_shard(path)

    for module in (cache_module, cache_maintenance):
        monkeypatch.setattr(module, "read_shard", read_after_removal)
    assert len(cache.peek(entries(cache)[0].path, 0, 5)) == 0
    assert verify(cache) == (5, [])


def test_prune_removes_least_recently_used_first(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    size = entries(cache)[0].bytes
    assert names(prune(cache, max_bytes=3 * size)) == ""
    assert names(prune(cache, max_bytes=2 * size, keep=[cache.key(Fake("a"), 1)])) == "b"
    assert names(prune(cache, older_than=500)) == "a"
    assert names(prune(cache, key=entries(cache)[0].key[:8])) == "c"
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_locked_entries(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    with FileLock(next(entries(cache)[0].path.glob("client-*.lock"))):
        assert names(prune(cache, max_bytes=0)) == "bc"
    assert names(entries(cache)) == "a"


def test_ensure_space_keeps_the_runs_own_images(tmp_path: Path) -> None:
    cache = filled(tmp_path)
    rows = [[2, 0, 3], [4, 4, 4]]
    wanted = cache_maintenance.stored_bytes((4, 5, 2), rows)
    assert wanted >= 17 * 40
    assert ensure_space(cache, Fake("a"), 1, rows, "") == []
    assert names(ensure_space(cache, Fake("a"), 1, rows, f"{wanted}B")) == "bc"
    with pytest.raises(ValueError, match=r"cache-limit = 600 B: this run's images alone take "):
        ensure_space(cache, Fake("a"), 1, rows, "600")


def test_full_disk_raises_before_generating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(30_000))
    cache = ImageCache(tmp_path / "not" / "yet")
    with pytest.raises(ValueError, match=r"3,000 images of the run take 1\d\d KB in .*/not/yet, which has 30 KB free"):
        ensure_space(cache, Fake(), 1, [[1000, 2000, 0]], "")
    cache.ensure(Fake(), seed=1, client=0, wanted=[1000, 2000, 0])
    ensure_space(cache, Fake(), 1, [[1000, 2000, 0]], "")  # they are in the cache already


def test_parse_bytes_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [parse_bytes(t, "x") for t in ("5", "1.5 kb", "20GB", "2GiB")] == [5, 1500, 20 * 10**9, 2**31]
    assert [parse_age(t, "x") for t in ("5s", "90m", "1.5h", "30d")] == [5, 5400, 5400, 30 * 86400]
    assert [show_bytes(n) for n in (999, 1500, 2 * 10**12)] == ["999 B", "1.5 KB", "2 TB"]
    assert [show_bytes(n) for n in (999_499, 999_500, 10**15)] == ["999 KB", "1 MB", "1 PB"]
    with pytest.raises(ValueError, match="max-bytes = 'lots': must be a size such as 500MB"):
        parse_bytes("lots", "max-bytes")
    with pytest.raises(ValueError, match="must be a size"):
        parse_bytes("1" * 310, "cache-limit")
    with pytest.raises(ValueError, match="older-than = '3 weeks': must be a time such as 90m"):
        parse_age("3 weeks", "older-than")
    monkeypatch.setenv("FEDEAS_CACHE_LIMIT", "1KB")
    assert (cache_limit(""), cache_limit("2KB")) == (1000, 2000)
    monkeypatch.delenv("FEDEAS_CACHE_LIMIT")
    assert cache_limit("") is None


def test_beta_sweep_generates_only_the_largest_budget(tmp_path: Path) -> None:
    """On the paper's partition, K = 20 and α = 0.1, 68,172 images are requested and 23,514 generated."""
    counts = make_partition("cifar10", "paper", 20, 0.1, 42).counts(plan_labels("cifar10", "paper"), 10)

    class Cheap(Fake):
        image_shape = (1, 1, 1)

        def __init__(self) -> None:
            self.fingerprint, self.num_classes, self.made = "cheap", 10, 0

        def sample(self, samples):  # type: ignore[no-untyped-def]
            self.made += len(samples)
            return np.array([s.index % 256 for s in samples], np.uint8).reshape(-1, 1, 1, 1)

    cache, cheap, asked, generated = ImageCache(tmp_path), Cheap(), 0, 0
    for beta in (4, 8, 12, 16, 20):
        for client, row in enumerate(allocate(counts, "fedeas", beta=beta)):
            images, _, made = cache.ensure(cheap, seed=1, client=client, wanted=row.tolist())
            asked, generated = asked + len(images), generated + made
    assert (asked, generated, cheap.made) == (68_172, 23_514, 23_514)
    assert entries(cache)[0].images == 23_514


def test_eight_processes_generate_each_image_once(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_cache import Fake; from fedeas_flwr.generators.cache import ImageCache; import hashlib, json\n"
        "class Small(Fake): batch_size = 2\n"
        "made, sums = 0, []\n"
        "for client in range(4):\n"
        "    images, _, new = ImageCache(sys.argv[1]).ensure(Small(), seed=0, client=client, wanted=[9, 7, 5])\n"
        "    made += new; sums.append(hashlib.sha256(images).hexdigest())\n"
        "print(json.dumps([made, sums]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    answers = [json.loads(process.communicate(timeout=LONG)[0]) for process in started]
    assert sum(made for made, _ in answers) == 4 * 21
    assert all(sums == answers[0][1] for _, sums in answers)
    assert verify(ImageCache(tmp_path))[1] == []
    assert not list(tmp_path.rglob("*.tmp"))


def test_entry_already_removed_by_another_process_is_no_error(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path)
    cache.ensure(Fake(), seed=0, client=0, wanted=[1, 1, 1])
    (entry,) = entries(cache)
    assert cache_maintenance._remove(entry) and not cache_maintenance._remove(entry)
    assert entries(cache) == []
