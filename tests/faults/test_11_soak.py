"""Row 11: hundreds of rounds. The records agree with results/soak/README.md; the script works on a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.flower

ROOT = Path(__file__).parents[2]
RECORDS = {"inline": ("launcher MB",), "ray": ("launcher MB", "server MB", "client process MB")}


def test_slope_is_measured_over_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from soak import slope

    samples = [(float(n), 100.0 + 5 * min(n, 10) + 0.25 * max(0, n - 10)) for n in range(21)]
    assert slope(samples, 20) == {"at_half": 150.0, "at_end": 152.5, "per_round": 0.25, "samples": 11}


@pytest.mark.parametrize("backend", RECORDS)
def test_recorded_soak_has_no_memory_growth_or_leftovers(backend: str) -> None:
    record = json.loads((ROOT / "results" / "soak" / f"{backend}.json").read_text())
    assert record["rounds"] == {"inline": 500, "ray": 50}[backend]
    assert record["failures"] == 0
    assert not any(record["left_behind"].values())
    text = (ROOT / "results" / "soak" / "README.md").read_text()
    for role in RECORDS[backend]:
        found = record["second_half"][role]
        assert found["at_end"] - found["at_half"] < 0.02 * found["at_half"], role
        assert f"{found['at_half']:.0f} → {found['at_end']:.0f} MB, {1000 * found['per_round']:.0f} kB a round" in text


@pytest.mark.slow
def test_soak_script_runs_eight_rounds(tmp_path: Path, digits_generator: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "inline", "--rounds", "8"]
    done = subprocess.run([*command, "--out", str(tmp_path / "r.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["rounds"] == 8 and record["failures"] == 0
    assert not any(record["left_behind"].values())
