"""The value of the key ``generator``, taken apart into a kind of generator and where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from fedeas_flwr.common.files import absolute_in
from fedeas_flwr.common.import_path import is_import_path


class GeneratorSpec(NamedTuple):
    """A generator: its kind, and a folder, a file or an import path."""

    kind: Literal["builtin", "federated", "folder", "bank", "sd-turbo", "import path"]
    where: str = ""

    @classmethod
    def parse(cls, text: str) -> GeneratorSpec:
        """Return the spec of ``builtin``, ``federated``, ``bank:DIR``, ``sd-turbo[:DIR]``, an import path or a path."""
        if text == "builtin":
            return cls("builtin")
        if text == "federated":
            return cls("federated")
        kind, colon, where = text.partition(":")
        if kind == "sd-turbo":
            return cls("sd-turbo", where)
        if kind == "bank" and colon:
            return cls("bank", where)
        return cls("import path" if is_import_path(text) else "folder", text)

    @property
    def is_diffusion(self) -> bool:
        """Return whether it is a diffusion model of this package, which the sampler's keys apply to."""
        return self.kind in ("builtin", "federated", "folder")

    def absolute(self, folder: Path) -> str:
        """Return the key's value with a path that is relative to ``folder`` made absolute."""
        if self.kind == "folder":
            return absolute_in(folder, self.where, "generator")
        if self.kind in ("bank", "sd-turbo"):
            return f"{self.kind}:{absolute_in(folder, self.where, 'generator')}" if self.where else self.kind
        return self.where or self.kind
