"""The lines of a run's rounds.jsonl: line i is the record of round i, or the first that is not is named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAX_SHOWN = 40


@dataclass
class RoundLog:
    """What stands in rounds.jsonl behind a place."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """Up to the first line that is not the record of its round."""
    offset: int = 0
    """Behind the last of them."""
    lines: int = 0
    """All that have an end, whatever is in them; one that a crash cut short has none."""
    error: str = ""
    """What is wrong with the line after the last record, if that can be told."""


def read_records(path: Path, offset: int = 0) -> RoundLog:
    """Read the records behind a place, or all if that is no longer between two of them."""
    with path.open("rb") as file:
        file.seek(max(0, offset - 1))
        if offset and file.read(1) != b"\n":
            return read_records(path)
        found = RoundLog(offset=offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            found.lines += 1
            number = found.records[-1]["round"] + 1 if found.records else None if offset else 1
            record, found.error = _as_record(line, number)
            if record is None:
                found.lines += sum(rest.endswith(b"\n") for rest in file)
                break
            found.records.append(record)
            found.offset += len(line)
    return found


def _as_record(line: bytes, number: int | None) -> tuple[dict[str, Any] | None, str]:
    """A line as the record of a round, of any if no number is given; ``None``, and why, if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None, ""
    if not isinstance(record, dict):
        return None, ""
    its, accuracy = record.get("round"), record.get("accuracy")
    if type(its) is not int or its != (number or its):
        return None, f"round = {_shown(its)}, must be {number or 'a number'}"
    if not isinstance(accuracy, (int, float)) or isinstance(accuracy, bool) or not 0 <= accuracy <= 1:
        return None, f"accuracy = {_shown(accuracy)}, must be from 0 to 1"
    return record, ""


def _shown(value: Any) -> str:
    """As it stands in the line, cut."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
