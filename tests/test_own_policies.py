"""Policies by import path: the plan is what clients do, and a wrong one is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployments import Lab
from flwr.clientapp import ClientApp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from label_counts import betas, tables
from runners import CHEAP, black_bank, client_state, finish, quick, run_in_process, small, weights
from users_policies import ByBeta, Nameless

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.config import parse_config
from fedeas_flwr.config_keys import identity
from fedeas_flwr.doctor.inputs import check_policy as policy_findings
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView, PolicySettings, Share
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.own import FunctionPolicy, check_policy, find_policy, load_policy, matched, probe_counts
from fedeas_flwr.policies.registry import POLICIES, allocate, images_to_generate, split_over_rows
from fedeas_flwr.runs.checkpoints import Checkpoint

QUICKSTART = str(Path(__file__).parents[1] / "conf" / "quickstart.toml")
EXAMPLE = Path(__file__).parents[1] / "examples" / "own-policy"
OWN = ["users_policies:up_to", "users_policies:by_beta", "users_policies:same_budget", "users_policies:TwoParts"]
KEYS: dict[str, Any] = {**CHEAP, "clients": 2, "participation": 1.0, "rounds": 2, "local_epochs": 1, "beta": 4.0}


# ------------------------------------------------------------------------------------- properties of every policy


@pytest.mark.parametrize("name", [*POLICIES, *OWN])
@settings(max_examples=30)
@given(counts=tables(clients=4), beta=betas, random=st.randoms(use_true_random=False))
def test_every_policy_keeps_its_promises(name: str, counts: IntArray, beta: float, random: Any) -> None:
    policy, keys = find_policy(name), PolicySettings(beta)
    view = ClientView(counts, keys, round=policy.parts[-1])
    is_matched = isinstance(policy, MatchedPolicy)
    try:
        shares = split_over_rows(policy, view)
    except ValueError:  # nothing to scale, or no class lacks images
        assume(False)
    total = images_to_generate(policy, ClientView(counts, keys, shares, view.round))
    assert total.min() >= 0 and total.shape == counts.shape and total[~counts.any(axis=1)].sum() == 0

    # A node sees its own row only, and the server accepts what it reports.
    for k, row in enumerate(total):
        share = shares[k] if is_matched else EMPTY_SHARE
        alone = ClientView(counts[k : k + 1], keys, [share], view.round)
        assert images_to_generate(policy, alone)[0].tolist() == row.tolist()
        limit = policy.max_total(int(counts[k].sum()), counts.shape[1], keys, share)
        assert row.sum() <= limit or name in ("users_policies:up_to", "users_policies:by_beta")  # theirs is the default

    if is_matched:
        assert total.sum() == allocate(counts, "fedeas", beta=beta).sum()
    else:
        order = random.sample(range(len(counts)), len(counts))
        assert np.array_equal(allocate(counts[order], policy, beta=beta), total[order])


# ---------------------------------------------------------------------------------------------- plan = what clients do


@pytest.mark.parametrize("name", OWN)
def test_clients_generate_what_the_plan_says(tmp_path: Path, digits_generator: Path, name: str) -> None:
    run = finish(config := quick(tmp_path / "r", **{**KEYS, "rounds": 3}, policy=name))
    planned = planned_allocation(config, planned_counts(config))
    assert run.summary()["total_generated"] == planned.sum() > 0
    assert [client_state(run, client, 3).generate for client in range(2)] == [tuple(row) for row in planned.tolist()]


def test_built_in_policy_is_one_class_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but an entry in `POLICIES` makes a class known to configs, plans, clients and the server's check."""
    monkeypatch.setitem(POLICIES, "nameless", load_policy("users_policies:up_to", "most=3"))
    bank = black_bank(tmp_path / "bank.npz", [20] * 10)
    run = finish(config := quick(tmp_path / "r", **KEYS, policy="nameless", generator=bank))
    expected = np.maximum(3 - planned_counts(config), 0).sum()
    words = [f"{key.replace('_', '-')}={value}" for key, value in KEYS.items() if key != "beta"]
    plan = json.loads(run_in_process("plan", "policy=nameless", *words, "--format", "json").stdout)
    assert run.summary()["total_generated"] == plan["total"] == expected > 0
    find_policy.cache_clear()


def test_arguments_reach_the_policy() -> None:
    counts = np.array([[3, 0, 9]])
    assert allocate(counts, find_policy("users_policies:up_to", "most=7")).tolist() == [[4, 7, 0]]
    assert allocate(counts, find_policy("users_policies:by_beta"), beta=3).tolist() == [[0, 3, 0]]
    with pytest.raises(ValueError, match=r"total=5: policy 'users_policies:up_to' sets its own total"):
        allocate(counts, find_policy("users_policies:up_to"), total=5)
    assert allocate(counts, find_policy("users_policies:same_budget"), total=5).sum() == 5


def test_function_is_not_called_for_a_client_without_images() -> None:
    view = ClientView(np.array([[0, 0], [1, 2]]), PolicySettings(6.0))
    assert FunctionPolicy(lambda counts: counts + 5).plan(view).tolist() == [[0, 0], [6, 7]]


@pytest.mark.parametrize("parts", [(), (2, 3), (1, 3, 2), (1, 1)])
def test_parts_of_a_policy_ascend_from_round_1(parts: tuple[int, ...]) -> None:
    policy = FunctionPolicy(lambda counts: counts + 5, "plus five")
    policy.max_total = lambda samples, *_: samples + 50  # type: ignore[assignment, method-assign]
    check_policy(policy, probe_counts(10), PolicySettings(6.0))
    policy.parts = parts
    with pytest.raises(ConfigError, match=r"'plus five' has parts = .*: must be ascending rounds from 1"):
        check_policy(policy, probe_counts(10), PolicySettings(6.0))


def test_matched_policy_without_images_cannot_spend_a_total() -> None:
    policy = matched(lambda counts: 0 * counts)
    assert policy.split_total(lambda *_: {3: (0, 0)}, 10, PolicySettings(6.0)) == {3: Share()}
    with pytest.raises(ConfigError, match="plans no image for any client, so 9 cannot be spent"):
        policy.split_total(lambda *_: {3: (9, 0)}, 10, PolicySettings(6.0))


def test_plan_rejects_what_a_run_rejects() -> None:
    done = run_in_process("plan", "policy=users_policies:random", "clients=4")
    assert done.returncode == 2 and "users_policies:random" in done.stderr and "deterministic" in done.stderr


def test_library_takes_a_function() -> None:
    counts = np.array([[3, 0, 9], [0, 0, 0]])
    assert allocate(counts, lambda row: (4 - row).clip(0)).tolist() == [[1, 4, 0], [0, 0, 0]]
    assert allocate(counts, lambda row, beta: row * 0 + int(beta), beta=3).tolist() == [[3, 3, 3], [0, 0, 0]]
    with pytest.raises(ValueError, match="policy=3: must be"):
        allocate(counts, 3)  # type: ignore[arg-type]


def test_second_part_extends_the_first_and_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {**KEYS, "policy": "users_policies:TwoParts", "generator": black_bank(tmp_path / "b.npz", [20] * 10)}
    run = finish(config := quick(tmp_path / "r", **{**keys, "rounds": 4}))
    counts = planned_counts(config)
    first, second = (np.maximum(level - counts, 0).sum() for level in (2, 4))
    assert [record["generated"] for record in run.rounds()] == [first, first, second, second] and first < second
    assert planned_allocation(config, counts).sum() == second
    assert planned_allocation(config.with_changes(rounds=2), counts).sum() == first

    def interrupt_round_3(self: TrainingRounds, state: Checkpoint) -> Any:
        if state.round == 2:
            raise KeyboardInterrupt
        return train_round(self, state)

    train_round = TrainingRounds.train_round
    monkeypatch.setattr(TrainingRounds, "train_round", interrupt_round_3)
    stopped = quick(tmp_path / "s", **{**keys, "rounds": 4})
    with pytest.raises(KeyboardInterrupt):
        finish(stopped)
    monkeypatch.setattr(TrainingRounds, "train_round", train_round)
    resumed = finish(stopped.with_changes(resume=True))
    assert [record["generated"] for record in resumed.rounds()] == [first, first, second, second]
    assert weights(resumed) == weights(run)


@pytest.mark.slow
def test_sweep_and_report_show_it_next_to_the_others_at_the_same_total(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    keys = ["clients=2", "participation=1.0", "rounds=1", "backend=inline", "sampler-steps=2"]
    grid = "--grid=policy=fedeas,rules:same_budget"
    swept = run_in_process("sweep", "own-policy.toml", *keys, grid, f"--out={tmp_path}", cwd=EXAMPLE)
    assert swept.returncode == 0, swept.stderr
    found = json.loads(run_in_process("report", str(tmp_path), "--format", "json").stdout)
    images = {group["name"]: group["images"] for group in found["groups"]}
    assert images["same_budget"] == images["FedEAS"] > 0


def test_page_shows_the_examples_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "own-policy.md").read_text()
    assert f"```python\n{(EXAMPLE / 'rules.py').read_text()}```" in page


@pytest.mark.slow
@pytest.mark.flower
def test_example_generates_the_same_images_in_plan_ray_inline_and_deployment(
    tmp_path: Path, digits_generator: Path, fresh_images: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLE)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    keys = {**KEYS, "policy": "rules:same_budget", "policy_args": "quantile=0.9"}
    words = [f"{key.replace('_', '-')}={value}" for key, value in keys.items()]
    plan = json.loads(run_in_process("plan", *words, "--format", "json").stdout)
    fresh_images("inline")
    inline = finish(small(tmp_path / "inline", **keys))
    fresh_images("ray")
    ray = finish(small(tmp_path / "ray", **keys, backend="ray", actors=2))
    path = f"{EXAMPLE}:{Path(__file__).parents[1]}"
    with Lab(tmp_path, 2, digits_generator) as lab:
        monkeypatch.setenv("PYTHONPATH", path)
        lab.restart_superlink()
        lab.register()
        for number in range(2):
            lab.start_node(number)
        deployed = lab.follow(lab.submit(**keys, min_replies=1.0))
    totals = [run.summary()["total_generated"] for run in (inline, ray, deployed)]
    assert totals == [plan["total"]] * 3 and plan["total"] > 0
    planned = [tuple(client["generate"]) for client in plan["clients"]]
    assert [client_state(run, c, 2).generate for run in (inline, ray) for c in range(2)] == planned * 2
    assert weights(inline) == weights(ray) == weights(deployed)


# ------------------------------------------------------------------------------------------------------- wrong ones

WRONG = {
    "no_such_module:rule": "cannot be imported (ModuleNotFoundError",
    "users_policies:no_such_name": "cannot be imported (AttributeError",
    "users_policies:not_a_policy": "is of type float: must be a function of a client's counts, or a Policy",
    "users_policies:WithoutPlan": "is of type WithoutPlan: must be",
    "users_policies:RaisesWhenBuilt": "raised RuntimeError: not today",
    "users_policies:without_counts": "takes no argument",
    "users_policies:negative": "must be an integer from 0",
    "users_policies:fractional": "must be an integer from 0",
    "users_policies:no_numbers": "must be integers",
    "users_policies:too_short": "returned shape (9,): must be (10,)",
    "users_policies:returns_none": "returned None: must be (10,)",
    "users_policies:LatePart": "rounds = 20: must be at least 30",
    "users_policies:raises": "raised ZeroDivisionError: no budget (users_policies.py, line ",
    "users_policies:random": "must be deterministic",
    "users_policies:UsesOthers": "by other clients' counts",
    "users_policies:too_many": "but its max_total is",
    "users_policies:MaxTotalRaises": "raised KeyError: 'most'",
    "users_policies:MissesTotal": "plans 5 images in total: must be 360",
    "users_policies:NoParts": "raised TypeError",
    "users_policies:WrongFirstPart": "must be an integer from 0",
}


@pytest.mark.parametrize("path", WRONG)
def test_wrong_policy_is_one_line_and_nothing_starts(tmp_path: Path, path: str) -> None:
    found = run_in_process(
        "run", QUICKSTART, f"policy={path}", "clients=3", "backend=inline", f"run-dir={tmp_path / 'r'}"
    )
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert "policy" in line and path.split(":")[1].lower() in line.lower().replace("-", "") and WRONG[path] in line
    assert not (tmp_path / "r").exists()


def test_policy_without_a_name_has_its_path_as_name() -> None:
    policy = find_policy("users_policies:Nameless")
    check_policy(policy, probe_counts(10), PolicySettings(6.0))
    assert policy.name == "users_policies:Nameless"
    assert not allocate([[3, 0, 1]], Nameless(), beta=2).any()


def test_policy_class_that_declares_no_settings_gets_them_all(tmp_path: Path) -> None:
    assert allocate([[3, 0, 1]], ByBeta(), beta=7).tolist() == [[0, 7, 0]]
    config = quick(tmp_path, policy="users_policies:ByBeta", beta=7, clients=4)
    counts = planned_counts(config)
    assert np.array_equal(planned_allocation(config, counts), 7 * (counts == 0))
    with pytest.raises(ValueError, match="beta=None"):
        allocate([[3, 0, 1]], ByBeta())


def test_doctor_checks_the_policy() -> None:
    wrong = parse_config({"policy": "users_policies:negative", "clients": 3})
    (finding,) = policy_findings(wrong)
    assert finding.state == "problem" and "must be an integer" in finding.text
    assert [found.state for found in policy_findings(wrong.with_changes(policy="users_policies:up_to"))] == ["ok"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("least=3", "policy-args: 'users_policies:up_to' has no argument 'least'; it has most"),
        ("beta=3", "has no argument 'beta'; it has most"),
        ("3", "must be NAME=VALUE"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_policy("users_policies:up_to", arguments)
    assert reason in str(raised.value)


def test_node_without_the_package_answers_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grid(app: ClientApp, clients: int, run_config: Mapping[str, Any], *args: Any, **more: Any) -> InlineGrid:
        return InlineGrid(app, clients, {**run_config, "policy": "not_installed.rules:mine"}, *args, **more)

    monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", grid)
    with pytest.raises(RunError, match=r"client 0: .*'not_installed\.rules:mine' cannot be imported \(ModuleNotFound"):
        finish(quick(tmp_path / "r", **KEYS, policy="users_policies:up_to"))


def test_record_is_readable_without_the_package() -> None:
    config = parse_config({"policy": "gone_package.rules:mine", "policy-args": "quantile=0.5", "total": 7})
    assert config.generates and {"policy-args", "beta", "total"} <= identity(config).keys()


def test_built_in_policies_pass_the_same_check() -> None:
    for policy in POLICIES.values():
        check_policy(policy, probe_counts(10), PolicySettings(6.0))
