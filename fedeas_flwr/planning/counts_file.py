"""Read label counts from a CSV or JSON file."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import MAX_COUNT
from fedeas_flwr.common.text import counted

MAX_FILE_BYTES = 64 * 2**20  # bytes; a thousand clients by a thousand classes need about a tenth of it
NAMES_OF_CLIENTS = ("client", "id", "index")
"""Headers of a column with client names, which is skipped."""


def read_counts(path: str | Path) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return label counts, one row per client and one column per class, and the classes' names if there is a header.

    A ``.json`` file holds a list of rows. A ``.csv`` file holds rows of integers; its first line is a header
    if no cell of it is a number. If a header starts with ``client``, ``id``, ``index`` or an empty cell, the first
    column has the names of the clients and is skipped.
    """
    path = Path(path)
    readers = {".json": _json_rows, ".csv": _csv_rows}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: counts must be a .json or a .csv file")
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: too large, at most {MAX_FILE_BYTES // 2**20} MiB are allowed")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: must be text in UTF-8") from None
    names, rows = readers[path.suffix.lower()](path, text)
    if not rows or not rows[0]:
        raise ValueError(f"{path}: holds no counts, at least one client and one class are needed")
    for k, row in enumerate(rows):
        if len(row) != len(rows[0]):
            classes = counted(len(row), "class", "classes")
            raise ValueError(f"{path}: row {k + 1} has {classes}, must have {len(rows[0])} as the first row")
        for c, n in enumerate(row):
            if type(n) is not int or not 0 <= n <= MAX_COUNT:
                raise ValueError(
                    f"{path}: row {k + 1}, column {c + 1} is {str(n)[:40]!r}, must be an integer from 0 to 2**40"
                )
    return np.array(rows, dtype=np.int64), names


def _json_rows(path: Path, text: str) -> tuple[list[str], list[list[Any]]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON, {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{path}: must be a list of rows, each a list of integers")
    return [], rows


def _csv_rows(path: Path, text: str) -> tuple[list[str], list[list[Any]]]:
    try:
        lines = [[cell.strip() for cell in line] for line in csv.reader(text.splitlines(), strict=True)]
    except csv.Error as error:
        raise ValueError(f"{path}: not valid CSV, {error}") from None
    lines = [line for line in lines if any(line)]
    names: list[str] = []
    # A first line of an empty cell and numbers is no header: a count may be missing.
    if lines and (lines[0][0].lower() in NAMES_OF_CLIENTS or not any(map(_is_number, lines[0]))):
        names = header = lines.pop(0)
        if lines and len(lines[0]) != len(header):
            raise ValueError(f"{path}: the header has {counted(len(header), 'column')}, the first row {len(lines[0])}")
        if header[0].lower() in ("", *NAMES_OF_CLIENTS):
            names, lines = header[1:], [line[1:] for line in lines]
    # Cells that are not integers stay text; the check of all rows reports them.
    return names, [[int(cell) if re.fullmatch(r"-?[0-9]{1,18}", cell) else cell for cell in line] for line in lines]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
