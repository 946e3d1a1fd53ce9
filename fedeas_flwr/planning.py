"""Plan before anything is generated: what a policy would do with given label counts, as data and as a table."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedeas_flwr import allocation
from fedeas_flwr.allocation import MAX_COUNT, checked_counts
from fedeas_flwr.policies import POLICIES, ClientView, PolicySettings, allocate, settings_of
from fedeas_flwr.sizes import counted

LARGEST_FILE = 64 * 2**20  # bytes; a thousand clients by a thousand classes need about a tenth of it
MOST_CLASSES_SHOWN = 20
LONGEST_HEAD = 16
NAMES_OF_CLIENTS = ("client", "id", "index")
"""Above a column that holds no counts."""


def plan(
    counts: npt.ArrayLike,
    *,
    dataset: str | None,
    protocol: str | None,
    policy: str,
    beta: float,
    gamma: float,
    seed: int | None,
    strict_mean: bool = True,
    total: int | None = None,
) -> dict[str, Any]:
    """Say what every client would generate under a policy, and what that does to the imbalance.

    Parameters
    ----------
    counts : array_like of int, shape [K, C]
        Label counts of the clients' training data.
    dataset, protocol, seed
        Where the counts come from, carried into the plan; None where they were given as a file.
    policy, beta, gamma, strict_mean, total
        See `fedeas_flwr.policies.allocate`.

    Returns
    -------
    dict
        Plain Python values, ready for JSON. ``beta`` and ``gamma`` are None where nothing depends on them (see
        `settings_of`), a client's ``budget`` under a policy without budgets; ``imbalance.removed`` and
        ``synthetic_fraction`` are fractions. A policy that repeats images generates nothing; its clients have
        ``repeat`` besides, copies of each class, and the plan their number, ``repeated``.
    """
    counts, settings = checked_counts(counts), settings_of(policy, total is not None)
    generate = allocate(counts, policy, beta=beta, gamma=gamma, strict_mean=strict_mean, total=total)
    rule, view = POLICIES.get(policy), ClientView(counts, PolicySettings(beta, gamma, strict_mean, total))
    repeats = rule is not None and rule.repeats
    repeat = rule.plan(view) if rule and repeats else allocation.none(counts)
    budgets = rule.budget(view) if rule else None
    samples, entropy = counts.sum(axis=1).tolist(), allocation.normalised_entropy(counts).tolist()
    real, made = int(counts.sum()), int(generate.sum())
    return {
        "dataset": dataset,
        "protocol": protocol,
        "policy": policy,
        "beta": beta if "beta" in settings else None,
        "gamma": gamma if "gamma" in settings else None,
        "seed": seed,
        "clients": [
            {
                "client": k,
                "samples": samples[k],
                "entropy": entropy[k],
                "budget": None if budgets is None else int(budgets[k]),
                "generate": row,
                **({"repeat": repeat[k].tolist()} if repeats else {}),
            }
            for k, row in enumerate(generate.tolist())
        ],
        "total": made,
        "full_balance_total": int(allocation.full_balance(counts).sum()),
        "imbalance": {
            "before": allocation.imbalance(counts).score,
            "after": allocation.imbalance(counts, generate + repeat).score,
            "removed": allocation.removed(counts, generate + repeat),
        },
        "synthetic_fraction": made / (real + made) if real + made > 0 else 0.0,
        **({"repeated": int(repeat.sum())} if repeats else {}),
    }


def read_counts(path: str | Path) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Read label counts, one row a client and one column a class; and the classes' names, where a header has them.

    A ``.json`` file holds a list of rows. A ``.csv`` file holds rows of integers; its first line is taken for a header
    if no cell of it is a number. Under a header that begins with ``client``, ``id``, ``index`` or an empty cell, the
    first column names the clients and is left out.
    """
    path = Path(path)
    readers = {".json": _json_rows, ".csv": _csv_rows}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: counts must be a .json or a .csv file")
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read, {error.strerror or error}") from None
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path}: too large, at most {LARGEST_FILE // 2**20} MiB are allowed")
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
    if lines and _is_header(lines[0]):
        names = header = lines.pop(0)
        if lines and len(lines[0]) != len(header):
            raise ValueError(f"{path}: the header has {counted(len(header), 'column')}, the first row {len(lines[0])}")
        if header[0].lower() in ("", *NAMES_OF_CLIENTS):
            names, lines = header[1:], [line[1:] for line in lines]
    # Cells that are not integers stay text, for the check of all rows to name them.
    return names, [[int(cell) if re.fullmatch(r"-?[0-9]{1,18}", cell) else cell for cell in line] for line in lines]


def _is_header(line: list[str]) -> bool:
    # An empty cell before numbers may as well be a count that was forgotten.
    return line[0].lower() in NAMES_OF_CLIENTS or not any(map(_is_number, line))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def format_table(plan: dict[str, Any], names: Sequence[str] = ()) -> str:
    """Show a plan as plain text: a line a client, then the totals.

    Up to twenty classes are shown one by one, under their names where they have any; of more than that, how many
    classes get samples and how many each.
    """
    classes = len(plan["clients"][0]["generate"])
    heads = [_head(name) for name in names or map(str, range(classes))]
    shown = [heads, *_class_by_class(plan)] if classes <= MOST_CLASSES_SHOWN else _summarised(plan)
    header = ["client", "samples", "entropy", "budget", "repeat" if "repeated" in plan else "generate", *shown[0]]
    rows = [
        [
            str(client["client"]),
            f"{client['samples']:,}",
            f"{client['entropy']:.3f}",
            "-" if client["budget"] is None else f"{client['budget']:,}",
            f"{sum(added):,}",
            *more,
        ]
        for client, added, more in zip(plan["clients"], _added(plan), shown[1:], strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join([_title(plan), "", table[0], "-" * len(table[0]), *table[1:], "", *_totals(plan)])


def _added(plan: dict[str, Any]) -> list[list[int]]:
    """What every client gets of each class, generated or repeated."""
    return [client.get("repeat", client["generate"]) for client in plan["clients"]]


def _head(name: str) -> str:
    """A class above its column: a number would pass for a count, and a long name would push the table apart."""
    return f"c{name}" if name.isdecimal() else name if len(name) <= LONGEST_HEAD else f"{name[: LONGEST_HEAD - 1]}…"


def _class_by_class(plan: dict[str, Any]) -> list[list[str]]:
    return [[f"{n:,}" if n else "." for n in row] for row in _added(plan)]


def _summarised(plan: dict[str, Any]) -> list[list[str]]:
    rows = [[n for n in row if n] for row in _added(plan)]
    return [["classes", "each"]] + [[str(len(row)), _range(row)] for row in rows]


def _range(numbers: list[int]) -> str:
    if not numbers:
        return "."
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"


def _title(plan: dict[str, Any]) -> str:
    source = "given counts"
    if plan["dataset"] is not None:
        source = f"{plan['dataset']}, protocol {plan['protocol']}, seed {plan['seed']}"
    set_to = ", ".join(f"{name} {plan[name]:g}" for name in ("beta", "gamma") if plan[name] is not None)
    return f"Policy {plan['policy']}{f' ({set_to})' if set_to else ''} on {source}"


def _totals(plan: dict[str, Any]) -> list[str]:
    score, full = plan["imbalance"], plan["full_balance_total"]
    part = f"; the plan is {plan['total'] / full:.1%} of it" if full else ""
    repeat = "To repeat:    {:,} of the clients' own samples; classes a client has none of stay empty"
    return [
        *([repeat.format(plan["repeated"])] if "repeated" in plan else []),
        f"To generate:  {counted(plan['total'], 'sample')}, {plan['synthetic_fraction']:.1%} of the training data then",
        f"Full balance: {counted(full, 'sample')}{part}",
        f"Imbalance:    {score['before']:.4f} -> {score['after']:.4f}, {score['removed']:.1%} removed",
    ]
