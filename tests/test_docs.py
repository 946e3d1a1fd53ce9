"""README and docs match the code and the committed records."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fedeas_flwr.config import STRATEGIES, RunConfig, parse_config
from fedeas_flwr.config_files import read_config
from fedeas_flwr.config_keys import STRATEGY_KEYS, run_keys
from fedeas_flwr.federation.flower_internals import parse_config_args
from fedeas_flwr.generators.ray_service import GENERATOR_GPU_FRACTION
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.metrics import WALL_CLOCK
from fedeas_flwr.strategies.registry import TABLE_HEAD, find_algorithm, table_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def parameter_table() -> list[str]:
    """Return the rows of the parameter table, generated from the code."""
    cells = ((f"`{key.name}`", f"`{json.dumps(key.default)}`", key.allowed_shown(), key.meaning) for key in run_keys())
    return [f"| {' | '.join(row)} |" for row in cells]


def test_parameter_table_matches_the_code() -> None:
    lines = (ROOT / "docs" / "parameters.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| `[a-z0-9.-]+` \| `", line)]
    assert rows == parameter_table()


def test_strategies_table_matches_the_code() -> None:
    lines = (ROOT / "docs" / "strategies.md").read_text().splitlines()
    rows = ["| " + " | ".join(cells) + " |" for cells in (TABLE_HEAD, *table_rows())]
    assert [line for line in lines if line.startswith("| ")][: len(rows)] == rows


def test_strategies_times_match_the_committed_record() -> None:
    measured = json.loads((ROOT / "results" / "strategies" / "cpu.json").read_text())["seconds"]
    text = (ROOT / "results" / "strategies" / "README.md").read_text()
    assert all(f"| {name} | {taken / measured['fedavg']:.1f} × |" in text for name, taken in measured.items())


def test_strategy_keys_are_run_config_keys() -> None:
    owned = [key for keys in STRATEGY_KEYS.values() for key in keys]
    assert sorted(owned) == sorted(
        key for key, field in RunConfig.model_json_schema()["properties"].items() if "of" in field
    )
    for name in STRATEGIES:
        disclosure = find_algorithm(name).disclosure
        assert disclosure is None or disclosure.key in STRATEGY_KEYS[name]


def test_architecture_page_lists_every_package_and_top_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "fedeas_flwr").iterdir():
        name = path.name.removesuffix(".py")
        if name not in ("__init__", "__pycache__"):
            assert f"`{name}`" in text, name


def test_readme_quickstart_table_matches_the_committed_runs() -> None:
    for policy in ("none", "fedeas", "uniform", "missing-only"):
        summary = RunDirectory(ROOT / "results" / "quickstart" / policy).summary()
        row = next(line for line in README.splitlines() if line.startswith(f"{LABEL[policy]}  "))
        cells = row.removeprefix(LABEL[policy]).split()
        assert cells[1] == f"{100 * summary['last_20']:.1f}"
        assert cells[2] == f"{100 * summary['final']:.1f}"
        assert cells[3] == f"{100 * summary['peak']:.1f}"
        assert cells[4] == f"{summary['total_generated']:,}"


LABEL = {"none": "FedAvg, nothing generated", "fedeas": "FedEAS", "uniform": "Uniform", "missing-only": "Missing-only"}


@pytest.mark.parametrize("policy", ["none", "fedeas", "uniform", "missing-only"])
def test_committed_runs_have_the_current_quickstart_config(policy: str) -> None:
    """After a changed default, old numbers must not stay."""
    ran = RunDirectory(ROOT / "results" / "quickstart" / policy).config()
    today = read_config(ROOT / "conf" / "quickstart.toml", [f"policy={policy}"])
    free = {"run-dir", "backend"}
    assert {k: v for k, v in ran.to_user_dict().items() if k not in free} == {
        k: v for k, v in today.to_user_dict().items() if k not in free
    }


def test_speeds_match_the_committed_record() -> None:
    text = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    rates = json.loads((ROOT / "results" / "engine" / "engine-h200.json").read_text())["images_per_second"]
    names = (
        "(a) quickstart",
        "    graphed, tf32",
        "    graphed, bf16",
        "(b) 10 clients at once",
        "(b) 10 processes, by MPS",
    )
    for name in names:
        for found in (rate for key, rate in rates.items() if key.startswith(name)):
            assert f"{found:,.0f}" in text
    rows = json.loads((ROOT / "results" / "generation" / "generation.json").read_text())["rows"]
    service, plain, strict = (
        next(r["images_per_second"] for r in rows if r["name"].startswith(name) and r["sampler"] == "dpm++")
        for name in ("the service", "plain, torch", "plain, strict")
    )
    assert f"{service:,.0f} images/s with 20" in text
    assert f"{service / strict:.0f} times" in text and f"{service / plain:.1f} times" in text
    summary = RunDirectory(ROOT / "results" / "cifar10-k20-a0.1" / "fedeas-s1").summary()
    seconds = {phase: summary["seconds"][phase] for phase in WALL_CLOCK}
    total = sum(seconds.values())
    assert f"took {total:.0f} s in bf16" in text and "296 s" in (ROOT / "results/cifar10-k20-a0.1/wall.txt").read_text()
    assert f"{100 * (total - seconds['clients']) / total:.0f} % were not the clients'" in text
    inline, ray = (
        " ".join((ROOT / "results" / name / "wall.txt").read_text().split()) for name in ("precision", "framework")
    )
    assert "82 s by the shell's clock" in inline and "| 82 |" in text
    assert "212 s by the shell's clock" in ray and "| 212 |" in text


def test_flwr_run_on_a_gpu_leaves_room_for_the_generator() -> None:
    page = (ROOT / "docs" / "flwr-run.md").read_text()
    (block,) = (block for block in re.findall(r"```sh\n(.*?)```", page, re.S) if "nvidia-cuda-mps-control -d" in block)
    assert block.index("nvidia-cuda-mps-control -d") < block.index("flwr run . ")
    words = shlex.split(block[block.index("flwr run . ") :].replace("\\\n", " "))
    federation, run = (
        parse_config_args([words[words.index(f"--{name}-config") + 1]]) for name in ("federation", "run")
    )
    share, clients = float(np.float32(federation["client-resources-num-gpus"])), federation["num-supernodes"]
    assert int(1 / share) == clients == federation["init-args-num-cpus"] == parse_config(run).num_sampled(clients)
    assert clients * share + GENERATOR_GPU_FRACTION <= 1


def test_all_strategies_table_matches_the_committed_one() -> None:
    table = (ROOT / "results" / "strategies-on-digits" / "table.md").read_text()
    text = (ROOT / "results" / "strategies-on-digits" / "README.md").read_text()
    assert table in text
    found = json.loads((ROOT / "results" / "strategies-on-digits" / "results.json").read_text())["rows"]
    assert {row["strategy"] for row in found} == set(STRATEGIES)
    mean = {(row["strategy"], row["against_skew"]): sum(row["last_20"]) / len(row["last_20"]) for row in found}
    gains = [100 * (mean[name, "fedeas"] - mean[name, "nothing"]) for name in STRATEGIES]
    assert f"by {min(gains):.0f} to {max(gains):.0f} points" in text


def test_audit_table_matches_the_committed_records() -> None:
    text = (ROOT / "results" / "audit-digits" / "README.md").read_text()
    found = [
        json.loads((ROOT / f"results/audit-digits/{name}/audit.json").read_text()) for name in ("builtin", "control")
    ]
    assert [each["detected"] for each in found] == [
        False,
        True,
    ] and "| memorisation | not detected | detected |" in text
    for tests in zip(*(each["tests"].values() for each in found), strict=True):
        cells = (f"{test['value']:.3f} ({test['low']:.3f} to {test['high']:.3f})" for test in tests)
        assert f" | {' | '.join(cells)} |" in text


def test_reliability_page_names_existing_test_files() -> None:
    named = set(re.findall(r"`([\w/]*test_\w+\.py)`", (ROOT / "docs" / "reliability.md").read_text()))
    tests = ROOT / "tests"
    assert len(named) > 10
    assert {name for name in named if not ((tests / name).exists() or (tests / "faults" / name).exists())} == set()


def test_security_page_names_existing_tests() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named and {name for name in named if f"def {name}(" not in sources} == set()
