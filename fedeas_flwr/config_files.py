"""Where run-configs come from on a command line: a TOML file, and ``key=value`` words behind it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedeas_flwr.config import ConfigError, RunConfig, parse_config


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file of run-config keys and apply ``key=value`` overrides; a run-dir is seen from this folder."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets as deep
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    values |= parse_overrides(overrides)
    if isinstance(folder := values.get("run-dir"), str) and folder:
        values["run-dir"] = str(Path(folder).expanduser().absolute())
    return parse_config(values)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` words; a value is TOML where it can be, else a string."""
    values: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"'{word}' is not key=value")
        try:
            values[key.strip()] = tomllib.loads(f"v = {text.strip()}")["v"]
        except (ValueError, RecursionError):
            values[key.strip()] = text.strip()
    return values
