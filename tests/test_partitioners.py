"""flwr-datasets both ways: the paper's partition as a Partitioner, and its partitioners by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedeas_flwr import allocate
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import parse_config
from fedeas_flwr.config_keys import keys_in_use
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.partition import PARTITIONERS, make_partition, plan_labels
from fedeas_flwr.planning.run_plan import planned_counts

REASON = "an extra: pip install 'fedeas-flwr[datasets]'"
ARGUMENTS = {
    "inner-dirichlet": "partition_sizes=400,300,200,100",
    "pathological": "num_classes_per_partition=5",
    "shard": "num_shards_per_partition=2",
    "continuous": "strictness=0.5",
    "size": "partition_sizes=400,300,200,100",
}


@pytest.mark.parametrize(
    ("dataset", "clients", "alpha", "samples", "images"),
    [
        ("cifar10", 20, 0.05, 45_007, 18_080),
        ("cifar10", 20, 0.1, 45_007, 13_437),
        ("cifar10", 20, 0.3, 45_006, 5_675),
        ("cifar10", 100, 0.1, 45_046, 33_650),
        ("cifar10", 100, 0.3, 45_038, 15_666),
        ("cifar100", 20, 0.1, 45_008, 29_639),
        ("cifar100", 100, 0.1, 45_038, 74_005),
    ],
)
def test_paper_partitioner_gives_the_papers_totals(
    dataset: str, clients: int, alpha: float, samples: int, images: int
) -> None:
    datasets = pytest.importorskip("datasets", reason=REASON)
    pytest.importorskip("flwr_datasets", reason=REASON)
    from fedeas_flwr.data.dirichlet_partitioner import PaperDirichletPartitioner

    labels = np.random.RandomState(3).permutation(plan_labels(dataset, "paper"))
    partitioner = PaperDirichletPartitioner(clients, "fine", alpha, test_fraction=0.25)
    partitioner.dataset = datasets.Dataset.from_dict({"fine": labels, "row": np.arange(labels.size)})
    expected = make_partition(labels, "paper", clients, alpha, 42)
    parts = [partitioner.load_partition(k).with_format("numpy")[:] for k in range(partitioner.num_partitions)]
    assert all(np.array_equal(part["row"], mine) for part, mine in zip(parts, expected.train, strict=True))
    held_out = partitioner.load_test_partition(1).with_format("numpy")[:]["row"]
    assert np.array_equal(held_out, expected.test[1])
    counts = np.stack([np.bincount(part["fine"], minlength=labels.max() + 1) for part in parts])
    assert counts.sum() == samples and allocate(counts, "fedeas", beta=12).sum() == images


def test_paper_partitioner_takes_named_labels_and_decodes_no_image() -> None:
    datasets = pytest.importorskip("datasets", reason=REASON)
    pytest.importorskip("flwr_datasets", reason=REASON)
    from fedeas_flwr.data.dirichlet_partitioner import PaperDirichletPartitioner

    partitioner = PaperDirichletPartitioner(num_partitions=3, partition_by="label", alpha=1.0)
    table = {"label": ["cat", "dog"] * 50, "image": [{"bytes": b"no image", "path": None}] * 100}
    partitioner.dataset = datasets.Dataset.from_dict(table).cast_column("image", datasets.Image())
    assert sum(len(partitioner.load_partition(k)) for k in range(3)) == 100


@pytest.mark.parametrize("name", [name for name in PARTITIONERS if name != "dirichlet"])
@pytest.mark.parametrize("protocol", ["clean", "paper"])
def test_partitioner_is_planned_and_run_alike(name: str, protocol: str) -> None:
    pytest.importorskip("flwr_datasets", reason=REASON)
    given = {"protocol": protocol, "partition": name, "partition-args": ARGUMENTS.get(name, ""), "clients": 4}
    config = parse_config({**given, "alpha": 1.0})
    data = federated_data(config, 4)
    everything = np.concatenate([*data.partition.train, *data.partition.test])
    assert np.unique(everything).size == everything.size >= 900
    assert np.array_equal(data.counts(), planned_counts(config))
    assert all(len(mine) > 0 for mine in data.partition.test) == (protocol == "paper")


def test_iid_mixes_the_classes_and_pathological_equals_flwr_datasets() -> None:
    datasets = pytest.importorskip("datasets", reason=REASON)
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason=REASON)
    labels = plan_labels("cifar10", "clean")
    iid = make_partition(labels, "clean", 10, 0.1, 42, partition="iid").counts(labels, 10)
    assert iid.min() > 400 and set(iid.sum(axis=1)) == {5000}
    made = make_partition(
        labels, "clean", 10, 0.1, 42, partition="pathological", arguments="num_classes_per_partition=2"
    )
    theirs = partitioners.PathologicalPartitioner(10, "label", 2, seed=42)
    theirs.dataset = datasets.Dataset.from_dict({"label": labels})
    expected = [np.bincount(theirs.load_partition(k).with_format("numpy")[:]["label"], minlength=10) for k in range(10)]
    assert np.array_equal(made.counts(labels, 10), expected)


def test_partition_is_read_from_the_cache_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr_datasets", reason=REASON)
    given = {"partition": "shard", "arguments": "num_shards_per_partition=2"}
    first = make_partition("digits", "clean", 4, 0.1, 1, tmp_path, **given)
    monkeypatch.setattr("fedeas_flwr.common.import_path.find_spec", lambda name: None)
    again = make_partition("digits", "clean", 4, 0.1, 1, tmp_path, **given)
    assert all(np.array_equal(one, other) for one, other in zip(first.train, again.train, strict=True))


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedeas_flwr.common.import_path.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"partition = 'iid': needs the package flwr-datasets, pip install"):
        make_partition("digits", "clean", 4, 0.1, 1, partition="iid")


@pytest.mark.parametrize(
    ("partition", "arguments", "line"),
    [
        ("pathological", "", "needs num_classes_per_partition; give it in partition-args$"),
        ("pathological", "num_classes=2", "has no argument 'num_classes'; it has class_assignment_mode"),
        ("pathological", "num_classes_per_partition=11", "raised ValueError"),
        ("pathological", "num_classes_per_partition=2 seed=1", r"seed is set by the run \(clients, alpha"),
        ("size", "partition_sizes=400,300", "has 2 partitions, but clients = 4"),
        ("size", "partition_sizes=400,300,200,5", "gives a client 5 samples, and each needs 10"),
        ("fedeas_flwr.partition:Twice", "", "gives a sample to two clients"),
        ("numpy:zeros", "shape=3", "is no Partitioner"),
        ("fedeas_flwr.partition:split", "", "needs labels, num_clients: must be a Partitioner.* or a function that"),
        ("nowhere.at:all", "", "cannot be imported"),
    ],
)
def test_partition_that_cannot_be_used_is_one_line(
    partition: str, arguments: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner", reason=REASON)

    class Twice(partitioners.IidPartitioner):  # type: ignore[name-defined,misc]
        def load_partition(self, partition_id: int) -> object:
            return super().load_partition(0)

    def split(labels: object, num_clients: int, seed: int) -> object:
        return labels

    for own in (Twice, split):
        monkeypatch.setattr(f"fedeas_flwr.partition.{own.__name__}", own, raising=False)
    with pytest.raises(ConfigError, match=line) as caught:
        make_partition("digits", "clean", 4, 0.1, 1, partition=partition, arguments=arguments)
    assert "\n" not in str(caught.value)


def test_keys_of_a_partition() -> None:
    with pytest.raises(ConfigError, match=r"partition = 'patological': must be dirichlet.*did you mean 'pathological'"):
        parse_config({"partition": "patological"})
    with pytest.raises(ConfigError, match="partition-args = 'a=1' needs a partition of flwr-datasets"):
        parse_config({"partition-args": "a=1"})
    assert "alpha" not in keys_in_use(parse_config({"partition": "iid"}))
    assert "alpha" in keys_in_use(parse_config({"partition": "flwr-dirichlet"}))


def test_too_many_clients_are_rejected_before_a_partitioner_runs() -> None:
    labels = plan_labels("digits", "clean")
    with pytest.raises(ValueError, match=r"clients=150: .* there can be 143 clients at most"):
        make_partition(labels, "clean", 150, 0.1, 42, None, partition="users_partitions:missing")


@pytest.mark.parametrize(
    ("partition", "used"),
    [("users_partitions:by_alpha", True), ("users_partitions:in_order", False), ("users_partitions:missing", True)],
)
def test_own_partition_depends_on_alpha_if_it_takes_it(
    partition: str, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "def by_alpha(num_partitions, alpha): ...\ndef in_order(num_partitions): ..."
    (tmp_path / "users_partitions.py").write_text(code)
    assert ("alpha" in keys_in_use(parse_config({"partition": partition}))) is used
