"""Partitions: the paper's protocol, the clean one, the cache, and invalid arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.partition import (
    CLASS_COUNTS,
    Partition,
    dirichlet_partition,
    make_partition,
    plan_labels,
    stratified_split,
)


def reference_partition(labels: IntArray, clients: int, alpha: float, seed: int, test_fraction: float) -> Partition:
    """Return the partition by the protocol's description, with NumPy's global generator, not optimised."""
    np.random.seed(seed)
    members = [np.where(labels == c)[0] for c in range(labels.max() + 1)]
    while True:
        held: list[list[int]] = [[] for _ in range(clients)]
        for mine in members:
            np.random.shuffle(mine)
            shares = np.random.dirichlet(np.repeat(alpha, clients))
            cuts = [int(x) for x in np.cumsum(shares) * len(mine)][:-1]
            for client, part in zip(held, np.split(mine, cuts), strict=True):
                client.extend(part.tolist())
        if min(len(client) for client in held) >= 10:
            break
    train, test = [], []
    for client in held:
        indices = np.array(client)
        if test_fraction:
            np.random.shuffle(indices)
        first = int(test_fraction * len(indices))
        test.append(indices[:first])
        train.append(indices[first:])
    return Partition(train, test)


def same(one: Partition, other: Partition) -> bool:
    return all(
        len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in ((one.train, other.train), (one.test, other.test))
    )


@pytest.mark.parametrize("test_fraction", [0.25, 0.0])
@pytest.mark.parametrize(("clients", "alpha", "seed"), [(10, 0.3, 42), (5, 0.1, 7), (12, 0.1, 0), (1, 1.0, 3)])
def test_partition_equals_the_reference_implementation(
    clients: int, alpha: float, seed: int, test_fraction: float
) -> None:
    labels = np.random.RandomState(1).randint(0, 7, size=900)
    expected = reference_partition(labels, clients, alpha, seed, test_fraction)
    assert same(dirichlet_partition(labels, clients, alpha, seed, test_fraction=test_fraction), expected)


@pytest.mark.parametrize("protocol", ["paper", "clean"])
def test_make_partition_equals_the_reference_for_any_label_order(protocol: str) -> None:
    labels = np.random.RandomState(2).randint(0, 10, size=1200)
    fraction = {"paper": 0.25, "clean": 0.0}[protocol]
    assert same(make_partition(labels, protocol, 8, 0.2, 5), reference_partition(labels, 8, 0.2, 5, fraction))


def test_main_setting_takes_one_try() -> None:
    tries: list[int] = []
    partition = make_partition("cifar10", "paper", 20, 0.1, 42, progress=tries.append)
    assert tries == [1]
    assert sum(len(mine) for mine in partition.train) == 45_007
    assert sum(len(mine) for mine in partition.test) == 14_993
    # Train images come first, so an index shows which test images a generator has seen: about 5/6.
    in_test = np.concatenate(partition.test)
    assert 0.82 < (in_test < 50_000).mean() < 0.85


@pytest.mark.slow
def test_hardest_setting_takes_10826_tries() -> None:
    tries: list[int] = []
    partition = make_partition("cifar10", "paper", 100, 0.05, 42, progress=tries.append)
    assert tries[-1] == 10_826
    assert sum(len(mine) for mine in partition.train) == 45_038


def test_rejected_draws_advance_the_generator() -> None:
    tries: list[int] = []
    make_partition("cifar10", "paper", 100, 0.1, 42, progress=tries.append)
    assert tries == [1, 2, 3, 4, 5, 6, 7, 8]


@settings(max_examples=40)
@given(st.integers(1, 8), st.floats(0.2, 10), st.integers(0, 2**32 - 1), st.sampled_from(["paper", "clean"]))
def test_every_sample_is_assigned_once(clients: int, alpha: float, seed: int, protocol: str) -> None:
    labels = np.arange(600) % 6
    partition = make_partition(labels, protocol, clients, alpha, seed)
    assert np.array_equal(np.sort(np.concatenate(partition.train + partition.test)), np.arange(600))
    for train, test in zip(partition.train, partition.test, strict=True):
        assert len(train) + len(test) >= 10
        assert len(test) == (int(0.25 * (len(train) + len(test))) if protocol == "paper" else 0)


@pytest.mark.parametrize("protocol", ["paper", "clean"])
@pytest.mark.parametrize("dataset", list(CLASS_COUNTS))
def test_counts_do_not_depend_on_the_order_of_labels(dataset: str, protocol: str) -> None:
    in_order = plan_labels(dataset, protocol)
    mixed = np.random.RandomState(3).permutation(in_order)
    classes = len(CLASS_COUNTS[dataset]["train"])
    counts = make_partition(dataset, protocol, 10, 0.5, 42).counts(in_order, classes)
    assert np.array_equal(counts, make_partition(mixed, protocol, 10, 0.5, 42).counts(mixed, classes))
    assert counts.shape == (10, classes)


def test_plan_labels_have_the_datasets_class_counts() -> None:
    assert np.bincount(plan_labels("cifar10", "paper")).tolist() == [6000] * 10
    assert np.bincount(plan_labels("cifar100", "clean")).tolist() == [500] * 100
    assert np.array_equal(plan_labels("cifar10", "paper")[:50_000], plan_labels("cifar10", "clean"))


def test_digits_class_counts_match_the_split() -> None:
    from sklearn import datasets

    labels = datasets.load_digits().target
    train, test = stratified_split(labels)
    assert tuple(np.bincount(labels[train])) == CLASS_COUNTS["digits"]["train"]
    assert tuple(np.bincount(labels[test])) == CLASS_COUNTS["digits"]["test"]


def test_stratified_split_takes_a_share_of_each_class() -> None:
    labels = np.array([0] * 10 + [1] * 25 + [3] * 5)
    train, test = stratified_split(labels, 0.2, seed=1)
    assert np.bincount(labels[test], minlength=4).tolist() == [2, 5, 0, 1]
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(40))
    assert (np.diff(train) > 0).all()
    assert (np.diff(test) > 0).all()
    assert not np.array_equal(test, stratified_split(labels, 0.2, seed=2)[1])


# ------------------------------------------------------------------------------------------------------- the cache


def test_partition_is_cached(tmp_path: Path) -> None:
    first = make_partition("digits", "paper", 5, 0.3, 1, tmp_path)
    tries: list[int] = []
    again = make_partition("digits", "paper", 5, 0.3, 1, tmp_path, tries.append)
    assert same(first, again)
    assert tries == []
    assert [file.suffix for file in (tmp_path / "partitions").iterdir()] == [".npz"]


def test_plan_and_run_share_one_cached_partition(tmp_path: Path) -> None:
    make_partition("digits", "clean", 5, 0.3, 1, tmp_path)
    labels = np.random.RandomState(0).permutation(plan_labels("digits", "clean"))
    tries: list[int] = []
    found = make_partition(labels, "clean", 5, 0.3, 1, tmp_path, tries.append)
    assert tries == []
    assert same(found, reference_partition(labels, 5, 0.3, 1, 0.0))


def test_cache_key_depends_on_every_argument(tmp_path: Path) -> None:
    labels = plan_labels("digits", "paper")
    fewer = labels[:-1]
    for request in (
        (labels, "paper", 5, 0.3, 1),
        (labels, "clean", 5, 0.3, 1),
        (labels, "paper", 6, 0.3, 1),
        (labels, "paper", 5, 0.31, 1),
        (labels, "paper", 5, 0.3, 2),
        (fewer, "paper", 5, 0.3, 1),
    ):
        tries: list[int] = []
        make_partition(*request, tmp_path, tries.append)
        assert tries, request[1:]
    assert len(list((tmp_path / "partitions").iterdir())) == 6


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "other", "repeated", "swapped", "pickle", "another"])
def test_damaged_cached_partition_is_computed_again(tmp_path: Path, damage: str) -> None:
    expected = make_partition("digits", "paper", 4, 0.5, 1, tmp_path)
    (file,) = (tmp_path / "partitions").iterdir()
    whole = file.read_bytes()
    if damage == "other":
        np.savez(file, something=np.arange(3))
    elif damage == "repeated":
        size = sum(len(mine) for mine in expected.train + expected.test)
        twos, none = np.full(size, 2), np.zeros(0, dtype=np.int64)
        np.savez(file, train=twos, train_sizes=[size, 0, 0, 0], test=none, test_sizes=[0, 0, 0, 0])
    elif damage == "another":
        make_partition("digits", "paper", 4, 0.5, 2, tmp_path)
        (file.parent / file.name.replace("-s1-", "-s2-")).replace(file)
    elif damage == "swapped":
        arrays = dict(np.load(file))
        arrays["train"][[0, -1]] = arrays["train"][[-1, 0]]
        np.savez(file, **arrays)
    elif damage == "pickle":
        np.savez(file, train=np.array([{}], dtype=object), train_sizes=[1], test=[1], test_sizes=[1])
    else:
        file.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "garbage": b"not a zip file"}[damage])
    assert same(make_partition("digits", "paper", 4, 0.5, 1, tmp_path), expected)
    assert same(make_partition("digits", "paper", 4, 0.5, 1, tmp_path), expected)
    assert file.stat().st_size == len(whole)


# ---------------------------------------------------------------------------------------------------- what is refused


def test_too_many_clients_are_rejected_at_once() -> None:
    tries: list[int] = []
    with pytest.raises(
        ValueError, match="clients=6: each client needs 10 samples, and there are 59; there can be 5 clients at most"
    ):
        dirichlet_partition(np.zeros(59, dtype=int), 6, 1.0, 0, test_fraction=0, progress=tries.append)
    assert tries == []


def test_max_tries_exceeded_raises() -> None:
    with pytest.raises(ValueError, match=r"clients=50, alpha=0\.01: none of 3 tries gave every client 10 samples"):
        dirichlet_partition(np.arange(600) % 3, 50, 0.01, 0, test_fraction=0, max_tries=3)


def test_alpha_whose_draws_underflow_raises() -> None:
    with pytest.raises(ValueError, match="none of 20 tries"):
        dirichlet_partition(np.arange(600) % 3, 5, 1e-300, 0, test_fraction=0, max_tries=20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clients": 0}, "clients=0: must be an integer of at least 1"),
        ({"clients": 2.5}, "clients=2.5"),
        ({"clients": True}, "clients=True"),
        ({"alpha": 0.0}, "alpha=0.0: must be a finite number above 0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"alpha": "0.1"}, "alpha='0.1'"),
        ({"seed": -1}, "seed=-1: must be an integer from 0"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"protocol": "dirty"}, "protocol='dirty': must be one of paper, clean"),
        ({"dataset": "mnist"}, "dataset='mnist': must be one of digits, cifar10, cifar100"),
        ({"dataset": [[1, 2]]}, r"labels of shape \(1, 2\)"),
        ({"dataset": [0.5, 1.5]}, "labels of shape .* type float64"),
        ({"dataset": [-1, 2]}, "integers from 0"),
        ({"dataset": []}, "non-empty"),
    ],
)
def test_invalid_arguments_are_named(change: dict[str, object], message: str) -> None:
    request: dict[str, object] = {"dataset": "digits", "protocol": "paper", "clients": 5, "alpha": 0.5, "seed": 1}
    with pytest.raises(ValueError, match=message) as caught:
        make_partition(**{**request, **change})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("test_fraction", [-0.1, 1.0, float("nan"), "0"])
def test_invalid_test_fraction_is_named(test_fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"^test_fraction={test_fraction!r}: must be at least 0 and below 1$"):
        dirichlet_partition(np.arange(60) % 6, 2, 1.0, 1, test_fraction=test_fraction)
