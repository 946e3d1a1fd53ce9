"""results/scale/README.md matches the committed measurements and the model fitted to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scale  # noqa: E402

GROWTH = json.loads((ROOT / "results" / "growth" / "cpu.json").read_text())["rows"]
DOC = (ROOT / "results" / "scale" / "README.md").read_text()


def test_scale_page_matches_the_committed_record() -> None:
    model = scale.Model.fitted(GROWTH)
    measured = json.loads((ROOT / "results" / "scale" / "cpu.json").read_text())["rows"]
    assert [row["clients"] for row in measured] == [100, 1000, 10_000]
    for cells in [*map(scale.table_row, measured), *scale.model_rows(model)]:
        assert "| " + " | ".join(cells) + " |" in DOC
    assert f"`{model.seconds_each:.1e} · P · n`" in DOC
    assert f"`{model.bytes_each:.0f} · P · n`" in DOC


def test_scale_model_fits_its_rows() -> None:
    model = scale.Model.fitted(GROWTH)
    grown = [row for row in GROWTH if row["growth_of"] == "parameters"]
    for row in (grown[0], grown[-1]):
        size = row["parameters"], row["clients_a_round"]
        assert model.seconds(*size) == pytest.approx(row["seconds_outside"])
        assert model.traffic(*size) == pytest.approx(row["bytes_a_round"], rel=0.01)
    held = (grown[-1]["own_peak_mb"] - grown[0]["own_peak_mb"]) * 2**20
    size = grown[-1]["parameters"] - grown[0]["parameters"], grown[0]["clients_a_round"]
    assert model.memory(*size) == pytest.approx(held)


def test_two_level_aggregation_time_by_hand() -> None:
    model = scale.Model(seconds_fixed=1.0, seconds_each=2.0, bytes_each=4.0, discover_each=0.0)
    assert model.seconds(3, 100) == 1 + 2 * 3 * 100
    assert model.seconds_in_two_levels(3, 100) == 2 * (1 + 2 * 3 * 10)


def test_scale_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--small", "--out", str(tmp_path / "s.json")]
    subprocess.run(command, check=True, capture_output=True)
    row = json.loads((tmp_path / "s.json").read_text())["rows"][0]
    assert (row["clients"], row["clients_a_round"]) == (200, 2)
    assert row["images_planned"] > 0
