"""Datasets: the fixed split, shared memory maps, invalid files, and atomic writes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import LONG

from fedeas_flwr.common.files import atomic_folder, atomic_path, atomic_write, cache_root, remove_unfinished
from fedeas_flwr.config import parse_config
from fedeas_flwr.data import datasets, sources
from fedeas_flwr.data.federated import federated_data


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDEAS_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def small_cifar(monkeypatch: pytest.MonkeyPatch) -> sources.DatasetInfo:
    """Reduce CIFAR-10 to 20 and 10 images, so that a test does not write 180 MB."""
    info = dataclasses.replace(datasets.dataset_info("cifar10"), num_train=20, num_test=10)
    monkeypatch.setitem(sources.BUILT_IN, "cifar10", info)
    return info


def small_arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8),
        "y_train": np.arange(20) % 10,
        "x_test": rng.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8),
        "y_test": np.arange(10),
    }


def test_digits_are_a_stratified_split_of_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    digits = datasets.open_dataset("digits")
    assert digits.x_train.shape == (1438, 8, 8, 1) and digits.x_test.shape == (359, 8, 8, 1)
    assert digits.y_train.dtype == np.int64 and digits.x_train.dtype == np.uint8
    assert np.bincount(digits.y_train).tolist() == [142, 146, 142, 146, 145, 146, 145, 143, 139, 144]
    assert np.bincount(digits.y_test).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    # Disjoint and complete: scikit-learn's images, as a multiset, are exactly train and test together.
    source = load_digits()
    original = np.rint(source.images * 255 / 16).astype(np.uint8)
    ours = np.concatenate([digits.x_train, digits.x_test])[..., 0]
    assert sorted(image.tobytes() for image in ours) == sorted(image.tobytes() for image in original)
    assert original.max() == 255


def test_digits_mean_and_std_are_of_the_train_split() -> None:
    digits = datasets.open_dataset("digits")
    pixels = digits.x_train / 255
    assert digits.mean == pytest.approx((pixels.mean(),), abs=1e-4)
    assert digits.std == pytest.approx((pixels.std(),), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "classes"), [("digits", 10), ("cifar10", 10), ("cifar100", 100), ("fashion-mnist", 10)]
)
def test_class_names_are_distinct(name: str, classes: int) -> None:
    assert len(set(datasets.dataset_info(name).classes)) == classes


def test_dataset_arrays_are_read_only_memory_maps() -> None:
    first, second = datasets.open_dataset("digits"), datasets.open_dataset("digits")
    for key in ("x_train", "y_train", "x_test", "y_test"):
        array, again = getattr(first, key), getattr(second, key)
        assert isinstance(array, np.memmap) and array.filename == again.filename
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_concurrent_processes_write_the_dataset_once(own_cache: Path) -> None:
    code = "from fedeas_flwr.data.datasets import open_dataset; print(open_dataset('digits').x_train.filename)"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate(timeout=LONG)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(printed) == 1 and Path(printed.pop()).is_relative_to(own_cache)
    assert [path.name for path in (own_cache / "data").iterdir() if path.name.endswith(".tmp")] == []


@pytest.mark.parametrize("left", [1000, 20, 0])
def test_damaged_dataset_cache_is_rewritten(own_cache: Path, left: int) -> None:
    whole = np.array(datasets.open_dataset("digits").x_train)
    (file,) = own_cache.glob("data/digits-*/x_train.npy")
    file.write_bytes(file.read_bytes()[:left])
    assert np.array_equal(datasets.open_dataset("digits").x_train, whole)


def test_changed_npz_is_read_again(own_cache: Path, small_cifar: sources.DatasetInfo, tmp_path: Path) -> None:
    arrays = small_arrays()
    arrays["y_train"] = arrays["y_train"].astype(np.uint8)
    np.savez_compressed(tmp_path / "cifar10.npz", **arrays)
    opened = datasets.open_dataset("cifar10", str(tmp_path))
    assert np.array_equal(opened.x_train, arrays["x_train"]) and opened.y_train.dtype == np.int64
    arrays["x_train"] = 255 - arrays["x_train"]
    np.savez(tmp_path / "cifar10.npz", **arrays)
    assert np.array_equal(datasets.open_dataset("cifar10", str(tmp_path)).x_train, arrays["x_train"])


def test_federated_data_reads_a_changed_npz_again(
    own_cache: Path, small_cifar: sources.DatasetInfo, tmp_path: Path
) -> None:
    config, arrays = parse_config({"dataset": "cifar10", "data-dir": str(tmp_path), "policy": "none"}), small_arrays()
    np.savez(tmp_path / "cifar10.npz", **arrays)
    assert federated_data(config, 1) is federated_data(config, 1)
    arrays["x_train"] = 255 - arrays["x_train"]
    np.savez(tmp_path / "cifar10.npz", **arrays)
    assert np.array_equal(federated_data(config, 1).dataset.x_train, arrays["x_train"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((19, 32, 32, 3), np.uint8)}, r"x_train .* is uint8 \[19, 32, 32, 3\]; it must be uint8"),
        ({"x_test": np.zeros((10, 32, 32, 3), np.float32)}, "x_test .* is float32"),
        ({"y_test": np.full(10, 10)}, "has labels 10 to 10; must be 0 to 9"),
        ({"y_train": np.zeros(20)}, "y_train .* must be integer"),
        ({"y_train": np.array([None] * 20)}, "cifar10.npz .* Python objects"),
        ({"y_train": None}, r"it lacks .*y_train\.npy.* with x_train, y_train, x_test, y_test$"),
    ],
)
def test_invalid_npz_is_rejected_in_one_line(
    own_cache: Path, small_cifar: sources.DatasetInfo, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    arrays = {key: value for key, value in (small_arrays() | change).items() if value is not None}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        datasets.open_dataset("cifar10", str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "text"])
def test_damaged_npz_is_rejected_in_one_line(
    own_cache: Path, small_cifar: sources.DatasetInfo, tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "cifar10.npz"
    np.savez_compressed(file, **small_arrays())
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    file.write_bytes({"truncated": content[: len(content) // 2], "flipped": content, "text": b"no archive"}[damage])
    with pytest.raises(ValueError, match=r"cifar10.npz cannot be used \(") as caught:
        datasets.open_dataset("cifar10", str(tmp_path))
    assert "\n" not in str(caught.value)


def write_idx(file: Path, array: np.ndarray[Any, Any]) -> None:
    """Write an array as torchvision's raw files are: magic number, sizes, bytes."""
    sizes = np.array(array.shape, dtype=">i4").tobytes()
    file.write_bytes(bytes((0, 0, 8, array.ndim)) + sizes + array.astype(np.uint8).tobytes())


@pytest.fixture
def small_fashion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Reduce Fashion-MNIST to 20 and 10 images and write them as torchvision's raw files."""
    info = dataclasses.replace(datasets.dataset_info("fashion-mnist"), num_train=20, num_test=10)
    monkeypatch.setitem(sources.BUILT_IN, "fashion-mnist", info)
    rng, raw = np.random.default_rng(0), tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    arrays: dict[str, Any] = {}
    for split, stem, count in (("train", "train", 20), ("test", "t10k", 10)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 10
        write_idx(raw / f"{stem}-images-idx3-ubyte", arrays[f"x_{split}"][..., 0])
        write_idx(raw / f"{stem}-labels-idx1-ubyte", arrays[f"y_{split}"])
    return arrays


def test_fashion_mnist_is_read_from_torchvisions_files_and_npz(
    own_cache: Path, small_fashion: dict[str, Any], tmp_path: Path
) -> None:
    read = datasets.open_dataset("fashion-mnist", str(tmp_path))
    assert all(np.array_equal(getattr(read, key), array) for key, array in small_fashion.items())
    write_idx(tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte", 255 - small_fashion["x_train"][..., 0])
    again = datasets.open_dataset("fashion-mnist", str(tmp_path))
    assert np.array_equal(again.x_train, 255 - small_fashion["x_train"])  # torchvision does not check these files
    np.savez(tmp_path / "fashion-mnist.npz", **small_fashion)
    assert np.array_equal(datasets.open_dataset("fashion-mnist", str(tmp_path)).x_train, small_fashion["x_train"])


@pytest.mark.parametrize("content", [b"", b"not what it should be", bytes((0, 0, 8, 3)) + bytes(12) + b"more"])
def test_damaged_fashion_mnist_is_rejected(
    own_cache: Path, small_fashion: dict[str, Any], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "FashionMNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(FileNotFoundError, match="incomplete or damaged") as caught:
        datasets.open_dataset("fashion-mnist", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_dataset_error_names_three_remedies(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")
    with pytest.raises(FileNotFoundError) as caught:
        datasets.open_dataset("cifar100", str(tmp_path))
    line = str(caught.value)
    assert all(way in line for way in ("cifar100.npz", "cifar-100-python", "download")) and "\n" not in line


def test_folder_with_wrong_checksums_is_rejected(own_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"not what it should be")
    with pytest.raises(FileNotFoundError, match="incomplete or damaged"):
        datasets.open_dataset("cifar10", str(tmp_path))


def test_unknown_dataset_is_rejected() -> None:
    with pytest.raises(ValueError, match="'mnist' is not known; use one of cifar10, cifar100, digits"):
        datasets.open_dataset("mnist")


def test_atomic_writes_leave_the_old_or_new_content(tmp_path: Path) -> None:
    file, folder = tmp_path / "deep" / "file", tmp_path / "folder"
    atomic_write(file, b"old")
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_path(file) as part:
        part.write_bytes(b"half")
        raise RuntimeError
    with pytest.raises(RuntimeError), atomic_folder(folder) as temporary:
        (temporary / "b").write_bytes(b"half")
        raise RuntimeError
    assert file.read_bytes() == b"old" and [path.name for path in folder.iterdir()] == ["a"]
    with atomic_folder(folder) as temporary:
        (temporary / "c").write_bytes(b"new")
    assert [path.name for path in folder.iterdir()] == ["c"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["c", "deep", "file", "folder"]


def test_atomic_folder_keeps_similarly_named_temporaries(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "site.2") as other:
        with atomic_folder(tmp_path / "site"):
            assert other.exists()
        (other / "a").write_bytes(b"")
    assert (tmp_path / "site").exists() and (tmp_path / "site.2" / "a").exists()


def test_atomic_folder_is_renamed_before_the_old_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed while it removes the old folder leaves the new one, and removable temporary folders."""
    folder, rename = tmp_path / "a" / "folder", os.rename

    def replace(name: str) -> None:
        with atomic_folder(folder) as temporary:
            (temporary / name).write_bytes(b"")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def killed_between(old: Path, new: Path) -> None:
        killed() if (old / "third").exists() else rename(old, new)

    replace("first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        replace("second")
    assert [path.name for path in folder.iterdir()] == ["second"]
    shutil.copytree(folder.parent, tmp_path / "b")
    remove_unfinished(tmp_path / "b")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.rename", killed_between)
        replace("third")
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", "folder", "second"}


def test_cache_root_follows_the_environment(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == own_cache
    monkeypatch.delenv("FEDEAS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")  # not absolute, so it is ignored
    assert cache_root() == Path.home() / ".cache" / "fedeas"
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache.parent))
    assert cache_root() == (own_cache.parent if sys.platform == "linux" else Path.home() / ".cache") / "fedeas"


def test_cache_in_unknown_home_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", "~no-one/x")
    with pytest.raises(
        ValueError, match=r"^FEDEAS_CACHE = '~no-one/x': its home folder is unknown; give the full path$"
    ):
        cache_root()


def test_only_files_module_expands_home_folders() -> None:
    package = Path(datasets.__file__).parents[1]
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    assert [path.name for path, text in texts.items() if "expanduser" in text or "Path.home" in text] == ["files.py"]
