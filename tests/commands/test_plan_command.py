"""`fedeas plan`: exact output, the choice of β, no heavy imports."""

from __future__ import annotations

import io
import json
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from runners import fedeas, run_in_process, small

from fedeas_flwr.config_files import read_config
from fedeas_flwr.data import federated
from fedeas_flwr.data.datasets import Dataset, dataset_info
from fedeas_flwr.data.federated import local_data
from fedeas_flwr.data.node import Node
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.partition import CLASS_COUNTS
from fedeas_flwr.planning.run_plan import planned_counts, planned_images
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import POLICIES, images_to_generate
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]


COUNTS = str(ROOT / "tests" / "helpers" / "three_clients.csv")
QUICKSTART = str(ROOT / "conf" / "quickstart.toml")
PAPER = str(ROOT / "conf" / "cifar10-k20.toml")
"""The paper's main setting."""


def cpu_seconds_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended, independent of other load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_plan_prints_exactly_the_agreed_json(tmp_path: Path) -> None:
    began = cpu_seconds_of_children()
    done = fedeas("plan", PAPER, "--format", "json", FEDEAS_CACHE=str(tmp_path))  # nothing is cached
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


def test_plan_accepts_the_relative_run_dir_of_a_run(tmp_path: Path) -> None:
    for words in (["policy=none"], [QUICKSTART]):
        done = run_in_process("plan", *words, "run-dir=runs/mine", cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_plan_without_config_is_that_of_the_quickstart() -> None:
    bare, quickstart = run_in_process("plan"), run_in_process("plan", QUICKSTART)
    assert bare.stdout == quickstart.stdout and "893 samples" in bare.stdout
    assert (quickstart.stderr, bare.stderr) == (
        "",
        "no config given: all other keys are those of conf/quickstart.toml\n",
    )
    assert run_in_process("plan", "--counts", COUNTS).stderr == ""


CLASSIFIERS = [path for path in sorted((ROOT / "conf").glob("*.toml")) if read_config(path).task == "classifier"]


@pytest.mark.parametrize("words", [[], ["policy=waterfill"], ["policy=uniform", "total=1000"], ["printed-rule=true"]])
@pytest.mark.parametrize("conf", CLASSIFIERS, ids=lambda path: path.stem)
def test_plan_of_a_config_is_what_its_clients_compute(
    conf: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients count their own labels in their own data, here in any order and without pixels."""
    config = read_config(conf, words)
    info, labels = dataset_info(config.dataset), {}
    for part, counts in CLASS_COUNTS[config.dataset].items():
        labels[part] = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts))
    images = {part: np.broadcast_to(np.uint8(0), (len(y), *info.image_shape)) for part, y in labels.items()}
    pixels = [images["train"], labels["train"], images["test"], labels["test"]]
    dataset = Dataset(info.name, info.classes, info.mean, info.std, *pixels)
    monkeypatch.setattr(federated, "find_source", lambda *_: SimpleNamespace(origin=str(conf)))
    monkeypatch.setattr(federated, "open_dataset", lambda *_: dataset)
    nodes = [Node(client, config.clients, "", {}, "", None, True) for client in range(config.clients)]
    views = [ClientView(local_data(config, node).label_counts(node.part), config.policy_settings) for node in nodes]
    policy, shares = POLICIES[config.policy], dict.fromkeys(range(config.clients), EMPTY_SHARE)
    if isinstance(policy, MatchedPolicy):
        shares = policy.split_total(
            lambda question, at: {k: policy.reply(view, question, at)[0].tolist() for k, view in enumerate(views)},
            len(info.classes),
            config.policy_settings,
        )
    made = [images_to_generate(policy, replace(view, shares=[shares[k]]))[0].tolist() for k, view in enumerate(views)]
    plan = json.loads(run_in_process("plan", str(conf), *words, "--format", "json").stdout)
    assert [client["generate"] for client in plan["clients"]] == made
    assert plan["total"] == int(planned_images(config, planned_counts(config)).sum())
    assert (plan["beta"], plan["total"]) == (config.beta if "total=1000" not in words else None, np.sum(made))


def test_run_generates_what_its_plan_prints(digits_generator: Path, tmp_path: Path) -> None:
    words = ("clients=3", "beta=2", "alpha=0.3")
    plan = json.loads(run_in_process("plan", QUICKSTART, *words, "--format", "json").stdout)
    cheap = ("rounds=1", "local-epochs=1", "participation=1.0", "sampler-steps=2", "generation-batch=16")
    done = run_in_process("run", QUICKSTART, *words, *cheap, "backend=inline", f"run-dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert RunDirectory(tmp_path / "run").summary()["total_generated"] == plan["total"] > 0


def test_plan_counts_shared_images_once() -> None:
    words = ("plan", QUICKSTART, "shared-images=by-class")
    plan = json.loads(run_in_process(*words, "--format", "json").stdout)
    most = np.max([client["generate"] for client in plan["clients"]], axis=0)
    assert (plan["total"], plan["shared_total"]) == (893, most.sum())
    assert f"{most.sum()} images are generated for all clients together" in run_in_process(*words).stdout


@pytest.mark.parametrize("words", [["--beta", "3", "--seed", "7"], ["beta=3", "partition-seed=7"]])
def test_keys_and_options_override_the_config(words: list[str]) -> None:
    plan = json.loads(run_in_process("plan", PAPER, *words, "--format", "json").stdout)
    assert (plan["beta"], plan["seed"], plan["protocol"]) == (3, 7, "paper")


@pytest.mark.parametrize(
    ("policy", "total"), [("uniform", 13_437), ("missing-only", 13_437), ("waterfill", 13_437), ("none", 0)]
)
def test_plan_of_matched_policies_spends_the_total_of_fedeas(policy: str, total: int) -> None:
    plan = json.loads(run_in_process("plan", PAPER, "--policy", policy, "--format", "json").stdout)
    assert plan["total"] == total
    assert plan["clients"][0]["budget"] is None


def test_plan_of_copies_generates_nothing() -> None:
    plan = json.loads(run_in_process("plan", PAPER, "--policy", "oversample", "--format", "json").stdout)
    assert (plan["total"], plan["repeated"], plan["synthetic_fraction"]) == (0, 3_528, 0)
    assert sum(sum(client["repeat"]) for client in plan["clients"]) == 3_528
    assert plan["clients"][0]["budget"] == 130


PAPERS_CHOICE = ("plan", PAPER, "--min-removed", "0.5", "--max-synthetic", "0.25", "--grid")


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
    words = ("plan", PAPER, "--min-removed", "0.5", "--max-images", "5000", "--figures", "pictures")
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


def test_plan_and_run_name_a_class_that_no_client_has(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("cat,dog,ship\n0,2,0\n0,4,1\n")
    (line,) = run_in_process("plan", "--counts", str(path)).stderr.splitlines()
    assert "'cat'" in line and "ship" not in line and str(path) in line
    np.savez(tmp_path / "a.npz", x=np.zeros((90, 8, 8, 1), np.uint8), y=np.repeat([1, 2, 3], 30))
    shown = io.StringIO()
    prepare(small(tmp_path / "run", dataset=f"own:{tmp_path}/a.npz", policy="none", clients=2), Console(file=shown))
    (line,) = [line for line in shown.getvalue().splitlines() if "warning" in line]
    assert "class '0'" in line and f"own:{tmp_path}/a.npz" in line


def test_plan_of_counts_keeps_the_names_of_clients(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("client_id,cat,dog,bird\nAachen,120,3,0\nBonn,0,80,62\n")
    plan = json.loads(run_in_process("plan", "--counts", str(path), "--format", "json").stdout)
    assert [(client["name"], client["samples"]) for client in plan["clients"]] == [("Aachen", 123), ("Bonn", 142)]
    assert "  Bonn      142 " in run_in_process("plan", "--counts", str(path)).stdout
    path.write_text("ward,cat,dog\n0,120,3\n1,0,80\n")
    assert run_in_process("plan", "--counts", str(path)).returncode == 2
    named = run_in_process("plan", "--counts", str(path), "--id-column", "ward", "--format", "json")
    assert [client["samples"] for client in json.loads(named.stdout)["clients"]] == [123, 80]


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
