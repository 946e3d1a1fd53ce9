"""One-step text-to-image generation with SD-Turbo of Stability AI, or a similar pipeline in a local folder.

The prompt names the class, the pipeline generates at its own size (512×512), and the image is downscaled to the
dataset's size with anti-aliasing. Needs the package transformers: ``pip install "fedeas-flwr[sd]"``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedeas_flwr.common.devices import one_thread
from fedeas_flwr.common.files import expanded, sha256_of
from fedeas_flwr.common.randomness import torch_seed
from fedeas_flwr.common.text import one_line
from fedeas_flwr.generators.diffusion.model_folder import check_weights
from fedeas_flwr.generators.interface import SampleId, check_variety

HUB_NAME = "stabilityai/sd-turbo"
_STEPS = 1
# No guidance: the model was distilled to work without it.
_GUIDANCE = 0.0
_MAX_BATCH = 16


class TurboGenerator:
    """Samples a text-to-image pipeline with one prompt per class, in float16 on CUDA.

    ``where`` is a pipeline's folder; empty: SD-Turbo from the hub, or from its local copy if ``FEDEAS_OFFLINE`` is set.
    A batch has at most 16 images, since they are large before downscaling.
    """

    def __init__(
        self,
        where: str | Path = "",
        *,
        classes: Sequence[str],
        image_shape: tuple[int, int, int],
        batch_size: int | None = None,
        device: str = "cpu",
    ) -> None:
        check_transformers()
        self.image_shape, self.num_classes = image_shape, len(classes)
        self.batch_size = min(batch_size or _MAX_BATCH, _MAX_BATCH)
        self._prompts = [f"a photo of a {name.replace('_', ' ')}" for name in classes]
        self._device = torch.device(device)
        self._folder = folder = find_pipeline(where)
        dtype = torch.float16 if self._device.type == "cuda" else torch.float32
        self._pipeline = _load(folder, dtype).to(self._device)
        settings = [_STEPS, _GUIDANCE, self._prompts, image_shape, self.batch_size, str(dtype), "turbo-1"]
        digest = hashlib.sha256(json.dumps(settings).encode())
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".safetensors", ".json", ".txt"):
                digest.update(file.relative_to(folder).as_posix().encode())
                digest.update(bytes.fromhex(sha256_of(file)))
        self.fingerprint = digest.hexdigest()

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Generate images; each has its own noise. See `Generator.sample`."""
        images = np.empty((len(samples), *self.image_shape), dtype=np.uint8)
        with torch.no_grad(), one_thread(self._device):
            for start in range(0, len(samples), self.batch_size):
                batch = list(samples[start : start + self.batch_size])
                padded = batch + [batch[-1]] * (self.batch_size - len(batch))
                images[start : start + len(batch)] = self._generate(padded)[: len(batch)]
        check_variety(images, samples, self._folder)
        return images

    def _generate(self, batch: Sequence[SampleId]) -> NDArray[np.uint8]:
        pictures = self._pipeline(
            prompt=[self._prompts[sample.label] for sample in batch],
            num_inference_steps=_STEPS,
            guidance_scale=_GUIDANCE,
            # Noise is drawn on the CPU, so that it is the same for every device.
            generator=[torch.Generator().manual_seed(torch_seed(*sample)) for sample in batch],
            output_type="pt",
        ).images
        if not bool(pictures.isfinite().all()):
            raise ValueError(f"generator: {self._folder}: the generated images hold NaN or infinity")
        return downscale(pictures.float().cpu(), self.image_shape)


def downscale(pictures: torch.Tensor, image_shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return images ``[N, 3, H, W]`` from 0 to 1 in a dataset's size and channels, as uint8 ``[N, H, W, C]``.

    They are downscaled with anti-aliasing; one channel is the luminance.
    """
    height, width, channels = image_shape
    small = torch.nn.functional.interpolate(
        pictures, size=(height, width), mode="bicubic", align_corners=False, antialias=True
    )
    if channels == 1:
        small = (small * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(dim=1, keepdim=True)
    pixels = (small.clamp(0, 1) * 255).round().to(torch.uint8)
    return np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy())


def check_transformers() -> None:
    """Raise ValueError unless the text encoder's package is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("generator: sd-turbo needs the package transformers; pip install 'fedeas-flwr[sd]'")


def find_pipeline(where: str | Path) -> Path:
    """Return the pipeline's folder, whose weights must be finite.

    An empty `where` is SD-Turbo, downloaded unless ``FEDEAS_OFFLINE`` is set.
    """
    folder = _pipeline_folder(where)
    for weights in sorted(folder.rglob("*.safetensors")):
        check_weights(weights)
    return folder


def _pipeline_folder(where: str | Path) -> Path:
    if str(where):
        folder = expanded(where, "generator")
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError(
                f"generator: there is no {folder / 'model_index.json'}; sd-turbo:DIR must be a pipeline"
            )
        return folder
    from diffusers import DiffusionPipeline

    offline = bool(os.environ.get("FEDEAS_OFFLINE"))
    try:
        return Path(DiffusionPipeline.download(HUB_NAME, use_safetensors=True, local_files_only=offline))
    except Exception as error:  # the hub's client raises many types
        reason = "FEDEAS_OFFLINE is set and it is not in the hub's cache" if offline else one_line(error)
        raise FileNotFoundError(f"generator: {HUB_NAME} cannot be loaded ({reason}); give sd-turbo:DIR") from None


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from diffusers import AutoPipelineForText2Image

    try:
        pipeline: Any = AutoPipelineForText2Image.from_pretrained(  # type: ignore[no-untyped-call, unused-ignore]
            folder, torch_dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        line = one_line(error)
        raise ValueError(f"generator: {folder} is not a text-to-image pipeline or is damaged ({line})") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
