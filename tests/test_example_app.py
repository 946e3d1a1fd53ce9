"""examples/in-your-flower-app and the plain app that the diff in docs/in-your-flower-app.md leads to: both run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedeas_flwr import allocate
from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.partition import dirichlet_partition

ROOT = Path(__file__).parents[1]
DIFF = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "in-your-flower-app.md").read_text(), re.S)[0]
CLIENTS = 3


@pytest.fixture
def apps(tmp_path: Path) -> dict[str, Path]:
    """Return copies of the example, one of them with the diff taken back."""
    for name in ("fedeas", "plain"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "examples" / "in-your-flower-app", tmp_path / name, ignore=ignored)
    subprocess.run(["git", "apply", "-R", "-"], input=DIFF, text=True, cwd=tmp_path / "plain", check=True)
    return {name: tmp_path / name for name in ("fedeas", "plain")}


def test_diff_adds_five_lines_three_imports_and_two_keys(apps: dict[str, Path]) -> None:
    *sides, keys = DIFF.split("--- a/")[1:]
    assert keys.startswith("pyproject.toml")
    added = [line for part in sides for line in re.findall(r"^\+(?!\+\+)(.*)", part, re.M)]
    imports = [line for line in added if re.match("from|import", line)]
    assert (len(added) - len(imports), len(imports)) == (5, 3)
    assert len(re.findall(r"^\+\w", keys, re.M)) == 2
    left = "".join(path.read_text() for path in apps["plain"].rglob("*.*") if path.is_file())
    assert not re.search("augment|with_fedeas|beta|generator", left, re.I)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> tuple[list[float], InlineGrid]:
    """Run an app on the inline grid; return the accuracy after each round, and the grid."""
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "myapp"]:
        del sys.modules[name]
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"results": str(folder / "results.jsonl"), "num-server-rounds": 2, "batch-size": 128, **keys}
    grid = InlineGrid(import_module("myapp.client_app").app, CLIENTS, config)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    import_module("myapp.server_app").app(grid, context)
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    return [line["accuracy"] for line in lines], grid


def test_example_runs_with_and_without_fedeas(apps: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    digits = open_dataset("digits")
    np.savez(apps["fedeas"] / "bank.npz", x=digits.x_test, y=digits.y_test)
    plain, untouched = run(apps["plain"], monkeypatch)
    fedeas, grid = run(apps["fedeas"], monkeypatch, generator=f"bank:{apps['fedeas'] / 'bank.npz'}")
    counts = dirichlet_partition(digits.y_train, CLIENTS, 0.1, 1, test_fraction=0.2).counts(digits.y_train, 10)
    plans = [here.state.config_records["fedeas"]["plan"] for here in grid._contexts.values()]
    assert plans == allocate(counts, "fedeas", beta=6.0).tolist()
    assert not any(here.state for here in untouched._contexts.values())
    assert plain[0] == fedeas[0] and plain[1:] != fedeas[1:]
