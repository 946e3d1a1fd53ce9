"""Train a small diffusion model by example-level DP-SGD for several ε, and measure its images.

    python benchmarks/dp_generator.py --data-dir /data --out results/dp-generator/gpu.json --folders generators/dp

DP-SGD (Abadi et al., 2016) on pooled images: Poisson sampling, each image's gradient clipped to norm C, Gaussian noise
of standard deviation σ·C on the sum. As in DPDM (Dockhorn et al., 2023), an image's gradient is the mean over several
timesteps (``--copies``). The number of steps follows from ``--seconds`` and the speed of the device, σ from ε. ε = inf
is the same training without clipping and noise.

Each row of the record is a setting. Its model is a folder for `generator = …`. The noise is seeded, so that a row can
be repeated; these models are for measurements only.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from run_records import markdown, write_record
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.common.image_sheet import save_sheet
from fedeas_flwr.common.randomness import torch_seed
from fedeas_flwr.data.datasets import Dataset, open_dataset
from fedeas_flwr.generators.classifier import agreement, independent_classifier
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.learn.denoiser import TIMESTEPS, rate_factor
from fedeas_flwr.generators.learn.presets import DIGITS
from fedeas_flwr.generators.learn.run import save_model
from fedeas_flwr.generators.learn.trainer import Trainer
from fedeas_flwr.generators.opening import open_generator
from fedeas_flwr.generators.quality import frechet_distance

# Three levels make a step cheaper than the two wider ones of DIGITS, with as many parameters.
LEVELS: dict[str, Any] = {"block_out_channels": (16, 32, 64)}
LEVELS |= {"down_block_types": ("DownBlock2D",) * 3, "up_block_types": ("UpBlock2D",) * 3}
PRESET = replace(DIGITS, name="dp-sgd", unet={**DIGITS.unet, **LEVELS}, cpu_threads=None)
CLIP = 0.01
"""Clipping norm C, below nearly all norms, so that every image counts alike; Adam's steps do not depend on its size."""
ORDERS = 1 + np.geomspace(0.05, 255, 60)
"""Orders of Rényi DP, of which the best one gives ε."""
PASSES_AT_ONCE, TIMED_STEPS, SEED = 6144, 3, 0
COLUMNS = ["images", "epsilon", "sigma", "steps", "noise_to_clip", "loss", "class_agreement", "frechet_distance"]


def epsilon(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Return ε at δ of steps of the Gaussian mechanism on Poisson samples; an image is added or removed.

    Rényi DP of Mironov, Talwar and Zhang (2019) with the moment integrated numerically, converted as in Mironov (2017),
    Proposition 3.
    """
    found = []
    for order in ORDERS:
        noise, width = np.linspace(-12 * sigma, order + 12 * sigma, 4001, retstep=True)
        with np.errstate(divide="ignore"):  # a rate of 1
            ratio = np.logaddexp(np.log1p(-rate), math.log(rate) + (2 * noise - 1) / (2 * sigma**2))
        density = -((noise / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))
        moment = np.logaddexp.reduce(density + order * ratio) + math.log(width)
        found.append((steps * moment + math.log(1 / delta)) / (order - 1))
    return float(min(found))


def find_sigma(target: float, rate: float, steps: int, delta: float) -> float:
    """Return the smallest noise multiplier σ, up to 0.1 %, whose ε is at most ``target``; 0 for infinity."""
    low, high = (0.1, 1000.0) if math.isfinite(target) else (0.0, 0.0)
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(middle, rate, steps, delta) <= target else (middle, high)
    return high


class ImageGradients:
    """Collects each image's gradient in a backward pass; an image has ``copies`` consecutive rows of the batch.

    `torch.func` gives the same gradients (a test compares them) by convolutions with one group per image. Here a
    convolution's gradients are one batched product of output gradients and patches, of which a GPU makes better use.
    """

    def __init__(self, network: nn.Module, copies: int) -> None:
        self.of: dict[nn.Parameter, torch.Tensor] = {}
        self._copies = copies
        for module in network.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(self._watch)
            if isinstance(module, nn.Conv2d):
                module.requires_grad_(False)  # autograd need not compute the sum over images as well

    def clipped_sum(self, clip: float) -> dict[nn.Parameter, torch.Tensor]:
        """Return the sum of the images' gradients, each clipped to a norm."""
        norms = torch.stack([each.flatten(1).square().sum(1) for each in self.of.values()]).sum(0).sqrt()
        factors = (clip / norms.clamp(min=1e-12)).clamp(max=1)
        return {parameter: torch.tensordot(factors, each, 1) for parameter, each in self.of.items()}

    def _watch(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._collect, module, inputs[0].detach()))  # type: ignore[no-untyped-call]

    def _collect(self, module: Any, x: torch.Tensor, grad: torch.Tensor) -> None:
        x = x if isinstance(module, nn.Embedding) else x.to(grad.dtype)
        if isinstance(module, nn.Conv2d):
            (height, width), stride, pad = module.kernel_size, module.stride[0], int(module.padding[0])
            patches = F.pad(x, (pad,) * 4).unfold(2, height, stride).unfold(3, width, stride)
            weight = torch.einsum("nohw,nchwij->nocij", grad, patches)
        elif isinstance(module, nn.GroupNorm):
            weight = (grad * F.group_norm(x, module.num_groups, eps=module.eps)).sum((2, 3))
        elif isinstance(module, nn.Linear):
            weight = torch.einsum("no,ni->noi", grad, x)
        elif isinstance(module, nn.Embedding):
            weight = torch.einsum("nc,ni->nci", F.one_hot(x, module.num_embeddings).to(grad.dtype), grad)
        else:
            raise TypeError(f"no rule for an image's gradient in {type(module).__name__}")
        bias = grad.sum((2, 3)) if grad.dim() == 4 else grad
        for parameter, rows in (module.weight, weight), (getattr(module, "bias", None), bias):
            if parameter is not None:
                self.of[parameter] = torch.unflatten(rows, 0, (-1, self._copies)).sum(1, dtype=torch.float32)


def train(dataset: Dataset, options: argparse.Namespace, sigma: float, steps: int) -> tuple[Trainer, dict[str, Any]]:
    """Train by DP-SGD with Adam; return the trainer, whose average has the result, and the row so far.

    Without ``--steps``, training stops after 1.5 times ``--seconds``, even if steps are left.
    """
    # The last tenth of the steps has most of the weight in the average.
    preset = replace(PRESET, learning_rate=options.learning_rate, warm_up=steps // 10, ema_decay=1 - 10 / (steps + 10))
    preset = replace(preset, batch=options.batch * options.copies)
    trainer = Trainer(preset, dataset, seed=SEED, device=options.device)
    parameters, gradients = list(trainer.unet.parameters()), ImageGradients(trainer.unet, options.copies)
    images = torch.tensor(dataset.x_train, device=trainer.device).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor(dataset.y_train, device=trainer.device)
    began, losses = time.monotonic(), []
    for step in range(steps):
        if not options.steps and time.monotonic() - began > 1.5 * options.seconds:
            break
        torch.manual_seed(torch_seed(SEED, step + 1))
        sampled = (torch.rand(len(labels), device=labels.device) < options.batch / len(labels)).nonzero().squeeze(1)
        total = {parameter: torch.zeros_like(parameter) for parameter in parameters}
        for part in sampled.chunk(math.ceil(len(sampled) * options.copies / PASSES_AT_ONCE)):
            losses.append(backward(trainer, images[part], labels[part], options.copies))
            for parameter, each in gradients.clipped_sum(CLIP if sigma else math.inf).items():
                total[parameter] += each
        for parameter, each in total.items():
            # Divided by the expected number of images: the sampled one depends on whether an image is present.
            parameter.grad = (each + sigma * CLIP * torch.randn_like(each)) / options.batch
        trainer.optimizer.param_groups[0]["lr"] = preset.learning_rate * rate_factor(preset, step, step / steps)
        trainer.optimizer.step()
        with torch.no_grad():  # EMAModel does not average parameters that require no gradient
            torch._foreach_lerp_(trainer.average.shadow_params, parameters, 1 - preset.ema_decay)
        trainer.state.step += 1
    loss = float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean())
    trainer.state.seconds = time.monotonic() - began
    noise = sigma * math.sqrt(sum(parameter.numel() for parameter in parameters)) / options.batch
    row = {"images": len(labels), "sigma": sigma, "noise_to_clip": noise, "loss": loss}
    return trainer, row | {"steps": trainer.state.step, "seconds": trainer.state.seconds}


def backward(trainer: Trainer, images: torch.Tensor, labels: torch.Tensor, copies: int) -> torch.Tensor:
    """Propagate the images' losses back, each at timesteps that depend on no other image; return the mean loss."""
    clean = images.repeat_interleave(copies, dim=0).float() / 127.5 - 1
    within = torch.arange(copies, device=labels.device) + torch.rand(len(labels), copies, device=labels.device)
    times = (within.flatten() * TIMESTEPS / copies).long().clamp(max=TIMESTEPS - 1)
    dropped = torch.rand(len(times), device=labels.device) < trainer.preset.label_dropout
    no_label = trainer.unet.config.num_class_embeds - 1
    shown = torch.where(dropped, no_label, labels.repeat_interleave(copies))
    noise = torch.randn_like(clean)
    # The input requires a gradient because the parameters of the first convolution do not.
    noisy = trainer.scheduler.add_noise(clean, noise, times).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=labels.is_cuda):
        predicted = trainer.unet(noisy, times, class_labels=shown, return_dict=False)[0]
    losses = (predicted.float() - trainer.scheduler.get_velocity(clean, noise, times)).square().mean(dim=(1, 2, 3))
    (losses.sum() / copies).backward()
    return torch.mean(losses.detach())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and measure each setting; write the record after each, and at the end a sheet with a row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion-mnist")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--images", default="60000,6000", help="numbers of train images")
    parser.add_argument("--epsilons", default="inf,100,30,10,3")
    parser.add_argument("--batch", type=int, default=2048, help="expected number of images in a step")
    parser.add_argument("--copies", type=int, default=4, help="timesteps per image and step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seconds", type=float, default=18.0, help="training time of a setting")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as fit in --seconds")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True, help="record; the sheet is a PNG file next to it")
    parser.add_argument("--folders", type=Path, required=True, help="where the models are written")
    options = parser.parse_args(arguments)
    dataset = open_dataset(options.dataset, options.data_dir)
    classifier = independent_classifier(options.dataset, options.data_dir, options.device)
    real = classifier.predict(np.asarray(dataset.x_train))[1].astype(np.float64)
    order = np.random.default_rng(SEED).permutation(len(dataset.y_train))
    steps, classes = options.steps, len(dataset.classes)
    if not steps:
        train(dataset, options, 1.0, 1)  # loads the kernels
        timed = train(dataset, options, 1.0, TIMED_STEPS)[1]
        steps = max(1, int(options.seconds * timed["steps"] / timed["seconds"]))
    setting = {key: value for key, value in vars(options).items() if key not in ("out", "folders", "data_dir")}
    setting |= {"clip": CLIP, "unet": PRESET.unet, "classifier_test_accuracy": classifier.test_accuracy}
    ids = [SampleId(SEED, 0, label, index) for index in range(options.samples // classes) for label in range(classes)]
    rows: list[dict[str, Any]] = []
    sheet = []
    for number in map(int, options.images.split(",")):
        part = replace(dataset, x_train=dataset.x_train[order[:number]], y_train=dataset.y_train[order[:number]])
        rate, delta = min(1.0, options.batch / number), 0.1 / number
        for target in map(float, options.epsilons.split(",")):
            sigma = find_sigma(target, rate, steps, delta)
            trainer, row = train(part, options, sigma, steps)
            spent = epsilon(sigma, rate, row["steps"], delta) if sigma else None
            folder = options.folders / f"{number}-{target:g}"
            save_model(folder, trainer, part)
            with (folder / "README.md").open("a") as card:
                card.write(f"- **DP-SGD**: σ = {sigma:.3g}, ε = {spent} at δ = {delta:.2g}, with seeded noise.\n")
            row |= {"epsilon": spent, "delta": delta, "class_agreement": None, "frechet_distance": None}
            try:
                sampling = {"sampler": "dpm++-logsnr", "batch_size": min(len(ids), 512), "device": options.device}
                samples = open_generator(str(folder), options.dataset, **sampling).sample(ids)
                row["class_agreement"] = agreement(classifier, samples, np.array([each.label for each in ids]))[0]
                row["frechet_distance"] = frechet_distance(real, classifier.predict(samples)[1].astype(np.float64))
                sheet.append(samples[: 2 * classes])
            except ValueError as error:  # NaN, or equal images
                row["fault"] = str(error)
            rows.append(row)
            print(row, flush=True)
            write_record(options.out, options.device, setting, rows)
    if sheet:
        save_sheet(sheet, 2 * classes, options.out.with_suffix(".png"))
    print(markdown(COLUMNS, [["–" if row[key] is None else f"{row[key]:.3g}" for key in COLUMNS] for row in rows]))


if __name__ == "__main__":
    main()
