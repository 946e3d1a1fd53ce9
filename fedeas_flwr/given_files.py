"""The files that a result was made with, by what is in them."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from fedeas_flwr.config import RunConfig
from fedeas_flwr.generators.digits import builtin_folder
from fedeas_flwr.generators.folders import weights_file
from fedeas_flwr.models import imagenet_file
from fedeas_flwr.paths import expanded


def files_of(config: RunConfig) -> dict[str, str]:
    """Name the files that a run is given by what is in them: the generator's weights or its bank, and the start's.

    Folders have other names elsewhere, and other weights the same name. Only single files that can be read here have
    one; whoever needs a file says what is wrong with it.
    """
    wanted = {"generator": _generator_file(config.generator) if config.generates else None}
    wanted["weights"] = _start_file(config.weights)
    found = {}
    for key, path in wanted.items():
        with suppress(OSError):
            if path is not None and path.is_file():
                found[key] = _digest(path)
    return found


def _generator_file(spec: str) -> Path | None:
    kind, _, where = spec.partition(":")
    if kind == "sd-turbo":
        return None
    if kind == "bank":
        return expanded(where, "generator")
    return weights_file(builtin_folder() if spec == "builtin" else expanded(spec, "generator"))


def _start_file(weights: str) -> Path | None:
    if weights == "none":
        return None
    return imagenet_file() if weights == "imagenet" else expanded(weights, "weights")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
