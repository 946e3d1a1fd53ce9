"""docs/speed.md shows what the benchmarks measured. To renew its tables: python tests/test_speed_docs.py"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.metrics import WALL_CLOCK, seconds_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speed.md"
RECORDS = {
    "engine": "engine/engine-h200.json",
    "framework": "framework/cpu.json",
    "framework on a GPU": "framework/h200.json",
    "growth": "growth/cpu.json",
    "parity": "parity/h200.json",
}
"""What the first word of a table's name measured. Seconds are shown where they are a GPU's."""


def tables() -> dict[str, str]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    found = {}
    for name, path in RECORDS.items():
        record = json.loads((ROOT / "results" / path).read_text())
        module = importlib.import_module(name.split()[0])
        if name == "engine":
            found[name] = module.table(record)
        elif name == "parity":
            found[name] = module.table(record["rows"])
        else:
            found[name] = module.table(record["rows"], record["environment"]["device"] != "cpu")
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
    for folder in ("cifar10-k20-a0.1/fedeas-s1", "precision/none-s2-bf16", "framework/ray-h200"):
        row = next(line for line in PAGE.read_text().splitlines() if f"`results/{folder}`" in line)
        seconds = json.loads((ROOT / "results" / folder / "summary.json").read_text())["seconds"]
        assert row.split("|")[2].strip() == f"{sum(seconds_of(phase, seconds) for phase in WALL_CLOCK):.0f}"
        wall = (ROOT / "results" / folder).parent / "wall.txt"
        assert f" {row.split('|')[3].strip()} s by the shell's clock" in wall.read_text()


def rounds_of(record: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "results" / record / "rounds.jsonl").read_text().splitlines()]


def accuracies(rounds: list[dict[str, Any]]) -> NDArray[np.float64]:
    return 100 * np.array([record["accuracy"] for record in rounds])


def test_bf16_differs_from_tf32_as_the_page_says() -> None:
    whole, half = rounds_of("cifar10-k100-a0.1/none-s2"), rounds_of("precision/none-s2-bf16")
    assert [r["clients"] for r in whole] == [r["clients"] for r in half]
    first, second = accuracies(whole), accuracies(half)
    for page in (PAGE.read_text(), (ROOT / "docs" / "reproduction.md").read_text()):
        text = " ".join(page.split())
        assert f"tf32 is above bf16 by {np.mean(first - second):.2f} points in the mean" in text
        assert f"a standard deviation of {np.std(first - second):.2f}" in text
        assert f"from the one before with one of {np.std(np.diff(first)):.1f}" in text
        assert f"{first[-20:].mean():.1f} and {second[-20:].mean():.1f}" in text
    assert f"It is above in {(first > second).sum()} of the 200" in " ".join(PAGE.read_text().split())


def test_ray_computes_what_inline_does_and_takes_what_the_page_says() -> None:
    ray, inline = rounds_of("framework/ray-h200"), rounds_of("precision/none-s2-bf16")
    same = ("round", "accuracy", "loss", "train_loss", "clients")
    assert [[r[key] for key in same] for r in ray] == [[r[key] for key in same] for r in inline]
    assert len(ray) == 200
    text = " ".join(PAGE.read_text().split())
    mean = {
        phase: [np.mean([seconds_of(phase, r["seconds"]) for r in rounds[10:]]) for rounds in (ray, inline)]
        for phase in WALL_CLOCK
    }
    both = np.sum(list(mean.values()), axis=0)
    assert "a round takes {:.2f} s where it took {:.2f} inline".format(*both) in text
    found = [f"{mean[phase][0]:.2f}" for phase in ("clients", "aggregate")]
    assert "{} until the last reply, {} for averaging".format(*found) in text


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
