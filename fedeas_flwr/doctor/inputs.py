"""Check what the run-config names: dataset, model, strategy, clients, generator; download and train nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fedeas_flwr import partition
from fedeas_flwr.allocation import IntArray
from fedeas_flwr.common.errors import MissingPackageError
from fedeas_flwr.common.files import expanded, is_whole
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import SMALL_BATCH, RunConfig
from fedeas_flwr.data.datasets import dataset_info, readable_info
from fedeas_flwr.data.sources import OWN, check_npz, find_source, is_own
from fedeas_flwr.doctor.findings import Finding, note, ok, problem

if TYPE_CHECKING:
    from fedeas_flwr.generators.bank import BankGenerator


_CLIENTS = 1000


def check_dataset(config: RunConfig) -> Iterable[Finding]:
    """Check that the dataset is there, or would be downloaded."""
    name = config.dataset
    online = ", or unset FEDEAS_OFFLINE to download it" if os.environ.get("FEDEAS_OFFLINE") else ""
    fix = f"give data-dir=DIR with {name}.npz or torchvision's folder in it{online}"
    if is_own(name):
        fix = f"dataset={OWN}PATH with a folder or an .npz file, or hf:PATH, see docs/your-own-data-and-generator.md"
    try:
        source = find_source(name, config.data_dir)
        if source.where is None:
            return [ok("dataset", f"{name}, comes with scikit-learn")]
        if source.downloads:
            return [note("dataset", f"{name} is not at {source.where}; the first run downloads it there", fix)]
        if source.where.suffix == ".npz" and not is_own(name):
            check_npz(name, source.where)
        dataset_info(name)  # reads custom data
    except (OSError, ValueError) as error:
        return [problem("dataset", error, fix)]
    return [ok("dataset", f"{name}, {source.where}")]


def check_model(config: RunConfig) -> Iterable[Finding]:
    """Check that the network can be built with its initial weights."""
    from fedeas_flwr.federation.learners import find_learner
    from fedeas_flwr.training.models import imagenet_file

    if readable_info(config.dataset) is None:  # check_dataset reports it
        return []
    if config.task == "generator":
        text, keys = f"diffusion model, preset {config.generator_training.preset}", "generator-training.preset"
    else:
        text, keys = f"{config.model}, weights {config.weights}", "model, stem and weights"
    pretrained = (config.task, config.model, config.weights) == ("classifier", "resnet18", "imagenet")
    if pretrained and not imagenet_file().is_file():
        fix = f"put them there, or give weights=FILE.safetensors ({imagenet_file().name})"
        if os.environ.get("FEDEAS_OFFLINE"):
            return [problem("model", f"{text}: not at {imagenet_file()}, and FEDEAS_OFFLINE is set", fix)]
        return [note("model", f"{text}: not at {imagenet_file()}; the first run downloads them", fix)]
    try:
        find_learner(config).initial_state(config)
    except (OSError, ValueError, RuntimeError) as error:
        return [problem("model", error, f"see `fedeas keys`: {keys}")]
    return [ok("model", text)]


def check_strategy(config: RunConfig) -> Iterable[Finding]:
    """Check that the strategy works with the other keys and the number of clients."""
    from fedeas_flwr.strategies.registry import build_strategy, client_part

    if not config.clients:  # check_clients reports it
        return []
    try:
        build_strategy(config)
        client_part(config)
    except ValueError as error:
        page = "docs/strategies.md" if config.dp == "none" else "docs/privacy.md"
        return [problem("strategy", error, f"see `fedeas strategies` and {page}")]
    return [ok("strategy", config.strategy)]


def check_policy(config: RunConfig) -> Iterable[Finding]:
    """Check that a policy given by its import path can be imported and makes plans."""
    from fedeas_flwr.planning.run_plan import check_own_policy

    try:
        check_own_policy(config)
    except ValueError as error:
        return [problem("policy", error, "see docs/own-policy.md")]
    return [ok("policy", config.policy)]


def check_clients(config: RunConfig) -> Iterable[Finding]:
    """Check that the dataset can be partitioned; with over 1,000 clients, only that it has enough images."""
    if not config.clients:
        text = "clients = 0: as many as the federation has; strategy, last batches and plan are not checked"
        return [note("clients", text, "give the number, such as clients=10")]
    if is_own(config.dataset):
        return [note("clients", f"{config.clients:,}; the number of images in {config.dataset} is not checked")]
    try:
        partition.check_clients(config.clients, partition.plan_labels(config.dataset, config.protocol).size)
        if config.clients <= _CLIENTS:
            _counts(config)
    except ValueError as error:
        fix = "" if isinstance(error, MissingPackageError) else "use other clients, alpha, partition or partition-args"
        return [problem("clients", error, fix)]
    return [ok("clients", f"{config.clients:,}")]


def _counts(config: RunConfig) -> IntArray:
    """Return the label counts of every client of a simulation."""
    own = is_own(config.dataset)  # its files may change under the same path
    return _cached_counts(config, find_source(config.dataset).origin if own else "")


@lru_cache(maxsize=1)  # some partitions take long, and three checks need the counts
def _cached_counts(config: RunConfig, origin: str) -> IntArray:
    from fedeas_flwr.planning.run_plan import planned_counts

    return planned_counts(config, keep=False)


def check_last_batches(config: RunConfig) -> Iterable[Finding]:
    """Report clients of a simulation whose last batch is small: BatchNorm turns it into a very large step.

    Custom data, which would have to be opened, and more than 1,000 clients are not checked.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    from fedeas_flwr.planning.run_plan import added_images
    from fedeas_flwr.training.build import local_training_config
    from fedeas_flwr.training.models import build_model

    if is_own(config.dataset) or not 0 < config.clients <= _CLIENTS or config.task == "generator":
        return []
    info = dataset_info(config.dataset)
    try:
        model = build_model(config.model, len(info.classes), info.image_shape, stem=config.stem, seed=config.seed)
    except (OSError, ValueError, RuntimeError):  # check_model reports it
        return []
    if not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        return []
    try:
        counts = _counts(config)
    except ValueError:  # check_clients reports it
        return []
    samples = [int(held) for held in (counts + added_images(config, counts)).sum(axis=1)]
    last = {client: local_training_config(config).batches(held)[1] for client, held in enumerate(samples)}
    short = {client: size for client, size in last.items() if 0 < size < SMALL_BATCH}
    if not short:
        return [ok("last batches", f"none of fewer than {SMALL_BATCH} images")]
    smallest = min(short, key=lambda client: short[client])
    text = (
        f"{len(short)} of {counted(config.clients, 'client')} end an epoch with a batch of fewer than {SMALL_BATCH} "
        f"images, client {smallest} with {short[smallest]} of its {samples[smallest]:,}: with BatchNorm such a step "
        "can be many times the usual size"
    )
    fix = f"min-batch={SMALL_BATCH} skips these batches; see results/notes/accuracy-drops.md"
    return [note("last batches", text, fix)]


def check_generator(config: RunConfig) -> Iterable[Finding]:
    """Check the generator without building its model."""
    if not config.generates:
        return [note("generator", f"not needed: policy = '{config.policy}' with β = {config.beta:g} generates nothing")]
    if readable_info(config.dataset) is None:  # check_dataset reports it
        return []
    fix = (
        "generator=FOLDER in diffusers' format, as `fedeas train-generator` writes; or bank:DIR; see docs/generators.md"
    )
    try:
        spec = config.generator_spec
        if spec.kind == "bank":
            return [_bank(spec.where, config)]
        if spec.kind == "sd-turbo":
            return [_turbo(spec.where)]
        return [_model(config)]
    except (OSError, ValueError) as error:
        return [problem("generator", error, fix)]


def check_plan(config: RunConfig) -> Iterable[Finding]:
    """Check how many images the clients of a simulation will request, and that a bank has them."""
    from fedeas_flwr.generators.bank import check_bank_size
    from fedeas_flwr.planning.run_plan import empty_plan_message, planned_images

    if not config.generates:
        return [ok("plan", "nothing to generate")]
    if not config.clients:  # check_clients reports it
        return []
    if config.clients > _CLIENTS:
        return [note("plan", f"not checked: more than {_CLIENTS:,} clients; see `fedeas plan`")]
    spec = config.generator_spec
    try:
        needed = planned_images(config, _counts(config))
        available = _open_bank(spec.where, config.dataset).images_of_class if spec.kind == "bank" else None
    except (OSError, ValueError):  # the checks of the dataset, the clients and the generator report it
        return []
    if available is not None:
        try:
            check_bank_size(config.generator, available, needed, dataset_info(config.dataset).classes)
        except ValueError as error:
            return [problem("plan", error, "use a bank with more images of these classes, or a smaller beta or total")]
    if not needed.any():
        return [note("plan", empty_plan_message(config), "use a larger beta")]
    return [ok("plan", f"{counted(int(needed.sum()), 'image')}, at most {int(needed.max()):,} per client and class")]


def _model(config: RunConfig) -> Finding:
    from fedeas_flwr.common.devices import pick_device
    from fedeas_flwr.generators.federated import with_folder
    from fedeas_flwr.generators.learn.builtin import builtin_folder
    from fedeas_flwr.generators.opening import check_for_run, generator_warning

    try:
        device = pick_device(config.device)
    except ValueError:  # check_gpu reports it
        device = "cpu"
    check_for_run(config, device)
    kind = config.generator_spec.kind
    if kind in ("builtin", "federated"):
        folder = builtin_folder() if kind == "builtin" else Path(with_folder(config).generator)
        if is_whole(folder):
            return ok("generator", f"{kind}, {folder}")
        lacking = f"builtin is missing or incomplete at {folder}; the first run trains it, a minute on two cores"
        untrained = "federated: the first run with this config trains it"
        return note("generator", lacking if kind == "builtin" else untrained)
    if kind == "import path":
        return ok("generator", config.generator)
    if warning := generator_warning(config):
        return note("generator", warning, "continue its training: `fedeas train-generator … --resume`")
    folder, info = expanded(config.generator, "generator"), dataset_info(config.dataset)
    return ok("generator", f"{folder.absolute()}, {len(info.classes)} classes, images {list(info.image_shape)}")


def _open_bank(where: str, dataset: str) -> BankGenerator:
    from fedeas_flwr.generators.bank import BankGenerator

    info = dataset_info(dataset)
    return BankGenerator(where, classes=info.classes, image_shape=info.image_shape)


def _bank(where: str, config: RunConfig) -> Finding:
    from fedeas_flwr.generators.opening import generator_warning

    bank, info = _open_bank(where, config.dataset), dataset_info(config.dataset)
    empty = [name for name, count in zip(info.classes, bank.images_of_class, strict=True) if not count]
    if empty:
        lacking = counted(len(empty), "class", "classes")
        raise ValueError(f"generator: bank {bank.path} has no images of {lacking}: {', '.join(empty[:5])}")
    if warning := generator_warning(config):
        return note("generator", warning, "use a bank without the dataset's test images")
    fewest = counted(min(bank.images_of_class), "image")
    return ok("generator", f"bank {bank.path.absolute()}, at least {fewest} per class")


def _turbo(where: str) -> Finding:
    from fedeas_flwr.generators.sd_turbo import HUB_NAME, check_transformers, find_pipeline

    check_transformers()
    if not where and not os.environ.get("FEDEAS_OFFLINE"):
        return note("generator", f"{HUB_NAME}; the first run downloads it, unless the hub's cache has it")
    return ok("generator", f"sd-turbo, {find_pipeline(where)}")
