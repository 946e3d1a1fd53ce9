"""Check a run before it starts and prepare what it needs, with progress on the console: data, partition, generator."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedeas_flwr.callbacks.registry import open_callbacks
from fedeas_flwr.common.devices import configure_torch, pick_device
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import is_whole
from fedeas_flwr.common.text import show_bytes, show_seconds
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import absolute_paths
from fedeas_flwr.config_keys import DIFFUSION_KEYS, GENERATION_KEYS, PARTITION_KEYS
from fedeas_flwr.data.datasets import Labels, dataset_info, open_dataset
from fedeas_flwr.federation.learners import find_learner
from fedeas_flwr.generators.bank import check_bank_size
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.cache_maintenance import ensure_space
from fedeas_flwr.generators.classifier import independent_classifier, trained_network
from fedeas_flwr.generators.federated import with_folder
from fedeas_flwr.generators.interface import Generator, LazyGenerator, images_per_class
from fedeas_flwr.generators.opening import check_for_run, generator_warning, hash_own_inputs, open_for_run
from fedeas_flwr.generators.own import check_own
from fedeas_flwr.generators.service import own_generator
from fedeas_flwr.launch.progress import show_tries, showing_log
from fedeas_flwr.launch.resources import ray_resources
from fedeas_flwr.launch.superlink import check_commands
from fedeas_flwr.planning.run_plan import (
    absent_classes_warning,
    check_own_policy,
    empty_plan_message,
    planned_counts,
    planned_images,
)
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.privacy import describe_noise
from fedeas_flwr.strategies.registry import build_strategy, client_part
from fedeas_flwr.training.build import check_engine
from fedeas_flwr.training.models import split_state


def prepare(config: RunConfig, console: Console, previous: bool = False) -> RunConfig:
    """Check the run, create what is slow to create, and return its config with absolute paths.

    An error found here costs a second; found by Flower's processes it would cost half a minute. For ``previous``
    see `RunDirectory.check_ready`.
    """
    device = configure_torch(config.device)
    check_config(config)
    if config.ray_address:
        _check_ray_address(config.ray_address)
    # Flower's processes and `fedeas resume` start in other folders.
    config = parse_config(absolute_paths(config.to_user_dict(), Path()))
    if config.run_dir:
        run = RunDirectory(Path(config.run_dir))
        run.check_ready(config, previous)
        if config.resume:
            run.check_classes(config.dataset, dataset_info(config.dataset).classes)
            run.check_own_inputs(hash_own_inputs(config))
    counts = planned_counts(config, show_tries(console))
    if warning := absent_classes_warning(counts, dataset_info(config.dataset).classes, config.dataset):
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True, markup=False)
    check_own_policy(config, counts)
    open_dataset(config.dataset, config.data_dir)
    trainable, _ = find_learner(config).initial_state(config)
    if noise := describe_noise(config, trainable):
        console.print(noise, highlight=False, soft_wrap=True)
    if config.generates:
        if config.generator_spec.kind == "builtin":
            ensure_digits_generator(console)
        generator = _open_or_check(config, device)
        if config.generator_spec.kind == "import path":
            check_own(config.generator, generator)
        print_generator_warning(config, console)
        check_bank_covers_plan(config, counts, generator)
        check_disk_space(config, counts, generator, console)
        if config.min_class_agreement:
            with showing_log(console):
                independent_classifier(config.dataset, config.data_dir, device)
    return config


def _open_or_check(config: RunConfig, device: str) -> Generator:
    """Open the run's generator; check one that the federation has yet to train, and return a stand-in for it."""
    found = with_folder(config)
    if config.trains_generator and not is_whole(Path(found.generator)):
        check_for_run(config, device)
        info = dataset_info(config.dataset)
        return LazyGenerator(
            "not trained yet", len(info.classes), info.image_shape, lambda: open_for_run(found, device)
        )
    # Inline, this process also generates, so weights of gigabytes are read and hashed only once.
    return (own_generator if config.backend == "inline" else open_for_run)(found, device)


def check_config(config: RunConfig) -> None:
    """Raise `RunError` or `ConfigError` for what the config and this machine alone rule out; open nothing."""
    if not config.clients:
        raise ConfigError(
            "clients = 0: `fedeas run` creates the federation and needs the number of clients, such as clients=10"
        )
    open_callbacks(config.callbacks)
    check_own_policy(config)
    build_strategy(config)  # raises if there are too few clients
    client_part(config)
    device = pick_device(config.device)
    check_engine(config, device)
    if config.backend == "ray":
        check_commands()
        ray_resources(config, device == "cuda")


def check_runs(configs: Sequence[RunConfig], console: Console) -> None:
    """Check several runs before the first one starts, each dataset, partition and generator once.

    Raise the error that a run would raise hours later. Datasets and partitions are then in the cache; generator weights
    are only read once, to check that they are finite.
    """
    for config in configs:
        check_config(config)
    for address in dict.fromkeys(config.ray_address for config in configs if config.ray_address):
        _check_ray_address(address)
    generating = [config for config in configs if config.generates]
    with_model = [config for config in generating if config.generator_spec.kind != "bank"]
    for config in _differing(with_model, "dataset", "device", *_GENERATOR_KEYS):
        check_for_run(config, pick_device(config.device))
        print_generator_warning(config, console)
    for config in _differing(configs, "task", "generator-training", "dataset", "model", "stem", "weights"):
        find_learner(config).initial_state(config)
    for config in configs:
        if config.dp != "none":
            describe_noise(config, find_learner(config).initial_state(config)[0])
    for config in _differing(configs, "dataset", "data-dir"):
        open_dataset(config.dataset, config.data_dir)
    for config in _differing(configs, *PARTITION_KEYS):
        planned_counts(config, show_tries(console))
    for config in _differing(configs, *PARTITION_KEYS, *GENERATION_KEYS):
        check_own_policy(config, planned_counts(config))
    with_bank = [config for config in generating if config.generator_spec.kind == "bank"]
    for one in _differing(with_bank, "dataset", "generator"):
        opened = open_for_run(one, "cpu")
        print_generator_warning(one, console)
        users = [config for config in with_bank if (config.dataset, config.generator) == (one.dataset, one.generator)]
        for config in _differing(users, *PARTITION_KEYS, *GENERATION_KEYS):
            check_bank_covers_plan(config, planned_counts(config), opened)


_GENERATOR_KEYS = ("generator", "generator-training", *DIFFUSION_KEYS, "generation-batch")


def _differing(configs: Iterable[RunConfig], *keys: str) -> list[RunConfig]:
    """Return one config per distinct combination of the keys' values."""
    fields = [key.replace("-", "_") for key in keys]
    return list({tuple(getattr(config, field) for field in fields): config for config in configs}.values())


def _check_ray_address(address: str) -> None:
    """Raise `ConfigError` if no Ray head node answers; Flower's processes would retry for minutes without a message."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"ray-address = '{address}': must be HOST:PORT, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"ray-address = '{address}': cannot connect ({reason}); is the Ray head node running?"
        ) from None


def print_generator_warning(config: RunConfig, console: Console) -> None:
    """Print the warning about the generator, if there is one."""
    if warning := generator_warning(config):
        console.print(f"warning: {warning}", highlight=False, soft_wrap=True)


def check_bank_covers_plan(config: RunConfig, counts: Labels, generator: Generator) -> None:
    """Raise `ConfigError` if the generator is a bank with fewer images than the plan needs."""
    available = images_per_class(generator)
    if available is not None:
        check_bank_size(
            config.generator, available, planned_images(config, counts), dataset_info(config.dataset).classes
        )


def check_disk_space(config: RunConfig, counts: Labels, generator: Generator, console: Console) -> None:
    """Free cache space for the images the run will generate; raise if the disk or `cache-limit` is too small."""
    planned = planned_images(config, counts)
    if not planned.any():
        console.print(f"warning: the plan has {empty_plan_message(config)}", highlight=False, soft_wrap=True)
    for entry in ensure_space(ImageCache(), generator, config.seed, planned.tolist(), config.cache_limit):
        console.print(f"cache-limit: pruned {entry.key[:12]} ({show_bytes(entry.bytes)})", highlight=False)


def ensure_digits_generator(console: Console) -> None:
    """Train the built-in generator if it is not in the user's cache yet."""
    from fedeas_flwr.generators.learn.builtin import ensure_builtin

    began = time.monotonic()

    def show(step: int, total: int, loss: float) -> None:
        if step == 1:
            console.print("training the built-in digits generator once (about a minute on two cores) …")
        if step % 40 == 0 or step == total:
            left = (total - step) * (time.monotonic() - began) / step
            remaining = f"  about {show_seconds(left)} left" if left else ""
            console.print(f"  step {step:>3}/{total}  loss {loss:.3f}{remaining}", highlight=False)

    ensure_builtin(progress=show)


def evaluate_run(run: RunDirectory) -> dict[str, Any]:
    """Evaluate a finished run's model on the global test set and return the scores."""
    config = run.config()
    arrays = run.load_model()
    run.check_classes(config.dataset, dataset_info(config.dataset).classes)
    device = configure_torch(config.device, config.precision)
    state = (arrays, {}) if config.task == "generator" else split_state(trained_network(run))
    return find_learner(config).central_test(config, device)(*state)
