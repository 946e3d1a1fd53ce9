"""The commands `fedeas generate` and `fedeas cache ls|verify|prune`, and the estimate of `fedeas plan`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from fedeas_flwr.commands.help import OrderedGroup
from fedeas_flwr.commands.output import DATASETS, GENERATORS, FormatOption, check_folder, reject_options
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.common.tables import print_table
from fedeas_flwr.common.text import MAX_LINE, counted, one_line, parse_age, parse_bytes, show_bytes, show_seconds
from fedeas_flwr.config import SAMPLER_STEPS, RunConfig
from fedeas_flwr.runs.directory import RunDirectory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedeas_flwr.generators.cache_maintenance import Entry
    from fedeas_flwr.generators.interface import Generator, SampleId
    from fedeas_flwr.planning.beta_selection import GeneratorSpeed

    _Measure = Callable[[NDArray[np.uint8], NDArray[np.int64]], dict[str, Any]]

cache_app = typer.Typer(cls=OrderedGroup, help="Manage the cache of generated images.", rich_markup_mode=None)

Number = TypeVar("Number", int, float)
_LINE_EVERY = 10.0
_MAX_SHOWN = 20


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

    generator = open_or_train(config, configure_torch(config.device))
    if classes != generator.num_classes:
        found = f"the counts have {counted(classes, 'class', 'classes')}, {config.dataset} has {generator.num_classes}"
        raise ValueError(f"{wanted_by}: {found}; give the matching --dataset")
    return generator


def open_or_train(config: RunConfig, device: str) -> Generator:
    """Open a generator; train the built-in one, with progress, if it is not in the user's cache."""
    from fedeas_flwr.generators.opening import open_for_run

    if config.generator_spec.kind == "builtin":
        from fedeas_flwr.launch.prepare import ensure_digits_generator

        ensure_digits_generator(Console(stderr=True, markup=False))
    return open_for_run(config, device)


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
    dataset: Annotated[str, typer.Option(help=DATASETS)] = "digits",
    generator: Annotated[str, typer.Option(help=GENERATORS)] = "builtin",
    per_class: Annotated[int, typer.Option(min=1, help="images of each class")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="seed of the noise")] = 0,
    sampler: Annotated[str, typer.Option(help=", ".join(SAMPLER_STEPS))] = "dpm++",
    sampler_steps: Annotated[
        str, typer.Option(help="sampler steps; 0: the sampler's default; with --report also several, such as 10,20")
    ] = "0",
    guidance: Annotated[
        str, typer.Option(help="classifier-free guidance scale; 1 is none; with --report also several, such as 1,1.5,2")
    ] = "1",
    guidance_start: Annotated[float, typer.Option(help="fraction of the steps before the first guided one")] = 0.0,
    guidance_stop: Annotated[float, typer.Option(help="fraction of the steps after the last guided one")] = 1.0,
    guidance_rescale: Annotated[float, typer.Option(help="guidance rescale factor φ, 0 to 1")] = 0.0,
    generation_batch: Annotated[int, typer.Option(min=0, help="images per forward pass; 0: by device")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    report: Annotated[bool, typer.Option("--report", help="compare the images with real ones")] = False,
    data_dir: Annotated[str, typer.Option(help="with --report: folder of the dataset")] = "",
    inception: Annotated[Path | None, typer.Option(help="with --report: Inception weights, for FID and KID")] = None,
    classifier: Annotated[
        Path | None,
        typer.Option(help="with --report: run directory whose model classifies the images; no real image is compared"),
    ] = None,
) -> None:
    """Generate images of every class to view, to measure or to use as a bank."""
    if not report:
        reject_options(context, ["data_dir", "inception", "classifier"], "it has no effect without --report")
    if classifier:
        reject_options(context, ["data_dir", "inception"], "--classifier compares with no real images")
    has_sampler = GeneratorSpec.parse(generator).is_diffusion
    if not has_sampler:
        names = ["sampler", "sampler_steps", "guidance", "guidance_start", "guidance_stop", "guidance_rescale"]
        reject_options(context, names, "it applies only to diffusion models in a folder")
    if inception and not inception.is_file():  # checked before generating
        raise ConfigError(f"--inception: there is no file {inception}")
    from fedeas_flwr.common.devices import configure_torch
    from fedeas_flwr.common.files import atomic_write
    from fedeas_flwr.config import parse_config
    from fedeas_flwr.runs.listing import without_folder

    values = {"dataset": dataset, "generator": generator, "generation-batch": generation_batch}
    guided = {"guidance-start": guidance_start, "guidance-stop": guidance_stop, "guidance-rescale": guidance_rescale}
    settings: list[dict[str, Any]] = [
        {"sampler": sampler, "sampler-steps": steps, "guidance": scale, **guided}
        for scale in numbers("--guidance", guidance, float)
        for steps in dict.fromkeys(
            n or SAMPLER_STEPS.get(sampler, 0) for n in numbers("--sampler-steps", sampler_steps, int)
        )
    ]
    if len(settings) > 1 and not report:
        raise ConfigError("--guidance, --sampler-steps: several values need --report, which compares them")
    configs = [parse_config(values | sampling | {"device": device}) for sampling in settings]
    where, reports = configure_torch(device), []
    measure = _measure_by_run(dataset, where, classifier) if classifier else None
    for config, sampling in zip(configs, settings, strict=True):
        folder = out if len(configs) == 1 else out / f"g{config.guidance:g}-n{sampling['sampler-steps']}"
        images, labels, made = _write_images(config, where, per_class, seed, folder)
        if report:
            measure = measure or _measure_by_real_images(dataset, data_dir, where, inception)
            found = measure(images, labels)
            facts = values | {"generator": without_folder(generator)} | (sampling if has_sampler else {})
            facts |= {"seed": seed, "per-class": per_class, **made, **found}
            atomic_write(folder / "report.json", (json.dumps(facts, indent=1) + "\n").encode())
            reports.append(facts)
            if len(configs) == 1:
                for key, value in found.items():
                    print(f"  {key.replace('_', ' '):<45} {_show(value)}")
    if len(reports) > 1:
        _print_comparison(reports)
    if classifier:
        print("no real image was compared: distances and copies are not measured")


def numbers(option: str, text: str, number: type[Number]) -> list[Number]:
    """Return the distinct numbers of an option, which are separated by commas."""
    try:
        return list(dict.fromkeys(number(word) for word in text.split(",")))
    except ValueError:
        what = "a whole number" if number is int else "a number"
        raise ConfigError(f"{option} '{text}': must be {what}, or several separated by commas") from None


def _write_images(
    config: RunConfig, device: str, per_class: int, seed: int, out: Path
) -> tuple[NDArray[np.uint8], NDArray[np.int64], dict[str, Any]]:
    """Write images of every class to a folder; return them, their labels and how they were made."""
    import numpy as np

    from fedeas_flwr.common.files import atomic_path
    from fedeas_flwr.common.image_sheet import save_sheet
    from fedeas_flwr.data.datasets import dataset_info
    from fedeas_flwr.generators.bank import check_bank_size
    from fedeas_flwr.generators.interface import SampleId, images_per_class

    opened = open_or_train(config, device)
    if (available := images_per_class(opened)) is not None:
        planned = np.full((1, opened.num_classes), per_class)
        classes = dataset_info(config.dataset).classes
        check_bank_size(config.generator, available, planned, classes, "--per-class asks for")
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
    return images, labels, {"fingerprint": opened.fingerprint, "seconds": seconds}


def _measure_by_real_images(dataset: str, data_dir: str, device: str, inception: Path | None) -> _Measure:
    """Return the function that compares images with real ones."""
    from fedeas_flwr.data.datasets import open_dataset
    from fedeas_flwr.generators.classifier import independent_classifier
    from fedeas_flwr.generators.quality import quality_report
    from fedeas_flwr.launch.progress import showing_log

    with showing_log(Console(stderr=True, markup=False)):
        classifier = independent_classifier(dataset, data_dir, device)
    real = open_dataset(dataset, data_dir)
    if len(real.y_test) < 2:
        raise ConfigError(f"dataset = {dataset!r}: --report compares with held-out images, and needs two of them")
    return lambda images, labels: quality_report(real, classifier, images, labels, inception)


def _measure_by_run(dataset: str, device: str, folder: Path) -> _Measure:
    """Return the function that classifies images by the model of a run."""
    from fedeas_flwr.generators.classifier import classifier_of_run
    from fedeas_flwr.generators.quality import agreement_report

    run = RunDirectory(folder.absolute())
    classifier = classifier_of_run(run, dataset, device)
    facts = {"classifier": run.path.name, "classifier_evaluation": run.config().evaluation}
    return lambda images, labels: facts | agreement_report(classifier, images, labels)


def _print_comparison(reports: Sequence[dict[str, Any]]) -> None:
    """Print reports that differ in guidance and steps, and which is best.

    With real images it is the one with the lowest Fréchet distance. Class agreement alone rises with guidance while
    the images become more alike: of the reports within one standard error of the highest agreement, it is then the one
    with the weakest guidance, and of those the one with the fewest steps.
    """
    distance = "classifier_frechet_distance"
    if has_distance := distance in reports[0]:
        best, why = min(reports, key=lambda found: float(found[distance])), "lowest distance"
    else:
        highest = max(found["class_agreement"] for found in reports)
        error = (highest * (1 - highest) / reports[0]["samples"]) ** 0.5
        near = [found for found in reports if found["class_agreement"] >= highest - error]
        best = min(near, key=lambda found: (found["guidance"], found["sampler-steps"]))
        why = "weakest guidance and fewest steps within a standard error of the highest agreement"
    head = ("guidance", "steps", "images/s", "class agreement", *(["Fréchet distance"] if has_distance else []))
    rows = [
        (
            f"{found['guidance']:g}",
            str(found["sampler-steps"]),
            f"{found['samples'] / found['seconds']:,.0f}",
            f"{found['class_agreement']:.1%}",
            *([f"{found[distance]:.2f}"] if has_distance else []),
            "best" if found is best else "",
        )
        for found in reports
    ]
    print_table(Console(), (*head, ""), rows, fold=[], right=head)
    print(f"best: guidance={best['guidance']:g} sampler-steps={best['sampler-steps']} ({why})")


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
    if isinstance(value, str):
        return value
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
