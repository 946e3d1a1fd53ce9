"""The generator of a run with ``generator = "federated"``: where it is, and how a node on another machine gets it.

The ServerApp trains it before the classifier (`generator_config`). In a simulation the config determines the weights,
so the run directory of the training is in the cache, and every run with the same config uses it. On SuperNodes it is a
folder of the run's own directory; each client receives the weights with its first task and writes them to its cache.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from fedeas_flwr.common.files import atomic_folder, cache_root, expanded, is_whole, write_checksums
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.data.sources import find_source
from fedeas_flwr.runs.files import GENERATOR

if TYPE_CHECKING:  # the library works without pydantic
    from fedeas_flwr.config import RunConfig
    from fedeas_flwr.runs.directory import RunDirectory

_VERSION = 1
"""Part of the digest: raise it when anything changes the trained weights."""


def federated_training(config: RunConfig) -> RunConfig:
    """Return the config of the training of a simulation's generator; its run-dir is named by what decides the weights.

    These are the keys that identify the training, and the content of the dataset's files and of `start`'s weights.
    """
    from fedeas_flwr.config import generator_config
    from fedeas_flwr.config_keys import identity

    training = generator_config(config)
    content = [find_source(config.dataset, config.data_dir).origin]
    if start := training.generator_training.start:
        from fedeas_flwr.generators.diffusion.model_folder import weights_file

        with suppress(FileNotFoundError):  # the training raises the error
            stat = weights_file(expanded(start, "generator-training.start")).stat()
            content.append(f"{stat.st_size} bytes, {stat.st_mtime_ns}")
    facts = json.dumps([_VERSION, content, identity(training)], sort_keys=True)
    name = f"federated-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    return training.with_changes(run_dir=str(cache_root() / "generators" / name))


def with_folder(config: RunConfig) -> RunConfig:
    """Return the config with the folder of a simulation's generator, which may not exist yet, for ``federated``."""
    if not config.trains_generator:
        return config
    return config.with_changes(generator=str(Path(federated_training(config).run_dir) / GENERATOR))


def read_weights(training: RunDirectory) -> Arrays:
    """Return the weights of a finished training's generator, as its messages have them."""
    from fedeas_flwr.generators.learn.federated import WEIGHTS

    return {WEIGHTS: training.load_model()[WEIGHTS]}


def received_folder(run: str) -> Path:
    """Return the folder of the generator that a node received in a run of this identity."""
    return cache_root() / "generators" / f"received-{run}"


def expected_weights(config: RunConfig) -> Arrays:
    """Return an array with the name and shape of a generator's weights, from its training's config."""
    from torch.nn.utils import parameters_to_vector

    from fedeas_flwr.generators.learn.federated import WEIGHTS, initial_unet

    return {WEIGHTS: parameters_to_vector(initial_unet(config).parameters()).detach().numpy()}


def write_received(folder: Path, config: RunConfig, weights: Arrays) -> None:
    """Write a received generator as a folder in diffusers' format; ``config`` is that of its training."""
    from fedeas_flwr.generators.learn.federated import write_model

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # nodes of one machine share its cache
        if not is_whole(folder):
            with atomic_folder(folder) as temporary:
                write_model(temporary, config, weights)
                write_checksums(temporary)
