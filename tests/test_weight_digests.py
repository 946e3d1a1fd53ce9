"""The final weights of small runs are the recorded ones, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_weights_of_every_strategy_and_policy_match_the_record() -> None:
    script, file = ROOT / "benchmarks" / "weight_digests.py", ROOT / "tests" / "weight_digests.json"
    done = subprocess.run([sys.executable, str(script), "--check", str(file)], capture_output=True, text=True)
    if done.returncode == 3:  # another architecture, or other wheels
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
