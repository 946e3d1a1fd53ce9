"""The denoising loop: a diffusers solver calls a UNet. On a GPU, every step replays one CUDA graph of the UNet.

On a GPU the host never waits inside the loop. The solver's scalars (timesteps, noise levels) stay on the CPU. The UNet
reads its timestep from a buffer. The pixels of a batch are copied back while the next batch is queued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedeas_flwr.common.cuda import CaptureError, capture, capturing, own_stream, release_cached_memory
from fedeas_flwr.common.devices import one_thread
from fedeas_flwr.common.text import one_line

# diffusers takes seconds to import, so only functions import it.

logger = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]

# lambda_min_clipped: diffusers advises -5.1 for the cosine schedule, whose last timesteps are almost pure noise. It has
# no effect on schedules with less noise at the end. Trailing spacing starts at the noisiest remaining timestep. DDIM
# clips its estimate of the image, since a model that predicts ε makes it divide by almost zero in the first steps.
_DPM = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "timestep_spacing": "trailing",
    "lambda_min_clipped": -5.1,
    "final_sigmas_type": "zero",
}
SOLVER_SETTINGS: dict[str, dict[str, Any]] = {
    "dpm++": _DPM,
    "dpm++-logsnr": _DPM,
    "ddim": {"timestep_spacing": "trailing", "clip_sample": True, "set_alpha_to_one": True},
}

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the UNet for each precision. The solver's state is always float32."""

_PROBE = 32


def make_solver(sampler: str, schedule: dict[str, Any], steps: int) -> Any:
    """Return a new diffusers solver with its timesteps set and its scalars on the CPU.

    The timesteps of ``dpm++`` and ``ddim`` are evenly spaced, those of ``dpm++-logsnr`` in the log-SNR.
    """
    from diffusers import DDIMScheduler, DPMSolverMultistepScheduler

    solver_class: Any = DDIMScheduler if sampler == "ddim" else DPMSolverMultistepScheduler
    solver = solver_class(**schedule, **SOLVER_SETTINGS[sampler])
    solver.set_timesteps(steps)
    if sampler == "dpm++-logsnr":
        solver.set_timesteps(timesteps=_uniform_log_snr_steps(solver.lambda_t.numpy(), int(solver.timesteps[0]), steps))
    return solver


def _uniform_log_snr_steps(log_snr: NDArray[np.float32], first: int, steps: int) -> list[int]:
    """Return distinct timesteps from `first` to 0 with uniform log-SNR spacing, as DPM-Solver proposes."""
    levels = np.linspace(log_snr[first], log_snr[0], steps)
    times = np.interp(-levels, -log_snr, np.arange(len(log_snr))).round().astype(int)
    place = np.arange(steps)
    return [int(time) for time in np.minimum.accumulate(np.maximum(times, steps - 1 - place) + place) - place]


def try_to_fuse(unet: Any) -> None:
    """Let a UNet on a GPU use the fused kernels; if it or this machine does not support them, log why it is slower."""
    try:
        from fedeas_flwr.generators.diffusion.fused import fuse

        fuse(unet)
    except Exception as error:  # a compiler raises many types
        logger.warning("kernels not fused, the UNet is slower: %s", one_line(error))
        unet.to(memory_format=torch.channels_last)


class Denoiser:
    """Generates pixels from noise and labels with a UNet, which is on its device, in its precision and in eval mode.

    ``guidance`` is the classifier-free guidance scale; 1: no guidance. ``no_label`` is the label that means "no class",
    which guidance needs. ``guided`` are the fractions of the steps at which guidance begins and ends (Kynkäänniemi et
    al., 2024). ``rescale`` (φ in Lin et al., 2024) is how far, from 0 to 1, guided predictions are rescaled to the
    standard deviation without guidance.
    """

    def __init__(
        self,
        unet: Any,
        schedule: dict[str, Any],
        *,
        sampler: str,
        steps: int,
        guidance: float = 1.0,
        guided: tuple[float, float] = (0.0, 1.0),
        rescale: float = 0.0,
        no_label: int | None = None,
        precision: str = "fp32",
    ) -> None:
        self.unet = unet
        self._schedule, self._sampler, self._steps = schedule, sampler, steps
        self._guidance, self._rescale, self._no_label = guidance, rescale, no_label
        self._guided = range(int(guided[0] * steps), int(guided[1] * steps)) if guidance != 1 else range(0)
        self._precision = precision
        self._device: torch.device = next(unet.parameters()).device
        self._prepared: dict[bool, _Step] = {}

    def start(self, noise: NDArray[np.float32], labels: Sequence[int]) -> Callable[[], Pixels]:
        """Denoise one batch of noise ``[N, C, H, W]``; on a GPU, only queue the work.

        The returned function waits for the batch and returns its pixels, uint8 ``[N, H, W, C]``. It raises ValueError
        if the model's output is not finite.
        """
        with torch.no_grad(), self._on_device():
            x = self._send(torch.from_numpy(noise))
            sent = self._send(torch.tensor(labels))
            solver = make_solver(self._sampler, self._schedule, self._steps)
            for index, time in enumerate(solver.timesteps):
                step = self._prepare(x, sent, index in self._guided)
                x = solver.step(step(x, int(time)), time, x).prev_sample
            pixels = ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            return self._fetch(pixels.contiguous(), x.isfinite().all())

    def predict(self, x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor, guided: bool = True) -> torch.Tensor:
        """Return the model's prediction in float32, with guidance if it has any."""
        given = x.to(self.unet.dtype)
        conditional: torch.Tensor = self.unet(given, time, class_labels=labels, return_dict=False)[0].float()
        if not guided or self._guidance == 1.0 or self._no_label is None:
            return conditional
        none = torch.full_like(labels, self._no_label)
        free: torch.Tensor = self.unet(given, time, class_labels=none, return_dict=False)[0].float()
        moved = free + self._guidance * (conditional - free)
        if not self._rescale:
            return moved
        before, after = (each.std((1, 2, 3), keepdim=True) for each in (conditional, moved))
        return moved * (1 + self._rescale * (before / after - 1))

    def _predict(self, x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor, guided: bool = True) -> torch.Tensor:
        with _arithmetic(self._device, self._precision):
            return self.predict(x, time, labels, guided)

    def bytes_per_image(self, image_shape: tuple[int, int, int]) -> float:
        """Measure and return the peak memory of a forward pass, in bytes per image; CUDA only."""
        height, width, channels = image_shape
        with torch.no_grad(), self._on_device():
            x = torch.zeros(_PROBE, channels, height, width, device=self._device)
            time, labels = (torch.zeros(n, dtype=torch.int64, device=self._device) for n in (1, _PROBE))
            before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._predict(x, time, labels)
            return (torch.cuda.max_memory_allocated(self._device) - before) / _PROBE

    def forget(self) -> None:
        """Release the graph and its memory, for instance after running out of memory."""
        with capturing:  # no thread may synchronise the device during another thread's capture
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # queued batches still use the graph
            self._prepared = {}
            release_cached_memory()

    def _on_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _prepare(self, x: torch.Tensor, labels: torch.Tensor, guided: bool) -> _Step:
        """Return the step for this batch size, with or without guidance, with its labels set."""
        if any(len(step.labels) != len(x) for step in self._prepared.values()):
            self.forget()
        if guided not in self._prepared:
            self._prepared[guided] = _Step(partial(self._predict, guided=guided), x)
        self._prepared[guided].labels.copy_(labels)
        return self._prepared[guided]

    def _send(self, values: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return values
        return values.pin_memory().to(self._device, non_blocking=True)

    def _copy_to_host(self, values: torch.Tensor) -> torch.Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def _fetch(self, pixels: torch.Tensor, finite: torch.Tensor) -> Callable[[], Pixels]:
        done = None
        if self._device.type != "cpu":
            pixels, finite = self._copy_to_host(pixels), self._copy_to_host(finite)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            done.record()  # type: ignore[no-untyped-call, unused-ignore]

        def wait() -> Pixels:
            if done is not None:
                done.synchronize()  # type: ignore[no-untyped-call, unused-ignore]
            if not bool(finite):
                raise ValueError("the generated images hold NaN or infinity")
            return pixels.numpy()

        return wait


class _Step:
    """Predicts for a fixed batch size; on a GPU, replays a CUDA graph with fixed buffers."""

    def __init__(self, predict: Callable[..., torch.Tensor], like: torch.Tensor) -> None:
        self._predict = predict
        self._time = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.labels = torch.zeros(len(like), dtype=torch.int64, device=like.device)
        self._replay: Callable[[], None] | None = None
        if like.device.type == "cuda":
            self._x = torch.zeros_like(like, memory_format=torch.channels_last)
            self._capture()

    def __call__(self, x: torch.Tensor, time: int) -> torch.Tensor:
        self._time.fill_(time)
        if self._replay is None:
            return self._predict(x, self._time, self.labels)
        self._x.copy_(x)
        self._replay()
        return self._output.clone()  # the next replay overwrites it, and a multistep solver keeps earlier outputs

    def _capture(self) -> None:
        # Clients of this process may be training, so the graph has its own stream for its lifetime.
        self._stream, before = own_stream(), torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                self._replay = capture(self._fill, self._stream)
        except CaptureError as error:
            logger.warning("no CUDA graph; sampling continues without one: %s", one_line(error))
        before.wait_stream(self._stream)

    def _fill(self) -> None:
        self._output = self._predict(self._x, self._time, self.labels)


@contextmanager
def _arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """Set the flags that affect the last bits of results on `device`, and restore them afterwards.

    On a GPU the flags apply to the whole process, in which clients may be training. So they are set only during a
    forward pass, which runs when the graph is captured.
    """
    if device.type == "cpu":
        with one_thread(device):
            yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with capturing:
        before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
        # torch uses TF32 in convolutions by default, so "fp32" must switch it off.
        matmul.allow_tf32 = cudnn.allow_tf32 = precision != "fp32"
        # A benchmark may choose other kernels next time, which changes the last bits.
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
