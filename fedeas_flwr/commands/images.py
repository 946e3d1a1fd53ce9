"""The commands `fedeas generate` and `fedeas cache ls|verify|prune`, and the estimate of `fedeas plan`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedeas_flwr.commands.help import OrderedGroup
from fedeas_flwr.commands.output import FormatOption, check_folder, reject_options
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.common.tables import print_table
from fedeas_flwr.common.text import MAX_LINE, counted, one_line, parse_age, parse_bytes, show_bytes, show_seconds
from fedeas_flwr.config import SAMPLER_STEPS, RunConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedeas_flwr.generators.cache_maintenance import Entry
    from fedeas_flwr.generators.interface import Generator, SampleId
    from fedeas_flwr.planning.beta_selection import GeneratorSpeed


cache_app = typer.Typer(cls=OrderedGroup, help="Manage the cache of generated images.", rich_markup_mode=None)

_LINE_EVERY = 10.0
_MAX_SHOWN = 20

GeneratorOption = Annotated[
    str, typer.Option(help="builtin, FOLDER in diffusers' format, bank:DIR, sd-turbo[:DIR], package.module:name")
]


# ------------------------------------------------------------------------------------------------ cache


@cache_app.command(short_help="List cache entries, least recently used first")
def ls(output: FormatOption = "table") -> None:
    """List cache entries, least recently used first."""
    from fedeas_flwr.generators.cache import ImageCache
    from fedeas_flwr.generators.cache_maintenance import entries

    found = entries(ImageCache())
    if output == "json":
        rows = [{**asdict(entry), "path": str(entry.path)} for entry in found]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    head, cells = ("key", "generator", "dataset", "seed", "images", "size", "last used"), []
    for entry in found:
        used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
        facts = [str(entry.manifest.get(key, "?")) for key in ("generator", "dataset", "seed")]
        cells.append((entry.key[:12], *facts, f"{entry.images:,}", show_bytes(entry.bytes), used))
    print_table(Console(), head, cells, fold=["generator", "dataset"], right=["images", "size"])
    print(f"{ImageCache().root}: {_in_all(found)}")


@cache_app.command(short_help="Check all cached images and datasets")
def verify() -> None:
    """Compare all cached images and datasets with their digests; damaged ones are made again when next needed."""
    from fedeas_flwr.data.datasets import verify_datasets
    from fedeas_flwr.generators.cache import ImageCache
    from fedeas_flwr.generators.cache_maintenance import verify as verify_cache

    shards, damaged = verify_cache(ImageCache())
    datasets, damaged_arrays = verify_datasets()
    damaged += damaged_arrays
    for path in damaged:
        print(one_line(f"damaged: {path}", MAX_LINE))
    print(f"{counted(shards, 'shard')} and {counted(datasets, 'dataset')} checked, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(1)


@cache_app.command(short_help="Remove images that can be regenerated")
def prune(
    max_bytes: Annotated[str, typer.Option(help="size to keep, such as 20GB; removes least recently used first")] = "",
    older_than: Annotated[str, typer.Option(help="remove entries unused for, such as 30d")] = "",
    key: Annotated[str, typer.Option(help="remove the entry whose key starts with this")] = "",
) -> None:
    """Remove images that can be regenerated."""
    from fedeas_flwr.generators.cache import ImageCache
    from fedeas_flwr.generators.cache_maintenance import prune as prune_cache

    if not (max_bytes or older_than or key):
        raise ValueError("give what to remove: --max-bytes, --older-than or --key")
    removed = prune_cache(
        ImageCache(),
        max_bytes=parse_bytes(max_bytes, "max-bytes") if max_bytes else None,
        older_than=parse_age(older_than, "older-than") if older_than else None,
        key=key or None,
    )
    print(f"removed {counted(len(removed), 'entry', 'entries')} of the cache, {_in_all(removed)}")


def _in_all(found: Sequence[Entry]) -> str:
    return f"{counted(sum(entry.images for entry in found), 'image')}, {show_bytes(sum(e.bytes for e in found))}"


# --------------------------------------------------------------------------------------------- estimate


def estimate_generation(images: NDArray[np.int64], config: RunConfig) -> dict[str, Any]:
    """Return the seconds and bytes that generating ``images`` per client and class, [K, C], would take.

    Images that are already in the cache are counted too.
    """
    from fedeas_flwr.common.devices import pick_device
    from fedeas_flwr.generators.cache_maintenance import stored_bytes

    generator = _open_checked(config, images.shape[1], "--estimate")
    speed = _measure_speed(generator)
    return {
        "generator": config.generator,
        "device": pick_device(config.device),
        "batch": speed.batch,
        "seconds_a_batch": speed.seconds_a_batch,
        "seconds": speed.seconds(int(images.sum())),
        "bytes": stored_bytes(generator.image_shape, images.tolist()),
    }


def batch_speed(config: RunConfig, classes: int) -> GeneratorSpeed:
    """Return the measured speed of a config's generator, for a limit in seconds."""
    return _measure_speed(_open_checked(config, classes, "--max-seconds"))


def _open_checked(config: RunConfig, classes: int, wanted_by: str) -> Generator:
    from fedeas_flwr.common.devices import configure_torch
    from fedeas_flwr.generators.opening import open_for_run

    generator = open_for_run(config, configure_torch(config.device))
    if classes != generator.num_classes:
        found = f"the counts have {counted(classes, 'class', 'classes')}, {config.dataset} has {generator.num_classes}"
        raise ValueError(f"{wanted_by}: {found}; give the matching --dataset")
    return generator


def _measure_speed(generator: Generator) -> GeneratorSpeed:
    """Return the time of one batch, measured after a warm-up batch."""
    from fedeas_flwr.generators.interface import SampleId, batch_size
    from fedeas_flwr.planning.beta_selection import GeneratorSpeed

    batch = batch_size(generator)
    samples = [SampleId(0, client, client % generator.num_classes, 0) for client in range(batch)]
    generator.sample(samples)
    began = time.perf_counter()
    generator.sample(samples)
    return GeneratorSpeed(batch, time.perf_counter() - began)


def show_estimate(estimate: dict[str, Any]) -> str:
    """Return an estimate as the line under the plan's table."""
    speed = estimate["batch"] / estimate["seconds_a_batch"]
    return (
        f"Estimate:     {estimate['seconds']:,.0f} s of generation by {estimate['generator']} on {estimate['device']} "
        f"({speed:,.0f} images/s), {show_bytes(estimate['bytes'])} on disk"
    )


# --------------------------------------------------------------------------------------------- generate


def generate(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="folder for images.npz, grid.png and report.json", callback=check_folder)],
    dataset: Annotated[
        str, typer.Option(help="digits, cifar10, cifar100, fashion-mnist, own:PATH or hf:PATH")
    ] = "digits",
    generator: GeneratorOption = "builtin",
    per_class: Annotated[int, typer.Option(min=1, help="images of each class")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="seed of the noise")] = 0,
    sampler: Annotated[str, typer.Option(help=", ".join(SAMPLER_STEPS))] = "dpm++",
    sampler_steps: Annotated[int, typer.Option(help="sampler steps; 0: the sampler's default")] = 0,
    guidance: Annotated[float, typer.Option(help="classifier-free guidance scale; 1 is none")] = 1.0,
    guidance_rescale: Annotated[float, typer.Option(help="guidance rescale factor φ, 0 to 1")] = 0.0,
    generation_batch: Annotated[int, typer.Option(min=0, help="images per forward pass; 0: by device")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    report: Annotated[bool, typer.Option("--report", help="compare the images with real ones")] = False,
    data_dir: Annotated[str, typer.Option(help="with --report: folder of the dataset")] = "",
    inception: Annotated[Path | None, typer.Option(help="with --report: Inception weights, for FID and KID")] = None,
) -> None:
    """Generate images of every class to view, to measure or to use as a bank."""
    if not report:
        reject_options(context, ["data_dir", "inception"], "it has no effect without --report")
    sampling: dict[str, Any] = {"sampler": sampler, "sampler-steps": sampler_steps}
    sampling |= {"guidance": guidance, "guidance-rescale": guidance_rescale}
    has_sampler = GeneratorSpec.parse(generator).is_diffusion
    if not has_sampler:
        names = [key.replace("-", "_") for key in sampling]
        reject_options(context, names, "it applies only to diffusion models in a folder")
    if inception and not inception.is_file():  # checked before generating
        raise ConfigError(f"--inception: there is no file {inception}")
    import numpy as np

    from fedeas_flwr.common.devices import configure_torch
    from fedeas_flwr.common.files import atomic_path, atomic_write
    from fedeas_flwr.common.image_sheet import save_sheet
    from fedeas_flwr.config import parse_config
    from fedeas_flwr.data.datasets import dataset_info, open_dataset
    from fedeas_flwr.generators.bank import check_bank_size
    from fedeas_flwr.generators.interface import SampleId, images_per_class
    from fedeas_flwr.generators.opening import open_for_run

    values = {"dataset": dataset, "generator": generator, "generation-batch": generation_batch}
    config = parse_config(values | sampling | {"device": device})
    where = configure_torch(device)
    if config.generator_spec.kind == "builtin":
        from fedeas_flwr.launch.prepare import ensure_digits_generator

        ensure_digits_generator(Console(stderr=True, markup=False))
    opened = open_for_run(config, where)
    if (available := images_per_class(opened)) is not None:
        planned = np.full((1, opened.num_classes), per_class)
        check_bank_size(generator, available, planned, dataset_info(dataset).classes, "--per-class asks for")
    labels = np.repeat(np.arange(opened.num_classes), per_class)
    samples = [SampleId(seed, 0, int(label), i % per_class) for i, label in enumerate(labels)]
    began = time.perf_counter()
    images = np.concatenate(list(sample_in_chunks(opened, samples)))
    seconds = time.perf_counter() - began
    with atomic_path(out / "images.npz") as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, x=images, y=labels)
    rows = images.reshape(opened.num_classes, per_class, *opened.image_shape)[:, :_MAX_SHOWN]
    save_sheet(list(rows), rows.shape[1], out / "grid.png")
    (out / "report.json").unlink(missing_ok=True)  # describes the previous images
    print(f"{counted(len(images), 'image')} in {seconds:.1f} s → {out}")
    if report:
        from fedeas_flwr.generators.classifier import independent_classifier
        from fedeas_flwr.generators.quality import quality_report
        from fedeas_flwr.launch.progress import showing_log
        from fedeas_flwr.runs.listing import without_folder

        with showing_log(Console(stderr=True, markup=False)):
            classifier = independent_classifier(dataset, data_dir, where)
        found = quality_report(open_dataset(dataset, data_dir), classifier, images, labels, inception)
        facts = {
            **values,
            "generator": without_folder(generator),
            **(sampling | {"sampler-steps": sampler_steps or SAMPLER_STEPS[sampler]} if has_sampler else {}),
            "seed": seed,
            "per-class": per_class,
            "fingerprint": opened.fingerprint,
            "seconds": seconds,
        }
        atomic_write(out / "report.json", (json.dumps(facts | found, indent=1) + "\n").encode())
        for key, value in found.items():
            print(f"  {key.replace('_', ' '):<45} {_show(value)}")


def sample_in_chunks(opened: Generator, samples: Sequence[SampleId]) -> Iterator[NDArray[np.uint8]]:
    """Yield images in chunks of whole batches and print the time left every ten seconds."""
    from fedeas_flwr.generators.interface import batch_size, images_per_class

    began = shown = time.monotonic()
    chunk, done = batch_size(opened), 0
    if len(samples) > chunk and images_per_class(opened) is None:  # a bank is only read
        print(f"{len(samples):,} images, {chunk:,} at a time", file=sys.stderr)
    while done < len(samples):
        yield opened.sample(samples[done : done + chunk])
        now = time.monotonic()
        if not done and now - began < _LINE_EVERY / 4:
            chunk, done = 4 * chunk, chunk  # larger chunks keep a fast generator busy
        else:
            done += chunk
        done = min(done, len(samples))
        if now - shown > _LINE_EVERY and done < len(samples):
            left, shown = show_seconds((len(samples) - done) * (now - began) / done), now
            print(f"{done:,} of {len(samples):,} images, about {left} left", file=sys.stderr)


def _show(value: Any) -> str:
    if isinstance(value, list):
        return " ".join("-" if v is None else f"{v:.2f}" for v in value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
