"""Open the generator that a spec names, check it before a run, and hash its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedeas_flwr.common.files import expanded, sha256_of
from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.common.import_path import is_import_path, source_hash
from fedeas_flwr.common.text import MAX_LINE, one_line
from fedeas_flwr.data.datasets import dataset_info, hash_own_images
from fedeas_flwr.data.sources import find_source, is_own
from fedeas_flwr.generators.federated import with_folder
from fedeas_flwr.generators.interface import Generator

if TYPE_CHECKING:  # the library works without pydantic
    from fedeas_flwr.config import RunConfig


def open_generator(
    spec: str,
    dataset_name: str,
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
) -> Generator:
    """Open a diffusion model or an image bank for a dataset.

    Parameters
    ----------
    spec
        ``builtin``: the digits model, trained on first use (about a minute). ``bank:DIR``: images from a folder
        (bank.py). ``sd-turbo`` or ``sd-turbo:DIR``: text to image (sd_turbo.py). ``package.module:name``: your own
        (own.py). Otherwise a folder in diffusers' format with ``unet`` and ``scheduler``.
    dataset_name
        The generator must have this dataset's classes and image shape.
    sampler
        ``dpm++``, ``dpm++-logsnr`` or ``ddim``, all deterministic.
    steps
        Solver steps; None: the sampler's default, 20 or 250.
    guidance
        Scale of classifier-free guidance; 1: no guidance.
    guidance_start, guidance_stop
        Fractions of the steps between which there is guidance.
    guidance_rescale
        Rescaling φ of the guided prediction to its standard deviation without guidance, 0 (none) to 1.
    batch_size
        Images in each forward pass; short batches are padded to it. None: 64 on the CPU, by free memory on CUDA.
    precision
        ``fp32``, ``tf32``, ``bf16`` or ``fp16``; None: fp32 on the CPU, bf16 on CUDA.
    device
        ``cpu``, ``cuda`` or ``cuda:N``.
    """
    for name, value in (("spec", spec), ("dataset_name", dataset_name)):
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r}: must be a string")
    info, (kind, where) = dataset_info(dataset_name), GeneratorSpec.parse(spec)
    if kind == "bank":
        from fedeas_flwr.generators.bank import BankGenerator

        return BankGenerator(where, classes=info.classes, image_shape=info.image_shape)
    if kind == "sd-turbo":
        from fedeas_flwr.generators.sd_turbo import TurboGenerator

        return TurboGenerator(
            where, classes=info.classes, image_shape=info.image_shape, batch_size=batch_size, device=device
        )
    if kind == "import path":
        from fedeas_flwr.generators.own import open_own

        return open_own(where, classes=info.classes, image_shape=info.image_shape, device=device)
    if kind == "federated":
        raise ValueError("generator: 'federated' is a run's; give the folder `generator` of its training")
    if kind == "builtin":
        if dataset_name != "digits":
            raise ValueError(
                f"generator: 'builtin' is for digits only; for {dataset_name} give a folder in diffusers' format"
            )
        from fedeas_flwr.generators.learn.builtin import ensure_builtin

        folder = ensure_builtin()
    else:
        folder = expanded(spec, "generator")
    from fedeas_flwr.generators.diffusion.sampler import DiffusionGenerator

    return DiffusionGenerator(
        folder,
        num_classes=len(info.classes),
        classes=info.classes,
        image_shape=info.image_shape,
        sampler=sampler,
        steps=steps,
        guidance=guidance,
        guidance_start=guidance_start,
        guidance_stop=guidance_stop,
        guidance_rescale=guidance_rescale,
        batch_size=batch_size,
        precision=precision,
        device=device,
    )


def open_for_run(config: RunConfig, device: str) -> Generator:
    """Open the generator that a run-config names; its values 0 and ``auto`` select the generator's defaults."""
    spec = with_folder(config).generator
    if config.trains_generator and not Path(spec).is_dir():
        raise ValueError("generator = 'federated' is not trained yet: the first run with this config trains it")
    with _naming_keys():
        return open_generator(spec, config.dataset, **_settings(config), device=device)


def check_for_run(config: RunConfig, device: str) -> None:
    """Raise the errors of `open_for_run` that can be found without building or training a model.

    Not for a bank, which is checked by opening it. A generator of a user's own is opened, and generates two images. For
    a federated one, the initial network is built.
    """
    kind, where = config.generator_spec
    if kind == "sd-turbo":
        from fedeas_flwr.generators.sd_turbo import check_transformers, find_pipeline

        check_transformers()
        find_pipeline(where)
        return
    if kind == "import path":
        from fedeas_flwr.generators.own import check_own

        check_own(where, open_for_run(config, device))
        return
    from fedeas_flwr.generators.diffusion.model_folder import read_model
    from fedeas_flwr.generators.diffusion.sampler import Settings
    from fedeas_flwr.generators.learn.denoiser import TIMESTEPS

    info, folder = dataset_info(config.dataset), _diffusion_folder(with_folder(config).generator)
    classes = len(info.classes)
    timesteps, embeddings = TIMESTEPS, classes + 1
    if kind == "folder":  # the others may still have to be trained
        model = read_model(folder, classes, info.classes, info.image_shape)
        timesteps, embeddings = model.schedule["num_train_timesteps"], model.config["num_class_embeds"]
    if kind == "federated":
        from fedeas_flwr.config import generator_config
        from fedeas_flwr.generators.learn.federated import initial_state

        initial_state(generator_config(config))
    with _naming_keys():
        Settings(**_settings(config), device=device).check(folder, timesteps, embeddings, classes)


def generator_warning(config: RunConfig) -> str:
    """Return in one line the fault that the training of a run's generator ended with, or that a bank is the dataset.

    Empty if no fault was found, without a verdict (learn/verdict.py), and if the files are not on this machine.
    """
    kind, where = config.generator_spec
    fault = ""
    if config.generates and kind in ("bank", "folder"):
        with suppress(OSError, ValueError):
            fault = _bank_fault(where, config) if kind == "bank" else _training_fault(where)
    return one_line(f"generator {fault}; do not rely on a gain from its images", MAX_LINE) if fault else ""


def _bank_fault(where: str, config: RunConfig) -> str:
    from fedeas_flwr.generators.bank import bank_path

    bank, data = bank_path(where), find_source(config.dataset, config.data_dir).where
    return f"{bank.name}: the bank is the dataset, test images included" if data and bank.samefile(data) else ""


def _training_fault(where: str) -> str:
    from fedeas_flwr.generators.diffusion.model_folder import read_warning

    folder = expanded(where, "generator")
    return f"{folder.name}: {warning}" if (warning := read_warning(folder)) else ""


def _settings(config: RunConfig) -> dict[str, Any]:
    return {
        "sampler": config.sampler,
        "steps": config.sampler_steps or None,
        "guidance": config.guidance,
        "guidance_start": config.guidance_start,
        "guidance_stop": config.guidance_stop,
        "guidance_rescale": config.guidance_rescale,
        "batch_size": config.generation_batch or None,
        "precision": None if config.generation_precision == "auto" else config.generation_precision,
    }


@contextmanager
def _naming_keys() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        setting, _, reason = str(error).partition(": ")
        if setting not in _KEYS:
            raise
        raise ValueError(f"{_KEYS[setting]}: {reason}") from None


_KEYS = {
    "guidance_start": "guidance-start",
    "guidance_rescale": "guidance-rescale",
    "steps": "sampler-steps",
    "batch_size": "generation-batch",
    "precision": "generation-precision",
}
"""Run-config keys of the settings with other names in Python, for errors."""


def hash_own_inputs(
    config: RunConfig, keys: Sequence[str] = ("dataset", "policy", "strategy", "model", "partition")
) -> dict[str, str]:
    """Return hashes of what a run may not exchange half-way: a user's own images, and the code that keys name.

    What cannot be read or imported is left out; opening it raises the error.
    """
    found = {}
    for key in keys:
        value = getattr(config, key)
        with suppress(OSError, ValueError):
            if key == "dataset":
                found[key] = hash_own_images(value) if is_own(value) else ""
            elif is_import_path(value):
                found[key] = source_hash(value, key)
    return {key: digest for key, digest in found.items() if digest}


def hash_input_files(config: RunConfig) -> dict[str, str]:
    """Return hashes of a run's inputs: the generator's weights or bank, the pretrained weights, and `hash_own_inputs`.

    Hashes identify the content, which a path does not. Folders and files that cannot be read are left out; opening them
    raises the error.
    """
    files = {"generator": _generator_file(config.generator) if config.generates else None}
    files["weights"] = _pretrained_file(config.weights)
    found = {}
    for key, path in files.items():
        with suppress(OSError):
            if path is not None and path.is_file():
                found[key] = sha256_of(path)[:16]
    return found | hash_own_inputs(config)


def _generator_file(spec: str) -> Path | None:
    kind, where = GeneratorSpec.parse(spec)
    if kind in ("sd-turbo", "import path", "federated"):
        return None
    if kind == "bank":
        from fedeas_flwr.generators.bank import bank_path

        return bank_path(where)
    from fedeas_flwr.generators.diffusion.model_folder import weights_file

    return weights_file(_diffusion_folder(spec))


def _diffusion_folder(spec: str) -> Path:
    from fedeas_flwr.generators.learn.builtin import builtin_folder

    return builtin_folder() if spec == "builtin" else expanded(spec, "generator")


def _pretrained_file(weights: str) -> Path | None:
    if weights == "none":
        return None
    from fedeas_flwr.training.models import imagenet_file

    return imagenet_file() if weights == "imagenet" else expanded(weights, "weights")
