"""Read and validate model folders in diffusers' format; errors are one line, raised before anything is sampled."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedeas_flwr.common.files import atomic_folder, sha256_of
from fedeas_flwr.common.text import counted, one_line

# diffusers takes seconds to import, so only functions import it.

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
CLASSES = "_fedeas_classes"
"""Key of a UNet's config: names of its training classes. diffusers keeps keys with an underscore and ignores them."""
VERDICT = "_fedeas_verdict"
"""Key of a UNet's config: the verdict on its training (learn/verdict.py). The fingerprint does not include it."""

_NOISE_SCHEDULE_KEYS = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "prediction_type",
    "rescale_betas_zero_snr",
)
_MAX_TIMESTEPS, _MAX_LAYERS, _MAX_BLOCKS, _MAX_WIDTH, _MAX_SIDE = 100_000, 32, 16, 16_384, 8192
_BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")  # supported by both samplers of diffusers
_PREDICTIONS = ("epsilon", "sample", "v_prediction")


class Model(NamedTuple):
    """Content of a model's folder; the weights are a path."""

    config: dict[str, Any]
    schedule: dict[str, Any]
    image_shape: tuple[int, int, int]
    weights: Path


def read_model(
    folder: Path, num_classes: int, classes: Sequence[str] = (), image_shape: tuple[int, int, int] | None = None
) -> Model:
    """Read a model's folder; raise for other classes or images, and weights that are missing or not finite."""
    config, weights = read_json(folder / "unet" / "config.json"), weights_file(folder)
    schedule = check_schedule(read_json(folder / "scheduler" / "scheduler_config.json"), folder)
    shape = check_unet(config, folder, image_shape)
    check_classes(config, folder, num_classes, classes)
    check_weights(weights)
    return Model(config, schedule, shape, weights)


def write_model_folder(folder: Path, unet: Any, scheduler: Any) -> None:
    """Write a network and its noise schedule in diffusers' format."""
    for name, part in (("unet", unet), ("scheduler", scheduler)):
        with atomic_folder(folder / name) as temporary:
            part.save_pretrained(temporary)


def weights_file(folder: Path) -> Path:
    """Return the path of a model's weights, which may be missing."""
    return folder / "unet" / WEIGHTS_NAME


def read_warning(folder: Path) -> str:
    """Return the verdict on a model's training if it found a fault; empty: no fault, or no verdict."""
    verdict = read_json(folder / "unet" / "config.json").get(VERDICT)
    return str(verdict.get("text", "")) if isinstance(verdict, dict) and verdict.get("warns") is True else ""


def check_weights(weights: Path) -> None:
    """Raise unless a safetensors file is there and all its values are finite; read one tensor at a time."""
    from safetensors import safe_open

    if not weights.is_file():
        raise FileNotFoundError(f"generator: there is no {weights}; must be one safetensors file")
    try:
        with safe_open(weights, framework="pt") as file:
            names = file.keys()
            wrong = next((name for name in names if not bool(file.get_tensor(name).float().isfinite().all())), None)
    except Exception as error:  # safetensors raises several types
        line = one_line(error)
        raise ValueError(f"generator: {weights} does not fit its config.json or is damaged ({line})") from error
    if wrong is not None:
        raise ValueError(f"generator: {weights} holds NaN or infinity in {wrong}")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of a generator's folder."""
    needed = "a generator is a folder with unet/ and scheduler/ in diffusers' format"
    if not path.is_file():
        near = difflib.get_close_matches(path.parents[1].name, ("builtin", "sd-turbo", "federated"), 1, 0.8)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise FileNotFoundError(f"generator: there is no {path}; {needed}{hint}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"generator: {path} is not JSON ({error}); {needed}") from error
    if not isinstance(content, dict):
        raise ValueError(f"generator: {path} is not a JSON object; {needed}")
    return content


def check_schedule(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys that define the noise schedule, for any scheduler class; raise ValueError for invalid ones."""
    schedule = {key: config[key] for key in _NOISE_SCHEDULE_KEYS if config.get(key) is not None}
    schedule.setdefault("num_train_timesteps", 1000)
    prediction = schedule.setdefault("prediction_type", "epsilon")
    if prediction not in _PREDICTIONS:
        raise ValueError(
            f"generator: prediction_type of {folder} is {prediction!r}; allowed are {', '.join(_PREDICTIONS)}"
        )
    steps, betas = schedule["num_train_timesteps"], schedule.get("trained_betas", ())
    _require(_is_whole(steps, 1, _MAX_TIMESTEPS), folder, "num_train_timesteps", steps, f"1 to {_MAX_TIMESTEPS}")
    for key in ("beta_start", "beta_end"):
        value = schedule.get(key, 0.01)
        _require(_is_share(value), folder, key, value, "a number between 0 and 1")
    shape = schedule.get("beta_schedule", "linear")
    _require(shape in _BETA_SCHEDULES, folder, "beta_schedule", shape, ", ".join(_BETA_SCHEDULES))
    fitting = isinstance(betas, list | tuple) and len(betas) in (0, steps) and all(map(_is_share, betas))
    _require(fitting, folder, "trained_betas", "…", f"a list of {steps} numbers between 0 and 1")
    zero_snr = schedule.get("rescale_betas_zero_snr", False)
    _require(isinstance(zero_snr, bool), folder, "rescale_betas_zero_snr", zero_snr, "true or false")
    return schedule


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1


def _require(right: bool, folder: Path, key: str, value: object, allowed: str) -> None:
    if not right:
        raise ValueError(f"generator: {key} of {folder} is {str(value)[:100]!r}; it must be {allowed}")


def check_classes(config: dict[str, Any], folder: Path, num_classes: int, names: Sequence[str] = ()) -> None:
    """Raise ValueError for a model of other classes; models that were not trained here store only their number."""
    embeddings, own = config.get("num_class_embeds"), config.get(CLASSES)
    fitting, allowed = [num_classes, num_classes + 1], f"{num_classes}, or {num_classes + 1} with a 'no label' class"
    if own is not None:
        right = isinstance(own, list) and all(isinstance(name, str) for name in own)
        _require(right, folder, CLASSES, own, "a list of names")
        fitting, allowed = [len(own) + 1], f"{len(own) + 1}, its classes and 'no label'"
    if embeddings not in fitting:
        raise ValueError(f"generator: num_class_embeds of {folder} is {embeddings}; it must be {allowed}")
    if own is None:
        return
    if len(own) != num_classes:
        trained = counted(len(own), "class", "classes")
        raise ValueError(f"generator: unet of {folder} was trained on {trained}; the dataset has {num_classes}")
    numbers = [str(label) for label in range(num_classes)]
    if numbers in (own, list(names)) and set(own) != set(names):  # numbers are no names, unless both use them
        return
    for label, (mine, theirs) in enumerate(zip(own, names, strict=False)):
        if mine != theirs:
            raise ValueError(f"generator: class {label} of {folder} is {mine!r}; the dataset's is {theirs!r}")


def check_unet(
    config: dict[str, Any], folder: Path, image_shape: tuple[int, int, int] | None = None
) -> tuple[int, int, int]:
    """Return the model's image shape, or raise ValueError if it differs from `image_shape`."""
    if config.get("_class_name") != "UNet2DModel":
        raise ValueError(f"generator: unet of {folder} is {config.get('_class_name')}; it must be UNet2DModel")
    layers = config.get("layers_per_block", 2)
    # diffusers rejects a model that it cannot build, but would try to build one of a million layers.
    _require(_is_whole(layers, 1, _MAX_LAYERS), folder, "layers_per_block", layers, f"1 to {_MAX_LAYERS}")
    widths = config.get("block_out_channels", (1,))
    fitting = isinstance(widths, list | tuple) and 1 <= len(widths) <= _MAX_BLOCKS
    fitting = fitting and all(_is_whole(width, 1, _MAX_WIDTH) for width in widths)
    _require(fitting, folder, "block_out_channels", widths, f"up to {_MAX_BLOCKS} numbers of 1 to {_MAX_WIDTH}")
    size, channels = config.get("sample_size"), config.get("in_channels")
    sides = [size, size] if isinstance(size, int) else size if isinstance(size, list | tuple) else []
    whole = len(sides) == 2 and all(_is_whole(side, 1, _MAX_SIDE) for side in (*sides, channels))
    if not whole or channels != config.get("out_channels"):
        raise ValueError(f"generator: unet of {folder} has no sample_size, or in_channels differs from out_channels")
    shape = (int(sides[0]), int(sides[1]), int(channels or 0))
    if image_shape is not None and shape != tuple(image_shape):
        raise ValueError(f"generator: {folder} makes images {list(shape)}; the dataset's are {list(image_shape)}")
    return shape


def load_unet(config: dict[str, Any], weights: Path) -> Any:
    """Build the model and load all of its weights as float32, ready to sample."""
    from diffusers import UNet2DModel
    from safetensors.torch import load_file

    try:
        # Building draws initial weights, which are then replaced; the caller's random state must not change.
        _check_shapes(config, weights)
        with torch.random.fork_rng(devices=[]):
            unet: Any = UNet2DModel.from_config(config)  # type: ignore[no-untyped-call, unused-ignore]
        # Not from_pretrained, which initialises missing weights at random and only warns.
        unet.load_state_dict({key: value.float() for key, value in load_file(weights).items()}, strict=True)
    except Exception as error:  # diffusers raises many types for inconsistent settings
        line = one_line(error)
        raise ValueError(f"generator: {weights} does not fit its config.json or is damaged ({line})") from error
    return unet.eval().requires_grad_(False)


def init_from_pretrained(unet: Any, folder: Path, schedule: Mapping[str, Any], named: str = "start") -> str:
    """Initialise a network with the weights of a trained one; return their name and hash, for the model card.

    The classes may differ. If their numbers do, every class starts with the embedding of "no label", the trained
    model's last. ``schedule`` has ``prediction_type`` and ``beta_schedule``, which must match. Errors begin with
    ``named``.
    """
    try:
        config = read_json(folder / "unet" / "config.json")
        found = check_schedule(read_json(folder / "scheduler" / "scheduler_config.json"), folder)
        embeddings = config.get("num_class_embeds")
        _require(_is_whole(embeddings, 1, _MAX_WIDTH), folder, "num_class_embeds", embeddings, f"1 to {_MAX_WIDTH}")
        check_unet(config, folder)
        for key, value in schedule.items():
            there = found.get(key, "linear")  # diffusers' default of beta_schedule
            _require(there == value, folder, key, there, f"{value}, as the preset's")
        weights = weights_file(folder)
        check_weights(weights)
        given, own = load_unet(config, weights).state_dict(), unet.state_dict()
        classes = given.pop("class_embedding.weight")
        for key in sorted((given.keys() | own.keys()) - {"class_embedding.weight"}):
            shapes = [tuple(state[key].shape) if key in state else None for state in (given, own)]
            _require(shapes[0] == shapes[1], folder, key, shapes[0], f"{shapes[1]}, as the preset's")
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(str(error).replace("generator:", f"{named}:", 1)) from error
    same = classes.shape == own["class_embedding.weight"].shape
    given["class_embedding.weight"] = classes if same else classes[-1:].expand_as(own["class_embedding.weight"])
    unet.load_state_dict(given)
    return f"`{folder.name}` (sha256 {sha256_of(weights)[:16]})"


def _check_shapes(config: dict[str, Any], weights: Path) -> None:
    """Raise ValueError unless the file has the model's weights; allocate nothing, as a config may claim any size."""
    from diffusers import UNet2DModel
    from safetensors import safe_open

    with torch.device("meta"):
        expected = UNet2DModel.from_config(config).state_dict()  # type: ignore[no-untyped-call, unused-ignore]
    with safe_open(weights, framework="pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    for key in sorted(expected.keys() | found.keys()):
        shape = tuple(expected[key].shape) if key in expected else None
        if shape != found.get(key):
            raise ValueError(f"{key} has shape {found.get(key)}; by the config it must be {shape}")
