"""docs/speed.md shows what the benchmarks measured. To renew its tables: python tests/test_speed_docs.py"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speed.md"
RECORDS = {"engine": "engine/engine-h200.json", "framework": "framework/cpu.json", "growth": "growth/cpu.json"}


def tables() -> dict[str, str]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    found = {}
    for name, path in RECORDS.items():
        record, module = json.loads((ROOT / "results" / path).read_text()), importlib.import_module(name)
        found[name] = module.table(record) if name == "engine" else module.table(record["rows"], seconds=False)
    return found


def renewed(text: str) -> str:
    for name, table in tables().items():
        text = re.sub(
            rf"(<!-- {name} -->\n\n).*?(<!-- end -->)", lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.S
        )
    return text


def test_the_tables_are_those_of_the_records() -> None:
    text = PAGE.read_text()
    assert renewed(text) == text
    assert all(table in text for table in tables().values())


def test_the_whole_runs_are_those_of_the_records() -> None:
    for folder in ("cifar10-k20-a0.1/fedeas-s1", "cifar10-k100-a0.1/none-s3"):
        row = next(line for line in PAGE.read_text().splitlines() if f"`results/{folder}`" in line)
        seconds = json.loads((ROOT / "results" / folder / "summary.json").read_text())["seconds"]
        total = sum(seconds[phase] for phase in ("clients", "evaluate", "aggregate", "gamma_hat"))
        assert abs(float(row.split("|")[2]) - total) < 1.5


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
