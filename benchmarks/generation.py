"""Compare images per second of this project's generator service with a plain diffusers loop: same model, noise and run.

    python benchmarks/generation.py --generator FOLDER --out results/generation-h200
    python benchmarks/generation.py --generator FOLDER --without normalise,add      (with these kernels off)
    python benchmarks/generation.py --generator builtin --dataset digits --images 64 --steps 20 --ddim-steps 10

The plain loop is the simplest code: float32 weights, batches of 64, eager, DPM-Solver++ (or DDIM) from diffusers; once
with torch's defaults, which let convolutions use TF32, and once without. "The service" is the Ray actor of a run, with
requests from 20 clients in parallel; its time includes replies through Ray's object store. Each row is warmed up with
one batch (loading, kernels, graph capture), which is shown but not counted. Rows with fewer images than --images are
marked: their time for all images is extrapolated. The last columns are the pixel differences from the strict float32
loop.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from switches import GENERATION, add_option, without

from fedeas_flwr.config import SAMPLER_STEPS, parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.generators.diffusion.denoising import make_solver
from fedeas_flwr.generators.diffusion.model_folder import check_schedule, load_unet, read_json
from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator, initial_noise
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.ray_service import ServiceGenerator, start_service

PLAIN_BATCH = 64


class PlainLoop:
    """The simplest sampling loop, for one process per client."""

    def __init__(self, folder: Path, shape: tuple[int, int, int], sampler: str, steps: int, device: str) -> None:
        config = read_json(folder / "unet" / "config.json")
        self.schedule = check_schedule(read_json(folder / "scheduler" / "scheduler_config.json"), folder)
        self.unet = load_unet(config, folder / "unet" / "diffusion_pytorch_model.safetensors").to(device)
        self.shape, self.sampler, self.steps, self.device = shape, sampler, steps, device
        self.batch_size = PLAIN_BATCH

    @torch.no_grad()
    def sample(self, samples: Sequence[SampleId]) -> np.ndarray:
        """Return images, generated in float32 in batches of `PLAIN_BATCH`."""
        height, width, channels = self.shape
        made = []
        for start in range(0, len(samples), PLAIN_BATCH):
            batch = samples[start : start + PLAIN_BATCH]
            noise = np.stack([initial_noise(sample, (channels, height, width)) for sample in batch])
            x = torch.from_numpy(noise).to(self.device)
            labels = torch.tensor([sample.label for sample in batch], device=self.device)
            solver = make_solver(self.sampler, self.schedule, self.steps)
            solver.set_timesteps(self.steps, device=self.device)
            for moment in solver.timesteps:
                x = solver.step(self.unet(x, moment, class_labels=labels).sample, moment, x).prev_sample
            pixels = ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            made.append(pixels.permute(0, 2, 3, 1).cpu().numpy())
        return np.concatenate(made)


def main() -> None:
    """Measure, print the tables and write them to --out."""
    options = parse_options()
    with without(options.without):
        measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    """Measure both samplers and compare the order of images."""
    device = options.device if options.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    info = dataset_info(options.dataset)
    if options.generator == "builtin":
        from fedeas_flwr.generators.learn.builtin import ensure_builtin

        folder = ensure_builtin()
    else:
        folder = Path(options.generator)
    console, rows = Console(width=150), []
    for sampler, steps in (("dpm++", options.steps), ("ddim", options.ddim_steps)):
        rows += measure_sampler(options, folder, info.image_shape, len(info.classes), sampler, steps, device)
        for row in rows:
            row.pop("made", None)
        console.print(table_of([row for row in rows if row["sampler"] == sampler], options.images))
        write_down(options, folder, device, rows)  # after each table, because the next takes minutes
    same = neighbours_do_not_matter(options, folder, info.image_shape, len(info.classes), device)
    console.print(f"another order and other neighbours: {same['differing']} of {same['pixels']:,} pixel values differ")
    write_down(options, folder, device, rows, order=same)


def write_down(options: argparse.Namespace, folder: Path, device: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write the record and the tables, if a folder was given."""
    if options.out is None:
        return
    result = {
        "command": shlex.join(
            Path(word).name if Path(word).is_absolute() else word for word in [sys.executable, *sys.argv]
        ),
        "hardware": torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU",
        "versions": {name: version(name) for name in ("torch", "diffusers", "numpy", "ray")},
        "python": platform.python_version(),
        "generator": folder.name,
        "images": options.images,
        "rows": rows,
        **more,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "generation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    with (options.out / "generation.txt").open("w", encoding="utf-8") as file:
        paper = Console(file=file, width=150)
        paper.print(f"$ {result['command']}\n{result['hardware']}, {result['versions']}", highlight=False)
        for sampler in dict.fromkeys(row["sampler"] for row in rows):
            paper.print(table_of([row for row in rows if row["sampler"] == sampler], options.images))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", required=True, help="a folder in diffusers' format, or builtin (digits)")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--out", type=Path, help="folder for generation.json and generation.txt")
    parser.add_argument(
        "--images", type=int, default=13_437, help="images per row with dpm++; 13,437 is K=20, α=0.1, β=12"
    )
    parser.add_argument("--plain-images", type=int, default=512, help="images of the plain loop with dpm++")
    parser.add_argument("--ddim-batches", type=int, default=2, help="batches of every row with ddim")
    parser.add_argument("--steps", type=int, default=SAMPLER_STEPS["dpm++"])
    parser.add_argument("--ddim-steps", type=int, default=SAMPLER_STEPS["ddim"])
    parser.add_argument("--precisions", default="", help="our precisions, such as bf16,fp16,tf32; empty: the default")
    parser.add_argument("--batches", default="0", help="our batch sizes, such as 512,1024,2048; 0: by free memory")
    parser.add_argument("--device", default="auto")
    add_option(parser, GENERATION)
    return parser.parse_args()


def measure_sampler(
    options: argparse.Namespace,
    folder: Path,
    shape: tuple[int, int, int],
    classes: int,
    sampler: str,
    steps: int,
    device: str,
) -> list[dict[str, Any]]:
    """Return the rows of one sampler: two plain loops, then ours."""
    rows, few = [], sampler == "ddim"
    for name, tf32 in (("plain, torch's defaults", True), ("plain, strict fp32", False)):
        torch.backends.cudnn.allow_tf32 = tf32
        plain = PlainLoop(folder, shape, sampler, steps, device)
        count = min(options.images, options.ddim_batches * PLAIN_BATCH if few else options.plain_images)
        rows.append(measure(name, plain, count, classes, {"sampler": sampler, "steps": steps}))
    torch.backends.cudnn.allow_tf32 = True
    for precision in options.precisions.split(","):
        for batch in options.batches.split(","):
            ours = DiffusionGenerator(
                folder,
                num_classes=classes,
                image_shape=shape,
                sampler=sampler,
                steps=steps,
                precision=precision or None,
                batch_size=int(batch) or None,
                device=device,
            )
            size = ours.find_batch_size()
            count = min(options.images, options.ddim_batches * size) if few else options.images
            name = f"ours, {ours.precision}, batch {size}"
            rows.append(measure(name, ours, count, classes, {"sampler": sampler, "steps": steps}))
            del ours
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
    if not options.without:  # the service is another process, with every kernel
        with running_service(options, folder, sampler, steps, device) as service:
            about = {"sampler": sampler, "steps": steps}
            rows.append(measure("the service, asked by 20 clients", service, count, classes, about))
    strict = rows[1]["made"]
    for row in rows:
        common = min(len(strict), len(row["made"]))
        off = np.abs(strict[:common].astype(int) - row["made"][:common])
        row |= {"mean_off": float(off.mean()), "max_off": int(off.max()), "compared": common}
        row["ratio"] = row["images_per_second"] / rows[0]["images_per_second"]
        row["seconds_for_all"] = options.images / row["images_per_second"]
    return rows


class TwentyClients:
    """Sends requests to the service as a federation does: 20 clients in parallel, each for its part of the images."""

    def __init__(self, address: str, dataset: str) -> None:
        self.clients = [ServiceGenerator(address, dataset) for _ in range(20)]
        self.batch_size = self.clients[0].batch_size

    def sample(self, samples: Sequence[SampleId]) -> np.ndarray:
        """Return images, generated by the service."""
        parts = [part for part in np.array_split(np.arange(len(samples)), len(self.clients)) if len(part)]
        with ThreadPoolExecutor(len(parts)) as pool:
            made = pool.map(lambda c, part: c.sample([samples[i] for i in part]), self.clients, parts)
            return np.concatenate(list(made))


@contextmanager
def running_service(
    options: argparse.Namespace, folder: Path, sampler: str, steps: int, device: str
) -> Iterator[TwentyClients]:
    """Start Ray and a run's generator service, and yield its clients."""
    import ray

    ray.init(num_cpus=2, num_gpus=1 if device.startswith("cuda") else 0, log_to_driver=False)
    config = parse_config(
        {"dataset": options.dataset, "generator": str(folder), "sampler": sampler, "sampler-steps": steps}
    )
    service = start_service(config, device)
    assert service is not None
    try:
        yield TwentyClients(service.address(), options.dataset)
    finally:
        service.end()
        ray.shutdown()


def measure(name: str, maker: Any, count: int, classes: int, about: dict[str, Any]) -> dict[str, Any]:
    """Return a row: the time of `count` images after one batch of warm-up."""
    wanted = [SampleId(1, 0, i % classes, i // classes) for i in range(count)]
    first, _ = timed(lambda: maker.sample([SampleId(2, 0, 0, i) for i in range(maker.batch_size)]))
    seconds, made = timed(lambda: maker.sample(wanted))
    return {
        "name": name,
        **about,
        "images": count,
        "first_batch_seconds": first,
        "seconds": seconds,
        "images_per_second": count / seconds,
        "made": made,
    }


def timed(work: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """Return the seconds and images of `work`, which must return its images on the host."""
    began = time.perf_counter()
    made = work()
    return time.perf_counter() - began, made


def neighbours_do_not_matter(
    options: argparse.Namespace, folder: Path, shape: tuple[int, int, int], classes: int, device: str
) -> dict[str, int]:
    """Generate the same images twice, the second time shuffled and with others; return how many pixels differ."""
    ours = DiffusionGenerator(folder, num_classes=classes, image_shape=shape, steps=options.steps, device=device)
    wanted = [SampleId(1, 0, i % classes, i // classes) for i in range(min(64, options.images))]
    straight = ours.sample(wanted)
    order = np.random.default_rng(0).permutation(len(wanted))
    others = [SampleId(3, 0, 0, i) for i in range(7)]
    shuffled = ours.sample([*others, *(wanted[i] for i in order)])[7:]
    return {"pixels": straight.size, "differing": int((straight[order] != shuffled).sum())}


def table_of(rows: list[dict[str, Any]], images: int) -> Table:
    """Return the table of one sampler."""
    about = f"{rows[0]['sampler']}, {rows[0]['steps']} steps"
    heads = ("images/s", "× plain", f"s for {images:,}", "first batch s", "mean |Δ|", "max |Δ|")
    table = Table(about, "images", *heads)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        for_all = f"{row['seconds_for_all']:.1f}" + ("" if row["images"] == images else " extrapolated")
        table.add_row(
            row["name"],
            f"{row['images']:,}",
            f"{row['images_per_second']:,.1f}",
            f"{row['ratio']:.2f}",
            for_all,
            f"{row['first_batch_seconds']:.1f}",
            f"{row['mean_off']:.3f}",
            f"{row['max_off']}",
        )
    return table


if __name__ == "__main__":
    main()
