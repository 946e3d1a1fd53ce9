"""Objects of a user's own package, which a run-config names as ``package.module:name``."""

from __future__ import annotations

import hashlib
import importlib
import re
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import Parameter, getsource, isclass, isroutine, signature, unwrap
from typing import Any

from fedeas_flwr.common.errors import ConfigError, MissingPackageError, place_in_user_code
from fedeas_flwr.common.text import one_line

_NAME = r"[^\W\d]\w*"
_PATH = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*")
_WORDS = {"true": True, "false": False}
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def check_installed(package: str, extra: str, what: str) -> None:
    """Raise `MissingPackageError`, beginning with ``what`` needs it, if a package of an extra is not installed."""
    if find_spec(package) is None:
        name = package.replace("_", "-")
        raise MissingPackageError(f"{what}: needs the package {name}, pip install 'fedeas-flwr[{extra}]'")


def is_import_path(value: str) -> bool:
    """Return whether a key's value has the form of an import path."""
    return _PATH.fullmatch(value) is not None


def short_name(value: str) -> str:
    """Return the last part of an import path, to show it by; any other value is returned as it is."""
    return re.split("[:.]", value)[-1] if is_import_path(value) else value


def import_object(path: str, key: str) -> Any:
    """Return the object at an import path; raise `ConfigError`, which names the ``key``, if it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(f"{key}: {path!r} cannot be imported ({describe_error(error)})") from error
    return found


def source_hash(path: str, key: str) -> str:
    """Return a hash of the source of the function or class at an import path, empty if it has none in Python.

    What it calls is not part of it: other functions of the same file may change.
    """
    found = unwrap(import_object(path, key))
    try:
        source = getsource(found if isclass(found) or isroutine(found) else type(found))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def parse_arguments(text: str, key: str) -> dict[str, Any]:
    """Return the arguments in a text such as ``quantile=0.5 mode='at most'``, with numbers, true and false."""
    try:
        words = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"{key} = {text!r}: {one_line(error)}") from None
    for name, equals, value in words:
        if not equals or not name.isidentifier() or re.search(rf",({_NAME}=|$)", value):
            raise ConfigError(f"{key} = {text!r}: must be NAME=VALUE, separated by spaces, as in 'a=0.5 b=2'")
    if len({name for name, _, _ in words}) < len(words):
        raise ConfigError(f"{key} = {text!r}: names an argument twice")
    return {name: _value(value) for name, _, value in words}


def accepted_arguments(function: Any) -> frozenset[str] | None:
    """Return the names of the arguments that a function or class takes by keyword; None if it takes any name."""
    parameters = _parameters(function)
    if parameters is None or any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters if each.kind in _BY_KEYWORD)


def required_arguments(function: Any) -> list[str]:
    """Return the names of the arguments that a function or class takes by keyword and that have no default."""
    named = [each for each in _parameters(function) or () if each.kind in _BY_KEYWORD]
    return [each.name for each in named if each.default is Parameter.empty]


def _parameters(function: Any) -> list[Parameter] | None:
    try:
        return [*signature(function).parameters.values()]
    except (TypeError, ValueError):  # no function or class, or one of C
        return None


def call_with(function: Any, path: str, key: str, arguments: Mapping[str, Any], arguments_key: str | None = "") -> Any:
    """Call a user's function or class with arguments by keyword; raise `ConfigError`, naming the ``key``, if it fails.

    The line names an argument that the function does not have, with those that it has; the key of the arguments is
    ``key``-args by default, None if there is none. A `ConfigError` of the function is raised as it is.
    """
    accepted = accepted_arguments(function)
    for name in arguments:
        if accepted is not None and name not in accepted:
            allowed = ", ".join(sorted(accepted)) or "none"
            raise ConfigError(f"{arguments_key or f'{key}-args'}: {path!r} has no argument {name!r}; it has {allowed}")
    if missing := [name for name in required_arguments(function) if name not in arguments]:
        how = ", which no key sets" if arguments_key is None else f"; give it in {arguments_key or f'{key}-args'}"
        raise ConfigError(f"{key}: {path!r} needs {', '.join(missing)}{how}")
    try:
        return function(**arguments)
    except ConfigError:  # it names the key itself
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {path!r} raised {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return an error of a user's code in one line: its type, its text and its place in that code."""
    return f"{type(error).__name__}: {one_line(error)}{place_in_user_code(error)}"


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
