"""What a run's clients would hold and generate, from its config alone: no image is opened."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedeas_flwr.common.files import cache_root
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info, open_dataset
from fedeas_flwr.data.federated import Labels, partitioned_labels
from fedeas_flwr.data.sources import OWN
from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.policies import allocate, settings_of


def planned_counts(config: RunConfig, clients: int, progress: Callable[[int], None] | None = None) -> Labels:
    """Label counts of a run's clients without opening its images; the partition is then in the user's cache."""
    return partition_counts(
        config.dataset, config.protocol, clients, config.alpha, config.partition_seed, progress=progress
    )


def partition_counts(
    dataset: str,
    protocol: str,
    clients: int,
    alpha: float,
    seed: int,
    *,
    progress: Callable[[int], None] | None = None,
    keep: bool = True,
) -> Labels:
    """The same of any partition, of which there need be no run, nor a trace left; see `make_partition`."""
    own = dataset.startswith(OWN)  # no constant knows its labels
    labels = partitioned_labels(open_dataset(dataset), protocol) if own else plan_labels(dataset, protocol)
    partition = make_partition(labels, protocol, clients, alpha, seed, cache_root() if keep else None, progress)
    return partition.counts(labels, len(dataset_info(dataset).classes))


def planned_allocation(config: RunConfig, counts: Labels) -> Labels:
    """How many images of each class every client of a run will have, ``[clients, classes]``."""
    return allocate(
        counts,
        config.policy,
        beta=config.beta,
        gamma=config.gamma,
        strict_mean=not config.printed_rule,
        total=config.total or None,
    )


def requested_images(config: RunConfig, wanted: Labels) -> Labels:
    """How many images of each class a client asks for, ``[…, classes]``, to use the last ``wanted`` of each.

    They are as many, unless all clients seed the generator alike: then a class's images are those whose numbers the
    client has reached in its list, class after class.
    """
    return np.where(wanted > 0, wanted.cumsum(axis=-1), 0) if config.shared_images == "one-seed" else wanted


def planned_images(config: RunConfig, counts: Labels) -> Labels:
    """How many images of each class will be made for every client of a run, ``[clients, classes]``.

    With shared images all are made for client 0, as many as any client asks for.
    """
    asked = requested_images(config, planned_allocation(config, counts))
    return asked if config.shared_images == "no" else asked.max(axis=0, keepdims=True)


def empty_plan_message(config: RunConfig) -> str:
    """Say that a plan has no image in it, though the policy generates: a run that looks like one of it, and is not."""
    given = f" with β = {config.beta:g}" if "beta" in settings_of(config.policy, config.total > 0) else ""
    return f"no images: policy '{config.policy}'{given} gives these clients none; see `fedeas plan`"


def count_distinct_images(config: RunConfig, counts: Labels) -> int:
    """How many different images the clients of a run use, all together."""
    wanted = planned_allocation(config, counts)
    if config.shared_images == "no":
        return int(wanted.sum())
    ends = requested_images(config, wanted)
    firsts, classes = ends - wanted, range(wanted.shape[1])
    used = [[range(*ends_of) for ends_of in zip(firsts[:, c], ends[:, c], strict=True)] for c in classes]
    return sum(len(set().union(*numbers)) for numbers in used)
