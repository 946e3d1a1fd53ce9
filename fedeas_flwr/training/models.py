"""Networks that clients train, their state as NumPy arrays, and the normalisation of pixels.

Both built-in networks end in a linear layer named ``fc``, whose input is a flat vector of features.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fedeas_flwr.common.files import expanded
from fedeas_flwr.common.import_path import describe_error, import_object
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.text import one_line

ImageShape = tuple[int, int, int]

drawing = threading.RLock()
"""Lock for torch's generator, of which a process has one: new networks and layers such as dropout draw from it."""


class SmallCNN(nn.Module):
    """Two convolutions and a linear layer: enough for 8×8 digits, and fast on a CPU.

    It has no BatchNorm, whose statistics a client's few images of few classes would distort.
    """

    def __init__(self, num_classes: int, image_shape: ImageShape) -> None:
        super().__init__()
        height, width, channels = image_shape
        if min(height, width) < 2:
            raise ValueError(f"model: small-cnn needs images of 2×2 or more, these are {height}×{width}; use resnet18")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.fc = nn.Linear(32 * (height // 2) * (width // 2), num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalised images ``[N, C, H, W]``."""
        logits: torch.Tensor = self.fc(self.features(images))
        return logits


def build_model(
    name: str,
    num_classes: int,
    image_shape: ImageShape,
    *,
    stem: str = "7x7",
    weights: str = "none",
    seed: int,
) -> nn.Module:
    """Return a network on the CPU, in training mode, whose initial weights depend on ``seed`` only.

    torch's global random state stays unchanged. The network is ``small-cnn``, ``resnet18`` (torchvision's), or
    ``package.module:callable``: a custom one, called with ``num_classes`` and ``image_shape`` by keyword.

    ``stem`` and ``weights`` are for resnet18. Its stem is ``7x7`` with max-pool (torchvision's), or ``3x3`` with stride
    1 and no max-pool. Its pretrained weights are ``none``; ``imagenet``, torchvision's official ones; or the path of a
    ``.safetensors`` file with torchvision's names, in any float dtype. The head is always new, and so is a 3×3 stem.
    For images of one channel the 7×7 stem is summed over its three: a grey image then has the same features as one
    whose channels are equal.
    """
    if name != "resnet18" and weights != "none":
        raise ValueError(f"weights: {weights!r} cannot be loaded into model {name!r}; allowed is none")
    with drawing, torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would also seed the GPUs, whose state fork_rng does not restore here.
        torch.default_generator.manual_seed(seed)
        if name == "small-cnn":
            return SmallCNN(num_classes, image_shape)
        if name == "resnet18":
            return _build_resnet18(num_classes, image_shape, stem, weights)
        if ":" in name:
            return _build_custom(name, num_classes, image_shape)
    raise ValueError(f"model: {name!r} is not known; use small-cnn, resnet18 or package.module:callable")


def _build_resnet18(num_classes: int, image_shape: ImageShape, stem: str, weights: str) -> nn.Module:
    from torchvision.models import resnet18  # slow to import

    channels = image_shape[2]
    model: nn.Module = resnet18(weights=None, num_classes=num_classes)
    if stem == "3x3":
        model.conv1 = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    if weights != "none":
        if stem == "7x7" and channels not in (1, 3):
            text = f"weights: {weights!r} with stem 7x7 needs images of 1 or 3 channels; these have {channels}"
            raise ValueError(text)
        loaded = _download_imagenet() if weights == "imagenet" else _read_safetensors(weights)
        _load_pretrained(model, loaded, weights, keep_stem=stem == "7x7")
    return model


def _load_pretrained(model: nn.Module, loaded: dict[str, torch.Tensor], origin: str, keep_stem: bool) -> None:
    state = model.state_dict()
    left_new = {"fc.weight", "fc.bias"} | (set() if keep_stem else {"conv1.weight"})
    for key in sorted(state.keys() - left_new):
        if key not in loaded:
            if key.endswith("num_batches_tracked"):  # older files lack it, and resnet18 never reads it
                continue
            raise ValueError(f"weights: {origin} lacks {key}; it must have torchvision's resnet18 names")
        value = loaded[key]
        if key == "conv1.weight" and state[key].shape[1] == 1 and value.dim() == 4:
            value = value.float().sum(dim=1, keepdim=True)
        if value.shape != state[key].shape:
            shapes = f"{list(value.shape)}; resnet18 needs {list(state[key].shape)}"
            raise ValueError(f"weights: {key} of {origin} has shape {shapes}")
        state[key].copy_(value)  # also converts float16


def _read_safetensors(path: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = expanded(path, "weights")
    if file.suffix != ".safetensors":
        raise ValueError(f"weights: {path!r} is not known; use none, imagenet or the path of a .safetensors file")
    if not file.is_file():
        raise FileNotFoundError(f"weights: there is no file {path!r}; use none, imagenet or the path of one")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"weights: {path!r} is not a whole safetensors file ({one_line(error)})") from error


def imagenet_file() -> Path:
    """Return the path where torchvision stores resnet18's ImageNet weights; the file may not exist."""
    from torchvision.models import ResNet18_Weights

    name = str(ResNet18_Weights.IMAGENET1K_V1.url).rsplit("/", 1)[1]
    return Path(torch.hub.get_dir()) / "checkpoints" / name


def _download_imagenet() -> dict[str, torch.Tensor]:
    from torchvision.models import ResNet18_Weights

    official, kept = ResNet18_Weights.IMAGENET1K_V1, imagenet_file()
    if os.environ.get("FEDEAS_OFFLINE") and not kept.is_file():
        raise FileNotFoundError(f"weights: imagenet is not at {kept}, FEDEAS_OFFLINE is set; give a .safetensors path")
    try:
        state: dict[str, torch.Tensor] = official.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"weights: imagenet could not be downloaded ({one_line(error)}); give a .safetensors path"
        ) from error
    return state


def _build_custom(name: str, num_classes: int, image_shape: ImageShape) -> nn.Module:
    build = import_object(name, "model")
    if not callable(build):
        raise ValueError(f"model: {name!r} is {type(build).__name__}; it must be callable")
    try:
        model = build(num_classes=num_classes, image_shape=image_shape)
    except Exception as error:
        text = f"model: {name!r}, called with num_classes and image_shape by keyword, raised {describe_error(error)}"
        raise ValueError(text) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {name!r} returned {type(model).__name__}; it must return a torch.nn.Module")
    _check_output(model, name, num_classes, image_shape)
    return model


def _check_output(model: nn.Module, name: str, num_classes: int, image_shape: ImageShape) -> None:
    """Check that a user's model returns one logit per class for two images; raise ValueError otherwise."""
    height, width, channels = image_shape
    expected = f"must return [2, {num_classes}] for images [2, {channels}, {height}, {width}]"
    try:
        with torch.no_grad():
            logits = model.eval()(torch.zeros(2, channels, height, width))
    except Exception as error:
        raise ValueError(f"model: {name!r} {expected} ({describe_error(error)})") from error
    found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
    if found != [2, num_classes]:
        raise ValueError(f"model: {name!r} {expected}; it returns {found}")
    model.train()


# ------------------------------------------------------------------------------------------- state and pixels


def split_state(model: nn.Module) -> tuple[Arrays, Arrays]:
    """Return copies of a model's trained parameters and of its buffers, in NumPy arrays.

    Buffers are the rest of the state dict, with its dtypes: statistics, integer counters, frozen parameters.
    """
    trainable: Arrays = {}
    buffers: Arrays = {}
    names = trained_names(model)
    for key, tensor in model.state_dict().items():
        if tensor.dtype == torch.bfloat16:
            raise ValueError(f"model: {key} is bfloat16, which NumPy does not support; keep parameters in float32")
        array = tensor.detach().cpu().numpy().copy()
        (trainable if key in names else buffers)[key] = array
    return trainable, buffers


def trained_names(model: nn.Module) -> set[str]:
    """Return the names in the state dict that are trained parameters, all names of tied ones included."""
    return {key for key, value in model.named_parameters(remove_duplicate=False) if value.requires_grad}


@torch.no_grad()
def uses_rng(model: nn.Module, images: torch.Tensor) -> bool:
    """Return whether a network draws random numbers in training, in layers or by functions such as dropout's.

    It runs one forward pass on two normalised images of any content. The generators and the network's buffers stay
    unchanged; the network is left in training mode.
    """
    devices = [images.device] if images.is_cuda else []
    with drawing, torch.random.fork_rng(devices):
        before = [torch.default_generator.get_state(), *map(torch.cuda.get_rng_state, devices)]
        buffers = [buffer.clone() for buffer in model.buffers()]
        model.train()(images)
        for buffer, kept in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(kept)
        after = [torch.default_generator.get_state(), *map(torch.cuda.get_rng_state, devices)]
    return not all(map(torch.equal, before, after))


class Normaliser:
    """Map uint8 [N, H, W, C] to float32 [N, C, H, W], normalised by channel mean and deviation on the scale 0 to 1."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: str) -> None:
        self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self.std = torch.tensor(std, device=device).view(1, -1, 1, 1)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
