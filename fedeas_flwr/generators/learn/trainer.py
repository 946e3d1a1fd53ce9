"""Train a class-conditional diffusion model on a dataset's train split, for a number of steps or of minutes.

The random numbers of a step are seeded by (seed, step) only. On the CPU, an interrupted and resumed training therefore
ends with the same bits as an uninterrupted one if its length is given in steps (in minutes, the learning rate follows
the clock). Preset ``cifar-small`` takes about 15 minutes for 10,000 steps on one H200.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedeas_flwr.common.randomness import torch_seed
from fedeas_flwr.data.datasets import Dataset, dataset_info
from fedeas_flwr.generators.diffusion.denoising import try_to_fuse
from fedeas_flwr.generators.diffusion.model_folder import init_from_pretrained
from fedeas_flwr.generators.learn.denoiser import (
    BETAS,
    MAX_GRADIENT_NORM,
    MOMENTS,
    DenoisingLoss,
    build_unet,
    rate_factor,
)
from fedeas_flwr.generators.learn.presets import Preset

# diffusers takes seconds to import, so only functions import it.

logger = logging.getLogger(__name__)

FROM_CHECKPOINT = "--resume continues from the last checkpoint"


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training; `loss` is the mean since the last report, `remaining` is in seconds."""

    step: int
    loss: float
    seconds: float
    remaining: float


@dataclass
class TrainingState:
    """State of a training except its tensors."""

    step: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    start: str = ""
    """Name of the pretrained initial weights; empty: random initial weights."""


class Trainer:
    """Trains a UNet and the moving average of its weights on a dataset's train images.

    On CUDA it uses bfloat16 autocast and the fused kernels.
    ``start`` is the folder of a pretrained model with the same network; its classes may differ.
    """

    def __init__(
        self,
        preset: Preset,
        dataset: Dataset,
        *,
        seed: int = 0,
        device: str = "cpu",
        start: Path | None = None,
    ) -> None:
        from diffusers.training_utils import EMAModel

        self.preset, self.seed = preset, seed
        self.device = torch.device(device)
        self.state = TrainingState()
        mirrored_keeps_class = dataset_info(dataset.name).mirrored_keeps_class
        self.loss = DenoisingLoss(preset, len(dataset.classes), mirrored_keeps_class, self.device)
        self.scheduler = self.loss.scheduler
        with self._deterministic():
            torch.manual_seed(torch_seed(seed, 0))
            self.unet = build_unet(preset, dataset.classes, dataset.x_train.shape[1:])
        if start is not None:
            self.state.start = init_from_pretrained(self.unet, start, preset.schedule)
        self.unet.to(self.device).train()
        if self.device.type == "cuda":
            try_to_fuse(self.unet)
        # uint8 on the device once: a step then moves nothing from the host.
        self._images = torch.tensor(dataset.x_train).permute(0, 3, 1, 2).contiguous().to(self.device)
        self._labels = torch.tensor(dataset.y_train).to(self.device)
        self.optimizer = torch.optim.Adam(self.unet.parameters(), betas=BETAS)
        self.average = EMAModel(self.unet.parameters(), decay=preset.ema_decay, foreach=True)

    def run(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        report: Callable[[TrainingProgress], None] | None = None,
        between: Callable[[], bool] | None = None,
    ) -> bool:
        """Train up to a total number of steps or minutes, those before a resume included; return whether it finished.

        ``report`` is called every `Preset.log_every` steps, ``between`` after each step, for checkpoints and plots; it
        returns whether to stop early.
        """
        earlier, began = self.state.seconds, time.monotonic()
        losses: list[torch.Tensor] = []
        with self._deterministic():
            while True:
                self.state.seconds = earlier + time.monotonic() - began
                step = self.state.step
                done = step / steps if steps is not None else self.state.seconds / (60 * (minutes or 1))
                if done >= 1:
                    if losses:
                        self._log(losses)
                    return True
                self.optimizer.param_groups[0]["lr"] = self.preset.learning_rate * rate_factor(self.preset, step, done)
                losses.append(self._train_step(step))
                self.state.step += 1
                if self.state.step in (1, steps) or self.state.step % self.preset.log_every == 0:
                    self.state.seconds = earlier + time.monotonic() - began
                    loss = self._log(losses)
                    if report is not None:
                        left = self._remaining(steps, minutes)
                        report(TrainingProgress(self.state.step, loss, self.state.seconds, left))
                if between is not None and between():
                    return False

    def averaged(self) -> Any:
        """Return a new network with the averaged weights, float32 on the CPU."""
        with self._deterministic():
            unet = type(self.unet).from_config(self.unet.config)
        self.average.copy_to(unet.parameters())
        return unet.eval().requires_grad_(False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a checkpoint by name, as contiguous copies on the CPU."""
        found: dict[str, torch.Tensor] = {}
        for (name, parameter), shadow in zip(self.unet.named_parameters(), self.average.shadow_params, strict=True):
            found |= {f"unet/{name}": parameter, f"average/{name}": shadow}
            found |= {f"adam-{key}/{name}": value for key, value in self.optimizer.state[parameter].items()}
        return {name: value.detach().cpu().contiguous().clone() for name, value in found.items()}

    def load(self, tensors: dict[str, torch.Tensor], state: TrainingState) -> None:
        """Restore `tensors` and `state` of a checkpoint."""
        parameters = dict(self.unet.named_parameters())
        with torch.no_grad():
            for (name, parameter), shadow in zip(parameters.items(), self.average.shadow_params, strict=True):
                parameter.copy_(tensors[f"unet/{name}"])
                shadow.copy_(tensors[f"average/{name}"])
                moments = {k: torch.empty_like(parameter).copy_(tensors[f"adam-{k}/{name}"]) for k in MOMENTS}
                # Adam keeps its step count on the CPU for every device.
                self.optimizer.state[parameter] = {"step": tensors[f"adam-step/{name}"].clone(), **moments}
        self.average.optimization_step = state.step
        self.state = state

    def _train_step(self, step: int) -> torch.Tensor:
        torch.manual_seed(torch_seed(self.seed, step + 1))
        batch = self.loss.random_batch(self._images, self._labels, self.preset.batch)
        loss = self.loss.of_batch(self.unet, batch).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.average.step(self.unet.parameters())
        return loss.detach()

    def _log(self, losses: list[torch.Tensor]) -> float:
        """Add a point to the loss curve; only here does the host wait for the device."""
        loss = float(torch.stack(losses).mean())
        losses.clear()
        if not math.isfinite(loss):
            raise ValueError(f"loss: {loss} at step {self.state.step}; {FROM_CHECKPOINT}")
        self.state.curve.append((self.state.step, loss))
        return loss

    def _remaining(self, steps: int | None, minutes: float | None) -> float:
        if steps is None:
            return max(0.0, 60 * (minutes or 0) - self.state.seconds)
        return self.state.seconds / self.state.step * (steps - self.state.step)

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Make arithmetic deterministic, and restore the caller's random state, threads and switches."""
        threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            if self.device.type == "cpu":
                torch.use_deterministic_algorithms(True)
                torch.set_num_threads(self.preset.cpu_threads or threads)
            try:
                yield
            finally:
                torch.set_num_threads(threads)
                torch.use_deterministic_algorithms(strict, warn_only=warn_only)
