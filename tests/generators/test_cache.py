"""The image cache: it generates each image once, and finds and regenerates damaged shards."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from waiting import LONG

from fedeas_flwr.config import parse_config
from fedeas_flwr.generators import cache as cache_module
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.fill import fill
from fedeas_flwr.generators.interface import Generator, SampleId, describe_generator


class Fake:
    """A generator of noise that depends only on the sample id; it records its calls."""

    def __init__(self, fingerprint: str = "fake", num_classes: int = 3) -> None:
        self.fingerprint = fingerprint
        self.image_shape = (4, 5, 2)
        self.num_classes = num_classes
        self.calls: list[list[SampleId]] = []

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        self.calls.append(list(samples))
        return np.stack([np.random.default_rng(s).integers(0, 256, self.image_shape, np.uint8) for s in samples])


def ids(seed: int, client: int, wanted: Sequence[int]) -> list[SampleId]:
    return [SampleId(seed, client, label, index) for label, count in enumerate(wanted) for index in range(count)]


def shards(root: Path) -> list[str]:
    return sorted(f"{path.parent.name}/{path.name}" for path in root.rglob("class-*/*"))


def test_ensure_orders_images_by_class_and_index(tmp_path: Path) -> None:
    fake = Fake()
    images, labels, generated = ImageCache(tmp_path).ensure(fake, seed=1, client=2, wanted=[2, 0, 3])
    assert labels.tolist() == [0, 0, 2, 2, 2] and labels.dtype == np.int64 and generated == 5
    assert fake.calls == [ids(1, 2, [2, 0, 3])]
    assert np.array_equal(images, Fake().sample(ids(1, 2, [2, 0, 3])))


def test_ensure_reports_its_progress(tmp_path: Path) -> None:
    fake, cache, seen = Fake(), ImageCache(tmp_path), []

    def ensure(*wanted: int) -> None:
        cache.ensure(fake, seed=0, client=0, wanted=wanted, report=lambda done, total: seen.append((done, total)))

    ensure(300, 0, 0)  # chunks of 256
    ensure(300, 0, 0)
    ensure(300, 1, 0)
    assert seen == [(0, 300), (256, 300), (300, 300), (0, 1), (1, 1)]


def test_cache_generates_only_missing_and_reads_prefixes(tmp_path: Path) -> None:
    fake, cache = Fake(), ImageCache(tmp_path)
    fifty, _, first = cache.ensure(fake, seed=0, client=0, wanted=[50, 1, 0])
    eighty, _, more = cache.ensure(fake, seed=0, client=0, wanted=[80, 1, 2])
    few, _, none = cache.ensure(fake, seed=0, client=0, wanted=[60, 0, 0])
    assert (first, more, none) == (51, 32, 0) and len(fake.calls) == 2
    assert fake.calls[1] == [SampleId(0, 0, 0, i) for i in range(50, 80)] + [SampleId(0, 0, 2, i) for i in range(2)]
    assert np.array_equal(eighty[:50], fifty[:50]) and np.array_equal(few, eighty[:60])
    assert np.array_equal(eighty, Fake().sample(ids(0, 0, [80, 1, 2])))
    assert shards(tmp_path) == [
        "class-000/000000-000050.npy",
        "class-000/000050-000080.npy",
        "class-001/000000-000001.npy",
        "class-002/000000-000002.npy",
    ]


@settings(max_examples=25)
@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=5))
def test_ensure_result_does_not_depend_on_earlier_requests(
    tmp_path_factory: pytest.TempPathFactory, requests: list[tuple[int, int, int]]
) -> None:
    cache, fake = ImageCache(tmp_path_factory.mktemp("images")), Fake()
    for wanted in requests:
        images, labels, _ = cache.ensure(fake, seed=0, client=0, wanted=wanted)
        expected = ids(0, 0, wanted)
        assert labels.tolist() == [sample.label for sample in expected]
        assert len(images) == len(expected)
        assert not expected or np.array_equal(images, Fake().sample(expected))
    asked = [sample for call in fake.calls for sample in call]
    assert len(asked) == len(set(asked)) == sum(map(max, zip(*requests, strict=True)))


def test_cache_separates_generators_seeds_and_clients(tmp_path: Path) -> None:
    cache, wanted = ImageCache(tmp_path), [2, 2, 2]
    made = [
        cache.ensure(fake, seed=seed, client=client, wanted=wanted)[2]
        for fake, seed, client in [(Fake("a"), 0, 0), (Fake("b"), 0, 0), (Fake("a"), 1, 0), (Fake("a"), 0, 1)]
    ]
    assert made == [6, 6, 6, 6]
    assert cache.ensure(Fake("a"), seed=0, client=0, wanted=wanted)[2] == 0


@pytest.mark.parametrize("damage", ["flip image", "flip header", "flip checksum", "truncate", "empty", "wrong shape"])
def test_damaged_shard_is_renamed_and_regenerated(tmp_path: Path, damage: str) -> None:
    cache, fake = ImageCache(tmp_path), Fake()
    before, _, _ = cache.ensure(fake, seed=0, client=0, wanted=[3, 4, 0])
    (shard,) = tmp_path.rglob("class-001/*.npy")
    whole = shard.read_bytes()
    at = {"flip image": 140, "flip header": 20, "flip checksum": len(whole) - 1}.get(damage)
    if at is not None:
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif damage == "wrong shape":  # intact, but another shard's content
        (other,) = tmp_path.rglob("class-000/*.npy")
        shard.write_bytes(other.read_bytes())
    else:
        shard.write_bytes(whole[: len(whole) // 2] if damage == "truncate" else b"")
    after, _, generated = cache.ensure(fake, seed=0, client=0, wanted=[3, 4, 0])
    assert generated == 4 and fake.calls[-1] == [SampleId(0, 0, 1, i) for i in range(4)]
    assert np.array_equal(before, after) and shard.read_bytes() == whole
    assert shard.with_name(shard.name + ".corrupt").exists()


def test_lost_shard_is_regenerated_without_the_others(tmp_path: Path) -> None:
    cache, fake = ImageCache(tmp_path), Fake()
    for count in (2, 5, 9):
        whole, _, _ = cache.ensure(fake, seed=0, client=0, wanted=[count, 0, 0])
    next(tmp_path.rglob("000002-000005.npy")).unlink()
    next(tmp_path.rglob("000005-000009.npy")).write_bytes(b"")
    images, _, generated = cache.ensure(fake, seed=0, client=0, wanted=[4, 0, 1])
    assert generated == 3 and np.array_equal(images[:4], whole[:4])
    images, _, generated = cache.ensure(fake, seed=0, client=0, wanted=[9, 0, 0])
    assert generated == 5 and np.array_equal(images, whole)


def test_intact_shard_of_another_size_is_regenerated(tmp_path: Path) -> None:
    cache, content = ImageCache(tmp_path), io.BytesIO()
    before, _, _ = cache.ensure(Fake(), seed=0, client=0, wanted=[0, 4, 0])
    np.save(content, np.zeros((4, 9, 9, 2), np.uint8))
    (shard,) = tmp_path.rglob("class-001/*.npy")
    shard.write_bytes(content.getvalue() + hashlib.sha256(content.getvalue()).digest())
    after, _, generated = cache.ensure(Fake(), seed=0, client=0, wanted=[0, 4, 0])
    assert generated == 4 and np.array_equal(before, after)


def test_generator_failure_loses_only_one_chunk(tmp_path: Path) -> None:
    class FailingGenerator(Fake):
        batch_size = 2
        lives = 2

        def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
            if len(self.calls) == self.lives:
                raise ConnectionError("killed")
            return super().sample(samples)

    cache, generator, wanted = ImageCache(tmp_path), FailingGenerator(), [11, 0, 10]
    with pytest.raises(ConnectionError):
        cache.ensure(generator, seed=0, client=0, wanted=wanted)
    assert [len(call) for call in generator.calls] == [8, 8]
    assert cache.missing(generator, seed=0, client=0, wanted=wanted) == 5
    heir = Fake()
    images, _, generated = cache.ensure(heir, seed=0, client=0, wanted=wanted)
    assert generated == 5 and [sample for call in heir.calls for sample in call] == ids(0, 0, wanted)[16:]
    assert np.array_equal(images, Fake().sample(ids(0, 0, wanted)))
    assert cache.missing(heir, seed=0, client=0, wanted=wanted) == 0


def test_empty_request_generates_and_writes_nothing(tmp_path: Path) -> None:
    fake = Fake()
    images, labels, generated = ImageCache(tmp_path / "none").ensure(fake, seed=0, client=0, wanted=[0, 0, 0])
    assert images.shape == (0, 4, 5, 2) and len(labels) == 0 and generated == 0
    assert fake.calls == [] and not (tmp_path / "none").exists()


@pytest.mark.parametrize("wanted", [[1, 2], [1, -1, 0], [1.5, 0, 0], [1, 2, 3, 4], [[1, 2, 3]], [[1, 2, 3]] * 3])
def test_invalid_request_is_rejected(tmp_path: Path, wanted: Any) -> None:
    """One of the requests is a plan of all clients."""
    with pytest.raises(ValueError, match=r"wanted: .* give 3 whole numbers, none negative"):
        ImageCache(tmp_path).ensure(Fake(), seed=0, client=0, wanted=wanted)


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (np.zeros((2, 4, 5, 2), np.float32), r"float32 \[2, 4, 5, 2\]"),
        (np.zeros((1, 4, 5, 2), np.uint8), r"uint8 \[1, 4, 5, 2\]"),
        (np.zeros((2, 2, 4, 5), np.uint8), r"uint8 \[2, 2, 4, 5\]"),
        ([[0]], "list"),
    ],
)
def test_invalid_generator_output_is_rejected_and_not_stored(tmp_path: Path, returned: object, found: str) -> None:
    class Wrong(Fake):
        def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
            return returned  # type: ignore[return-value]

    expected = rf"generator: sample\(\) returned {found}; it must return uint8 \[2, 4, 5, 2\]"
    with pytest.raises(ValueError, match=expected):
        ImageCache(tmp_path).ensure(Wrong(), seed=0, client=0, wanted=[2, 0, 0])
    assert shards(tmp_path) == []


def test_two_processes_generate_each_image_once(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from test_cache import Fake; from fedeas_flwr.generators.cache import ImageCache\n"
        "class Slow(Fake):\n"
        "    def sample(self, samples): time.sleep(0.5); return super().sample(samples)\n"
        "print(ImageCache(sys.argv[1]).ensure(Slow(), seed=0, client=0, wanted=[5, 5, 5])[2])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(int(process.communicate(timeout=LONG)[0]) for process in started) == [0, 15]


def test_cache_and_augment_need_no_torch() -> None:
    code = "import sys, fedeas_flwr.generators.fill; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("cached", [True, False])
def test_fill_appends_the_same_images_with_and_without_cache(tmp_path: Path, cached: bool) -> None:
    fake: Generator = Fake()
    real = np.full((2, 4, 5, 2), 7, dtype=np.uint8)
    cache = ImageCache(tmp_path) if cached else None
    images, labels = fill(real, np.array([2, 1]), [1, 0, 2], fake, seed=4, client=5, cache=cache)
    assert labels.tolist() == [2, 1, 0, 2, 2] and labels.dtype == np.int64
    assert np.array_equal(images[:2], real) and np.array_equal(images[2:], Fake().sample(ids(4, 5, [1, 0, 2])))
    unchanged, same_labels = fill(real, np.array([2, 1]), [0, 0, 0], fake, cache=cache)
    assert np.array_equal(unchanged, real) and same_labels.tolist() == [2, 1]


def test_fill_rejects_images_of_wrong_shape() -> None:
    with pytest.raises(ValueError, match=r"images: uint8 \[2, 4, 4, 2\] .* give uint8 \[N, 4, 5, 2\]"):
        fill(np.zeros((2, 4, 4, 2), np.uint8), np.zeros(2, np.int64), [1, 0, 0], Fake())
    with pytest.raises(ValueError, match=r"labels: shape \[3\]"):
        fill(np.zeros((2, 4, 5, 2), np.uint8), np.zeros(3, np.int64), [1, 0, 0], Fake())


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ([0, 3], "labels: 3 is not allowed; give whole numbers from 0 to 2"),
        ([-1, 0], "labels: -1 is not allowed; give whole numbers from 0 to 2"),
        ([0.5, 1.0], "labels: float64 is not allowed; give whole numbers from 0 to 2"),
        ([True, False], "labels: bool is not allowed"),
    ],
)
def test_fill_rejects_labels_outside_the_classes(labels: list[float], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}"):
        fill(np.zeros((2, 4, 5, 2), np.uint8), np.array(labels), [1, 0, 0], Fake())


@pytest.mark.parametrize("cached", [True, False])
def test_fill_rejects_invalid_generate_per_class(tmp_path: Path, cached: bool) -> None:
    real, cache = np.zeros((2, 4, 5, 2), np.uint8), ImageCache(tmp_path) if cached else None
    for wrong in ([1, 0], [1, -1, 0], [0.5, 0, 0]):
        with pytest.raises(ValueError, match=r"^generate_per_class: \[.* is not allowed; give 3 whole numbers"):
            fill(real, np.array([2, 1]), wrong, Fake(), cache=cache)
    images, labels = fill(real[:0], [], [1, 0, 0], Fake(), cache=cache)
    assert (len(images), labels.tolist(), labels.dtype) == (1, [0], np.int64)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"generator": "builtin"}, "generator: 'builtin' without fingerprint, image_shape, num_classes, sample"),
        ({"generator": None}, "generator: None without"),
        ({"seed": "1"}, "seed='1': must be an integer of at least 0"),
        ({"client": -1}, "client=-1: must be"),
        ({"cache": "folder"}, "cache='folder': must be an ImageCache"),
    ],
)
def test_fill_names_arguments_of_a_wrong_type(wrong: dict[str, Any], why: str) -> None:
    arguments = {"images": np.zeros((1, 4, 5, 2), np.uint8), "labels": [1], "generate_per_class": [1, 0, 0]}
    with pytest.raises(ValueError, match=f"^{why}"):
        fill(**{**arguments, "generator": Fake(), **wrong})


TOO_LARGE = json.dumps({"generator": "fake", "seed": 1, "more": "x" * 2**20})


@pytest.mark.parametrize("damaged", ["null", "[]", "{", "[" * 100_000, "", pytest.param(TOO_LARGE, id="too large")])
def test_find_ignores_damaged_manifests(tmp_path: Path, damaged: str) -> None:
    cache = ImageCache(tmp_path)
    cache.ensure(Fake(), seed=1, client=0, wanted=[1, 0, 0], about={"generator": "fake"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text(damaged)
    assert cache.find({"generator": "fake"}, 1) == tmp_path / cache.key(Fake(), 1)
    assert cache.find({"generator": "fake"}, 2) is None


def test_find_returns_the_images_used_last(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path)
    for fingerprint in ("old", "new", "other"):
        cache.ensure(Fake(fingerprint), seed=1, client=0, wanted=[1, 0, 0], about={"generator": "fake"})
        os.utime(tmp_path / cache.key(Fake(fingerprint), 1) / "manifest.json", (1000, 1000))
    cache.ensure(Fake("new"), seed=1, client=0, wanted=[1, 0, 0], about={"generator": "fake"})
    assert cache.find({"generator": "fake"}, 1) == tmp_path / cache.key(Fake("new"), 1)


def test_peek_returns_at_most_the_requested_number(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path)
    made = [cache.ensure(Fake(), seed=1, client=client, wanted=[3, 0, 0])[0] for client in (1, 0)]
    folder = tmp_path / cache.key(Fake(), 1)
    assert np.array_equal(cache.peek(folder, 0, 4), np.concatenate(made[::-1])[:4])
    assert len(cache.peek(folder, 0, 9)) == 6


def test_find_ignores_a_manifest_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ImageCache(tmp_path)
    for seed in (1, 2):
        cache.ensure(Fake(), seed=seed, client=0, wanted=[1, 0, 0], about={"generator": "fake"})
    removed = tmp_path / cache.key(Fake(), 2) / "manifest.json"
    read_manifest = cache_module.read_manifest

    def read_after_removal(path: Path) -> dict[str, Any]:
        if path == removed:
            path.unlink()
        return read_manifest(path)

    monkeypatch.setattr(cache_module, "read_manifest", read_after_removal)
    assert cache.find({"generator": "fake"}, 2) is None
    assert cache.find({"generator": "fake"}, 1) == tmp_path / cache.key(Fake(), 1)


def test_manifest_is_completed_by_a_writer_that_describes_the_images(tmp_path: Path) -> None:
    cache, about = ImageCache(tmp_path), describe_generator(parse_config({"guidance-stop": 0.5}))
    cache.ensure(Fake(), seed=1, client=0, wanted=[1, 0, 0])
    assert cache.find(about, 1) is None
    cache.ensure(Fake(), seed=1, client=0, wanted=[1, 0, 0], about=about)
    assert cache.find(about, 1) == tmp_path / cache.key(Fake(), 1)
    other = {**about, "guidance-stop": 1.0}
    cache.ensure(Fake(), seed=1, client=1, wanted=[1, 0, 0], about=other)  # the first description stays
    assert cache.find(about, 1) is not None and cache.find(other, 1) is None
