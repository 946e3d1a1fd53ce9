"""Read label counts from a CSV or JSON file."""

from __future__ import annotations

import csv
import json
import logging
import re
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedeas_flwr.allocation import MAX_COUNT
from fedeas_flwr.common.text import MAX_LINE, counted, one_line

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20  # bytes; a thousand clients by a thousand classes need about a tenth of it
_ID_WORDS = ("id", "client", "site", "node", "name", "hospital")
"""Last words of the header of a column with the clients' names."""
_CLASS_HEADERS, _COUNT_HEADERS = ("class", "label"), ("count", "n", "samples", "images")
"""Headers of the second and third column of the long format."""
_SUM_NAMES = ("total", "sum", "all")
"""Names of a last column or row with the sums of the others."""


class Counts(NamedTuple):
    """Label counts, [K, C], and the names of classes and clients; both lists are empty if the file has none."""

    counts: npt.NDArray[np.int64]
    classes: list[str]
    clients: list[str]


class _Row(NamedTuple):
    where: str
    """Its place in the file, for errors: ``line 3`` or, in a JSON file, ``row 3``."""
    cells: list[Any]


def read_counts(path: str | Path, id_column: str | None = None) -> Counts:
    """Return the label counts in a file.

    A ``.json`` file holds a list of rows, one per client, with one integer per class. A ``.csv`` or ``.tsv`` file,
    separated by commas, semicolons or tabs, holds such rows or, in the long format, rows of client, class and count; a
    pair that is absent from these counts as 0. Its first line is a header if no cell of it is a number, if its first
    cell is the header of a column of names, or if it numbers the classes from 0 or 1, which is logged; it may begin
    with ``#``.

    The first column holds the clients' names if the last word of its header is one of `_ID_WORDS`, or if the header is
    ``index``, empty or ``id_column``; ``id_column="none"`` makes it a class. A column that may be either raises
    ValueError, as do a last column or row with the sums of the others, and repeated names.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".json", ".csv", ".tsv"):
        raise ValueError(f"{path}: counts must be a .json or a .csv file, or .tsv")
    if kind == ".json" and id_column is not None:
        raise ValueError(f"id-column = {id_column!r}: must be left out, since {path} has no columns of names")
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
    classes: list[str] = []
    clients: list[str] = []
    if kind == ".json":
        rows = _json_rows(path, text)
    else:
        header, rows = _csv_rows(path, text.removeprefix("#"), id_column)
        if header and _is_long(header, id_column):
            return _read_long(path, rows)
        rows, classes, clients = _split_names(path, header, rows, id_column)
    _check_rows(path, rows, "class", "classes")
    may_be_ids = kind != ".json" and not clients and id_column is None
    for row in rows:
        for c, n in enumerate(row.cells):
            _check_count(path, row, c + bool(clients), n, classes[0] if classes and may_be_ids and c == 0 else "")
    counts = [row.cells for row in rows]
    _check_columns(path, counts, classes, may_be_ids)
    _check_clients(path, rows, clients)
    return Counts(np.array(counts, dtype=np.int64), classes, clients)


def _json_rows(path: Path, text: str) -> list[_Row]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON, {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"{path}: must be a list of rows, each a list of integers")
    return [_Row(f"row {number}", row) for number, row in enumerate(rows, 1)]


def _csv_rows(path: Path, text: str, id_column: str | None) -> tuple[list[str], list[_Row]]:
    """Return the header, empty if there is none, and the other rows; the first line's cells show the separator."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        separator = max(",;\t", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
        reader = csv.reader(text.splitlines(), strict=True, delimiter=separator)
        rows = [
            _Row(f"line {reader.line_num}", cells) for line in reader if any(cells := [cell.strip() for cell in line])
        ]
    except csv.Error as error:
        raise ValueError(f"{path}: not valid CSV, {error}") from None
    header = rows[0].cells if rows else []
    numbered = len(rows) > 1 and _numbers_classes(header)
    if header and (_names_clients(header, id_column) or numbered or not any(map(_is_number, header))):
        if id_column not in (None, "none", header[0]):
            allowed = f"none or the first column's header, {header[0][:40]!r}"
            raise ValueError(f"id-column = {id_column!r}: must be {allowed}")
        if repeated := _first_repeated(header):
            raise ValueError(f"{path}: {rows[0].where} repeats class {header[repeated][:40]!r}")
        if numbered:
            read = f"{rows[0].where} ({header[0]} to {header[-1]}) is read as the class names"
            logger.warning(one_line(f"{path}: {read}; if it has counts, add a header above it", MAX_LINE))
        return header, rows[1:]
    if id_column not in (None, "none"):
        raise ValueError(f"id-column = {id_column!r}: must be none, since the file has no header")
    return [], rows


def _numbers_classes(cells: list[str]) -> bool:
    """Return whether a line of numbers is a header, such as pandas writes for classes without names."""
    return len(cells) > 1 and any(cells == [str(first + c) for c in range(len(cells))] for first in (0, 1))


def _names_clients(header: list[str], id_column: str | None) -> bool:
    """Return whether a first line with numbers is a header, by its first cell.

    If that is empty, a count may be missing, unless the others are increasing class numbers.
    """
    if header[0]:
        return _is_id(header[0], id_column)
    numbers = header[1:]
    return all(map(str.isdecimal, numbers)) and numbers == sorted(set(numbers), key=lambda each: (len(each), each))


def _first_repeated(names: list[str]) -> int:
    """Return the place of the first name that is not new and not empty, or 0."""
    first = dict(reversed([*zip(names, range(len(names)), strict=True)]))
    return next((place for place, name in enumerate(names) if name and place > first[name]), 0)


def _is_id(header: str, id_column: str | None) -> bool:
    """Return whether a first column with this header holds the clients' names."""
    if id_column is not None:
        return header == id_column
    return header.lower() in ("", "index") or re.split(r"[_\- ]", header.lower())[-1] in _ID_WORDS


def _is_long(header: list[str], id_column: str | None) -> bool:
    names = [name.lower() for name in header]
    return (
        len(names) == 3 and _is_id(header[0], id_column) and names[1] in _CLASS_HEADERS and names[2] in _COUNT_HEADERS
    )


def _read_long(path: Path, rows: list[_Row]) -> Counts:
    """Return the counts of the long format: clients in the order of the file, classes by name or by number."""
    _check_rows(path, rows, "column", "columns", 3)
    clients = {name: k for k, name in enumerate(dict.fromkeys(row.cells[0] for row in rows))}
    found = {row.cells[1] for row in rows}
    ordered = sorted(found, key=int) if all(map(str.isdecimal, found)) else sorted(found)
    classes = {name: c for c, name in enumerate(ordered)}
    if len(clients) * len(classes) > MAX_FILE_BYTES // 2:
        size = f"{counted(len(clients), 'client')} by {counted(len(classes), 'class', 'classes')}"
        raise ValueError(f"{path}: {size} are too many, at most {MAX_FILE_BYTES // 2:,} counts are allowed")
    counts = np.full((len(clients), len(classes)), -1, dtype=np.int64)
    for row in rows:
        client, name, cell = row.cells
        _check_count(path, row, 2, count := _as_integer(cell))
        if counts[clients[client], classes[name]] >= 0:
            raise ValueError(f"{path}: {row.where} repeats client {client[:40]!r} and class {name[:40]!r}")
        counts[clients[client], classes[name]] = count
    return Counts(np.maximum(counts, 0), ordered, list(clients))


def _split_names(
    path: Path, header: list[str], rows: list[_Row], id_column: str | None
) -> tuple[list[_Row], list[str], list[str]]:
    """Return the rows of counts, the classes' names and the clients' names; cells that are no integers stay text."""
    if header and rows and len(rows[0].cells) != len(header):
        width = len(rows[0].cells)
        raise ValueError(f"{path}: the header has {counted(len(header), 'column')}, the first row {width}")
    first = int(bool(header) and _is_id(header[0], id_column))
    counts = [_Row(where, [_as_integer(cell) for cell in cells[first:]]) for where, cells in rows]
    return counts, header[first:], [row.cells[0] for row in rows] if first else []


def _check_rows(path: Path, rows: list[_Row], noun: str, plural: str, width: int = 0) -> None:
    if not rows or not rows[0].cells:
        raise ValueError(f"{path}: holds no counts, at least one client and one class are needed")
    first = len(rows[0].cells)
    for where, cells in rows:
        if len(cells) != (width or first):
            wanted = width or f"{first} as the first row"
            raise ValueError(f"{path}: {where} has {counted(len(cells), noun, plural)}, must have {wanted}")


def _check_count(path: Path, row: _Row, column: int, count: Any, header: str = "") -> None:
    """Raise ValueError unless a cell is a count; ``header`` is that of a column that may hold the clients' names."""
    if type(count) is not int or not 0 <= count <= MAX_COUNT:
        found = f"{row.where}, column {column + 1} is {str(count)[:40]!r}"
        hint = f"; if the column has the clients' names, give --id-column {header[:40]!r}" if header else ""
        raise ValueError(f"{path}: {found}, must be an integer from 0 to 2**40{hint}")


def _check_columns(path: Path, rows: list[list[int]], classes: list[str], may_be_ids: bool) -> None:
    """Raise ValueError for a first column that may number the clients, and for a last column of sums."""
    first, number = [row[0] for row in rows], len(rows)
    if may_be_ids and number > 1 and first in ([*range(number)], [*range(1, number + 1)]):
        header = f", {classes[0][:40]!r}," if classes else ""
        names = f"give --id-column {classes[0][:40]!r}" if classes else "add a header that begins with client"
        raise ValueError(
            f"{path}: the first column{header} counts {first[0]} to {first[-1]}; if it numbers the clients, {names}; "
            "if it is a class, give --id-column none"
        )
    named = len(classes) > 2 and classes[-1].lower() in _SUM_NAMES
    if named and all(row[-1] == sum(row[:-1]) for row in rows):
        raise ValueError(f"{path}: column {classes[-1]!r} is the sum of the others; remove it")


def _check_clients(path: Path, rows: list[_Row], clients: list[str]) -> None:
    """Raise ValueError for a client that is there twice, and for a last row of sums."""
    if repeated := _first_repeated(clients):
        raise ValueError(f"{path}: {rows[repeated].where} repeats client {clients[repeated][:40]!r}")
    if len(clients) > 1 and clients[-1].lower() in _SUM_NAMES:
        *others, last = (row.cells for row in rows)
        if last == [sum(column) for column in zip(*others, strict=True)]:
            raise ValueError(f"{path}: {rows[-1].where}, {clients[-1]!r}, is the sum of the others; remove it")


def _as_integer(cell: str) -> int | str:
    """Return a cell such as 120, 120.0 or 1.2e+02 as an integer, and any other as it is."""
    if not re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]*)?(e[+-]?[0-9]{1,2})?", cell, re.IGNORECASE):
        return cell
    number = Decimal(cell)
    return int(number) if number == number.to_integral_value() and abs(number) < 10**18 else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
