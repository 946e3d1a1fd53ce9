"""Import paths in a run-config, and the arguments given with them."""

from __future__ import annotations

import json

import pytest

from fedeas_flwr.common.errors import ConfigError, place_in_user_code
from fedeas_flwr.common.import_path import (
    accepted_arguments,
    call_with,
    import_object,
    is_import_path,
    parse_arguments,
    short_name,
)


def of(count: int, *, scale: float = 1.0) -> float:
    return count * scale


def reads(text: str) -> object:
    return json.loads(text)


@pytest.mark.parametrize("value", ["rules:by_median", "my_package.rules:Rule.build"])
def test_import_paths_are_recognised(value: str) -> None:
    assert is_import_path(value)


@pytest.mark.parametrize(
    "value", ["fedeas", "bank:/a/folder", "rules:", ":name", "C:\\folder", "a b:c", "1a:b", "a:b:c"]
)
def test_other_values_are_not_import_paths(value: str) -> None:
    assert not is_import_path(value) and short_name(value) == value


def test_an_object_is_imported_and_shown_by_its_last_name() -> None:
    assert import_object("collections:OrderedDict.fromkeys", "policy")("ab") == {"a": None, "b": None}
    assert short_name("collections:OrderedDict.fromkeys") == "fromkeys"


@pytest.mark.parametrize("path", ["no_such_module:rule", "math:no_such_name"])
def test_what_cannot_be_imported_is_one_line_with_key_and_value(path: str) -> None:
    with pytest.raises(ConfigError, match=f"^policy: '{path}' cannot be imported") as raised:
        import_object(path, "policy")
    assert "\n" not in str(raised.value)


def test_arguments_are_numbers_words_and_texts() -> None:
    text = "quantile=0.5 most=10 exact=true name='two words' empty="
    expected = {"quantile": 0.5, "most": 10, "exact": True, "name": "two words", "empty": ""}
    assert parse_arguments(text, "policy-args") == expected
    assert type(parse_arguments("n=10", "policy-args")["n"]) is int
    assert parse_arguments("", "policy-args") == {}
    assert parse_arguments("rounds=3,5", "policy-args") == {"rounds": "3,5"}


@pytest.mark.parametrize("text", ["0.5", "a-b=1", "a=1 a=2", "a='", "a=0.9, b=2", "a=0.9,b=2"])
def test_bad_arguments_are_refused_with_key_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^policy-args = "):
        parse_arguments(text, "policy-args")


def test_an_unknown_argument_and_an_error_inside_are_one_line() -> None:
    assert accepted_arguments(of) == {"count", "scale"}
    assert call_with(of, "tests:of", "policy", {"count": 2, "scale": 0.5}) == 1.0
    with pytest.raises(ConfigError, match=r"^policy-args: 'tests:of' has no argument 'size'; it has count, scale$"):
        call_with(of, "tests:of", "policy", {"size": 1})
    with pytest.raises(ConfigError, match=r"^policy: 'tests:of' needs count; give it in policy-args$"):
        call_with(of, "tests:of", "policy", {"scale": 1})
    with pytest.raises(ConfigError, match=r"^callbacks: 'tests:of' has no argument 'size'"):
        call_with(of, "tests:of", "callbacks", {"size": 1}, "callbacks")
    with pytest.raises(ConfigError, match=r"^policy: 'tests:of' raised TypeError: 'int' object is not callable$"):
        call_with(3, "tests:of", "policy", {})
    with pytest.raises(ConfigError, match=r"^policy: 'tests:of' raised TypeError: "):
        call_with(of, "tests:of", "policy", {"count": "a", "scale": 0.5})


def test_error_names_the_innermost_line_of_user_code() -> None:
    line = reads.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=rf" raised JSONDecodeError: .* \(test_import_path.py, line {line}\)$"):
        call_with(reads, "tests:reads", "policy", {"text": "{"})
    with pytest.raises(ConfigError) as raised:
        import_object("no_such_module:rule", "policy")
    assert ".py" not in str(raised.value)
    assert place_in_user_code(ValueError("never raised")) == ""
