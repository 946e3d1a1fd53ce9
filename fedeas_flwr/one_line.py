"""What another library says, brought to one line: messages of ours have no second."""

from __future__ import annotations


def one_line(said: object, most: int | None = 200) -> str:
    """An error, or any text, without line breaks and cut to so many characters; ``None``: not cut."""
    return " ".join(str(said).split())[:most]
