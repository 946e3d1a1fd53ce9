"""Format and parse counts, bytes and durations, and make texts from outside fit for logs and terminals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES = {"": 1, **_UNITS, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
MAX_LINE = 600
"""Maximum number of characters of an error in a log, in a record and on the terminal."""
MAX_TEXT = 20_000
"""Maximum number of characters of a text of several lines or sentences, such as a client's traceback in the log."""
MAX_NAMED = 6
"""Maximum number of clients, or of ranges of rounds, listed in one line; for more, only their count is given."""
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_bytes(text: str, name: str) -> int:
    """Read a number of bytes such as ``500MB``, ``20GB`` or ``2GiB``; `name` is its key, for the error."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].upper() not in _SIZES:
        raise ValueError(f"{name} = {text!r}: must be a size such as 500MB, 20GB or 2GiB")
    return int(float(found[1]) * _SIZES[found[2].upper()])


def parse_age(text: str, name: str) -> float:
    """Return the seconds of a duration such as ``90m``, ``12h`` or ``30d``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    if not found:
        raise ValueError(f"{name} = {text!r}: must be a time such as 90m, 12h or 30d")
    return float(found[1]) * _AGES[found[2]]


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: 1 run, 12,000 images; ``plural`` is for irregular plurals."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return a noun with its ascending numbers: round 3, rounds 1–3, 7; with their count if there are many ranges."""
    parts: list[str] = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):  # constant among neighbours
        found = [str(number) for _, number in group]
        parts += found if len(found) < 3 else [f"{found[0]}–{found[-1]}"]
    if len(parts) > MAX_NAMED:
        return counted(len(numbers), noun)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


def with_sign(number: float, digits: int) -> str:
    """Return a number with its sign: +1.2, −0.4."""
    return f"{number:+.{digits}f}".replace("-", "−")


def show_bytes(number: int) -> str:
    """Return a number of bytes as readable text."""
    unit = next((unit for unit, size in _UNITS.items() if number < 999.5 * size), "PB")  # 999.5 would print as 1e+03
    return f"{number / _UNITS[unit]:.3g} {unit}"


def show_seconds(seconds: float) -> str:
    """Return a duration as readable text, rounded up so that a positive one is never 0 s."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def one_line(message: object, most: int = 200) -> str:
    """Return an error or any text as one line of at most ``most`` characters, without control characters.

    Texts from outside may hold line breaks, which forge lines of a log, and sequences that control a terminal. A long
    text loses its middle: an error begins with what is wrong and ends with what is allowed.
    """
    text = " ".join(filter(None, map(str.strip, str(message).splitlines())))
    if len(text) > most:
        text = f"{text[: most - most // 3 - 1]}…{text[-(most // 3) :]}"
    return _printable(text)


def shortened(text: str, most: int) -> str:
    """Return a text as one line of at most ``most`` characters; a long text loses its end, not its middle."""
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def indented_lines(text: str) -> str:
    """Return a text of several lines for a log, cut to `MAX_TEXT` characters and without control characters.

    Every line but the first begins with a bar, so that none can be taken for a line of the log itself.
    """
    return "\n  | ".join(map(_printable, text[:MAX_TEXT].splitlines()))


def _printable(text: str) -> str:
    """Return a text with spaces for other white space and U+FFFD for control characters and lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
