"""Class-conditional diffusion: samples from any local folder in diffusers' format.

The folder holds ``unet`` (a `UNet2DModel` in safetensors) and ``scheduler``. Each sample starts from noise of its own
and is solved by a deterministic sampler, DPM-Solver++ (Lu et al., 2022), so that its identity fixes its pixels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedeas_flwr.generators import SampleId

# diffusers takes seconds to import, so only functions import it.

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"

# Part of the fingerprint: raise it when `initial_noise` changes.
_SEEDING = "philox-seedsequence-1"
# -5.1 is what diffusers advises for the cosine schedule, whose last steps are all but pure noise; it changes nothing
# for schedules that end earlier. Trailing spacing starts at the noisiest step left.
_SOLVER = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "timestep_spacing": "trailing",
    "lambda_min_clipped": -5.1,
    "final_sigmas_type": "zero",
}
_NOISE_SCHEDULE_KEYS = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)
_PREDICTIONS = ("epsilon", "sample", "v_prediction")


def initial_noise(sample: SampleId, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the standard normal noise that `sample` starts from, on any device and in any batch.

    Parameters
    ----------
    sample
        Its identity, all four numbers.
    shape
        Of one image.

    Returns
    -------
    array
        float32.
    """
    source = np.random.SeedSequence(sample.seed, spawn_key=(sample.client, sample.label, sample.index))
    return np.random.Generator(np.random.Philox(source)).standard_normal(shape, dtype=np.float32)


class DiffusionGenerator:
    """Samples a class-conditional `UNet2DModel`.

    Parameters
    ----------
    folder
        With ``unet`` and ``scheduler``, as `save_pretrained` writes them. Weights of any float type become float32.
    num_classes
        C of the dataset. A model with C + 1 class embeddings was trained with the last one meaning "no label", which
        guidance needs; one with C was not.
    image_shape
        ``(H, W, C)`` that is needed; None takes the model's.
    steps
        Solver steps.
    guidance
        Classifier-free guidance scale; 1 is none and spares the second forward pass.
    batch_size
        Images in every forward pass. A short batch is padded, because another size changes the last bits.
    device
        ``cpu``, ``cuda`` or ``cuda:N``.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        num_classes: int,
        image_shape: tuple[int, int, int] | None = None,
        steps: int = 20,
        guidance: float = 1.0,
        batch_size: int = 64,
        device: str = "cpu",
    ) -> None:
        self.folder = Path(folder)
        self.num_classes = num_classes
        self.steps, self.guidance, self.batch_size = steps, float(guidance), batch_size
        self.device = _check_device(device)
        config = _read_json(self.folder / "unet" / "config.json")
        self._schedule = _check_schedule(_read_json(self.folder / "scheduler" / "scheduler_config.json"), self.folder)
        self.image_shape = _check_unet(config, self.folder, num_classes, image_shape)
        self._no_label = num_classes if config["num_class_embeds"] == num_classes + 1 else None
        self._check_settings()
        weights = self.folder / "unet" / WEIGHTS_NAME
        self._unet = _load_unet(config, weights).to(self.device)
        self.fingerprint = self._make_fingerprint(config, weights)

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Make images; each depends on its own identity alone.

        Parameters
        ----------
        samples
            Identities, in any order.

        Returns
        -------
        array
            uint8 ``[len(samples), H, W, C]``.
        """
        for sample in samples:
            if min(sample) < 0 or sample.label >= self.num_classes:
                allowed = f"none negative, label below {self.num_classes}"
                raise ValueError(f"sample: {tuple(sample)} is not allowed as seed, client, label, index; {allowed}")
        images = np.empty((len(samples), *self.image_shape), dtype=np.uint8)
        with torch.no_grad(), _one_thread(self.device):
            for start in range(0, len(samples), self.batch_size):
                batch = list(samples[start : start + self.batch_size])
                padded = batch + [batch[-1]] * (self.batch_size - len(batch))
                images[start : start + len(batch)] = self._solve(padded)[: len(batch)]
        return images

    def _solve(self, batch: Sequence[SampleId]) -> NDArray[np.uint8]:
        from diffusers import DPMSolverMultistepScheduler

        solver: Any = DPMSolverMultistepScheduler(**self._schedule, **_SOLVER)  # type: ignore[no-untyped-call, unused-ignore]
        solver.set_timesteps(self.steps, device=self.device)
        height, width, channels = self.image_shape
        noise = np.stack([initial_noise(sample, (channels, height, width)) for sample in batch])
        x = torch.from_numpy(noise).to(self.device)
        labels = torch.tensor([sample.label for sample in batch], device=self.device)
        for time in solver.timesteps:
            x = solver.step(self._predict(x, time, labels), time, x).prev_sample
        pixels = ((x / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).cpu().numpy()

    def _predict(self, x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        conditional: torch.Tensor = self._unet(x, time, class_labels=labels).sample
        if self.guidance == 1.0 or self._no_label is None:
            return conditional
        none = torch.full_like(labels, self._no_label)
        free: torch.Tensor = self._unet(x, time, class_labels=none).sample
        return free + self.guidance * (conditional - free)

    def _check_settings(self) -> None:
        most = self._schedule["num_train_timesteps"]
        if not 1 <= self.steps <= most:
            raise ValueError(f"steps: {self.steps} is not allowed; give 1 to {most}")
        if self.batch_size < 1:
            raise ValueError(f"batch-size: {self.batch_size} is not allowed; give at least 1")
        if not (math.isfinite(self.guidance) and self.guidance >= 1):
            raise ValueError(f"guidance: {self.guidance} is not allowed; give 1 (none) or more")
        if self.guidance != 1 and self._no_label is None:
            raise ValueError(
                f"guidance: {self.guidance} needs a model with a 'no label' class, {self.num_classes + 1} embeddings; "
                f"{self.folder} has {self.num_classes}, so only 1 is allowed"
            )

    def _make_fingerprint(self, config: dict[str, Any], weights: Path) -> str:
        public = {key: value for key, value in config.items() if not key.startswith("_")}
        with weights.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        settings = [public, self._schedule, _SOLVER, self.steps, self.guidance, self.batch_size, _SEEDING, content]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    # Sums are split among threads: their number changes the last bits, and a client process may have any.
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_device(device: str) -> torch.device:
    try:
        checked = torch.device(device)
    except RuntimeError:
        checked = torch.device("meta")
    if checked.type not in ("cpu", "cuda"):
        raise ValueError(f"device: {device!r} is not allowed; use cpu, cuda or cuda:N")
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} is not there; torch sees no GPU, so use cpu")
    return checked


def _read_json(path: Path) -> dict[str, Any]:
    needed = "a generator is a folder with unet/ and scheduler/ in diffusers' format"
    if not path.is_file():
        raise FileNotFoundError(f"generator: there is no {path}; {needed}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"generator: {path} is not JSON ({error}); {needed}") from error
    if not isinstance(content, dict):
        raise ValueError(f"generator: {path} is not a JSON object; {needed}")
    return content


def _check_schedule(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what defines the noise, whichever scheduler class the folder names."""
    schedule = {key: config[key] for key in _NOISE_SCHEDULE_KEYS if config.get(key) is not None}
    schedule.setdefault("num_train_timesteps", 1000)
    prediction = schedule.setdefault("prediction_type", "epsilon")
    if prediction not in _PREDICTIONS:
        raise ValueError(
            f"generator: prediction_type of {folder} is {prediction!r}; allowed are {', '.join(_PREDICTIONS)}"
        )
    return schedule


def _check_unet(
    config: dict[str, Any], folder: Path, num_classes: int, image_shape: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    """Return the model's image shape if it fits."""
    if config.get("_class_name") != "UNet2DModel":
        raise ValueError(f"generator: unet of {folder} is {config.get('_class_name')}; it must be UNet2DModel")
    embeddings = config.get("num_class_embeds")
    if embeddings not in (num_classes, num_classes + 1):
        allowed = f"{num_classes}, or {num_classes + 1} with a 'no label' class"
        raise ValueError(f"generator: num_class_embeds of {folder} is {embeddings}; it must be {allowed}")
    size, channels = config.get("sample_size"), config.get("in_channels")
    sides = [size, size] if isinstance(size, int) else list(size or ())
    if len(sides) != 2 or channels != config.get("out_channels"):
        raise ValueError(f"generator: unet of {folder} has no sample_size, or in_channels differs from out_channels")
    shape = (int(sides[0]), int(sides[1]), int(channels or 0))
    if image_shape is not None and shape != tuple(image_shape):
        raise ValueError(f"generator: {folder} makes images {list(shape)}; the dataset's are {list(image_shape)}")
    return shape


def _load_unet(config: dict[str, Any], weights: Path) -> Any:
    from diffusers import UNet2DModel
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not weights.is_file():
        raise FileNotFoundError(f"generator: there is no {weights}; weights must be one safetensors file")
    try:
        # Building draws initial weights, which are then replaced: the caller's random state must not notice.
        with torch.random.fork_rng(devices=[]):
            unet: Any = UNet2DModel.from_config(config)  # type: ignore[no-untyped-call, unused-ignore]
        # Not from_pretrained, which fills missing weights at random and only warns.
        unet.load_state_dict({key: value.float() for key, value in load_file(weights).items()}, strict=True)
    except (SafetensorError, RuntimeError, ValueError, TypeError, OSError) as error:
        line = " ".join(str(error).split())[:200]
        raise ValueError(f"generator: {weights} does not fit its config.json or is damaged ({line})") from error
    return unet.eval().requires_grad_(False)
