"""Generators: anything that turns a sample's identity into an image.

A new kind of generator is one file. It needs no base class, only the three attributes and the method below::

    class GreyGenerator:
        fingerprint = "grey-1"  # change it whenever the pixels would change: the cache trusts it
        image_shape = (8, 8, 1)
        num_classes = 10

        def sample(self, samples):
            images = [np.full(self.image_shape, 25 * s.label, dtype=np.uint8) for s in samples]
            return np.stack(images)

The one rule is that a sample's pixels depend on its `SampleId` and the fingerprint, and on nothing else: not on the
order of the request, on its neighbours or on what was asked before. Then a larger budget extends a smaller one's
images, policies share what they have in common, and a lost file is made again alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.data import dataset_info
from fedeas_flwr.paths import expanded

if TYPE_CHECKING:  # the library's door does without pydantic
    from fedeas_flwr.config import RunConfig


class SampleId(NamedTuple):
    """Which image: the `index`-th of class `label` for client `client` in an experiment seeded with `seed`."""

    seed: int
    client: int
    label: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class Generator(Protocol):
    """What the rest of the project knows of a generator."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the pixels: weights, settings, sampler, precision, seeding."""
        ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(H, W, C)`` of the images."""
        ...

    @property
    def num_classes(self) -> int:
        """Labels run from 0 to ``num_classes - 1``."""
        ...

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Make the images asked for.

        Parameters
        ----------
        samples
            Their identities, in any order.

        Returns
        -------
        array
            uint8 ``[len(samples), H, W, C]``, in the order asked.
        """
        ...


def batch_size(generator: Generator) -> int:
    """Return how many images `generator` makes at once; one that does not say is taken to make 64.

    A generator that measures first, as one on a GPU does, has a method for it.
    """
    find = getattr(generator, "find_batch_size", None)
    return int(find() if find else getattr(generator, "batch_size", 0) or 64)


def stock(generator: Generator) -> list[int] | None:
    """Return how many images of each class `generator` has, if it hands out what is there; None: it makes them."""
    return getattr(generator, "images_of_class", None)


def open_generator(
    spec: str,
    dataset_name: str,
    *,
    sampler: str = "dpm++",
    steps: int | None = None,
    guidance: float = 1.0,
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
        (bank.py). ``sd-turbo`` or ``sd-turbo:DIR``: text to image (turbo.py). Otherwise the path of a folder in
        diffusers' format with ``unet`` and ``scheduler``.
    dataset_name
        The generator must have this dataset's classes and image shape.
    sampler
        ``dpm++``, ``dpm++-logsnr`` or ``ddim``, all deterministic.
    steps
        Solver steps; None is the sampler's own default, 20 or 250.
    guidance
        Scale of classifier-free guidance; 1 is none.
    guidance_rescale
        How much of the spread that guidance adds is taken away again; 0 is none.
    batch_size
        Images in each forward pass; short batches are padded to it. None: 64 on the CPU, by free memory on CUDA.
    precision
        ``fp32``, ``tf32``, ``bf16`` or ``fp16``; None: fp32 on the CPU, bf16 on CUDA.
    device
        ``cpu``, ``cuda`` or ``cuda:N``.

    Returns
    -------
    Generator
    """
    info = dataset_info(dataset_name)
    kind, _, where = spec.partition(":")
    if kind == "bank":
        from fedeas_flwr.generators.bank import BankGenerator

        return BankGenerator(where, classes=info.classes, image_shape=info.image_shape)
    if kind == "sd-turbo":
        from fedeas_flwr.generators.turbo import TurboGenerator

        return TurboGenerator(
            where, classes=info.classes, image_shape=info.image_shape, batch_size=batch_size, device=device
        )
    if spec == "builtin":
        if dataset_name != "digits":
            raise ValueError(
                f"generator: 'builtin' is for digits only; {dataset_name} needs the path of a diffusers folder"
            )
        from fedeas_flwr.generators.digits import ensure_builtin

        folder = ensure_builtin()
    else:
        folder = expanded(spec, "generator")
    from fedeas_flwr.generators.diffusion import DiffusionGenerator

    return DiffusionGenerator(
        folder,
        num_classes=len(info.classes),
        classes=info.classes,
        image_shape=info.image_shape,
        sampler=sampler,
        steps=steps,
        guidance=guidance,
        guidance_rescale=guidance_rescale,
        batch_size=batch_size,
        precision=precision,
        device=device,
    )


def open_for_run(config: RunConfig, device: str) -> Generator:
    """Open the generator that a run-config names.

    Parameters
    ----------
    config
        Of the run; 0 and ``auto`` in it leave the choice to the generator.
    device
        ``cpu``, ``cuda`` or ``cuda:N``.

    Returns
    -------
    Generator
    """
    with _naming_keys():
        return open_generator(config.generator, config.dataset, **_settings(config), device=device)


def check_for_run(config: RunConfig, device: str) -> None:
    """Refuse a model that `open_for_run` would, as far as can be told without reading weights or training any.

    Parameters
    ----------
    config, device
        As of `open_for_run`; its generator is no bank, which to check is to open.
    """
    kind, _, where = config.generator.partition(":")
    if kind == "sd-turbo":
        from fedeas_flwr.generators.turbo import check_transformers, find_pipeline

        check_transformers()
        find_pipeline(where)
        return
    from fedeas_flwr.generators.diffusion import Settings
    from fedeas_flwr.generators.digits import builtin_folder
    from fedeas_flwr.generators.folders import read_model
    from fedeas_flwr.generators.training import TIMESTEPS

    info = dataset_info(config.dataset)
    classes, built_in = len(info.classes), config.generator == "builtin"
    folder = builtin_folder() if built_in else expanded(config.generator, "generator")
    timesteps, embeddings = TIMESTEPS, classes + 1
    if not built_in:  # which may not be there yet, and is then trained
        model = read_model(folder, classes, info.classes, info.image_shape)
        timesteps, embeddings = model.schedule["num_train_timesteps"], model.config["num_class_embeds"]
    with _naming_keys():
        Settings(**_settings(config), device=device).check(folder, timesteps, embeddings, classes)


def _settings(config: RunConfig) -> dict[str, Any]:
    return {
        "sampler": config.sampler,
        "steps": config.sampler_steps or None,
        "guidance": config.guidance,
        "guidance_rescale": config.guidance_rescale,
        "batch_size": config.generation_batch or None,
        "precision": None if config.generation_precision == "auto" else config.generation_precision,
    }


@contextmanager
def _naming_keys() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        setting, _, refusal = str(error).partition(": ")
        if setting not in _KEYS:
            raise
        raise ValueError(f"{_KEYS[setting]}: {refusal}") from None


_KEYS = {
    "guidance_rescale": "guidance-rescale",
    "steps": "sampler-steps",
    "batch_size": "generation-batch",
    "precision": "generation-precision",
}
"""Settings that a run-config calls otherwise: an error names what its reader wrote."""


class RememberedGenerator:
    """A generator known by its fingerprint, opened only if an image must be made after all.

    Parameters
    ----------
    fingerprint
        As the generator gave it when it was open.
    dataset_name
        Whose classes and image shape are meant.
    open_generator
        Opens it; another one than remembered is refused, since a client's images come from one source.
    """

    def __init__(self, fingerprint: str, dataset_name: str, open_generator: Callable[[], Generator]) -> None:
        info = dataset_info(dataset_name)
        self.fingerprint, self._open = fingerprint, open_generator
        self.image_shape, self.num_classes = info.image_shape, len(info.classes)

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        """Open the generator and make images; see `Generator.sample`."""
        return self._generator.sample(samples)

    def find_batch_size(self) -> int:
        """Open the generator and ask it; see `batch_size`."""
        return batch_size(self._generator)

    @cached_property
    def _generator(self) -> Generator:
        generator = self._open()
        if generator.fingerprint != self.fingerprint:
            raise ValueError(
                f"generator: not the one that made this client's images (fingerprint {generator.fingerprint[:12]}, was "
                f"{self.fingerprint[:12]}); put the old one back, or start a new run"
            )
        return generator


def describe_generator(config: RunConfig) -> dict[str, Any]:
    """Return the run-config's keys that a person reads to know where an image comes from."""
    keys = ("generator", "dataset", "sampler", "sampler-steps", "guidance", "guidance-rescale")
    return {k: v for k, v in config.outside().items() if k in keys or k.startswith("generation-")}


def absolute_spec(spec: str) -> str:
    """Return a generator's spec with its folder as an absolute path: Flower's processes start elsewhere."""
    kind, colon, where = spec.partition(":")
    if spec in ("builtin", "sd-turbo"):
        return spec
    if colon and kind in ("bank", "sd-turbo"):
        return f"{kind}:{expanded(where, 'generator').absolute()}"
    return str(expanded(spec, "generator").absolute())
