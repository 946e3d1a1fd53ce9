"""The images that a federated training of a generator used and did not use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import Labels
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.generators.audit.neighbours import LabelledImages
from fedeas_flwr.generators.learn.federated import split_held_out, trains
from fedeas_flwr.runs.directory import RunDirectory


class TrainingImages(NamedTuple):
    """Members, non-members and what these are, and the positions of each client's members."""

    members: LabelledImages
    non_members: LabelledImages
    non_members_are: str
    clients: list[Labels]


def training_config(run: RunDirectory, data_dir: str = "") -> RunConfig:
    """Return the config of a run that trained a generator; ``data_dir`` replaces its folder of the dataset."""
    config = run.config()
    if config.task != "generator":
        raise ConfigError(f"{run.path} has task = {config.task!r}; give the run that trained the generator")
    return parse_config({**config.to_user_dict(), "data-dir": data_dir}) if data_dir else config


def training_images(run: RunDirectory, config: RunConfig) -> TrainingImages:
    """Return the images that the run's clients trained on, from the partition of a simulation.

    Non-members are the images that all clients held out, or without any the server's test set. The other images of
    clients that never trained are on neither side.
    """
    data, trained = federated_data(config, config.clients), {c for record in run.rounds() for c in record["clients"]}
    used, held_out = [], []
    for client, given in enumerate(data.partition.train):
        own, rest = split_held_out(config, client, len(given))
        used.append(given[own] if client in trained and trains(config, len(own)) else given[:0])
        held_out.append(given[rest])
    ends = np.cumsum([len(rows) for rows in used])
    if not ends[-1]:
        raise ConfigError(f"{run.path}: no client has trained")
    clients = [np.arange(end - len(rows), end) for rows, end in zip(used, ends, strict=True)]
    members = LabelledImages(*data.images_at(np.concatenate(used)))
    if any(map(len, held_out)):
        others, others_are = data.images_at(np.concatenate(held_out)), "held-out images"
    else:
        others, others_are = data.global_test(), "test set"
    return TrainingImages(members, LabelledImages(*others), others_are, clients)
