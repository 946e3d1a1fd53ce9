"""Damaged files and wrong values, drawn at random, for the campaign (campaign.py)."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fedeas_flwr.config import KEYS, GeneratorTraining, RunConfig

# ------------------------------------------------------------------------------------------------------- files


def damage(path: Path, draws: random.Random) -> str:
    """Flip bits, cut the end off or edit a value of a file; return a description of the damage."""
    before = path.read_bytes()
    how = draws.choice(["flip", "truncate", "edit"])
    if how == "flip":
        bits = sorted(draws.randrange(8 * len(before)) for _ in range(draws.choice([1, 1, 1, 8])))
        after = bytearray(before)
        for bit in bits:
            after[bit // 8] ^= 1 << bit % 8
        what = f"flip bits {bits}"
    elif how == "truncate":
        length = draws.choice([0, draws.randrange(len(before)), len(before) - 1])
        after, what = bytearray(before[:length]), f"truncate {len(before)} bytes to {length}"
    else:
        edited, what = edit(path.suffix, before, draws)
        after = bytearray(edited)
    path.write_bytes(after)
    return what


def edit(suffix: str, content: bytes, draws: random.Random) -> tuple[bytes, str]:
    """Return a file of the same format with one other value, and a description of the change."""
    if suffix == ".json":
        changed, what = edit_json(json.loads(content), draws)
        return json.dumps(changed).encode(), what
    if suffix == ".jsonl":
        lines = content.decode().splitlines()
        number = draws.randrange(len(lines))
        changed, what = edit_json(json.loads(lines[number]), draws)
        lines[number] = json.dumps(changed)
        return ("\n".join(lines) + "\n").encode(), f"line {number + 1}: {what}"
    if suffix == ".safetensors":
        return _edit_safetensors(content, draws)
    if suffix == ".npz":
        with np.load(io.BytesIO(content)) as archive:
            arrays = dict(archive)
        name = draws.choice(sorted(name for name in arrays if len(np.unique(arrays[name])) > 1))
        flat = arrays[name].reshape(-1)
        one = draws.randrange(flat.size)
        other = draws.choice(np.flatnonzero(flat != flat[one]).tolist())
        flat[[one, other]] = flat[[other, one]]
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        return buffer.getvalue(), f"swap elements {one} and {other} of {name}"
    # A .npy file, an image shard or a text: another value at one place after the header.
    start = 128 if content.startswith(b"\x93NUMPY") else 0
    place = draws.randrange(start, len(content))
    new = draws.choice([b for b in (b"0123456789abcdef" if suffix == "" else range(256)) if b != content[place]])
    return content[:place] + bytes([new]) + content[place + 1 :], f"byte {place} is {new}"


def edit_json(value: Any, draws: random.Random) -> tuple[Any, str]:
    """Return a copy of a JSON value with one other number, text or truth value, and a description of the change."""
    copy = json.loads(json.dumps(value))
    leaves = list(_leaves(copy, ()))
    *above, last = draws.choice(leaves)
    inner = copy
    for key in above:
        inner = inner[key]
    old = inner[last]
    inner[last] = _other(old, draws)
    return copy, f"{'/'.join(map(str, [*above, last]))}: {str(old)[:40]} is {str(inner[last])[:40]}"


def _leaves(value: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(value, dict | list) and value:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _leaves(value[key], (*path, key))
    elif path:
        yield path


def _other(value: Any, draws: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draws.choice([value + 1, value * 2 + 1, -value - 1])
    if isinstance(value, str):
        return draws.choice([value + "x", value[:-1], "fedavg"])
    return 1


def _edit_safetensors(content: bytes, draws: random.Random) -> tuple[bytes, str]:
    """Change the record in the header, or one element of an array."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    record = header.get("__metadata__", {}).get("state")
    if record and (draws.random() < 0.5 or not data):
        changed, what = edit_json(json.loads(record), draws)
        header["__metadata__"]["state"] = json.dumps(changed)
    else:
        name = draws.choice(sorted(name for name in header if name != "__metadata__"))
        start, stop = header[name]["data_offsets"]
        place = draws.randrange(start, stop)
        data[place] ^= 0x41
        what = f"{name}: byte {place - start} is {data[place]}"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(data), what


# ------------------------------------------------------------------------------------------------------ values

NONSENSE = [
    "",
    "abc",
    "nan",
    "inf",
    "-inf",
    "1e309",
    "9" * 400,
    "-1",
    "1.5",
    "0x10",
    "true",
    "[1]",
    "{a = 1}",
    "[" * 2000,
    "1979-05-27",
    "1\nlearning-rate=9",
    "☃",
    "\x1b[31mred",
    "a" * 5000,
    "../../x",
    "/dev/null/x",
    "~nobody-here/x",
]
PATHS = {"data-dir", "run-dir", "generator", "weights", "dataset"}


def wrong_value(draws: random.Random) -> tuple[str, str]:
    """Return a run-config key, now and then a misspelt one, and a value that is probably not allowed."""
    key = draws.choice(KEYS)
    *table, name = key.replace("-", "_").split(".")
    field = (GeneratorTraining if table else RunConfig).model_fields[name]
    bounds = {
        name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)
    }
    outside = [str(bounds[name] - step) for name, step in (("ge", 1), ("gt", 0)) if name in bounds]
    outside += [str(bounds[name] + step) for name, step in (("le", 1), ("lt", 0)) if name in bounds]
    choices = [str(choice)[:-1] for choice in get_args(field.annotation) if isinstance(choice, str)]
    value = draws.choice([*NONSENSE, *3 * outside, *choices])
    if draws.random() < 0.1:
        key = draws.choice([key[:-1], key + "x", key.replace("-", "_") + "_", key.upper(), ""])
    return key, value


def means(text: str, recorded: Any, key: str) -> bool:
    """Return whether the value in a run's record is what the text on the command line says."""
    text = text.strip()
    if key in PATHS:
        return str(recorded).endswith(text)
    if isinstance(recorded, bool):
        return text == str(recorded).lower()
    if isinstance(recorded, int | float):
        try:
            return (int(text, 16) if text.startswith("0x") else float(text)) == recorded
        except ValueError:
            return False
    return bool(text == recorded)
