"""What a check of `fedeas doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedeas_flwr.one_line import one_line


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    state: Literal["ok", "problem", "note"]
    """``problem``: a run of the given config would fail, or badly suffer. ``note``: worth knowing."""
    text: str
    fix: str = ""
    """What to do; a problem always has one."""


def ok(name: str, text: str) -> Finding:
    """All is as a run needs it."""
    return Finding(name, "ok", text)


def note(name: str, text: str, fix: str = "") -> Finding:
    """Nothing is wrong, but a person may want to know."""
    return Finding(name, "note", text, fix)


def problem(name: str, text: str | Exception, fix: str) -> Finding:
    """A run would fail or badly suffer. An error becomes one line."""
    line = one_line(text, None) or type(text).__name__
    return Finding(name, "problem", line if len(line) <= 400 else line[:399] + "…", fix)
