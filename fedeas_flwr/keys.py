"""Every run-config key in a row: its default, what it allows and what it means, as `RunConfig` itself has them.

What is allowed is said in JSON Schema's words, which pydantic makes from the very fields that it checks values by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedeas_flwr.config import RunConfig

_LOWEST = {"minimum": "≤", "exclusiveMinimum": "<"}
_HIGHEST = {"maximum": "≤", "exclusiveMaximum": "<"}
_WORDS = ("type", "enum", *_LOWEST, *_HIGHEST)
_ANY = {"integer": "n", "number": "x", "boolean": "true, false", "string": "text"}


@dataclass(frozen=True)
class Key:
    """One key of a run-config; ``allowed`` in the words of JSON Schema."""

    name: str
    default: Any
    allowed: dict[str, Any]
    meaning: str

    def allowed_shown(self) -> str:
        """What is allowed, for a person: choices, or a range in which n is a whole number and x is any."""
        if "enum" in self.allowed:
            return ", ".join(self.allowed["enum"])
        low = [f"{_show(self.allowed[word])} {sign} " for word, sign in _LOWEST.items() if word in self.allowed]
        high = [f" {sign} {_show(self.allowed[word])}" for word, sign in _HIGHEST.items() if word in self.allowed]
        return "".join([*low, _ANY[self.allowed["type"]], *high])


def _show(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def run_keys() -> list[Key]:
    """All keys, in the order in which they are declared."""
    return [
        Key(name, field["default"], {word: field[word] for word in _WORDS if word in field}, field["description"])
        for name, field in RunConfig.model_json_schema()["properties"].items()
    ]
