"""Read run-configs from the command line: a TOML file and ``key=value`` overrides."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import absolute_in
from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.common.hf_spec import HF, HfSpec
from fedeas_flwr.common.text import shortened
from fedeas_flwr.config import TEXT_KEYS, RunConfig, flatten, parse_config


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run-config from a TOML file and ``key=value`` overrides; see `read_values`."""
    config = parse_config(read_values(path, overrides))
    refuse_ignored(config, parse_overrides(overrides))
    return config


def split_conf(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split ``[CONF] [KEY=VALUE]...`` into the path of the file, None if it was left out, and the overrides."""
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        return Path(words[0]), list(words[1:])
    return None, list(words)


def refuse_ignored(config: RunConfig, given: Collection[str]) -> None:
    """Reject budget keys that were given on the command line although `total` overrides them.

    A file may hold them together with `total`: a run's record has all keys.
    """
    values = config.to_user_dict()
    for key in ("beta", "gamma", "printed-rule"):
        if config.total and key in given:
            raise ConfigError(
                f"{key} = {values[key]!r}: remove the key, since total = {config.total} sets the number of images"
            )


def read_values(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML file of run-config keys, if one is given, and apply ``key=value`` overrides.

    Relative paths in the file are resolved against its folder. Those of overrides are relative to the working
    directory, and a run-dir among them is resolved against it.
    """
    given = parse_overrides(overrides)
    run_dir = {key: given[key] for key in given.keys() & {"run-dir"}}
    return (_read_file(path) if path else {}) | given | absolute_paths(run_dir, Path())


def _read_file(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits and deep nesting
        raise ConfigError(f"config file {path} is not TOML: {error}{_line_of(str(error), text)}") from None
    return absolute_paths(flatten(values), path.parent)


def _line_of(error: str, text: str) -> str:
    """Return the line of a TOML text that an error names, and that text needs quotes if its value is invalid."""
    found, lines = re.search(r"at line (\d+)", error), text.split("\n")
    if not found:
        return ""
    hint = '; text needs quotes, as in policy = "fedeas"' if error.startswith("Invalid value") else ""
    return f": {shortened(lines[int(found[1]) - 1], 80)}{hint}"


def absolute_paths(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return run-config values with their relative paths resolved against a folder."""
    found = dict(values)
    for key, (prefix, names) in _PATHS.items():
        value = values.get(key)
        if isinstance(value, str) and value.startswith(prefix) and value not in ("", prefix, *names):
            found[key] = prefix + absolute_in(folder, value.removeprefix(prefix), key)
    if isinstance(dataset := values.get("dataset"), str) and dataset.startswith(HF) and dataset != HF:
        found["dataset"] = HfSpec.parse(dataset).absolute(folder)
    if isinstance(generator := values.get("generator"), str) and generator:
        found["generator"] = GeneratorSpec.parse(generator).absolute(folder)
    return found


_PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dataset": ("own:", ()),
    "data-dir": ("", ()),
    "weights": ("", ("none", "imagenet")),
    "run-dir": ("", ()),
    "generator-training.start": ("", ()),
}
"""Keys whose values are paths → what precedes the path, and values that are no path.

`HfSpec` and `GeneratorSpec` resolve the paths of `hf:` datasets and of generators."""


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` words; a value is parsed as TOML if possible and if the key allows it, else it is a string."""
    values: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not key:
            raise ConfigError(f"'{word}' is not key=value, such as beta=6")
        if key in values:
            raise ConfigError(f"{word}: {key} is given twice; give it once")
        values[key] = text
        with suppress(ValueError, RecursionError):
            found = tomllib.loads(f"v = {text}")
            if len(found) == 1 and (isinstance(found["v"], str) or key not in TEXT_KEYS):  # a line break adds keys
                values[key] = found["v"]
    return values
