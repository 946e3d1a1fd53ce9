"""The command `fedeas audit`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedeas_flwr.commands.images import open_or_train, sample_in_chunks
from fedeas_flwr.commands.output import DATASETS, GENERATORS, check_folder, console, reject_options
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.tables import print_table
from fedeas_flwr.config import parse_config
from fedeas_flwr.config_files import read_values, split_conf
from fedeas_flwr.runs.directory import RunDirectory

if TYPE_CHECKING:
    from fedeas_flwr.data.datasets import Images, Labels
    from fedeas_flwr.data.sources import DatasetInfo
    from fedeas_flwr.generators.audit.neighbours import LabelledImages

_TESTS = {
    "nearest": "nearest image is a member",
    "loss_auc": "loss, AUC",
    "pia_auc": "PIA, AUC",
    "loss_true_positives": "loss, TPR at 1 % FPR",
    "pia_true_positives": "PIA, TPR at 1 % FPR",
}
_LIMITS = (
    "Memorisation that is not detected may still be there: other attacks, or more images, may find it. A difference "
    "between members and non-members with another cause, such as another source, is detected too."
)


def audit(
    context: typer.Context,
    generator: Annotated[str, typer.Argument(help=GENERATORS)],
    out: Annotated[Path, typer.Option(help="folder for audit.json and neighbours.png", callback=check_folder)],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONF] [KEY=VALUE]...", help="config of a run, for its dataset, its sampler and a row per client"
        ),
    ] = None,
    dataset: Annotated[str, typer.Option(help=DATASETS)] = "digits",
    data_dir: Annotated[str, typer.Option(help="folder of the dataset")] = "",
    members: Annotated[
        str, typer.Option(help=".npz file or folder of images that it was trained on; default: the train split")
    ] = "",
    non_members: Annotated[
        str, typer.Option(help=".npz file or folder of images that it was not trained on; default: the test split")
    ] = "",
    run: Annotated[
        Path | None,
        typer.Option(
            help="run directory of the federated training of the generator: members are the images that its clients "
            "trained on, non-members those that they held out or the test split; adds a row per client"
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="number of images to generate")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="seed of all random numbers")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Test whether a generator memorised its training images; the exit code is 1 if that is detected.

    Members are images that it was trained on. Its samples are compared with their nearest members and non-members; a
    diffusion model is also attacked by membership inference.
    """
    import numpy as np

    from fedeas_flwr.common.devices import configure_torch
    from fedeas_flwr.common.files import atomic_write
    from fedeas_flwr.data.datasets import dataset_info, open_dataset
    from fedeas_flwr.data.federated import federated_data
    from fedeas_flwr.generators.audit.audit import Audit
    from fedeas_flwr.generators.audit.federated import training_config, training_images
    from fedeas_flwr.generators.audit.neighbours import LabelledImages
    from fedeas_flwr.generators.audit.picture import draw_neighbours
    from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator
    from fedeas_flwr.generators.interface import SampleId, describe_generator, images_per_class
    from fedeas_flwr.launch.progress import showing_log
    from fedeas_flwr.runs.listing import without_folder

    conf, overrides = split_conf(words or [])
    if conf:
        reject_options(context, ["dataset", "data_dir", "members", "non_members"], f"{conf} determines the images")
    if run:
        reject_options(context, ["dataset", "members", "non_members"], "--run determines the images")
        if conf:
            raise ConfigError(f"{conf}: remove the config, since --run determines the images")
        training = training_config(RunDirectory(run.absolute()), data_dir)
        dataset, data_dir = training.dataset, training.data_dir
    own = {} if conf else {"dataset": dataset, "data-dir": data_dir}
    config = parse_config(own | read_values(conf, overrides) | {"generator": generator, "device": device})
    if conf and config.protocol != "clean":
        raise ConfigError(f"protocol = {config.protocol!r}: its clients train on test images; use protocol=clean")
    where, info = configure_torch(device), dataset_info(config.dataset)
    clients: Sequence[Labels] = []
    if run:
        *sides, others_are, clients = training_images(RunDirectory(run.absolute()), training)
        sources = ("images of the clients", others_are)
    else:
        given = open_dataset(config.dataset, config.data_dir)
        sides = [
            _read_images("--members", members, info, given.x_train, given.y_train),
            _read_images("--non-members", non_members, info, given.x_test, given.y_test),
        ]
        sources = (without_folder(members) or "train split", without_folder(non_members) or "test split")
    labels = np.intersect1d(sides[0].labels, sides[1].labels).tolist()
    if not labels:
        raise ConfigError("--members and --non-members: have no class in common; give images of the same classes")
    if samples < len(labels):
        raise ConfigError(f"--samples {samples}: must be at least {len(labels)}, the number of classes")
    if conf:
        clients = federated_data(config, config.clients).partition.train
    opened = open_or_train(config, where)
    available = images_per_class(opened) or [samples] * len(info.classes)
    wanted = [(label, i) for label in labels for i in range(min(samples // len(labels), available[label]))]
    if not wanted:
        raise ConfigError(f"generator: {generator} has no image of a class of the members and non-members")
    images = np.concatenate(list(sample_in_chunks(opened, [SampleId(seed, 0, *each) for each in wanted])))
    made = LabelledImages(images, np.array([label for label, _ in wanted]))
    found = Audit(made, *sides, clients=clients, mirrored=info.mirrored_keeps_class, seed=seed)
    if isinstance(opened, DiffusionGenerator):
        with showing_log(Console(stderr=True, markup=False)):
            found.attack(opened.folder, len(info.classes), where)
    results = {
        **(describe_generator(config) if config.generator_spec.is_diffusion else {}),
        "generator": without_folder(generator),
        "dataset": without_folder(config.dataset),
        "fingerprint": opened.fingerprint,
        "seed": seed,
        "samples": len(images),
        "members": {"from": sources[0], "images": len(sides[0].labels)},
        "non_members": {"from": sources[1], "images": len(sides[1].labels)},
        **found.results(info.classes),
    }
    draw_neighbours(found, info.classes, out / "neighbours.png")
    atomic_write(out / "audit.json", (json.dumps(results, indent=1) + "\n").encode())
    _print_results(results)
    print(f"look at: {out / 'neighbours.png'}")
    if results["detected"]:
        raise typer.Exit(1)


def _read_images(option: str, where: str, info: DatasetInfo, images: Images, labels: Labels) -> LabelledImages:
    """Return the images that an option names, or without it the given ones."""
    from fedeas_flwr.data.own_images import read_images
    from fedeas_flwr.generators.audit.neighbours import LabelledImages

    height, width, channels = info.image_shape
    try:
        if where:
            images, labels, _ = read_images(where, classes=info.classes, size=(height, width), channels=channels)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{option}: {error}") from None
    return LabelledImages(images, labels)


def _print_results(results: Mapping[str, Any]) -> None:
    """Print the tests, the rows per class and per client, and what the tests cannot show."""
    compared, sides = results["compared"], [results[side] for side in ("members", "non_members")]
    given = (f"{compared:,} of {side['images']:,} ({side['from']})" for side in sides)
    print("{:,} samples; members: {}; non-members: {}; seed {}".format(results["samples"], *given, results["seed"]))
    rows, detected = [], []
    for name, test in results["tests"].items():
        detected += [_TESTS[name]] if test["detected"] else []
        values = (f"{test['value']:.3f}", f"{test['low']:.3f} to {test['high']:.3f}", f"{test['expected']:.3g}")
        rows.append((_TESTS[name], *values, "detected" if test["detected"] else "not detected"))
    head: tuple[str, ...] = ("test", "value", "interval", "without memorisation", "memorisation")
    print_table(console, head, rows, fold=[], right=head[1:4])
    single = ", ".join(f"{name} {test['value']:.3f}" for name, test in results["auc_by_timestep"].items())
    print(f"AUC at single timesteps: {single}" if single else "no membership inference: it needs a diffusion model")
    for name, groups in (("class", results["classes"]), ("client", results["clients"])):
        rows = []
        for group in groups:
            tests = group["tests"].values()
            detected += [f"{name} {group['name']}"] if any(test["detected"] for test in tests) else []
            rows.append((group["name"], f"{group['compared']:,}", *map(_cell, tests)))
        if rows:
            print()
            head = (name, "members", *(_TESTS[test] for test in groups[0]["tests"]))
            print_table(console, head, rows, fold=[name], right=head[1:])
    verdict = f"detected ({'; '.join(detected)})" if detected else "not detected"
    print(f"\nmemorisation: {verdict}", _LIMITS, sep="\n")


def _cell(test: Mapping[str, Any]) -> str:
    return f"{test['value']:.2f} ({test['low']:.2f} to {test['high']:.2f}){' detected' if test['detected'] else ''}"
