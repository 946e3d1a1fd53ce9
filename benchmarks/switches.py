"""Switches that replace one of the GPU's custom kernels, or another of its tricks, by what PyTorch does without it.

`without(["blocks", "sgd"])` is a context in which both are off. What is built in it stays so: a captured step keeps the
kernels that it was captured with.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

Patch = tuple[Any, str, Callable[[Any], Any]]
"""An object, the name of its attribute, and a function from the attribute's value to the one in the context."""


def _blocks() -> list[Patch]:
    from fedeas_flwr.training.gpu.fast_layers import FusedLayers

    def run(self: Any, block: Any, x: torch.Tensor, shortcut: torch.Tensor) -> Any:
        y = type(block).forward(block, x)
        return y, y

    return [(FusedLayers, "_basic_block", lambda _: run)]


def _shortcut() -> list[Patch]:
    from fedeas_flwr.training.gpu import fast_layers
    from fedeas_flwr.training.gpu.batchnorm_kernels import plain_batchnorm

    def separately(fused: Any) -> Any:
        def run(layer: Any, count: Any, x: Any, added: Any = None, relu: bool = False, other: Any = None) -> Any:
            added = added if other is None else plain_batchnorm(other, count, added)
            return fused(layer, count, x, added, relu)

        return run

    return [(fast_layers, "batchnorm", separately)]


def _one_pixel() -> list[Patch]:
    from fedeas_flwr.training.gpu import graphed

    return [(graphed, "one_pixel_convolutions", lambda _: lambda model, images: [])]


def _padded() -> list[Patch]:
    from fedeas_flwr.training.gpu import graphed

    return [(graphed, "first_convolution", lambda _: lambda model: None)]


def _fetch() -> list[Patch]:
    from fedeas_flwr.training.gpu.graphed import GraphedEngine

    def unfused(fetch: Any) -> Any:
        def run(self: Any, *given: Any) -> Any:
            with patch.object(self, "_fast", None):
                return fetch(self, *given)

        return run

    return [(GraphedEngine, "_fetch", unfused)]


def _loss() -> list[Patch]:
    from fedeas_flwr.training import losses, objective
    from fedeas_flwr.training.gpu import step_kernels

    return [
        (step_kernels, "cross_entropy", lambda _: losses.cross_entropy),
        (step_kernels, "mean_of_first", lambda _: objective.mean_of_first),
    ]


def _sgd() -> list[Patch]:
    from fedeas_flwr.training.gpu import step_kernels

    return [(step_kernels, "FusedSGD", lambda _: lambda parameters, masters: None)]


def _triton() -> list[Patch]:
    from fedeas_flwr.training.gpu import graphed

    return [(graphed, "fast_layers", lambda _: lambda model: None)]


def _launcher() -> list[Patch]:
    from fedeas_flwr.training.gpu import graphed

    def launch(stream: Any, steps: Any) -> None:
        for step in steps:
            step()

    return [(graphed, "launch", lambda _: launch)]


def _graphs() -> list[Patch]:
    from fedeas_flwr.training.gpu.graphed import GraphedEngine

    def run(self: Any, work: Any) -> Any:
        self._row.zero_()
        work()  # the SGD kernel needs the gradients' addresses
        return work

    return [(GraphedEngine, "_captured", lambda _: run), *_launcher()]


def _compiled() -> list[Patch]:
    from fedeas_flwr.training import eager

    def compiling(start: Any) -> Any:
        def run(self: Any, model: torch.nn.Module, *given: Any, **more: Any) -> None:
            model.compile(mode="reduce-overhead")
            start(self, model, *given, **more)

        return run

    # A look at random numbers, with two images, would compile once more.
    return [(eager.EagerEngine, "__init__", compiling), (eager, "uses_rng", lambda _: lambda model, images: False)]


def _normalise() -> list[Patch]:
    from fedeas_flwr.generators.diffusion import fused

    def run(norm: Any, *maps: Any, before: Any = None, scale_shift: Any = None, silu: bool = False) -> Any:
        x = torch.cat([each.values for each in maps], dim=1)
        if x.numel() == 1:  # a trial of the compiler; PyTorch's own GroupNorm refuses it
            return x
        by_channel = (-1, x.shape[1], 1, 1)
        x = norm(x if before is None else x + before.view(by_channel))
        if scale_shift is not None:
            scale, shift = scale_shift.chunk(2, dim=1)
            x = x * (1 + scale.view(by_channel)) + shift.view(by_channel)
        return F.silu(x) if silu else x

    return [(fused, "normalise", lambda _: run)]


def _add() -> list[Patch]:
    from fedeas_flwr.generators.diffusion import fused
    from fedeas_flwr.generators.diffusion.unet_kernels import with_sums

    def run(x: torch.Tensor, y: Any, bias: torch.Tensor, *, doubled: bool = False) -> Any:
        total = (x if y is None else x + y) + bias.view(1, -1, 1, 1)
        return with_sums(F.interpolate(total, scale_factor=2.0) if doubled else total)

    return [(fused, "add", lambda _: run)]


def _fused() -> list[Patch]:
    from fedeas_flwr.generators.diffusion import sampler

    return [(sampler, "try_to_fuse", lambda _: lambda unet: unet.to(memory_format=torch.channels_last))]


def _denoising_graph() -> list[Patch]:
    from fedeas_flwr.generators.diffusion.denoising import _Step

    return [(_Step, "_capture", lambda _: lambda self: None)]


def _compiled_unet() -> list[Patch]:
    from fedeas_flwr.generators.diffusion import sampler

    def compiling(unet: Any) -> None:
        unet.to(memory_format=torch.channels_last)
        unet.compile(mode="reduce-overhead")

    return [(sampler, "try_to_fuse", lambda _: compiling), *_denoising_graph()]


TRAINING: dict[str, tuple[str, Callable[[], list[Patch]]]] = {
    "blocks": ("ReLU and sum in BatchNorm's kernel (batchnorm_kernels.py)", _blocks),
    "shortcut": ("a shortcut's BatchNorm in the block's kernel (batchnorm_kernels.py)", _shortcut),
    "one-pixel": ("convolutions of one-pixel maps as matrix products (convolutions.py)", _one_pixel),
    "padded": ("images and first weights with padded channels (convolutions.py)", _padded),
    "fetch": ("gather and normalise a batch (step_kernels.py)", _fetch),
    "loss": ("cross-entropy and its mean (step_kernels.py)", _loss),
    "sgd": ("SGD and the bfloat16 copies (step_kernels.py)", _sgd),
    "triton": ("all Triton kernels of training, and what needs them", _triton),
    "launcher": ("one thread that launches for all clients (launcher.py)", _launcher),
    "graphs": ("CUDA graphs of the steps, and the launcher", _graphs),
}
GENERATION: dict[str, tuple[str, Callable[[], list[Patch]]]] = {
    "normalise": ("GroupNorm, scale, shift and SiLU of concatenated maps (unet_kernels.py)", _normalise),
    "add": ("sum of maps and a bias, upsampled (unet_kernels.py)", _add),
    "fused": ("all of fused.py; the UNet is still channels last", _fused),
    "graph": ("the CUDA graph of a denoising step", _denoising_graph),
}
COMPILED = {
    "compiled": ('torch.compile(mode="reduce-overhead") of the network, eager otherwise', _compiled),
    "compiled-unet": ('torch.compile(mode="reduce-overhead") of the UNet, and no graph of ours', _compiled_unet),
}
SWITCHES = TRAINING | GENERATION | COMPILED


@contextmanager
def without(names: Collection[str]) -> Iterator[None]:
    """Switch the named kernels off inside the `with` block; with the names of `COMPILED`, compile instead."""
    with ExitStack() as stack:
        for name in names:
            for target, attribute, change in SWITCHES[name][1]():
                stack.enter_context(patch.object(target, attribute, change(getattr(target, attribute))))
        yield


def add_option(parser: argparse.ArgumentParser, known: Collection[str]) -> None:
    """Add --without, a list of switches."""

    def names(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not known; use some of {', '.join(known)}")
        return given

    about = f"switch these off, separated by commas: {', '.join(known)}"
    parser.add_argument("--without", type=names, default=[], metavar="NAMES", help=about)
