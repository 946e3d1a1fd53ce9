"""The name of a Hugging Face dataset in a config: ``hf:PATH`` and options, such as ``hf:photos label=kind size=32``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import absolute_in, expanded
from fedeas_flwr.common.import_path import parse_arguments

HF = "hf:"
"""Prefix of the dataset's name."""
OPTIONS = ("image", "label", "train", "test", "size")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class HfSpec:
    """Where a dataset is, and the columns, splits and image size to use."""

    where: str
    options: Mapping[str, str] = field(default_factory=dict)
    written: str = ""
    """The options as the user wrote them."""

    @classmethod
    def parse(cls, text: str, key: str = "dataset") -> HfSpec:
        """Return the parts of ``hf:PATH NAME=VALUE …``; a text without the prefix is a path. Errors name the key."""
        if not text.startswith(HF):
            return cls(text)
        where, written = re.fullmatch(r"(.*?)(\s+\w+=.*)?", text.removeprefix(HF), re.S).groups("")  # type: ignore[union-attr]
        options = {name: str(value) for name, value in parse_arguments(written, key).items()}
        if not where:
            raise ConfigError(f"{key} = {text!r}: must be {HF}PATH")
        if unknown := [name for name in options if name not in OPTIONS]:
            raise ConfigError(f"{key} = {text!r}: no option {unknown[0]!r}; there are {', '.join(OPTIONS)}")
        if not re.fullmatch(r"|[1-9]\d{0,4}(x[1-9]\d{0,4})?", options.get("size", "")):
            raise ConfigError(f"{key} = {text!r}: size must be pixels, such as 32 or HEIGHTxWIDTH")
        return cls(where, options, written)

    @property
    def path(self) -> Path:
        """Return the file or folder, which need not exist."""
        return expanded(self.where)

    @property
    def may_be_on_hub(self) -> bool:
        """Return whether nothing is at the path, and it has the form of a name on the Hugging Face Hub, USER/NAME."""
        return _HUB_NAME.fullmatch(self.where) is not None and not self.path.exists()

    @property
    def size(self) -> tuple[int, int] | None:
        """Return the size (H, W) that images are resampled to, None if it is not given."""
        height, _, width = self.options.get("size", "").partition("x")
        return (int(height), int(width or height)) if height else None

    def absolute(self, folder: Path) -> str:
        """Return the name with its path, which may be relative to a folder, as an absolute one."""
        path = absolute_in(folder, self.where, "dataset")
        return HF + (self.where if self.may_be_on_hub and not Path(path).exists() else path) + self.written
