"""Row 13: pipes, sockets, devices, folders, circular links and other formats in the place of files. Nothing waits."""

from __future__ import annotations

import io
import os
import signal
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from runners import run_in_process
from test_cache import Fake, ids
from test_own_data import save_image

from fedeas_flwr.common import npy
from fedeas_flwr.data import datasets
from fedeas_flwr.data.own_images import read_images
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.cache_maintenance import verify
from fedeas_flwr.partition import make_partition


class WaitedError(BaseException):
    """A file that never ends was read; no `except Exception` may hide it."""


@pytest.fixture(autouse=True)
def no_test_waits() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise WaitedError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(15)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)
    os.chdir(here)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": bind,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.fixture(params=SPECIAL)
def put(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Return a function that replaces a file by something that is none."""

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        SPECIAL[request.param](path)

    return replace


def test_a_special_file_as_image_is_refused(tmp_path: Path, put: Callable[[Path], None]) -> None:
    for name in ("a/1.png", "b/1.png"):
        save_image(tmp_path / name, 7)
    put(tmp_path / "b" / "2.png")
    with pytest.raises(ValueError, match=r"2\.png is not an image that can be read \(.* is not a regular file\)$"):
        read_images(tmp_path)
    with pytest.raises(ValueError, match=r"2\.png is not an image that can be read \(.* is not a regular file\)$"):
        read_images(tmp_path, size=(6, 8), channels=1)


def test_a_special_file_as_shard_is_set_aside(tmp_path: Path, put: Callable[[Path], None]) -> None:
    cache = ImageCache(tmp_path)
    cache.ensure(Fake(), seed=0, client=0, wanted=[3, 0, 0])
    (shard,) = tmp_path.rglob("*.npy")
    put(shard)
    assert verify(cache) == (1, [shard])
    images, _, made = cache.ensure(Fake(), seed=0, client=0, wanted=[3, 0, 0])
    assert made == 3 and np.array_equal(images, Fake().sample(ids(0, 0, [3]))) and shard.is_file()


def test_a_special_file_as_manifest_is_no_manifest(tmp_path: Path, put: Callable[[Path], None]) -> None:
    cache = ImageCache(tmp_path)
    cache.ensure(Fake(), seed=0, client=0, wanted=[3, 0, 0], about={"generator": "x"})
    assert cache.find({"generator": "x"}, 0) is not None
    (manifest,) = tmp_path.rglob("manifest.json")
    put(manifest)
    assert cache.find({"generator": "x"}, 0) is None


def test_a_special_file_as_cached_array_is_written_again(
    tmp_path: Path, put: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    np.savez(tmp_path / "own.npz", x=np.arange(40, dtype=np.uint8).reshape(10, 2, 2, 1), y=np.repeat([0, 1], 5))
    for name in ("x_train.npy", "about.json"):
        before = datasets.open_dataset(f"own:{tmp_path / 'own.npz'}").x_train.copy()
        (cached,) = (tmp_path / "cache").rglob(name)
        put(cached)
        datasets._open_own_cached.cache_clear()
        assert np.array_equal(datasets.open_dataset(f"own:{tmp_path / 'own.npz'}").x_train, before)


def test_a_special_file_as_cached_partition_is_drawn_again(tmp_path: Path, put: Callable[[Path], None]) -> None:
    made = make_partition("digits", "clean", 4, 0.5, 1, tmp_path)
    (kept,) = tmp_path.rglob("*.npz")
    put(kept)
    if kept.is_dir():
        with pytest.raises(IsADirectoryError):
            make_partition("digits", "clean", 4, 0.5, 1, tmp_path)
        return
    again = make_partition("digits", "clean", 4, 0.5, 1, tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(made.train, again.train, strict=True))


def test_names_of_ignored_files_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a/1.png", "b/1.png"):
        save_image(tmp_path / name, 7)
    (tmp_path / "a" / "x\nINFO all is well\x1b[2J").touch()
    read_images(tmp_path)
    assert "such as a/x INFO all is well�[2J; only" in caplog.text


def test_circular_links_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    planned = run_in_process("plan", "--dataset", "own:a", cwd=tmp_path)
    removed = run_in_process("runs", "rm", "a", cwd=tmp_path)
    assert planned.stderr.startswith("error: dataset: 'a' is not there; must be a folder")
    assert removed.stderr.endswith("a is not a run directory: nothing is removed\n")
    assert [told.stderr.count("\n") for told in (planned, removed)] == [1, 1]


def eps(path: Path) -> None:
    Image.new("L", (8, 6)).save(path, "EPS")


def dds(path: Path) -> None:
    """Write a header with a pixel format that Pillow does not implement, which raises NotImplementedError."""
    path.write_bytes(
        b"DDS " + struct.pack("<7I", 124, 0, 6, 8, 0, 0, 0) + bytes(44) + struct.pack("<2I", 32, 4) + b"WXYZ" * 12
    )


@pytest.mark.parametrize("write", [eps, dds])
def test_other_formats_under_the_name_of_a_png_are_refused(
    tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    save_image(tmp_path / "a" / "1.png", 7)
    save_image(tmp_path / "b" / "1.png", 7)
    write(tmp_path / "b" / "1.png")
    for given in ({}, {"size": (6, 8), "channels": 1}):
        with pytest.raises(ValueError, match=r"1\.png is not an image that can be read \(cannot identify"):
            read_images(tmp_path, **given)  # type: ignore[arg-type]


def test_a_header_that_claims_gigabytes_is_not_read() -> None:
    class Spaces(io.RawIOBase):
        """A header of 1.5 GiB of spaces."""

        given = 0

        def read(self, size: int = -1) -> bytes:
            start = b"\x93NUMPY\x02\x00" + struct.pack("<I", 3 << 29)
            found = start[self.given : self.given + size].ljust(size)
            self.given += size
            return found

    file = Spaces()
    with pytest.raises(ValueError, match="expected 1610612736 bytes"):
        npy._read_header(file)  # type: ignore[arg-type]
    assert file.given <= 2**14


@pytest.mark.parametrize("channels", [1, 3])
def test_statistics_in_blocks_equal_numpys(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    monkeypatch.setattr(datasets, "_ROWS_AT_ONCE", 1000)
    for rows in (1, 999, 1000, 1001, 40_007):
        pixels = draw.integers(0, 256, (rows, channels), dtype=np.uint8)
        mean, std = datasets._mean_and_std(pixels)
        assert np.allclose(mean, pixels.mean(axis=0), rtol=1e-12) and np.allclose(std, pixels.std(axis=0), rtol=1e-12)
    tracemalloc.start()
    datasets._mean_and_std(pixels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < pixels.size * 8 / 2
