"""Hugging Face datasets: saved, image folder, parquet; columns, splits, sizes; a node's; bad input in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from runners import run_in_process

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.hf_spec import HfSpec
from fedeas_flwr.config import parse_config
from fedeas_flwr.config_files import absolute_paths
from fedeas_flwr.data.datasets import dataset_info, open_dataset, short_name
from fedeas_flwr.data.federated import local_data
from fedeas_flwr.data.node import read_node

REASON = "an extra: pip install 'fedeas-flwr[datasets]'"
KINDS = ("ash", "elm", "oak")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDEAS_OFFLINE", "1")


@pytest.fixture
def hf() -> Any:
    return pytest.importorskip("datasets", reason=REASON)


def png(colour: int, size: tuple[int, int] = (8, 8), mode: str = "L") -> bytes:
    content = io.BytesIO()
    pixels = np.full(size[::-1], colour << 8, np.uint16) if mode == "I;16" else None
    image = Image.new(mode, size, tuple([colour] * len(mode)) if len(mode) > 1 else colour) if pixels is None else None
    (image or Image.fromarray(pixels)).save(content, "PNG")  # type: ignore[arg-type]
    return content.getvalue()


def rows(number: int = 30, **more: Any) -> dict[str, Any]:
    """Return images whose grey level is ten times their class's number."""
    return {"image": [{"bytes": png(10 * (i % 3)), "path": None} for i in range(number)], **more}


def saved(hf: Any, folder: Path, number: int = 30, names: tuple[str, ...] = KINDS) -> Path:
    labels = [names.index(KINDS[i % 3]) for i in range(number)]
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=list(names))})
    hf.Dataset.from_dict(rows(number, label=labels), features=features).save_to_disk(folder)
    return folder


def check(name: str, train: int, test: int) -> None:
    """Check a dataset's classes, sizes, and that each image has its label."""
    found = open_dataset(name)
    assert found.classes == KINDS and (len(found.y_train), len(found.y_test)) == (train, test)
    assert np.array_equal(found.x_train[:, 0, 0, 0], 10 * found.y_train)
    assert np.array_equal(found.x_test[:, 0, 0, 0], 10 * found.y_test)


def test_saved_dataset_holds_out_a_fifth(hf: Any, tmp_path: Path) -> None:
    check(f"hf:{saved(hf, tmp_path / 'trees')}", 24, 6)
    check(f"own:{tmp_path / 'trees'}", 24, 6)
    assert dataset_info(f"hf:{tmp_path / 'trees'}").image_shape == (8, 8, 1)


def test_saved_splits_and_those_given(hf: Any, tmp_path: Path) -> None:
    parts = {name: hf.load_from_disk(str(saved(hf, tmp_path / name, n))) for name, n in (("train", 12), ("test", 6))}
    hf.DatasetDict(parts).save_to_disk(tmp_path / "both")
    check(f"hf:{tmp_path / 'both'}", 12, 6)
    hf.DatasetDict({"a": parts["train"], "b": parts["test"]}).save_to_disk(tmp_path / "other")
    check(f"hf:{tmp_path / 'other'} train=a test=b", 12, 6)
    with pytest.raises(ValueError, match="has no split 'train'; it has a, b: add train=NAME test=NAME after the path"):
        open_dataset(f"hf:{tmp_path / 'other'}")


def test_image_folder(hf: Any, tmp_path: Path) -> None:
    for part, number in (("train", 4), ("test", 2)):
        for label, kind in enumerate(KINDS):
            (tmp_path / "trees" / part / kind).mkdir(parents=True)
            for i in range(number):
                (tmp_path / "trees" / part / kind / f"{i}.png").write_bytes(png(10 * label))
    check(f"hf:{tmp_path / 'trees'}", 12, 6)


def test_parquet_of_bytes_two_sizes_and_columns_given(hf: Any, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    sizes = [(8, 8), (12, 10)]
    table = {
        "picture": [png(10 * (i % 3), sizes[i % 2]) for i in range(30)],
        "kind": [KINDS[i % 3] for i in range(30)],
    }
    parquet.write_table(pyarrow.table(table), tmp_path / "trees.parquet")
    name = f"hf:{tmp_path / 'trees.parquet'}"
    with pytest.raises(ValueError, match="no columns that may hold the labels; it has picture, kind: add label=COLUMN"):
        open_dataset(name)
    with pytest.raises(ValueError, match=r"row 28 is 8×8, row 29 12×10\): add size=8x8 after the path"):
        open_dataset(f"{name} label=kind")
    check(f"{name} label=kind size=8", 24, 6)
    assert short_name(f"{name} label=kind size=8") == "trees"


def test_changed_files_are_read_again(hf: Any, tmp_path: Path) -> None:
    check(f"hf:{saved(hf, tmp_path / 'trees')}", 24, 6)
    check(f"hf:{saved(hf, tmp_path / 'trees', 60)}", 48, 12)


def test_node_reads_a_saved_folder_by_class_name(hf: Any, tmp_path: Path) -> None:
    config = parse_config({"dataset": f"hf:{saved(hf, tmp_path / 'trees')}", "policy": "none"})
    node = read_node({"client-id": 3, "data-path": str(saved(hf, tmp_path / "mine", 9, KINDS[::-1]))})
    data = local_data(config, node)
    images, labels = data.train(node.part)
    assert len(labels) == 9 and np.array_equal(images[:, 0, 0, 0], 10 * labels)
    other = read_node({"client-id": 3, "data-path": f"hf:{saved(hf, tmp_path / 'other', 9, (*KINDS, 'yew'))}"})
    with pytest.raises(ValueError, match="has a class 'yew'; the dataset's classes are ash, elm, oak"):
        local_data(config, other)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("hf:/nowhere", "data-path = 'hf:/nowhere' is not there"),
        ("hf:", "data-path = 'hf:': must be hf:PATH"),
        ("hf:/tmp labl=kind", "data-path = 'hf:/tmp labl=kind': no option 'labl'"),
        ("hf:/tmp size=0", "data-path = 'hf:/tmp size=0': size must be pixels"),
    ],
)
def test_wrong_data_path_is_named(given: str, line: str) -> None:
    with pytest.raises(ConfigError, match=f"^node-config: {line}"):
        read_node({"client-id": 3, "data-path": given})


def test_mixed_modes_are_converted(hf: Any, tmp_path: Path) -> None:
    modes = ["RGB", "L", "RGBA", "I;16"]
    images = [{"bytes": png(10 * (i % 3), mode=modes[i % 4]), "path": None} for i in range(24)]
    hf.Dataset.from_dict({"image": images, "label": [KINDS[i % 3] for i in range(24)]}).save_to_disk(tmp_path / "mixed")
    check(f"hf:{tmp_path / 'mixed'}", 18, 6)
    assert dataset_info(f"hf:{tmp_path / 'mixed'}").image_shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (rows(), "no columns that may hold the labels; it has image: add label=COLUMN"),
        (rows(label=[0, 1, None] * 10), "row 2 has no label in column 'label'"),
        (rows(label=[0, 1, -1] * 10), "column 'label' has a label -1; must be whole numbers from 0"),
        (rows(label=[0.5] * 30), "labels must be names or integers"),
        (rows(label=[0] * 30), "has 1 class; must have 2 to 10,000"),
        (
            rows(label=[0, 1] * 15, photo=[png(1)] * 30),
            "2 columns that may hold the images; it has image, label, photo",
        ),
        (
            {"image": [b"no image"] * 4, "label": [0, 1] * 2},
            r"row 0 is not an image that can be read \(cannot identify image file\)$",
        ),
        ({"image": [png(1)[:45]] * 4, "label": [0, 1] * 2}, "row 0 is not an image that can be read"),
        ({"image": [png(1), None] * 2, "label": [0, 1] * 2}, "row 1 is not an image that can be read .it is empty"),
        ({"text": ["a", "b"], "label": [0, 1]}, "no columns that may hold the images; it has text, label"),
        ({"image": [], "label": []}, "bad has no images, or has a split without any"),
    ],
)
def test_bad_data_is_one_line(hf: Any, tmp_path: Path, table: dict[str, Any], line: str) -> None:
    hf.Dataset.from_dict(table).save_to_disk(tmp_path / "bad")
    with pytest.raises(ValueError, match=line) as caught:
        open_dataset(f"hf:{tmp_path / 'bad'}")
    assert str(caught.value).startswith("dataset: ") and "\n" not in str(caught.value)


def test_damaged_and_missing_files_are_one_line(hf: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"bad.parquet cannot be read by the package datasets \("):
        open_dataset(f"hf:{tmp_path / 'bad.parquet'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty cannot be read by the package datasets"):
        open_dataset(f"hf:{tmp_path / 'empty'}")
    with pytest.raises(FileNotFoundError, match="hf:/nowhere is not there; must be a folder saved by datasets"):
        open_dataset("hf:/nowhere")
    with pytest.raises(FileNotFoundError, match="hf:trees is not there"):  # a name on the Hub has a user
        open_dataset("hf:trees")
    with pytest.raises(FileNotFoundError, match="hf:some/name is not there"):  # FEDEAS_OFFLINE: the Hub is not asked
        open_dataset("hf:some/name")


def test_only_names_with_a_user_are_looked_up_on_the_hub() -> None:
    """Without a network, datasets finds a name without one in its cache, which may hold another dataset."""
    assert HfSpec.parse("hf:some/name size=8").may_be_on_hub
    assert not HfSpec.parse("hf:trees").may_be_on_hub


def test_missing_extra_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedeas_flwr.common.import_path.find_spec", lambda name: None)
    line = rf"^dataset: hf:{tmp_path}: needs the package datasets, pip install 'fedeas-flwr\[datasets\]'"
    with pytest.raises(ValueError, match=line):
        open_dataset(f"hf:{tmp_path}")


def test_names_in_a_config(tmp_path: Path) -> None:
    (tmp_path / "trees of 2").mkdir()
    name = absolute_paths({"dataset": "hf:trees of 2 label=kind"}, tmp_path)["dataset"]
    assert name == f"hf:{tmp_path}/trees of 2 label=kind"
    assert absolute_paths({"dataset": "hf:user/name"}, tmp_path)["dataset"] == "hf:user/name"
    for bad, line in (
        ("hf:", "hf:PATH"),
        ("hf:x labl=y", "no option 'labl'; there are image, "),
        ("hf:x size=0", "size"),
    ):
        with pytest.raises(ConfigError, match=line):
            parse_config({"dataset": bad, "policy": "none"})


def test_parquet_folder_to_a_finished_run_in_two_commands(hf: Any, tmp_path: Path) -> None:
    """Three classes, two sizes, PNG bytes in parquet: train a generator on it, then run FedEAS with it."""
    import pyarrow
    from pyarrow import parquet

    pixels = [png(10 * (i % 3), [(8, 8), (12, 12)][i % 2], "RGB") for i in range(90)]
    labels = [KINDS[i % 3] for i in range(90)]
    (tmp_path / "trees").mkdir()
    parquet.write_table(pyarrow.table({"image": pixels, "label": labels}), tmp_path / "trees" / "train.parquet")
    (tmp_path / "trees.toml").write_text(
        'dataset = "hf:trees size=8"\ngenerator = "generator"\nclients = 3\nrounds = 2\n'
        'partition = "pathological"\npartition-args = "num_classes_per_partition=2"\n'
    )
    for words in (
        ["train-generator", "--dataset", "hf:trees size=8", "--out", "generator", "--preset=digits", "--steps=2"],
        ["run", "trees.toml", "backend=inline", "run-dir=run", "sampler-steps=2"],
    ):
        done = run_in_process(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["total_generated"] > 0


def test_command_with_bad_data_is_one_line(hf: Any, tmp_path: Path) -> None:
    hf.Dataset.from_dict(rows()).save_to_disk(tmp_path / "bad")
    (tmp_path / "bad.toml").write_text('dataset = "hf:bad"\npolicy = "none"\nclients = 3\n')
    done = run_in_process("run", "bad.toml", "backend=inline", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: dataset") and "no columns that may hold the labels" in done.stderr


def test_node_reads_what_flwr_datasets_create_writes(hf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("flwr_datasets.cli.create", reason=REASON)
    (tmp_path / "trees").mkdir()
    hf.load_from_disk(str(saved(hf, tmp_path / "saved"))).to_parquet(tmp_path / "trees" / "train.parquet")
    monkeypatch.setattr(hf.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    cli.create(str(tmp_path / "trees"), num_partitions=3, out_dir=tmp_path / "parts")
    node = read_node({"client-id": 1, "data-path": str(tmp_path / "parts" / "partition_1")})
    data = local_data(parse_config({"dataset": f"hf:{tmp_path / 'trees'}", "policy": "none"}), node)
    images, labels = data.train(node.part)
    assert len(labels) == 10 and np.array_equal(images[:, 0, 0, 0], 10 * labels)
