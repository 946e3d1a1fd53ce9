"""Label counts and plans of a run's clients, computed from its config; no image is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import cache_root
from fedeas_flwr.common.text import MAX_LINE, counted, one_line
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import Labels, dataset_info, open_dataset
from fedeas_flwr.data.federated import partitioned_labels
from fedeas_flwr.data.own_images import few_names
from fedeas_flwr.data.sources import BUILT_IN, is_own
from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.policies.interface import ClientView
from fedeas_flwr.policies.own import check_policy, probe_counts
from fedeas_flwr.policies.registry import POLICIES, checked_plan, federation_plan, settings_of


def planned_counts(config: RunConfig, progress: Callable[[int], None] | None = None, *, keep: bool = True) -> Labels:
    """Return the label counts of a run's clients; with ``keep`` the partition is stored in the user's cache."""
    if is_own(config.dataset):
        labels = partitioned_labels(open_dataset(config.dataset), config.protocol)
    else:
        labels = plan_labels(config.dataset, config.protocol)
    partition = make_partition(
        labels,
        config.protocol,
        config.clients,
        config.alpha,
        config.partition_seed,
        cache_root() if keep else None,
        progress,
        partition=config.partition,
        arguments=config.partition_args,
    )
    return partition.counts(labels, len(dataset_info(config.dataset).classes))


def planned_allocation(config: RunConfig, counts: Labels) -> Labels:
    """Return the number of synthetic images that each client of a run uses, ``[clients, classes]``."""
    return federation_plan(config.find_policy(), counts, config.policy_settings, config.rounds)


def added_images(config: RunConfig, counts: Labels) -> Labels:
    """Return the images that each client adds to its own, generated or repeated, ``[clients, classes]``."""
    policy = config.find_policy()
    if policy.repeats:
        return checked_plan(policy, ClientView(counts, config.policy_settings))
    return planned_allocation(config, counts)


def check_own_policy(config: RunConfig, counts: Labels | None = None) -> None:
    """Raise `ConfigError` if a policy given by its import path is not usable; see `check_policy`.

    It is checked on the clients' label counts or, without them, on made-up ones.
    """
    if config.policy not in POLICIES:
        counts = probe_counts(len(dataset_info(config.dataset).classes)) if counts is None else counts
        policy = config.find_policy()
        check_policy(policy, counts, config.policy_settings)
        if policy.parts[-1] > config.rounds:
            last = f"policy {policy.name!r} has parts = {policy.parts}"
            raise ConfigError(f"rounds = {config.rounds}: must be at least {policy.parts[-1]}: {last}")


def requested_images(config: RunConfig, wanted: Labels) -> Labels:
    """Return the number of images per class that a client requests, ``[…, classes]``, to use the last ``wanted``.

    The numbers are equal, unless all clients use one seed (``one-seed``): a class's images are then numbered by their
    position in the client's list of all classes.
    """
    return np.where(wanted > 0, wanted.cumsum(axis=-1), 0) if config.shared_images == "one-seed" else wanted


def planned_images(config: RunConfig, counts: Labels) -> Labels:
    """Return the number of images to generate for each client of a run, ``[clients, classes]``; see `stored_images`."""
    return stored_images(config, planned_allocation(config, counts))


def stored_images(config: RunConfig, wanted: Labels) -> Labels:
    """Return the number of images to generate, ``[clients, classes]``, so that the clients can use the ``wanted``.

    Shared images are generated once, for client 0: per class, the largest number that any client requests.
    """
    asked = requested_images(config, wanted)
    return asked if config.shared_images == "no" else asked.max(axis=0, keepdims=True)


def describe_plan(config: RunConfig, counts: Labels | None) -> str:
    """Return a run's policy and budget and, if the clients' label counts are known, its planned images, in one line."""
    given = f", total = {config.total:,}" if config.total else ""
    if "beta" in settings_of(config.policy, config.total > 0):
        given = f", β = {config.beta:g}"
    if counts is None:
        return f"policy {config.policy}{given}"
    images = counted(int(planned_allocation(config, counts).sum()), "synthetic image")
    return f"policy {config.policy}{given}: {images} for {counted(len(counts), 'client')}"


def empty_plan_message(config: RunConfig) -> str:
    """Return the message for a plan without images under a policy that generates, which is easily overlooked."""
    given = f" with β = {config.beta:g}" if "beta" in settings_of(config.policy, config.total > 0) else ""
    return f"no images: policy '{config.policy}'{given} gives these clients none; see `fedeas plan`"


def absent_classes_warning(counts: Labels, classes: Sequence[str], where: object) -> str:
    """Return in one line the classes that no client holds, which a policy fills nevertheless; empty if there is none.

    ``where`` names the data.
    """
    names = [repr(name) for name, held in zip(classes, counts.sum(axis=0).tolist(), strict=True) if not held]
    if not names:
        return ""
    which = f"{'class' if len(names) == 1 else 'classes'} {few_names(names)} of {where}"
    if where in BUILT_IN:
        return f"this partition gives no client an image of {which}"
    return one_line(f"no client has an image of {which}; check the labels, which start at 0", MAX_LINE)


def count_distinct_images(config: RunConfig, counts: Labels) -> int:
    """Return the number of distinct images that the clients of a run use in total."""
    wanted = planned_allocation(config, counts)
    if config.shared_images == "no":
        return int(wanted.sum())
    ends = requested_images(config, wanted)
    firsts, classes = ends - wanted, range(wanted.shape[1])
    used = [[range(*ends_of) for ends_of in zip(firsts[:, c], ends[:, c], strict=True)] for c in classes]
    return sum(len(set().union(*numbers)) for numbers in used)
