"""Custom data: reading from folders and files, and one-line errors."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runs import write_run
from PIL import Image
from rich.console import Console
from runners import finish, run_in_process, small

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import parse_config
from fedeas_flwr.data import datasets, own_dataset, own_images
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.data.own_dataset import read_dataset
from fedeas_flwr.data.own_images import read_images
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.report import allocations
from fedeas_flwr.report.allocations import maps_of
from fedeas_flwr.report.document import make_document
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.page import as_markdown
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import export


def save_image(path: Path, value: int, size: tuple[int, int] = (6, 8), mode: str = "L") -> None:
    """Save an image of one value; ``size`` is (height, width)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colour: Any = value if mode == "L" else (value, 0, 255 - value)
    Image.new(mode, (size[1], size[0]), colour).save(path)


def test_read_images_subfolders_are_classes_sorted_by_name(tmp_path: Path) -> None:
    save_image(tmp_path / "zebra" / "a.png", 30)
    save_image(tmp_path / "ant" / "b.png", 20)
    save_image(tmp_path / "ant" / "a.PNG", 10)
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    images, labels, classes = read_images(tmp_path)
    assert classes == ("ant", "zebra")
    assert labels.tolist() == [0, 0, 1] and labels.dtype == np.int64
    assert images.shape == (3, 6, 8, 1) and images.dtype == np.uint8
    assert images[:, 0, 0, 0].tolist() == [10, 20, 30]


def test_read_images_numeric_classes_are_sorted_numerically(tmp_path: Path) -> None:
    """Label 2 of an array is then the class of folder 2, also if there is a folder 10."""
    for number in range(12):
        save_image(tmp_path / str(number) / "a.png", number)
    found = read_images(tmp_path)
    assert found.classes == tuple(map(str, range(12))) and found.labels.tolist() == list(range(12))
    assert found.images[:, 0, 0, 0].tolist() == list(range(12))
    save_image(tmp_path / "other" / "a.png", 1)
    assert read_images(tmp_path).classes[:4] == ("0", "1", "10", "11"), (
        "with one name that is no number, all sort as text"
    )


def test_read_images_numeric_names_match_by_name_only(tmp_path: Path) -> None:
    for name in ("1", "2"):
        save_image(tmp_path / name / "a.png", 1)
    assert read_images(tmp_path, classes=["1", "2", "3"]).labels.tolist() == [0, 1]
    save_image(tmp_path / "0" / "a.png", 1)
    with pytest.raises(ValueError, match="subfolder '0'; the dataset's classes are 1, 2, 3"):
        read_images(tmp_path, classes=["1", "2", "3"])


def test_one_colour_image_makes_all_images_rgb(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "grey.png", 9)
    save_image(tmp_path / "b" / "red.png", 200, mode="RGB")
    images = read_images(tmp_path).images
    assert images[0, 0, 0].tolist() == [9, 9, 9] and images[1, 0, 0].tolist() == [200, 0, 55]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "tiff", "webp"])
def test_exif_orientation_is_applied(suffix: str, tmp_path: Path) -> None:
    """A phone stores the sensor's image and its orientation; 6 is a quarter turn to the right."""
    (tmp_path / "a").mkdir()
    pixels = np.zeros((16, 32), np.uint8)
    pixels[:, :16] = 255  # white on the left, and at the top once rotated
    orientation = Image.Exif()
    orientation[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a" / f"turned.{suffix}", exif=orientation)
    save_image(tmp_path / "b" / "upright.png", 9, (32, 16))
    found = read_images(tmp_path, channels=1).images[0, ..., 0]
    assert found.shape == (32, 16) and found[:14].min() > 200 and found[18:].max() < 50
    given = read_images(tmp_path, size=(32, 16), channels=1).images[0, ..., 0]
    assert np.array_equal(given, found), "a given size must be that of the rotated image"


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_ignored(tmp_path: Path) -> None:
    for name, exif in {"a": b"Exif\0\0no TIFF", "b": b"Exif\0\0II*\0\xff\xff\xff\xff"}.items():
        (tmp_path / name).mkdir()
        Image.new("L", (8, 6), 7).save(tmp_path / name / "one.jpg", exif=exif)
    assert read_images(tmp_path).images.shape == (2, 6, 8, 1)


def test_exif_orientation_is_applied_to_16_bit_images(tmp_path: Path) -> None:
    orientation = Image.Exif()
    orientation[0x0112] = 3
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pixels = np.array([[256, 512], [1024, 2048]], np.uint16)
        Image.fromarray(pixels).save(tmp_path / name / "grey.png", exif=orientation)
    assert read_images(tmp_path).images[0, ..., 0].tolist() == [[8, 4], [2, 1]]


def test_ignored_files_are_logged_once_with_example(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("ant", "bee"):
        save_image(tmp_path / name / "a.png", 1)
    (tmp_path / "ant" / ".DS_Store").write_text("hidden")
    read_images(tmp_path)
    assert not caplog.messages, "hidden files were logged"
    save_image(tmp_path / "ant" / "more" / "b.png", 1)
    (tmp_path / "ant" / "moving.gif").write_text("not read")
    (tmp_path / "list.csv").write_text("not read")
    read_images(tmp_path)
    read_images(tmp_path)
    (said,) = caplog.messages
    assert f"{tmp_path}: 3 files ignored, such as ant/more/b.png" in said
    assert ".png, .jpg, .jpeg, .webp, .tif, .tiff files directly in a class's folder" in said


def test_16_bit_images_keep_their_upper_8_bits(tmp_path: Path) -> None:
    """Pillow does so with 16-bit colours, but would make grey values above 255 white."""
    values = np.array([[0, 255, 256, 1000], [32768, 65279, 65280, 65535]], np.uint16)
    for number, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        Image.fromarray(values + number).save(tmp_path / name / "grey.png")
    found = read_images(tmp_path).images
    assert found.shape == (2, 2, 4, 1) and found[0, ..., 0].tolist() == [[0, 0, 1, 3], [128, 254, 255, 255]]
    assert found[1, 0, :, 0].tolist() == [0, 1, 1, 3]
    coloured = read_images(tmp_path, channels=3).images
    assert np.array_equal(coloured, np.repeat(found, 3, axis=3))
    Image.frombytes("I;16B", (4, 2), values.astype(">u2").tobytes()).save(tmp_path / "b" / "grey.png", "TIFF")
    assert np.array_equal(read_images(tmp_path).images[1], found[0])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("I", "Pillow's mode I has no fixed range"),
        ("F", "Pillow's mode F has no fixed range"),
        ("LAB", "conversion from LAB to .* not supported"),
    ],
)
def test_images_without_fixed_range_raise(mode: str, message: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_image(tmp_path / name / "one.png", 9)
    Image.new(mode, (8, 6)).save(tmp_path / "b" / "one.png", "TIFF")
    with pytest.raises(ValueError, match=rf"b/one.png is not an image that can be read \({message}") as caught:
        read_images(tmp_path, channels=1)
    assert "\n" not in str(caught.value)


def test_class_without_images_is_rejected(tmp_path: Path) -> None:
    for name in ("ant", "zebra"):
        save_image(tmp_path / name / "a.png", 30)
    (tmp_path / "bee").mkdir()
    (tmp_path / "bee" / "notes.txt").write_text("not an image")
    with pytest.raises(ValueError, match=r"bee has no images; every subfolder of .* is a class") as caught:
        read_dataset(tmp_path)
    assert "\n" not in str(caught.value)
    assert read_images(tmp_path, classes=["ant", "bee", "zebra"]).labels.tolist() == [0, 2], "a client may lack a class"


def test_images_of_different_sizes_need_a_given_size(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "one.png", 9, (6, 8))
    save_image(tmp_path / "b" / "two.png", 9, (10, 4))
    with pytest.raises(ValueError, match=r"one.png is 8×6, two.png 4×10.*one size first"):
        read_images(tmp_path)
    assert read_images(tmp_path, size=(4, 4)).images.shape == (2, 4, 4, 1)


def test_read_images_given_classes_match_by_name_or_number(tmp_path: Path) -> None:
    save_image(tmp_path / "dog" / "a.png", 1)
    save_image(tmp_path / "0" / "a.png", 2)
    found = read_images(tmp_path, classes=["cat", "bird", "dog"])
    assert found.labels.tolist() == [0, 2] and found.classes == ("cat", "bird", "dog")
    with pytest.raises(ValueError, match="subfolder 'dog'; the dataset's classes are cat, bird"):
        read_images(tmp_path, classes=["cat", "bird"])


def test_read_npz_with_and_without_class_names(tmp_path: Path) -> None:
    x, y = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3), np.array([1, 0, 1, 1], np.uint8)
    np.savez(tmp_path / "grey.npz", x=x, y=y)
    found = read_images(tmp_path / "grey.npz")
    assert found.images.shape == (4, 2, 3, 1) and np.array_equal(found.images[..., 0], x)
    assert found.labels.tolist() == [1, 0, 1, 1] and found.classes == ("0", "1")
    np.savez(tmp_path / "named.npz", x=x, y=y, classes=np.array(["no", "yes", "perhaps"]))
    assert read_images(tmp_path / "named.npz").classes == ("no", "yes", "perhaps")


def test_read_npz_given_classes_relabel_by_name(tmp_path: Path) -> None:
    """A site without the first class starts counting at the second, so its label 0 differs."""
    x, y = np.zeros((4, 2, 2), np.uint8), np.array([1, 0, 1, 1])
    np.savez(tmp_path / "d.npz", x=x, y=y, classes=np.array(["dog", "bird"]))
    found = read_images(tmp_path / "d.npz", classes=["cat", "bird", "dog"])
    assert found.labels.tolist() == [1, 2, 1, 1] and found.classes == ("cat", "bird", "dog")
    with pytest.raises(ValueError, match=r"d.npz has a class 'dog'; the dataset's classes are cat, bird$"):
        read_images(tmp_path / "d.npz", classes=["cat", "bird"])
    np.savez(tmp_path / "d.npz", x=x, y=y, classes=np.array(["2", "0"]))
    assert read_images(tmp_path / "d.npz", classes=["cat", "bird", "dog"]).labels.tolist() == [0, 2, 0, 0]
    np.savez(tmp_path / "d.npz", x=x, y=y + 1, classes=np.array(["dog", "bird"]))
    with pytest.raises(ValueError, match=r"d.npz: in y a label is 2; must be 0 to 1"):
        read_images(tmp_path / "d.npz", classes=["cat", "bird", "dog"])
    np.savez(tmp_path / "d.npz", x=x, y=y * 0, classes=np.array(["dog"]))
    assert read_images(tmp_path / "d.npz", classes=["cat", "bird", "dog"]).labels.tolist() == [2] * 4
    for twice, told in ((["dog", "dog"], "dog, dog"), (["dog", "2"], "dog, 2"), (np.array([], str), "none")):
        np.savez(tmp_path / "d.npz", x=x, y=y * 0, classes=np.array(twice))
        with pytest.raises(ValueError, match=f"holds classes = {told}; each must be present once"):
            read_images(tmp_path / "d.npz", classes=["cat", "bird", "dog"])


X, Y = np.zeros((4, 2, 2, 3), np.uint8), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "with x and y; it has x"),
        ({"x": X.astype(np.float32), "y": Y}, r"x float32 \[4, 2, 2, 3\].*must be uint8"),
        ({"x": X[:3], "y": Y}, r"x uint8 \[3, 2, 2, 3\], y int64 \[4\]"),
        ({"x": X[..., :2], "y": Y}, "1 or 3"),
        ({"x": X, "y": Y - 1}, "whole numbers from 0"),
        ({"x": X, "y": Y * 0.5}, "y float64"),
        ({"x": X.astype(np.float32), "y": Y}, r"holds x float32 \[4, 2, 2, 3\]; x must be uint8 \[N, H, W, 1 or 3\]$"),
        ({"x": X[:0], "y": Y[:0]}, r"holds x uint8 \[0, 2, 2, 3\], which has no images$"),
        ({"x": X[:3], "y": Y}, r"holds x uint8 \[3, .*, y int64 \[4\]; y must be \[3\]"),
        ({"x": X, "y": Y[:, None]}, r"y int64 \[4, 1\]; y must be \[4\]"),
        ({"x": X, "y": Y * 0.5}, r"d.npz holds y float64 \[4\]; y must be whole numbers from 0, such as int64$"),
        ({"x": X, "y": Y == 1}, r"d.npz holds y bool \[4\]; y must be whole numbers from 0, such as int64$"),
        ({"x": X, "y": Y - 1}, r"d.npz: in y a label is -1; must be whole numbers from 0$"),
        ({"x": X, "y": Y + 1, "classes": np.array(["a", "b"])}, "d.npz: in y a label is 2; must be 0 to 1"),
        ({"x": X, "y": np.array([None] * 4)}, "cannot be used: it holds Python objects, which are never unpickled"),
        ({"x": X, "y": Y * 0}, "1 class; must have 2 to"),
        ({"x": X, "y": Y, "classes": np.array(["a"])}, "1 class; must have 2 to"),
        ({"x": X, "y": Y + 1, "classes": np.array(["a", "b"])}, "a label is 2; must be 0 to 1"),
        ({"x": X, "y": Y, "classes": np.array(["a", "a"])}, "same name"),
        ({"x": X, "y": Y, "classes": np.array([1, 2])}, "list of strings"),
    ],
)
def test_invalid_arrays_are_rejected_in_one_line(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        read_images(tmp_path / "d.npz")
    assert "\n" not in str(caught.value) and "d.npz" in str(caught.value)


def test_label_without_class_error_names_the_array(tmp_path: Path) -> None:
    arrays = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y * 5, "classes": np.array(["a", "b"])}
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(ValueError, match=r"d.npz: in y_test a label is 5; must be 0 to 1"):
        read_dataset(tmp_path / "d.npz")


def test_npz_larger_than_the_limit_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.zeros((1000, 8, 8, 3), np.uint8), y=np.zeros(1000, int))
    assert (tmp_path / "d.npz").stat().st_size < 10_000
    monkeypatch.setattr(own_images, "MAX_BYTES", 100_000)
    monkeypatch.setattr(np, "load", lambda *a, **k: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=r"would unpack to 200,\d+ bytes, but at most 100,000 are allowed"):
        read_images(tmp_path / "d.npz")


@pytest.mark.parametrize("parts", [("",), ("_train", "_test")])
def test_large_label_is_rejected_without_listing_classes(parts: tuple[str, ...], tmp_path: Path) -> None:
    labels = np.array([0, 1, 0, 10**6])
    np.savez(
        tmp_path / "d.npz", **{f"{key}{part}": value for part in parts for key, value in (("x", X), ("y", labels))}
    )
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"d.npz has 1,000,001 classes; must have 2 to 10,000"):
            read_dataset(tmp_path / "d.npz")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_images_larger_than_the_limit_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_image(tmp_path / "a" / "one.png", 9)
    save_image(tmp_path / "b" / "two.png", 9)
    monkeypatch.setattr(own_images, "MAX_BYTES", 95)
    with pytest.raises(ValueError, match=r"2 images of 6×8 are 96 bytes; must be at most 95"):
        read_images(tmp_path)


@pytest.mark.parametrize("content", [b"no picture", b"\x89PNG\r\n\x1a\nhalf a header"])
def test_damaged_image_is_named(content: bytes, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_image(tmp_path / name / "good.png", 9)
    bad, whole = tmp_path / "b" / "bad.png", (tmp_path / "a" / "good.png").read_bytes()
    for damaged in (content, whole[:45]):
        bad.write_bytes(damaged)
        for settled in ({}, {"size": (6, 8), "channels": 1}):
            with pytest.raises(ValueError, match=r"bad\.png is not an image"):
                read_images(tmp_path, **settled)


def test_path_that_is_neither_folder_nor_npz_is_rejected(tmp_path: Path) -> None:
    for where in (tmp_path / "nothing", tmp_path / "nothing.npz"):
        with pytest.raises(FileNotFoundError, match="is not there; must be a folder"):
            read_images(where)
    (tmp_path / "d.npz").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="not a zip file"):
        read_images(tmp_path / "d.npz")
    with pytest.raises(ValueError, match="has no images"):
        read_images(tmp_path)


# ---------------------------------------------------------------------------------------------------- whole datasets


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets._open_own_cached.cache_clear()
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def shapes(folder: Path, each: int = 20) -> Path:
    """Write an easy dataset of vertical bars, horizontal bars and dots, 8×8, grey, with noise; return its folder."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("dot", "lying", "standing")):
        for number in range(each):
            image = rng.integers(0, 60, (8, 8), dtype=np.uint8)
            at = int(rng.integers(1, 6))
            here, all_of_it = slice(at, at + 2), slice(0, 8)
            image[((here, here), (here, all_of_it), (all_of_it, here))[label]] = 255
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / name / f"{number}.png")
    return folder


def test_own_folder_holds_out_a_fifth_of_each_class(own_cache: Path, tmp_path: Path) -> None:
    name = f"own:{shapes(tmp_path / 'shapes')}"
    info, opened = datasets.dataset_info(name), datasets.open_dataset(name)
    assert info.classes == ("dot", "lying", "standing") and info.image_shape == (8, 8, 1)
    assert np.bincount(opened.y_train).tolist() == [16] * 3 and np.bincount(opened.y_test).tolist() == [4] * 3
    assert opened.mean == pytest.approx((opened.x_train.mean() / 255,)) and isinstance(opened.x_train, np.memmap)
    assert info.mirrored_keeps_class is False
    before = np.array(opened.x_test)
    (folder,) = own_cache.glob("data/own-*/")
    (folder / "x_test.npy").write_bytes(b"damaged")
    datasets._open_own_cached.cache_clear()
    assert np.array_equal(datasets.open_dataset(name).x_test, before)


@pytest.mark.parametrize("content", [b"", b'{"classes": ["dot", "ly', b"[]", b"{}", b"\xff\xfe"])
def test_damaged_description_in_the_cache_is_rewritten(content: bytes, own_cache: Path, tmp_path: Path) -> None:
    name = f"own:{shapes(tmp_path / 'shapes')}"
    before = datasets.dataset_info(name)
    (about,) = own_cache.glob("data/own-*/about.json")
    about.write_bytes(content)
    datasets._open_own_cached.cache_clear()
    assert datasets.dataset_info(name) == before


def test_another_datasets_folder_in_the_cache_is_rewritten(own_cache: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "dark.npz", tmp_path / "light.npz"]
    for path, value in zip(paths, (0, 255), strict=True):
        np.savez(path, x=np.full((10, 2, 2, 1), value, np.uint8), y=np.repeat([0, 1], 5))
        datasets.open_dataset(f"own:{path}")
    dark, light = (own_cache / "data" / f"own-{own_dataset.fingerprint(path)}" for path in paths)
    light.rename(tmp_path / "elsewhere")
    dark.rename(light)
    datasets._open_own_cached.cache_clear()
    assert datasets.open_dataset(f"own:{paths[1]}").x_train.min() == 255


def test_own_folder_is_cached_once_for_all_spellings_of_its_path(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shapes(tmp_path / "shapes").parent)
    assert own_dataset.fingerprint("shapes") == own_dataset.fingerprint(tmp_path / "shapes")


def test_changed_folder_is_read_again(own_cache: Path, tmp_path: Path) -> None:
    name = f"own:{shapes(tmp_path / 'shapes')}"
    assert datasets.dataset_info(name).num_train == 48
    save_image(tmp_path / "shapes" / "dot" / "more.png", 9, (8, 8))
    assert datasets.dataset_info(name).num_train + datasets.dataset_info(name).num_test == 61


def test_image_overwritten_in_place_is_read_again(own_cache: Path, tmp_path: Path) -> None:
    config = parse_config({"dataset": f"own:{shapes(tmp_path / 'shapes')}", "alpha": 10.0, "policy": "none"})
    before = federated_data(config, 2)
    assert federated_data(config, 2) is before
    for file in (tmp_path / "shapes" / "dot").iterdir():
        save_image(file, 77, (8, 8))
    assert (federated_data(config, 2).dataset.x_train[:16] == 77).all()


def test_change_in_a_linked_class_folder_is_read_again(own_cache: Path, tmp_path: Path) -> None:
    elsewhere, linked = shapes(tmp_path / "shapes"), tmp_path / "linked"
    for part in ("train", "test"):
        (linked / part).mkdir(parents=True)
        for folder in elsewhere.iterdir():
            (linked / part / folder.name).symlink_to(folder)
    assert [datasets.dataset_info(f"own:{folder}").num_train for folder in (linked, linked / "train")] == [60, 48]
    save_image(elsewhere / "dot" / "more.png", 9, (8, 8))
    assert [datasets.dataset_info(f"own:{folder}").num_train for folder in (linked, linked / "train")] == [61, 49]


def test_own_fingerprint_depends_on_version(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached arrays and classifiers are named by the fingerprint."""
    folder = shapes(tmp_path / "shapes")
    before = own_dataset.fingerprint(folder)
    monkeypatch.setattr(own_dataset, "_VERSION", "another")
    assert own_dataset.fingerprint(folder) != before


def test_given_train_and_test_folders_are_used(own_cache: Path, tmp_path: Path) -> None:
    save_image(tmp_path / "d" / "train" / "a" / "1.png", 1)
    save_image(tmp_path / "d" / "train" / "b" / "1.png", 2)
    save_image(tmp_path / "d" / "test" / "b" / "1.png", 3)
    arrays, classes = read_dataset(tmp_path / "d")
    assert classes == ("a", "b") and arrays["y_train"].tolist() == [0, 1] and arrays["y_test"].tolist() == [1]
    given = {"x_train": X, "y_train": Y, "x_test": X[:1], "y_test": Y[:1] + 1}
    np.savez(tmp_path / "d.npz", **given)
    arrays, classes = read_dataset(tmp_path / "d.npz")
    assert classes == ("0", "1") and all(np.array_equal(arrays[key], given[key]) for key in given)
    np.savez(tmp_path / "d.npz", **{**given, "x_test": np.zeros((1, 3, 3, 3), np.uint8)})
    with pytest.raises(ValueError, match="differ in size"):
        read_dataset(tmp_path / "d.npz")


def test_train_folder_without_test_folder_raises(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_image(tmp_path / "train" / name / "1.png", 1)
    with pytest.raises(ValueError, match=r"has train/ but no test/: add it, or give .*/train, of which a fifth is"):
        read_dataset(tmp_path)
    (tmp_path / "train").rename(tmp_path / "test")
    with pytest.raises(ValueError, match=r"has test/ but no train/: add it$"):
        read_dataset(tmp_path)


def test_class_may_be_named_train(tmp_path: Path) -> None:
    for number in range(5):
        for name in ("plane", "train"):
            save_image(tmp_path / name / f"{number}.png", 1)
    assert read_dataset(tmp_path)[1] == ("plane", "train")


def test_classes_too_small_for_a_test_image_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, number in {"ant": 5, "bee": 3, "cow": 2, "dog": 1}.items():
        for each in range(number):
            save_image(tmp_path / name / f"{each}.png", 1)
    arrays, _ = read_dataset(tmp_path)
    assert np.bincount(arrays["y_train"]).tolist() == [4, 2, 2, 1] and arrays["y_test"].tolist() == [0, 1]
    assert caplog.messages == [
        f"{tmp_path}: 2 classes of fewer than 3 images have no test images, such as 'cow'; all are used for training"
    ]


@pytest.mark.parametrize(
    ("cache", "line"),
    [
        pytest.param(
            "/proc/nowhere",
            "/proc/nowhere: No such file or directory (FEDEAS_CACHE = '/proc/nowhere')",
            marks=pytest.mark.skipif(not Path("/proc").exists(), reason="a folder where nobody can make one"),
        ),
        ("~nobody-here/c", "FEDEAS_CACHE = '~nobody-here/c': its home folder is unknown; give the full path"),
    ],
)
def test_cache_errors_do_not_blame_the_dataset(
    cache: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets._open_own_cached.cache_clear()
    monkeypatch.setenv("FEDEAS_CACHE", cache)
    assert (
        run_in_process("plan", "--dataset", f"own:{shapes(tmp_path / 'shapes')}", "--clients", "2").stderr
        == f"error: {line}\n"
    )


def test_full_disk_is_reported_as_such(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("135168 requested and 122752 written")  # NumPy's message

    monkeypatch.setattr(datasets.np, "save", full)
    told = run_in_process("plan", "--dataset", f"own:{shapes(tmp_path / 'shapes')}", "--clients", "2")
    assert told.returncode == 1 and told.stderr.startswith(f"error: {own_cache}/data/own-")
    assert told.stderr.endswith(f": No space left on device (FEDEAS_CACHE = '{own_cache}')\n")


def test_invalid_dataset_is_one_line(own_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^dataset = 'own:': must be own:PATH"):
        datasets.dataset_info("own:")
    with pytest.raises(FileNotFoundError, match="dataset: '/nowhere' is not there; must be a folder"):
        datasets.dataset_info("own:/nowhere")
    with pytest.raises(
        ConfigError,
        match=r"dataset = 'mnist': must be digits, cifar10, cifar100, fashion-mnist, own:PATH .* or hf:PATH",
    ):
        parse_config({"dataset": "mnist"})
    with pytest.raises(ConfigError, match="generator = 'builtin'"):
        parse_config({"dataset": "own:x"})


def test_plan_and_heat_maps_use_class_names(own_cache: Path, tmp_path: Path) -> None:
    where = {"dataset": f"own:{shapes(tmp_path / 'shapes')}", "protocol": "clean", "clients": 3, "alpha": 0.3}
    words = [word for key, value in where.items() for word in (f"--{key}", str(value))]
    head = run_in_process("plan", *words, "--beta", "4").stdout.splitlines()[2]
    assert head.split()[-3:] == ["dot", "lying", "standing"]
    maps, notes = maps_of(group_runs([write_run(tmp_path / "run", [0.5], **where)])[0])
    (axes,) = allocations.draw(maps[0]).axes
    assert not notes and [label.get_text() for label in axes.get_xticklabels()] == ["dot", "lying", "standing"]


def test_run_on_custom_data_with_a_custom_bank(own_cache: Path, tmp_path: Path) -> None:
    folder = shapes(tmp_path / "shapes", 60)
    keys = {"dataset": f"own:{folder}", "generator": f"bank:{shapes(tmp_path / 'bank', 40)}", "clients": 3, "rounds": 8}
    run = finish(prepare(small(tmp_path / "run", **keys, alpha=0.3), Console(file=io.StringIO())))
    assert run.summary()["peak"] > 0.9 and run.summary()["total_generated"] > 0
    groups, _ = group_runs([run])
    text = as_markdown(make_document(groups))
    assert "FedEAS report: shapes" in text and "allocation-1.png" in text and "worst class" in text
    export(run, tmp_path / "record")
    record = RunDirectory(tmp_path / "record")
    assert record.config().dataset == "own:shapes" and str(tmp_path) not in (record.path / "config.json").read_text()
    assert "No heat map" in as_markdown(make_document(group_runs([record])[0]))
