"""Train a generator in a folder with checkpoints, plots, the finished model and its card.

unet/, scheduler/       the finished model in diffusers' format, with the verdict on it (verdict.py) in unet/config.json
README.md               its model card
checkpoint.safetensors  state to resume from, with the loss curve; may be deleted after the training
only.npz                the images that it was trained on, if they are not all train images
samples.png, loss.png   samples of the averaged weights, one row per class, and the loss so far
"""

from __future__ import annotations

import json
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from fedeas_flwr.common.checked import read_checked, write_checked
from fedeas_flwr.common.files import atomic_path, atomic_write
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.data.datasets import Dataset, dataset_info, open_dataset, short_name
from fedeas_flwr.generators.diffusion.model_folder import VERDICT, write_model_folder
from fedeas_flwr.generators.learn.data_licences import describe_data
from fedeas_flwr.generators.learn.presets import Preset
from fedeas_flwr.generators.learn.trainer import FROM_CHECKPOINT, Trainer, TrainingProgress, TrainingState
from fedeas_flwr.generators.learn.training_plots import draw_pictures
from fedeas_flwr.generators.learn.verdict import Verdict, judge

CHECKPOINT = "checkpoint.safetensors"
_OWNER = "generator training"

_PICTURES_EVERY = 180.0
_MINUTES = 1_000_000

_PRETRAINED = """- **Initial weights**: {start}, pretrained. Their model card describes the data that they were
  trained on; this card describes the training that followed.
"""

_CARD = """---
license: {licence}
library_name: diffusers
tags: [image-generation, class-conditional, {dataset}]
---
# {dataset}, {height}×{width}, class-conditional diffusion

Made by FedEAS on Flower with preset `{preset.name}`: {state.step:,} steps of {preset.batch} images, {seen:,} images in
all, {state.seconds:.0f} s.

- **Data**: the {num_train:,} train images of {dataset} ({split}). No test set was seen: it was not
  trained on the {num_test:,} test images.
- **Data's licence**: {licence_text}
- **Model**: UNet2DModel, {parameters:.1f} M parameters, {preset.prediction}, schedule {preset.beta_schedule}, EMA
  weights in {precision}. Class {no_label} is "no label", for guidance; labels were dropped {preset.label_dropout:.0%}
  of the time.
{start}{verdict}- **Hardware**: {hardware}; torch {torch}, diffusers {diffusers}.
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
    half: bool = False,
    resume: bool = False,
    start: Path | None = None,
    only: int = 0,
    checkpoint_every: float = 300.0,
    on_start: Callable[[], None] | None = None,
    report: Callable[[TrainingProgress], None] | None = None,
) -> Verdict | None:
    """Train a generator into a folder; return the verdict on it. Ctrl-C ends it with a checkpoint and returns None.

    ``out`` must be empty or new, unless ``resume`` continues from its checkpoint. ``steps`` or ``minutes`` is the total
    length, the training before a resume included; neither: the preset's number of steps. ``half`` writes float16
    weights. ``start`` is ignored with ``resume``; see `Trainer` for it. ``only`` is the number of train images to use,
    equally many of each class; 0: all of them. ``checkpoint_every`` is in seconds. ``on_start`` is called when all
    arguments are checked, ``report`` with the progress.
    """
    steps = preset.steps if steps is None and minutes is None else steps
    _check_length(steps, minutes)
    if not checkpoint_every > 0:  # also rejects NaN
        raise ValueError(f"checkpoint-every: {checkpoint_every:g} is not allowed; give more than 0")
    _check_folder(out, resume)
    identity = {"dataset": dataset_name, "seed": seed, "preset": json.loads(json.dumps(asdict(preset)))}
    info = dataset_info(dataset_name)  # a custom dataset may change under its name
    preset.check_size(*info.image_shape[:2])
    identity |= {"images": list(info.image_shape), "classes": list(info.classes), "only": only}
    before = read_checkpoint(out / CHECKPOINT, identity) if resume else None
    dataset = open_dataset(dataset_name, data_dir)
    if only:
        dataset = _first_of_each_class(dataset, only)
    trainer = Trainer(preset, dataset, seed=seed, device=device, start=None if resume else start)
    if before:
        trainer.load(*before)
    if on_start:
        on_start()
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
    if not finished:
        return None
    write_checkpoint(out / CHECKPOINT, trainer, identity)
    verdict = judge(trainer, dataset, *draw_pictures(out, trainer, dataset))
    if only:
        with atomic_path(out / "only.npz") as temporary, temporary.open("wb") as file:
            np.savez(file, x=dataset.x_train, y=dataset.y_train)
    save_model(out, trainer, dataset, half=half, verdict=verdict)
    return verdict


def save_model(
    folder: Path, trainer: Trainer, dataset: Dataset, *, half: bool = False, verdict: Verdict | None = None
) -> None:
    """Write the averaged model in diffusers' format, with its card and, if there is one, the verdict on it."""
    unet = trainer.averaged()
    if verdict is not None:
        unet.register_to_config(**{VERDICT: asdict(verdict)})
    parameters = sum(value.numel() for value in unet.parameters())
    if half:
        torch.nn.Module.half(unet)
    write_model_folder(folder, unet, trainer.scheduler)
    preset, state, (split, licence, licence_text) = trainer.preset, trainer.state, describe_data(dataset.name)
    if len(dataset.y_train) < dataset_info(dataset.name).num_train:
        split += "; only the first of each class"
    card = _CARD.format(
        preset=preset,
        state=state,
        split=split,
        licence=licence,
        licence_text=licence_text,
        dataset=short_name(dataset.name),
        height=dataset.x_train.shape[1],
        width=dataset.x_train.shape[2],
        seen=state.step * preset.batch,
        num_train=len(dataset.y_train),
        num_test=len(dataset.y_test),
        parameters=parameters / 1e6,
        precision="float16" if half else "float32",
        no_label=len(dataset.classes),
        start=_PRETRAINED.format(start=state.start) if state.start else "",
        verdict=f"- **Verdict**: {verdict.text}.\n" if verdict else "",
        hardware=_hardware(trainer.device),
        torch=version("torch"),
        diffusers=version("diffusers"),
        seed=trainer.seed,
    )
    atomic_write(folder / "README.md", card.encode())


def _first_of_each_class(dataset: Dataset, images: int) -> Dataset:
    """Return the dataset with the first train images of each class only, ``images`` in total."""
    each, rest = divmod(images, len(dataset.classes))
    if rest or not each:
        raise ValueError(
            f"only: {images} is not allowed; give a multiple of {len(dataset.classes)}, the number of classes"
        )
    present = np.bincount(dataset.y_train, minlength=len(dataset.classes))
    if present.min() < each:
        fewest = f"class {dataset.classes[present.argmin()]!r} has {present.min()}"
        raise ValueError(f"only: {images} is not allowed; it needs {each} images of each class, and {fewest}")
    rows = np.concatenate([np.flatnonzero(dataset.y_train == label)[:each] for label in range(len(dataset.classes))])
    return replace(dataset, x_train=dataset.x_train[rows], y_train=dataset.y_train[rows])


def write_checkpoint(path: Path, trainer: Trainer, identity: dict[str, Any]) -> None:
    """Write a checkpoint for `read_checkpoint` atomically; keep the one before if the weights are not finite."""
    tensors = trainer.tensors()
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError(f"weights: not finite at step {trainer.state.step}; {FROM_CHECKPOINT}")
    write_checked(path, {"identity": identity, "diary": asdict(trainer.state)}, tensors, _OWNER)


def read_checkpoint(path: Path, identity: dict[str, Any]) -> tuple[dict[str, torch.Tensor], TrainingState]:
    """Read a checkpoint; raise ValueError if it is damaged or its dataset, seed, preset, images or classes differ."""
    state, arrays = _checkpoint(path)
    known, stored = identity | state["identity"], state["diary"]
    curve = [(int(step), loss) for step, loss in stored["curve"]]
    so_far = TrainingState(stored["step"], stored["seconds"], curve, stored["start"])
    pairs = {key: (value, known.get(key)) for key, value in identity.items() if key != "classes"}
    classes = zip_longest(identity["classes"], known["classes"])
    pairs |= {f"class {label}": pair for label, pair in enumerate(classes)}
    for key, pair in pairs.items():
        if pair[0] != pair[1]:
            shown = [v["name"] if isinstance(v, dict) else v for v in pair]
            raise ValueError(f"{key}: {shown[0]!r} is not allowed; the checkpoint in {path.parent} has {shown[1]!r}")
    return {key: torch.from_numpy(array) for key, array in arrays.items()}, so_far


def read_preset_name(out: Path) -> str:
    """Return the name of the preset of a folder's training, with which it is resumed on any device."""
    _check_folder(out, resume=True)
    return str(_checkpoint(out / CHECKPOINT)[0]["identity"]["preset"]["name"])


def _checkpoint(path: Path) -> tuple[dict[str, Any], Arrays]:
    try:
        return read_checked(path, _OWNER)
    except ValueError as error:
        raise ValueError(f"resume: {error}; start again in another folder") from None


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Make the first Ctrl-C or SIGTERM request a stop after the current step; the second has its usual effect."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested  # only the main thread may handle signals
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: FrameType | None) -> None:
        requested.set()
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, request)
    try:
        yield requested
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _check_length(steps: int | None, minutes: float | None) -> None:
    if steps is not None and minutes is not None:
        raise ValueError(f"steps: {steps} and minutes: {minutes:g} exclude each other; give one of them")
    if steps is not None and steps < 1:
        raise ValueError(f"steps: {steps} is not allowed; give at least 1")
    if minutes is not None and not 0 < minutes < _MINUTES:
        raise ValueError(f"minutes: {minutes} is not allowed; give more than 0 and less than {_MINUTES:,}")


def _check_folder(out: Path, resume: bool) -> None:
    begun, taken = (out / CHECKPOINT).is_file(), out.exists() and (not out.is_dir() or any(out.iterdir()))
    if resume and not begun:
        begin = "give another folder" if taken else "omit --resume"
        raise ValueError(f"resume: there is no {out / CHECKPOINT}; {begin} to start a training")
    if taken and not resume:
        advice = "give --resume to continue there, or" if begun else "it has no training to continue; give"
        raise ValueError(f"out: {out} is not empty; {advice} another folder")


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU"
