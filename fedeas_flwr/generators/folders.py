"""Folders in diffusers' format, read with suspicion: a wrong one is refused in one line, before anything is sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

# diffusers takes seconds to import, so only functions import it.

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"

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


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of a generator's folder."""
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


def check_schedule(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what defines the noise, whichever scheduler class the folder names."""
    schedule = {key: config[key] for key in _NOISE_SCHEDULE_KEYS if config.get(key) is not None}
    schedule.setdefault("num_train_timesteps", 1000)
    prediction = schedule.setdefault("prediction_type", "epsilon")
    if prediction not in _PREDICTIONS:
        raise ValueError(
            f"generator: prediction_type of {folder} is {prediction!r}; allowed are {', '.join(_PREDICTIONS)}"
        )
    return schedule


def check_unet(
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


def load_unet(config: dict[str, Any], weights: Path) -> Any:
    """Build the model and load all of its weights as float32, ready to sample."""
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
