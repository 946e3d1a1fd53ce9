"""Row 9: malicious files. No pickle is opened, no archive bomb unpacked, no link followed out of the cache."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
import resource
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cache import Fake, ids

from fedeas_flwr.common import npy
from fedeas_flwr.data import datasets
from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.federation.client_state import ClientStore
from fedeas_flwr.generators.bank import BankGenerator
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.cache_maintenance import entries, prune, verify
from fedeas_flwr.partition import make_partition

PACKAGE = Path(datasets.__file__).parents[1]
DIGITS = tuple("0123456789")


class Exploit:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def pickled_array(mark: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Exploit(mark)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return path


def test_exploit_runs_if_pickles_are_allowed(tmp_path: Path) -> None:
    np.load(io.BytesIO(pickled_array(tmp_path / "mark")), allow_pickle=True)
    assert (tmp_path / "mark").exists()


def test_pickled_dataset_bank_and_partition_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, evil = tmp_path / "mark", pickled_array(tmp_path / "mark")
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    archive(tmp_path / "cifar10.npz", x_train=evil, y_train=evil, x_test=evil, y_test=evil)
    with pytest.raises(ValueError, match=r"dataset cifar10: .* Python objects"):
        open_dataset("cifar10", str(tmp_path))
    with pytest.raises(ValueError, match=r"generator: bank .* Python objects"):
        BankGenerator(archive(tmp_path / "bank.npz", x=evil, y=evil), classes=DIGITS, image_shape=(8, 8, 1))
    made = make_partition("digits", "clean", 4, 0.5, 1, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").rglob("*.npz")
    archive(kept, train=evil, train_sizes=evil, test=evil, test_sizes=evil)
    again = make_partition("digits", "clean", 4, 0.5, 1, tmp_path / "cache")
    assert all(np.array_equal(a, b) for a, b in zip(made.train, again.train, strict=True))
    assert not mark.exists()


def test_pickled_shard_with_valid_checksum_is_regenerated(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache")
    cache.ensure(Fake(), seed=0, client=0, wanted=[3, 0, 0])
    (shard,) = (tmp_path / "cache").rglob("*.npy")
    evil = pickled_array(tmp_path / "mark")
    shard.write_bytes(evil + hashlib.sha256(evil).digest())
    images, _, made = cache.ensure(Fake(), seed=0, client=0, wanted=[3, 0, 0])
    assert made == 3 and np.array_equal(images, Fake().sample(ids(0, 0, [3])))
    assert not (tmp_path / "mark").exists()


def test_pickled_cifar_batches_need_the_official_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's own format is a pickle: it compares MD5 sums with those in its source before it opens one."""
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps(Exploit(tmp_path / "mark")))
    with pytest.raises(FileNotFoundError, match="incomplete or damaged"):
        open_dataset("cifar10", str(tmp_path))
    assert not (tmp_path / "mark").exists()


def test_client_state_is_read_only_as_safetensors(tmp_path: Path) -> None:
    (tmp_path / "state-000001.safetensors").write_bytes(pickle.dumps(Exploit(tmp_path / "mark")))
    with pytest.raises(RuntimeError, match="cannot be read"):
        ClientStore(tmp_path).load(1)
    assert not (tmp_path / "mark").exists()


def test_no_module_unpickles_or_evaluates_code() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {a.name for a in node.names} | {getattr(node, "module", None)}
                if names == {"pickle", "PickleBuffer"}:  # a buffer wrapper, which unpickles nothing
                    continue
                assert not names & {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}, path
            if not isinstance(node, ast.Call):
                continue
            name, keys = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            assert name not in ("eval", "exec", "os.system", "compile"), path
            assert name != "torch.load" or keys.get("weights_only") == "True", path
            assert name != "np.load" or keys.get("allow_pickle") == "False", path
            assert keys.get("shell") != "True", path


# -------------------------------------------------------------------------------------------------- bombs


def zeros_header(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": kind, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def test_bank_archive_bomb_is_not_unpacked(tmp_path: Path) -> None:
    images = 10**8
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("x.npy", "w", force_zip64=True) as member:
            member.write(zeros_header((images, 8, 8, 1)))
            for _ in range(200):
                member.write(bytes(2**20))
        file.writestr("y.npy", zeros_header((images,)) + bytes(100))
    assert (tmp_path / "bomb.npz").stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"bank .* would unpack to 6,500,000,000 bytes"):
        BankGenerator(tmp_path / "bomb.npz", classes=DIGITS, image_shape=(8, 8, 1))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_dataset_of_wrong_size_is_rejected_by_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    huge = zeros_header((10**12, 32, 32, 3))
    archive(tmp_path / "cifar10.npz", x_train=huge, y_train=huge, x_test=huge, y_test=huge)
    with pytest.raises(ValueError, match=r"x_train of .* is uint8 \[1000000000000, 32, 32, 3\]; it must be"):
        open_dataset("cifar10", str(tmp_path))


def test_array_header_that_claims_too_much_allocates_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="needs 10000000000000 bytes, but there are 64"):
        npy.read_array(zeros_header((10**13,)) + bytes(64))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_bank_image_bomb_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "bank" / "0"
    folder.mkdir(parents=True)
    chunks = (
        b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0),
        b"IDAT" + zlib.compress(bytes(99)),
        b"IEND",
    )
    content = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    (folder / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(ValueError, match=r"bomb\.png is not an image .*decompression bomb"):
        BankGenerator(tmp_path / "bank", classes=DIGITS, image_shape=(8, 8, 1))


# ------------------------------------------------------------------------------------------ links and names


def test_cache_does_not_follow_symbolic_links(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "cache"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    cache, fake = ImageCache(root), Fake()
    key = root / cache.key(fake, 0)
    for link in (key, key / "client-00000", key / "client-00000.lock", key / "client-00000" / "class-000"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside / "precious" if link.suffix == ".lock" else outside)
        with pytest.raises(ValueError, match=r"cache: .* is a link"):
            cache.ensure(fake, seed=0, client=0, wanted=[2, 0, 0])
        link.unlink()
    images, _, _ = cache.ensure(fake, seed=0, client=0, wanted=[2, 0, 0])
    (shard,) = root.rglob("*.npy")
    (outside / "shard.npy").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(outside / "shard.npy")
    assert verify(cache)[1] == [shard]
    again, _, made = cache.ensure(fake, seed=0, client=0, wanted=[2, 0, 0])
    assert made == 2 and np.array_equal(images, again)
    (root / ("f" * 64)).symlink_to(outside)
    manifest = key / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(outside / "precious")
    (key / "client-00001.lock").symlink_to(outside / "precious")
    assert [entry.manifest for entry in entries(cache)] == [{}]
    prune(cache, max_bytes=0)
    assert not key.exists()
    assert (outside / "precious").read_text() == "precious"
    assert sorted(os.listdir(outside)) == ["precious", "shard.npy"]


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "..", "a/b", "\0"])
def test_names_from_manifests_or_messages_are_not_used_as_paths(tmp_path: Path, name: str) -> None:
    """A fingerprint comes from the server, a manifest from any writer of the cache."""
    root = tmp_path / "cache"
    cache = ImageCache(root)
    cache.ensure(Fake(name), seed=0, client=0, wanted=[1, 0, 0], about={"generator": name, "key": name})
    assert all(path.resolve().is_relative_to(root) for path in root.rglob("*"))
    (entry,) = entries(cache)
    assert json.loads((entry.path / "manifest.json").read_text())["fingerprint"] == name
    prune(cache, key=name)
    assert entries(cache) == [entry]
