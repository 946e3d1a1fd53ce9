"""Partition a labelled dataset over clients: protocols ``paper`` and ``clean``.

``paper``
    Train and test images together (train first) are distributed by a Dirichlet draw per class; then every client keeps
    a quarter of its images as its test set. The union of these test sets is the global test set. About 5/6 of it are
    images that a generator trained on the official training set has seen.
``clean``
    Only the official training images are distributed, in the same way and without a local split; the official test set
    is the global test set.

Both draw from NumPy's legacy generator, whose stream is frozen, so a seed always gives the same partition. A
partitioner of flwr-datasets can replace the Dirichlet draw (`PARTITIONERS`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import isclass
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_path
from fedeas_flwr.common.import_path import (
    accepted_arguments,
    call_with,
    check_installed,
    describe_error,
    import_object,
    parse_arguments,
    required_arguments,
)
from fedeas_flwr.common.npy import Arrays, arrays_digest, read_archive
from fedeas_flwr.common.text import counted

# Samples of each class in the official (digits: our stratified) train and test sets.
CLASS_COUNTS: dict[str, dict[str, tuple[int, ...]]] = {
    "digits": {
        "train": (142, 146, 142, 146, 145, 146, 145, 143, 139, 144),
        "test": (36, 36, 35, 37, 36, 36, 36, 36, 35, 36),
    },
    "cifar10": {"train": (5000,) * 10, "test": (1000,) * 10},
    "cifar100": {"train": (500,) * 100, "test": (100,) * 100},
    "fashion-mnist": {"train": (6000,) * 10, "test": (1000,) * 10},
}

# Fraction of its samples that a client keeps for testing.
TEST_FRACTION: dict[str, float] = {"paper": 0.25, "clean": 0.0}

MIN_SAMPLES = 10
"""Minimum number of samples per client, before the local split."""

DIRICHLET = "dirichlet"
_FLOWERS = ("InnerDirichlet", "Pathological", "Shard", "Continuous", "Iid", "Size", "Linear", "Square", "Exponential")
PARTITIONERS = {
    DIRICHLET: "",
    f"flwr-{DIRICHLET}": "flwr_datasets.partitioner:DirichletPartitioner",
    **{
        re.sub("(?<=[a-z])(?=[A-Z])", "-", name).lower(): f"flwr_datasets.partitioner:{name}Partitioner"
        for name in _FLOWERS
    },
}
"""Values of the key `partition` besides import paths → class of flwr-datasets; ``dirichlet`` is the paper's draw."""

LEAKAGE = (
    "Protocol `paper` splits CIFAR's train and test images together: about 5/6 of its test images were in the training "
    "set of a generator trained on the official training images. Compare these figures with each other and with the "
    "paper's, not with test accuracies elsewhere."
)
"""Note on every page with figures under protocol ``paper``."""
LEAKAGE_ELSEWHERE = (
    "Protocol `paper` splits a dataset's train and test images together: a generator trained on its training images "
    "has seen most of these test images. Compare these figures with each other, not with test accuracies elsewhere."
)
"""The note for datasets that are not the paper's."""


@dataclass(frozen=True)
class Partition:
    """The sample indices that each client holds; every index is in one client's train or test set."""

    train: list[IntArray]
    """Indices client k trains on."""
    test: list[IntArray]
    """Indices client k tests on; all empty where no local split was made."""

    def counts(self, labels: npt.ArrayLike, num_classes: int) -> IntArray:
        """Return the training samples of every client and class, [K, C]."""
        labels = np.asarray(labels)
        return np.stack([np.bincount(labels[mine], minlength=num_classes) for mine in self.train]).astype(np.int64)


def uses_alpha(partition: str) -> bool:
    """Return whether a value of `partition` depends on `alpha`; one that cannot be imported here may."""
    if partition in PARTITIONERS:
        return partition.endswith(DIRICHLET)
    try:
        accepted = accepted_arguments(import_object(partition, "partition"))
    except ConfigError:
        return True
    return accepted is None or "alpha" in accepted


def dirichlet_partition(
    labels: npt.ArrayLike,
    clients: int,
    alpha: float,
    seed: int,
    *,
    test_fraction: float,
    max_tries: int = 20_000,
    progress: Callable[[int], None] | None = None,
) -> Partition:
    """Distribute samples class by class in Dirichlet proportions, so that every client has at least `MIN_SAMPLES`.

    A draw that gives a client fewer, before the local split, is rejected and repeated, up to ``max_tries`` draws;
    ``progress`` is called after each with the number of draws so far. For protocol ``paper``, ``labels`` are those of
    the train set followed by those of the test set. A smaller ``alpha`` is more skewed. ``seed`` is that of NumPy's
    legacy generator. A client sets ``test_fraction`` of its samples aside for testing. With 0 they are not shuffled and
    no random number is drawn for a split; they stay in class order.
    """
    labels = _checked_labels(labels)
    _check_request(clients, alpha, seed)
    if not isinstance(test_fraction, int | float | np.number) or not 0 <= test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction!r}: must be at least 0 and below 1")
    check_clients(clients, labels.size)
    rng = np.random.RandomState(seed)
    by_class = [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]
    for tries in range(1, max_tries + 1):
        cuts = _shuffle_and_cut(rng, by_class, np.full(clients, float(alpha)))
        if progress is not None:
            progress(tries)
        if cuts is not None and np.diff(cuts, axis=1).sum(axis=0).min() >= MIN_SAMPLES:
            held = [
                np.concatenate([mine[cut[k] : cut[k + 1]] for mine, cut in zip(by_class, cuts, strict=True)])
                for k in range(clients)
            ]
            return _split_locally(rng, held, test_fraction)
    raise ValueError(
        f"clients={clients}, alpha={alpha}: none of {max_tries} tries gave every client {MIN_SAMPLES} samples; "
        "use fewer clients, a larger alpha or another seed"
    )


def check_clients(clients: int, samples: int) -> None:
    """Raise ValueError, before any draw, if there are too few samples for the clients."""
    if clients * MIN_SAMPLES > samples:
        raise ValueError(
            f"clients={clients}: each client needs {MIN_SAMPLES} samples, and there are {samples}; "
            f"there can be {counted(samples // MIN_SAMPLES, 'client')} at most"
        )


def _shuffle_and_cut(
    rng: np.random.RandomState, by_class: Sequence[IntArray], concentration: npt.NDArray[np.float64]
) -> IntArray | None:
    """Shuffle every class in place and return where to cut it: K + 1 positions per class.

    Only the cuts decide whether a draw is accepted, but the shuffles cannot be skipped: they consume an amount of the
    stream that is unknown before. Return None if the proportions underflowed (a very small alpha).
    """
    cuts = np.zeros((len(by_class), concentration.size + 1), dtype=np.int64)
    finite = True
    for cut, members in zip(cuts, by_class, strict=True):
        rng.shuffle(members)
        proportions = rng.dirichlet(concentration)
        if np.isfinite(proportions).all():
            cut[1:-1] = np.cumsum(proportions)[:-1] * members.size  # assignment truncates, as int() does
            cut[-1] = members.size
        else:
            finite = False
    return cuts if finite else None


def _split_locally(rng: np.random.RandomState, held: list[IntArray], test_fraction: float) -> Partition:
    """Shuffle each client's samples and return the partition with the first ones as test set."""
    if test_fraction == 0:
        return Partition(train=held, test=[mine[:0] for mine in held])
    for mine in held:
        rng.shuffle(mine)
    firsts = [int(test_fraction * mine.size) for mine in held]
    return Partition(
        train=[mine[first:] for mine, first in zip(held, firsts, strict=True)],
        test=[mine[:first] for mine, first in zip(held, firsts, strict=True)],
    )


def make_partition(
    dataset: str | npt.ArrayLike,
    protocol: str,
    clients: int,
    alpha: float,
    seed: int,
    cache_dir: Path | None = None,
    progress: Callable[[int], None] | None = None,
    *,
    partition: str = DIRICHLET,
    arguments: str = "",
) -> Partition:
    """Return the partition of a dataset under a protocol, from the cache if it is there.

    The positions of a class's samples do not affect the draw, so it is made (and cached) for labels in class order and
    then mapped to the given ones. A plan and a training run therefore share one cached file.

    ``dataset`` is the name of a built-in dataset (its labels taken in class order, see `plan_labels`), or the labels
    themselves: for protocol ``paper``, those of the train set followed by those of the test set. ``clients``,
    ``alpha``, ``seed`` and ``progress`` are those of `dirichlet_partition`. The cache is the folder ``partitions`` of
    ``cache_dir``; without it nothing is read or written. ``partition`` is a name of `PARTITIONERS`, or the import path
    of a `Partitioner` of your own, whose partitions are not cached; ``arguments`` are its, such as
    ``num_classes_per_partition=2``.
    """
    if isinstance(dataset, str):
        dataset = plan_labels(dataset, protocol)
    _check_name("protocol", protocol, TEST_FRACTION)
    _check_request(clients, alpha, seed)
    labels = _checked_labels(dataset)
    class_counts = np.bincount(labels).astype("<i8")
    digest = hashlib.sha256(class_counts.tobytes() + arguments.encode()).hexdigest()[:16]
    file = None
    if cache_dir is not None and partition in PARTITIONERS:
        rule = protocol if partition == DIRICHLET else f"{protocol}-{partition}"
        file = Path(cache_dir) / "partitions" / f"{rule}-k{clients}-a{float(alpha)!r}-s{seed}-{digest}.npz"

    in_class_order = _read(file) if file is not None else None
    if in_class_order is None:
        sorted_labels = np.repeat(np.arange(class_counts.size), class_counts)
        fraction = TEST_FRACTION[protocol]
        if partition == DIRICHLET:
            in_class_order = dirichlet_partition(
                sorted_labels, clients, alpha, seed, test_fraction=fraction, progress=progress
            )
        else:
            held = _held_by_partitioner(sorted_labels, clients, alpha, seed, partition, arguments)
            in_class_order = _split_locally(np.random.RandomState(seed), held, fraction)
        if file is not None:
            _write(file, in_class_order)
    position = np.argsort(labels, kind="stable")
    return Partition(
        train=[position[mine] for mine in in_class_order.train],
        test=[position[mine] for mine in in_class_order.test],
    )


def _held_by_partitioner(
    labels: IntArray, clients: int, alpha: float, seed: int, partition: str, arguments: str
) -> list[IntArray]:
    """Return the samples of every client under a partitioner of flwr-datasets, or of that interface.

    It is given the samples in random order, as `FederatedDataset` gives them; some partitioners keep that order.
    """
    check_clients(clients, labels.size)
    check_installed("flwr_datasets", "datasets", f"partition = {partition!r}")
    from datasets import Dataset
    from flwr_datasets.partitioner import Partitioner

    build = import_object(PARTITIONERS.get(partition, partition), "partition")
    accepted = accepted_arguments(build)
    set_here: dict[str, Any] = {"num_partitions": clients, "partition_by": "label", "seed": seed, "alpha": alpha}
    given = {name: _numbers(value) for name, value in parse_arguments(arguments, "partition-args").items()}
    if name := next((name for name in given if name in set_here), ""):
        raise ConfigError(
            f"partition-args: {name} is set by the run (clients, alpha, partition-seed, labels); remove it"
        )
    known = {name: value for name, value in set_here.items() if accepted is None or name in accepted}
    missing = [name for name in required_arguments(build) if name not in {**known, **given}]
    if missing and not (isclass(build) and issubclass(build, Partitioner)):
        raise ConfigError(
            f"partition: {partition!r} needs {', '.join(missing)}: must be a Partitioner class of flwr-datasets, or a "
            "function that returns one; its other arguments are given in partition-args"
        )
    partitioner = call_with(build, partition, "partition", {**known, **given})
    if not isinstance(partitioner, Partitioner):
        raise ConfigError(f"partition: {partition!r} is no Partitioner of flwr_datasets.partitioner")
    order = np.random.RandomState(seed).permutation(labels.size)
    partitioner.dataset = Dataset.from_dict({"label": labels[order], "sample": order})
    try:
        with catch_warnings(action="ignore"):  # what they warn of is checked below, or does not matter here
            number = partitioner.num_partitions
            parts = [
                partitioner.load_partition(k).with_format("numpy")[:]["sample"] for k in range(min(number, clients))
            ]
    except (Exception, SystemExit) as error:  # the rule may be a user's own
        raise ConfigError(f"partition: {partition!r} raised {describe_error(error)}") from error
    held = [np.asarray(part, dtype=np.int64).reshape(-1) for part in parts]
    if number != clients:
        raise ConfigError(f"partition: {partition!r} has {counted(number, 'partition')}, but clients = {clients}")
    if (fewest := min(part.size for part in held)) < MIN_SAMPLES:
        few = f"gives a client {counted(fewest, 'sample')}, and each needs {MIN_SAMPLES}"
        raise ConfigError(f"partition: {partition!r} {few}; use fewer clients or other partition-args")
    if np.unique(together := np.concatenate(held)).size < together.size:
        raise ConfigError(f"partition: {partition!r} gives a sample to two clients")
    return held


def _numbers(value: Any) -> Any:
    """Return an argument's value; numbers separated by commas are a list."""
    if not isinstance(value, str) or "," not in value:
        return value
    try:
        return [float(word) if "." in word else int(word) for word in value.split(",")]
    except ValueError:
        return value


def plan_labels(dataset: str, protocol: str) -> IntArray:
    """Return a built-in dataset's labels in class order: enough for a plan, which needs counts only."""
    _check_name("dataset", dataset, CLASS_COUNTS)
    _check_name("protocol", protocol, TEST_FRACTION)
    parts = ("train", "test") if protocol == "paper" else ("train",)
    return np.concatenate([np.repeat(np.arange(len(n)), n) for n in (CLASS_COUNTS[dataset][part] for part in parts)])


def stratified_split(labels: npt.ArrayLike, test_fraction: float = 0.2, seed: int = 0) -> tuple[IntArray, IntArray]:
    """Set the same fraction of every class aside for testing; return the sorted indices for training and testing."""
    labels = _checked_labels(labels)
    rng = np.random.RandomState(seed)
    is_test = np.zeros(labels.size, dtype=bool)
    for c in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == c)
        rng.shuffle(members)
        is_test[members[: round(test_fraction * members.size)]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _read(file: Path) -> Partition | None:
    """Read a cached partition; return None if it is missing or damaged, so that it is drawn again."""
    try:
        stored = read_archive(file, ("train", "train_sizes", "test", "test_sizes", "digest"))
        if str(stored.pop("digest")) != _digest(file, stored):
            return None
    except ValueError:
        return None
    return Partition(*(np.split(stored[name], np.cumsum(stored[f"{name}_sizes"])[:-1]) for name in ("train", "test")))


def _write(file: Path, partition: Partition) -> None:
    """Write a partition atomically: readers see all of it or nothing, even with several writers."""
    stored = {
        "train": np.concatenate(partition.train),
        "train_sizes": np.array([mine.size for mine in partition.train]),
        "test": np.concatenate(partition.test),
        "test_sizes": np.array([mine.size for mine in partition.test]),
    }
    with atomic_path(file) as unfinished, unfinished.open("wb") as stream:
        np.savez(stream, allow_pickle=False, digest=_digest(file, stored), **stored)


def _digest(file: Path, stored: Arrays) -> str:
    """Return a digest of the arrays and of the file's name, which says what the partition is of."""
    return hashlib.sha256(f"{file.name} {arrays_digest(stored)}".encode()).hexdigest()


def _checked_labels(labels: npt.ArrayLike) -> IntArray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise ValueError(
            f"labels of shape {labels.shape} and type {labels.dtype}: must be a non-empty list of integers from 0"
        )
    return labels.astype(np.int64)


def _check_name(key: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value!r}: must be one of {', '.join(allowed)}")


def _check_request(clients: int, alpha: float, seed: int) -> None:
    if not isinstance(clients, int | np.integer) or isinstance(clients, bool) or clients < 1:
        raise ValueError(f"clients={clients!r}: must be an integer of at least 1")
    if not isinstance(alpha, int | float | np.number) or not math.isfinite(alpha) or alpha <= 0:
        raise ValueError(f"alpha={alpha!r}: must be a finite number above 0")
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: must be an integer from 0 to 2**32 - 1")
