"""One training in a folder: checkpoints to resume from, pictures to watch, the finished model and its card.

unet/, scheduler/       the finished model in diffusers' format
README.md               its model card
checkpoint.safetensors  where to go on, with the loss curve; may be deleted once the training is over
samples.png, loss.png   images of the averaged weights, a row a class, and the loss so far
"""

from __future__ import annotations

import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fedeas_flwr.common.files import atomic_folder, atomic_write
from fedeas_flwr.data.datasets import Dataset, dataset_info, open_dataset, short_name
from fedeas_flwr.generators.learn.presets import Preset
from fedeas_flwr.generators.learn.trainer import Progress, Trainer, TrainingState
from fedeas_flwr.generators.learn.training_plots import draw_pictures

CHECKPOINT = "checkpoint.safetensors"

_PICTURES_EVERY = 180.0
_MINUTES = 1_000_000

# Which split, the licence's identifier, and the licence in words.
_DATA = {
    "digits": (
        "the project's fixed stratified 80/20 one",
        "cc-by-4.0",
        "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), UCI Machine Learning Repository, "
        "CC BY 4.0.",
    ),
    "cifar10": (
        "the official one",
        "other",
        "CIFAR-10 (Krizhevsky, 2009), published without a licence, in use for research.",
    ),
    "cifar100": (
        "the official one",
        "other",
        "CIFAR-100 (Krizhevsky, 2009), published without a licence, in use for research.",
    ),
}

_START = """- **Start**: the weights of {start}, not random ones. What they were trained on, their own
  card says; this one is of the training that followed.
"""

_OWN_DATA = (
    "as given, or a fifth of every class of three images or more set aside",
    "other",
    "Data of your own: its licence is yours.",
)

_CARD = """---
license: {licence}
library_name: diffusers
tags: [image-generation, class-conditional, {dataset}]
---
# {dataset}, {height}×{width}, class-conditional diffusion

Made by FedEAS on Flower with preset `{preset}`: {steps:,} steps of {batch} images, {seen:,} images in all,
{seconds:.0f} s.

- **Data**: the {num_train:,} train images of {dataset} ({split}). No test set was seen: the {num_test:,} test
  images were not used.
- **Data's licence**: {licence_text}
- **Model**: UNet2DModel, {parameters:.1f} M parameters, {prediction}, schedule {schedule}, EMA weights in {precision}.
  Class {no_label} is "no label", for guidance; labels were dropped {dropout:.0%} of the time.
{start}- **Hardware**: {hardware}; torch {torch}, diffusers {diffusers}.
- **Seed**: {seed}.
"""


def train_generator(
    dataset_name: str,
    out: Path,
    preset: Preset,
    *,
    steps: int | None = None,
    minutes: float | None = None,
    data_dir: str = "",
    seed: int = 0,
    device: str = "cpu",
    compiled: bool = True,
    half: bool = False,
    resume: bool = False,
    start: Path | None = None,
    checkpoint_every: float = 300.0,
    begun: Callable[[], None] | None = None,
    report: Callable[[Progress], None] | None = None,
) -> bool:
    """Train a generator into a folder.

    Parameters
    ----------
    dataset_name, data_dir
        As `open_dataset` takes them; only the train split is used.
    out
        The folder. It must be empty or new, unless `resume`.
    preset
        Network and recipe.
    steps, minutes
        How long, counted from the very beginning; at most one. Neither is the preset's own number of steps.
    seed, device, compiled
        Of the `Trainer`.
    half
        Write float16 weights.
    resume
        Go on from the folder's checkpoint.
    start
        Of the `Trainer`; a resumed training has its own weights and does not read it again.
    checkpoint_every
        Seconds between checkpoints, more than 0.
    begun
        Called once nothing that was given is wrong.
    report
        Told how it goes.

    Returns
    -------
    bool
        Whether the end was reached; False after Ctrl-C, with a checkpoint written.
    """
    steps = preset.steps if steps is None and minutes is None else steps
    _check_length(steps, minutes)
    if not checkpoint_every > 0:  # nor is NaN
        raise ValueError(f"checkpoint-every: {checkpoint_every:g} is not allowed; give more than 0")
    _check_folder(out, resume)
    identity = {"dataset": dataset_name, "seed": seed, "preset": json.loads(json.dumps(asdict(preset)))}
    info = dataset_info(dataset_name)  # data of one's own may change under their name
    preset.check_size(*info.image_shape[:2])
    identity |= {"images": list(info.image_shape), "classes": list(info.classes)}
    before = read_checkpoint(out / CHECKPOINT, identity) if resume else None
    dataset = open_dataset(dataset_name, data_dir)
    first = None if resume else start
    trainer = Trainer(preset, dataset, seed=seed, device=device, compiled=compiled, start=first)
    if before:
        trainer.load(*before)
    if begun:
        begun()
    saved = drawn = time.monotonic()
    with _stop_requests() as stopping:

        def between() -> bool:
            nonlocal saved, drawn
            now = time.monotonic()
            if stopping.is_set() or now - saved >= checkpoint_every:
                write_checkpoint(out / CHECKPOINT, trainer, identity)
                saved = time.monotonic()
            if now - drawn >= _PICTURES_EVERY:
                draw_pictures(out, trainer, dataset)
                drawn = time.monotonic()
            return stopping.is_set()

        finished = trainer.run(steps=steps, minutes=minutes, report=report, between=between)
    if finished:
        write_checkpoint(out / CHECKPOINT, trainer, identity)
        save_model(out, trainer, dataset, half=half)
        draw_pictures(out, trainer, dataset)
    return finished


def save_model(folder: Path, trainer: Trainer, dataset: Dataset, *, half: bool = False) -> None:
    """Write the averaged model in diffusers' format, with its card."""
    unet = trainer.averaged()
    parameters = sum(value.numel() for value in unet.parameters())
    if half:
        torch.nn.Module.half(unet)
    with atomic_folder(folder / "unet") as temporary:
        unet.save_pretrained(temporary, safe_serialization=True)
    with atomic_folder(folder / "scheduler") as temporary:
        trainer.scheduler.save_pretrained(temporary)
    preset, (split, licence, licence_text) = trainer.preset, _DATA.get(dataset.name, _OWN_DATA)
    card = _CARD.format(
        split=split,
        licence=licence,
        licence_text=licence_text,
        dataset=short_name(dataset.name),
        height=dataset.x_train.shape[1],
        width=dataset.x_train.shape[2],
        preset=preset.name,
        steps=trainer.diary.step,
        batch=preset.batch,
        seen=trainer.diary.step * preset.batch,
        seconds=trainer.diary.seconds,
        num_train=len(dataset.y_train),
        num_test=len(dataset.y_test),
        parameters=parameters / 1e6,
        prediction=preset.prediction,
        schedule=preset.beta_schedule,
        precision="float16" if half else "float32",
        no_label=len(dataset.classes),
        dropout=preset.label_dropout,
        start=_START.format(start=trainer.diary.start) if trainer.diary.start else "",
        hardware=_hardware(trainer.device),
        torch=version("torch"),
        diffusers=version("diffusers"),
        seed=trainer.seed,
    )
    atomic_write(folder / "README.md", card.encode())


def write_checkpoint(path: Path, trainer: Trainer, identity: dict[str, Any]) -> None:
    """Write everything that `read_checkpoint` needs, as one file that appears whole."""
    from safetensors.torch import save

    state = json.dumps({"identity": identity, "diary": asdict(trainer.diary)})
    atomic_write(path, save(trainer.tensors(), metadata={"state": state}))


def read_checkpoint(path: Path, identity: dict[str, Any]) -> tuple[dict[str, torch.Tensor], TrainingState]:
    """Read a checkpoint, refusing one of another dataset, seed or preset, or of other images or classes."""
    with _opened(path) as (file, state):
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        known, diary = identity | state["identity"], state["diary"]  # older ones say less
        curve = [(int(step), loss) for step, loss in diary["curve"]]
        so_far = TrainingState(diary["step"], diary["seconds"], curve, diary.get("start", ""))
        pairs = {key: (value, known.get(key)) for key, value in identity.items() if key != "classes"}
        classes = zip_longest(identity["classes"], known["classes"])
        pairs |= {f"class {label}": pair for label, pair in enumerate(classes)}
    for key, pair in pairs.items():
        if pair[0] != pair[1]:
            shown = [v["name"] if isinstance(v, dict) else v for v in pair]
            raise ValueError(f"{key}: {shown[0]!r} is not allowed; the checkpoint in {path.parent} has {shown[1]!r}")
    return tensors, so_far


def read_preset_name(out: Path) -> str:
    """Name the preset of a folder's training, with which it is to go on, whatever would suit the device."""
    _check_folder(out, resume=True)
    with _opened(out / CHECKPOINT) as (_, state):
        return str(state["identity"]["preset"]["name"])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Give a checkpoint's file and what stands beside its tensors; what is no checkpoint is one line."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file, json.loads(file.metadata()["state"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"resume: {path} cannot be read ({error}); train anew in another folder") from None


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C or SIGTERM into a wish to stop after the step; the second is the usual one."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread may handle signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _check_length(steps: int | None, minutes: float | None) -> None:
    if steps is not None and minutes is not None:
        raise ValueError(f"steps: {steps} and minutes: {minutes:g} do not go together; give one of them")
    if steps is not None and steps < 1:
        raise ValueError(f"steps: {steps} is not allowed; give at least 1")
    if minutes is not None and not 0 < minutes < _MINUTES:
        raise ValueError(f"minutes: {minutes} is not allowed; give more than 0 and less than {_MINUTES:,}")


def _check_folder(out: Path, resume: bool) -> None:
    begun, taken = (out / CHECKPOINT).is_file(), out.exists() and (not out.is_dir() or any(out.iterdir()))
    if resume and not begun:
        begin = "name another folder" if taken else "leave --resume out"
        raise ValueError(f"resume: there is no {out / CHECKPOINT}; {begin} to begin")
    if taken and not resume:
        go_on = "give --resume to go on there, or" if begun else "it has no training to go on with; give"
        raise ValueError(f"out: {out} is not empty; {go_on} another folder")


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"
