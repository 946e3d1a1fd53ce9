"""The diffusion generator: samples a class-conditional model in a local folder in diffusers' format.

The folder has ``unet`` (a `UNet2DModel` in safetensors) and ``scheduler``. Each sample starts from its own noise and
the sampler is deterministic, so its identity determines its pixels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedeas_flwr.common.cuda import release_cached_memory
from fedeas_flwr.common.files import sha256_of
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import SAMPLER_STEPS
from fedeas_flwr.generators.diffusion.denoising import PRECISIONS, SOLVER_SETTINGS, Denoiser, try_to_fuse
from fedeas_flwr.generators.diffusion.model_folder import load_unet, read_model
from fedeas_flwr.generators.interface import SampleId, check_variety

logger = logging.getLogger(__name__)

# Part of the fingerprint: raise it when `initial_noise` changes.
_SEEDING = "philox-seedsequence-1"
# Part of the fingerprint on CUDA: raise it when the kernels change the output by more than the last bits.
_KERNELS = "fused-2"
_CPU_BATCH = 64
# On a GPU, the largest of these whose forward pass fits in half of the free memory; more than 1024 is no faster.
_CUDA_BATCHES = (1024, 512, 256, 128, 64, 32)
_MIN_BATCH = 8


def initial_noise(sample: SampleId, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the initial standard normal noise of `sample`, the same on any device and in any batch."""
    source = np.random.SeedSequence(sample.seed, spawn_key=(sample.client, sample.label, sample.index))
    return np.random.Generator(np.random.Philox(source)).standard_normal(shape, dtype=np.float32)


class Settings:
    """Sampling settings, with the defaults of the sampler and the device; see `open_generator`.

    A batch shorter than ``batch_size`` is padded, because another size changes the last bits. The size is halved when a
    GPU runs out of memory.
    """

    def __init__(
        self,
        *,
        sampler: str = "dpm++",
        steps: int | None = None,
        guidance: float = 1.0,
        guidance_start: float = 0.0,
        guidance_stop: float = 1.0,
        guidance_rescale: float = 0.0,
        batch_size: int | None = None,
        precision: str | None = None,
        device: str = "cpu",
    ) -> None:
        self.device = _check_device(device)
        on_cpu = self.device.type == "cpu"
        self.sampler, self.guidance, self.guidance_rescale = sampler, float(guidance), float(guidance_rescale)
        self.guided = float(guidance_start), float(guidance_stop)
        self.steps = SAMPLER_STEPS.get(sampler, 0) if steps is None else steps
        self.batch_size = _CPU_BATCH if batch_size is None and on_cpu else batch_size
        self.precision = precision or ("fp32" if on_cpu else "bf16")

    @property
    def guidance_identity(self) -> list[float]:
        """The settings of guidance that have an effect, for the fingerprint."""
        if self.guidance == 1:
            return [1.0]
        rescale = [self.guidance_rescale] if self.guidance_rescale else []
        return [self.guidance, *rescale, *(self.guided if self.guided != (0, 1) else ())]

    def check(self, folder: Path, timesteps: int, embeddings: int, num_classes: int) -> None:
        """Raise ValueError for settings that a model with these timesteps and class embeddings cannot have."""
        if self.sampler not in SAMPLER_STEPS:
            raise ValueError(f"sampler: {self.sampler!r} is not allowed; give one of {', '.join(SAMPLER_STEPS)}")
        if not isinstance(self.steps, int | np.integer) or not 1 <= self.steps <= timesteps:
            raise ValueError(f"steps: {self.steps!r} is not allowed; give 1 to {timesteps}")
        if self.sampler == "ddim" and timesteps % self.steps:
            # diffusers rounds the stride down, so a step's noise level would not be the one that the next step expects.
            raise ValueError(f"steps: {self.steps} is not allowed with ddim; give a divisor of {timesteps}")
        if self.batch_size is not None and (not isinstance(self.batch_size, int | np.integer) or self.batch_size < 1):
            raise ValueError(f"batch_size: {self.batch_size!r} is not allowed; give at least 1")
        if self.precision not in PRECISIONS or (self.precision == "tf32" and self.device.type == "cpu"):
            allowed = ", ".join(name for name in PRECISIONS if name != "tf32" or self.device.type != "cpu")
            raise ValueError(f"precision: {self.precision!r} is not allowed on {self.device.type}; give {allowed}")
        if not (math.isfinite(self.guidance) and self.guidance >= 1):
            raise ValueError(f"guidance: {self.guidance} is not allowed; give 1 (none) or more")
        if not 0 <= self.guided[0] < self.guided[1] <= 1:
            start, stop = self.guided
            raise ValueError(
                f"guidance_start: {start:g} is not allowed; give 0 or more, below guidance-stop = {stop:g} (at most 1)"
            )
        if not 0 <= self.guidance_rescale <= 1:
            raise ValueError(f"guidance_rescale: {self.guidance_rescale} is not allowed; give 0 (none) to 1")
        if self.guidance != 1 and embeddings == num_classes:
            raise ValueError(
                f"guidance: {self.guidance} needs a model with a 'no label' class, {num_classes + 1} embeddings; "
                f"{folder} has {num_classes}, so only 1 is allowed"
            )


class DiffusionGenerator:
    """Samples a class-conditional `UNet2DModel`.

    On the CPU the fingerprint includes the batch size, and the same fingerprint gives the same bytes (same machine and
    wheels). On CUDA it includes device type and precision but not the batch size, which depends on free memory: images
    generated again are the same up to rounding.

    ``folder`` has ``unet`` and ``scheduler``, as `save_pretrained` writes them; weights may have any float dtype. In a
    model with C + 1 class embeddings the last one is "no label", which guidance needs; a model with C has none. A model
    that stores the names of its classes must have ``classes``; empty: any. Its images must have ``image_shape``; None:
    any. ``settings`` are those of `Settings`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        num_classes: int,
        classes: Sequence[str] = (),
        image_shape: tuple[int, int, int] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.num_classes = Path(folder), num_classes
        chosen = Settings(**settings)
        self.device, self.sampler, self.steps = chosen.device, chosen.sampler, chosen.steps
        self.guidance, self.batch_size, self.precision = chosen.guidance, chosen.batch_size, chosen.precision
        config, self._schedule, self.image_shape, weights = read_model(self.folder, num_classes, classes, image_shape)
        embeddings = config["num_class_embeds"]
        chosen.check(self.folder, self._schedule["num_train_timesteps"], embeddings, num_classes)
        unet = load_unet(config, weights)
        # torch's `to`, since that of diffusers warns about every cast.
        torch.nn.Module.to(unet, self.device, PRECISIONS[self.precision])
        if self.device.type != "cpu":
            try_to_fuse(unet)
        self._denoiser = Denoiser(
            unet,
            self._schedule,
            sampler=self.sampler,
            steps=self.steps,
            guidance=self.guidance,
            guided=chosen.guided,
            rescale=chosen.guidance_rescale,
            no_label=num_classes if embeddings == num_classes + 1 else None,
            precision=self.precision,
        )
        self.fingerprint = self._make_fingerprint(config, weights, chosen.guidance_identity)

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Generate images; each depends only on its identity. See `Generator.sample`."""
        for sample in samples:
            if min(sample) < 0 or sample.label >= self.num_classes:
                allowed = f"none negative, label below {self.num_classes}"
                raise ValueError(f"sample: {tuple(sample)} is not allowed as seed, client, label, index; {allowed}")
        images = np.empty((len(samples), *self.image_shape), dtype=np.uint8)
        requested = self.batch_size
        queued: deque[tuple[int, int, Callable[[], NDArray[np.uint8]]]] = deque()
        start = 0
        while start < len(samples) or queued:
            if start < len(samples):
                try:
                    batch = samples[start : start + self.find_batch_size()]
                    queued.append((start, len(batch), self._start(batch)))
                    start += len(batch)
                except torch.OutOfMemoryError:
                    requested = requested or self.batch_size
                    self._halve_batch_size()
                    continue
            # One batch stays queued until the next one is: the GPU computes while the CPU draws the next noise.
            if len(queued) > 1 or start == len(samples):
                first, count, fetch = queued.popleft()
                try:
                    images[first : first + count] = fetch()[:count]
                except ValueError as error:
                    raise ValueError(f"generator: {self.folder}: {error}") from None
        if requested and self.batch_size != requested:
            logger.warning("out of memory at a batch of %d; continuing with %s", requested, self.batch_size)
        check_variety(images, samples, self.folder)
        return images

    def _start(self, batch: Sequence[SampleId]) -> Callable[[], NDArray[np.uint8]]:
        """Queue one batch, padded to the constant size."""
        height, width, channels = self.image_shape
        padded = [*batch, *[batch[-1]] * (self.find_batch_size() - len(batch))]
        noise = np.empty((len(padded), channels, height, width), dtype=np.float32)
        for row, sample in enumerate(batch):
            noise[row] = initial_noise(sample, noise.shape[1:])
        noise[len(batch) :] = noise[len(batch) - 1]
        return self._denoiser.start(noise, [sample.label for sample in padded])

    def find_batch_size(self) -> int:
        """Return the batch size, chosen by free memory at the first call if it was not given."""
        if self.batch_size is None:
            release_cached_memory()
            need = self._denoiser.bytes_per_image(self.image_shape)
            free, _ = torch.cuda.mem_get_info(self.device)
            fitting = [size for size in _CUDA_BATCHES if size * need <= free / 2]
            self.batch_size = fitting[0] if fitting else _MIN_BATCH
            logger.info("batch of %d: %.1f MB per image, %.1f GB free", self.batch_size, need / 1e6, free / 1e9)
        return self.batch_size

    def _halve_batch_size(self) -> None:
        size = self.find_batch_size()
        self._denoiser.forget()
        if size // 2 < _MIN_BATCH:
            raise MemoryError(f"generation-batch: the GPU has no memory for {counted(size, 'image')}; free some memory")
        self.batch_size = size // 2

    def _make_fingerprint(self, config: dict[str, Any], weights: Path, guided: Sequence[float]) -> str:
        public = {key: value for key, value in config.items() if not key.startswith("_")}
        solver = [self.sampler, SOLVER_SETTINGS[self.sampler], self.steps, *guided]
        rounding = [self.device.type, self.precision, self.batch_size if self.device.type == "cpu" else _KERNELS]
        settings = [public, self._schedule, solver, rounding, _SEEDING, sha256_of(weights)]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _check_device(device: str) -> torch.device:
    try:
        checked = torch.device(device)
    except RuntimeError:
        checked = torch.device("meta")
    if checked.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {device!r} is not allowed; use cpu, cuda or cuda:N")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} is not available; torch finds no GPU, so use cpu")
    return checked
