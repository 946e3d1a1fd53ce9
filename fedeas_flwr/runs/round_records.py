"""Read rounds.jsonl, where line i is the record of round i, up to the first invalid line."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedeas_flwr.common.checked import unseal

_MAX_SHOWN = 40


@dataclass
class RoundLog:
    """Records read from rounds.jsonl from a byte offset on."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """The records before the first invalid line."""
    offset: int = 0
    """Byte offset after the last record."""
    lines: int = 0
    """Number of complete lines, valid or not; a line that a crash cut short is not complete."""
    error: str = ""
    """Why the line after the last record is invalid, if known."""


def read_records(path: Path, owner: str = "", offset: int = 0) -> RoundLog:
    """Return the records of the run ``owner`` from a byte offset on, or all if that is not the start of a line."""
    with path.open("rb") as file:
        file.seek(max(0, offset - 1))
        if offset and file.read(1) != b"\n":
            return read_records(path, owner)
        found = RoundLog(offset=offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            found.lines += 1
            number = found.records[-1]["round"] + 1 if found.records else None if offset else 1
            record, found.error = _as_record(line, number, owner)
            if record is None:
                found.lines += sum(rest.endswith(b"\n") for rest in file)
                break
            found.records.append(record)
            found.offset += len(line)
    return found


def _as_record(line: bytes, number: int | None, owner: str) -> tuple[dict[str, Any] | None, str]:
    """Return a line's record, which must be of round ``number`` if given; or ``None`` and the reason."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None, ""
    if not isinstance(record, dict):
        return None, ""
    round_number, accuracy, loss = (record.get(key) for key in ("round", "accuracy", "loss"))
    if type(round_number) is not int or round_number != (number or round_number):
        return None, f"round = {_shown(round_number)}, must be {number or 'a number'}"
    is_generator = "accuracy" not in record and "loss" in record  # null if the round was not evaluated
    has_loss = is_generator and (loss is None or (type(loss) is float and math.isfinite(loss)))
    if not has_loss and (not isinstance(accuracy, int | float) or isinstance(accuracy, bool) or not 0 <= accuracy <= 1):
        return None, f"accuracy = {_shown(accuracy)}, must be from 0 to 1"
    try:
        return unseal(record, owner, required=False), ""
    except ValueError as error:
        return None, str(error)


def _shown(value: Any) -> str:
    """Return a value as JSON, cut to `_MAX_SHOWN` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
