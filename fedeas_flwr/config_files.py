"""Where run-configs come from on a command line: a TOML file, and ``key=value`` words behind it."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import expanded
from fedeas_flwr.config import TEXT_KEYS, RunConfig, parse_config


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run-config from a TOML file and ``key=value`` overrides; see `read_values`."""
    config = parse_config(read_values(path, overrides))
    refuse_ignored(config, parse_overrides(overrides))
    return config


def refuse_ignored(config: RunConfig, given: Collection[str]) -> None:
    """Refuse, of the keys given on a command line, those of a budget that `total` takes the place of.

    In a file they may stand beside it: a run's own record has all keys.
    """
    values = config.to_user_dict()
    for key in ("beta", "gamma", "printed-rule"):
        if config.total and key in given:
            raise ConfigError(f"{key} = {values[key]!r}: leave it out, total = {config.total} says what is spent")


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file of run-config keys and apply ``key=value`` overrides; a run-dir is seen from this folder."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets as deep
        raise ConfigError(f"config file {path} is not TOML: {error}") from None
    values |= parse_overrides(overrides)
    if isinstance(folder := values.get("run-dir"), str) and folder:
        values["run-dir"] = str(expanded(folder, "run-dir").absolute())
    return values


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` words; a value is TOML where it can be and the key takes it, else a string."""
    values: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not key:
            raise ConfigError(f"'{word}' is not key=value")
        values[key] = text
        with suppress(ValueError, RecursionError):
            value = tomllib.loads(f"v = {text}")["v"]
            if isinstance(value, str) or key not in TEXT_KEYS:
                values[key] = value
    return values
