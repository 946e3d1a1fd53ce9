"""`fedeas plan`: exact output, the choice of β, no heavy imports."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from runners import fedeas, run_in_process

ROOT = Path(__file__).parents[2]


COUNTS = str(ROOT / "tests" / "helpers" / "three_clients.csv")


def cpu_seconds_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended, independent of other load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_plan_prints_exactly_the_agreed_json(tmp_path: Path) -> None:
    began = cpu_seconds_of_children()
    done = fedeas("plan", "--format", "json", FEDEAS_CACHE=str(tmp_path))  # nothing cached: the paper's main setting
    took = cpu_seconds_of_children() - began
    plan = json.loads(done.stdout)
    assert list(plan) == [
        "dataset", "protocol", "policy", "beta", "gamma", "seed", "clients", "total", "full_balance_total", "imbalance",
        "synthetic_fraction",
    ]  # fmt: skip
    assert list(plan["clients"][0]) == ["client", "samples", "entropy", "budget", "generate"]
    assert list(plan["imbalance"]) == ["before", "after", "removed"]
    assert (plan["total"], plan["full_balance_total"]) == (13_437, 226_783)
    assert [c["budget"] for c in plan["clients"]][:5] == [130, 93, 27, 133, 175]
    assert plan["imbalance"]["removed"] == pytest.approx(0.518, abs=5e-4)
    assert plan["synthetic_fraction"] == pytest.approx(13_437 / (45_007 + 13_437))
    assert took < 2, f"{took:.1f} s"  # measured: 0.6 s


@pytest.mark.parametrize(
    ("policy", "total"), [("uniform", 13_437), ("missing-only", 13_437), ("waterfill", 13_437), ("none", 0)]
)
def test_plan_of_matched_policies_spends_the_total_of_fedeas(policy: str, total: int) -> None:
    plan = json.loads(run_in_process("plan", "--policy", policy, "--format", "json").stdout)
    assert plan["total"] == total
    assert plan["clients"][0]["budget"] is None


def test_plan_of_copies_generates_nothing() -> None:
    plan = json.loads(run_in_process("plan", "--policy", "oversample", "--format", "json").stdout)
    assert (plan["total"], plan["repeated"], plan["synthetic_fraction"]) == (0, 3_528, 0)
    assert sum(sum(client["repeat"]) for client in plan["clients"]) == 3_528
    assert plan["clients"][0]["budget"] == 130


PAPERS_CHOICE = ("plan", "--min-removed", "0.5", "--max-synthetic", "0.25", "--grid")


def test_plan_chooses_the_papers_beta_and_writes_figures(tmp_path: Path) -> None:
    done = run_in_process(*PAPERS_CHOICE, "4,8,12,16,20", "--figures", "pictures", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Policy fedeas (beta 12, ")
    assert lines[-3] == "Window:       β from 11.374 to 13.286 (--min-removed 0.5 --max-synthetic 0.25)"
    assert lines[-2].startswith(
        "Recommended:  β = 12, the only one on the grid that satisfies all limits: 51.8% removed"
    )
    names = ["beta-selection.png", "concentration.png", "demand.png", "reduction.png"]
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == names


def test_beta_choice_adds_one_key_to_the_plan() -> None:
    plan = json.loads(run_in_process(*PAPERS_CHOICE, "4,8,12,16,20", "--format", "json").stdout)
    assert list(plan)[-2:] == ["synthetic_fraction", "choice"]
    assert (plan["beta"], plan["total"], plan["choice"]["recommended"]) == (12, 13_437, 12)
    (window,) = plan["choice"]["windows"]
    assert (round(window["low"], 1), round(window["high"], 1)) == (11.4, 13.3)


def test_plan_with_contradicting_limits_exits_1(tmp_path: Path) -> None:
    words = ("plan", "--min-removed", "0.5", "--max-images", "5000", "--figures", "pictures")
    done = run_in_process(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    (line,) = done.stdout.splitlines()
    assert "--min-removed 0.5 needs β ≥ 11.374" in line and "--max-images 5000 allows β ≤ 4.827" in line
    assert list(tmp_path.iterdir()) == []
    machine = run_in_process(*words[:-2], "--format", "json")
    assert machine.returncode == 1
    assert json.loads(machine.stdout)["choice"]["contradictions"] == [line.removeprefix("Contradiction: ")]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bank is timed without importing diffusers; the built-in generator takes the same code path."""
    path = tmp_path_factory.mktemp("bank") / "noise.npz"
    images = np.random.default_rng(0).integers(0, 256, (100, 8, 8, 1), dtype=np.uint8)
    np.savez(path, x=images, y=np.arange(100) % 10)
    return f"bank:{path}"


def test_seconds_limit_beta_by_a_timed_batch(bank: str) -> None:
    words = ("plan", "--dataset", "digits", "--protocol", "clean", "--clients", "4", "--grid", "0,2,4")
    words += ("--generator", bank)
    plan = json.loads(run_in_process(*words, "--max-seconds", "100000", "--format", "json").stdout)
    assert plan["beta"] == 4
    seconds = [row["seconds"] for row in plan["choice"]["grid"]]
    assert seconds[0] == 0 < seconds[1] <= seconds[2]
    assert json.loads(run_in_process(*words, "--max-seconds", "0", "--format", "json").stdout)["beta"] == 0


def test_plan_from_a_file_of_counts(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("cat,dog\n100,0\n50,50\n")
    plan = json.loads(run_in_process("plan", "--counts", str(path), "--beta", "2", "--format", "json").stdout)
    assert plan["dataset"] is None
    assert plan["protocol"] is None and plan["seed"] is None
    # √50 · (1 − 0) · 2 = 14.14…; the second client is balanced.
    assert [c["generate"] for c in plan["clients"]] == [[0, 14], [0, 0]]
    given = run_in_process("plan", "--counts", str(path), "--policy", "uniform", "--total", "5", "--format", "json")
    assert [c["generate"] for c in json.loads(given.stdout)["clients"]] == [[2, 1], [1, 1]]


def test_printed_rule_changes_plan_choice_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bool] = []
    draw_plan = "fedeas_flwr.report.plan_figures.draw_plan"
    monkeypatch.setattr(draw_plan, lambda path, *rest: drawn.append(path.strict_mean) or [])
    path = tmp_path / "counts.csv"
    path.write_text("a,b,c,d\n64,0,0,0\n")
    words = ("plan", "--counts", str(path), "--max-images", "256", "--grid", "10,20", "--figures", "f", "--format")
    ours, printed = (json.loads(run_in_process(*words, "json", *rule).stdout) for rule in ((), ("--printed-rule",)))
    # At β = 20 the budget is 80, above the only present class: Eq. 9 as printed fills that class too.
    assert [c["generate"] for c in (*ours["clients"], *printed["clients"])] == [[0, 80, 80, 80], [16, 80, 80, 80]]
    assert [row["total"] for plan in (ours, printed) for row in plan["choice"]["grid"]] == [120, 240, 120, 256]
    assert drawn == [True, False]


def test_max_images_zero_gives_beta_zero() -> None:
    assert json.loads(run_in_process("plan", "--max-images", "0", "--format", "json").stdout)["beta"] == 0


def test_estimate_adds_one_key_to_the_plan(bank: str) -> None:
    words = ("plan", "--dataset", "digits", "--protocol", "clean", "--clients", "4", "--estimate", "--generator", bank)
    plan = json.loads(run_in_process(*words, "--format", "json").stdout)
    assert list(plan)[-2:] == ["synthetic_fraction", "estimate"]
    found = plan["estimate"]
    assert found["generator"] == bank and found["seconds_a_batch"] > 0
    assert list(found) == ["generator", "device", "batch", "seconds_a_batch", "seconds", "bytes"]
    assert found["seconds"] == pytest.approx(-(-plan["total"] // 64) * found["seconds_a_batch"])
    assert plan["total"] * 64 < found["bytes"] < plan["total"] * 64 + 40 * 5000
    assert "images/s" in run_in_process(*words).stdout.splitlines()[-1]
