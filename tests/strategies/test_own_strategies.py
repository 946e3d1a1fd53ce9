"""A user's strategies, named by import path: they train, resume and fail like the built-in ones."""

from __future__ import annotations

import ast
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import users_strategies
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from rich.console import Console
from runners import finish, quick, run_in_process, weights, with_fixed_noise_key

from fedeas_flwr.client_app import app as client_app
from fedeas_flwr.commands.run import run_name
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.config import STRATEGIES, BuiltinStrategy, parse_config
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.launch.prepare import prepare
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.notes import ending_notes
from fedeas_flwr.runs.metrics import LOST, UNSAVED
from fedeas_flwr.strategies.flower import unsaved_attributes
from fedeas_flwr.strategies.registry import build_strategy, client_part, table_rows

PACKAGE = Path(__file__).parents[2] / "fedeas_flwr"
TINY = {"clients": 3, "participation": 1.0, "batch_size": 128, "policy": "none"}
HIS = "users_strategies"


@pytest.fixture(autouse=True)
def import_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")


@pytest.mark.parametrize(
    ("path", "arguments", "builtin", "keys"),
    [
        ("flwr.serverapp.strategy:FedAvgM", "server_momentum=0.9", "fedavgm", {}),
        ("flwr.serverapp.strategy:QFedAvg", "q=0.1", "qfedavg", {}),
        (f"{HIS}:adam", "eta=0.1", "fedadam", {"participation": 0.34}),  # one client per round
        (f"{HIS}:PROXIMAL", "mu=0.5", "fedprox", {"fedprox_mu": 0.5}),
    ],
)
def test_own_strategy_gives_the_weights_of_the_same_builtin(
    tmp_path: Path, path: str, arguments: str, builtin: str, keys: dict[str, Any]
) -> None:
    keys = {**TINY, "rounds": 2, **keys}
    own = finish(prepare(quick(tmp_path / "own", strategy=path, strategy_args=arguments, **keys), silent()))
    assert weights(own) == weights(finish(quick(tmp_path / "builtin", strategy=builtin, **keys)))


def silent() -> Console:
    return Console(file=io.StringIO())


def test_own_strategy_with_dp_gives_the_weights_of_the_builtin(tmp_path: Path) -> None:
    keys = {**TINY, "rounds": 2, "dp": "server-fixed"}
    own = finish(quick(with_fixed_noise_key(tmp_path / "own"), strategy=f"{HIS}:OwnAdam", **keys))
    assert weights(own) == weights(
        finish(quick(with_fixed_noise_key(tmp_path / "builtin"), strategy="fedadam", **keys))
    )


@pytest.mark.parametrize(
    ("name", "dp", "unsaved"),
    [
        ("SlowStartWithState", "none", []),
        ("SlowStartWithState", "server-adaptive", []),  # besides the wrapper's state
        ("OwnAdam", "none", []),  # FedAdam's state is restored, and the class adds none
        ("SlowStart", "none", ["rounds", "sent"]),
        ("SlowStart", "server-adaptive", ["rounds", "sent"]),
    ],
)
def test_resume_restores_known_state_and_records_other(tmp_path: Path, name: str, dp: str, unsaved: list[str]) -> None:
    keys = {**TINY, "strategy": f"{HIS}:{name}", "dp": dp, "dp_noise_multiplier": 0.1}
    whole = finish(quick(with_fixed_noise_key(tmp_path / "whole"), rounds=3, **keys))
    folder = with_fixed_noise_key(tmp_path / "parts")
    finish(quick(folder, rounds=2, **keys))
    resumed = finish(quick(folder, rounds=3, resume=True, **keys))
    assert (weights(whole) == weights(resumed)) is not unsaved
    assert [record.get(UNSAVED, []) for record in resumed.rounds()] == [unsaved] * 3
    assert [record.get(LOST, []) for record in resumed.rounds()] == [[], [], unsaved]
    text = (folder / "flower.log").read_text()
    assert text.count("changed rounds, sent") == 2 * bool(unsaved)  # each start warns once
    assert text.count("resumed without rounds, sent") == bool(unsaved)
    notes = ending_notes(group_runs([resumed])[0])
    assert len(notes) == bool(unsaved) and all("in round 3, rounds, sent" in note for note in notes)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"strategy": "no_such_package:build"}, "strategy: 'no_such_package:build' cannot be imported (ModuleNotFound"),
        ({"strategy": f"{HIS}:no_such_name"}, f"strategy: '{HIS}:no_such_name' cannot be imported (AttributeError"),
        ({"strategy": f"{HIS}:NUMBER"}, f"strategy: '{HIS}:NUMBER' is 5: must be a Flower Strategy, a function that"),
        (
            {"strategy": "collections:OrderedDict"},
            "is <class 'collections.OrderedDict'>: must be a Flower Strategy",
        ),
        ({"strategy": "math:hypot"}, "strategy: 'math:hypot' is <built-in function hypot>: must be"),
        ({"strategy": f"{HIS}:returns_number"}, f"'{HIS}:returns_number' returned 5: must return a Flower Strategy"),
        ({"strategy": f"{HIS}:fails"}, f"strategy: '{HIS}:fails' raised RuntimeError: first line no luck"),
        ({"strategy": f"{HIS}:fails", "strategy-args": "reason=rain"}, "raised RuntimeError: first line rain"),
        ({"strategy": f"{HIS}:adam", "strategy-args": "rate=1"}, "has no argument 'rate'; it has eta"),
        ({"strategy": f"{HIS}:adam", "strategy-args": "eta=a"}, "strategy-args: eta = 'a': must be a finite number"),
        ({"strategy": f"{HIS}:SlowStart", "strategy-args": "other=1"}, "raised TypeError"),
        ({"strategy": f"{HIS}:WRONG_CLIENT"}, "has 5 as client part: must be a ClientAlgorithm"),
        ({"strategy": f"{HIS}:UNCALLABLE_CLIENT"}, "client=<class 'dict'>"),
        ({"strategy": f"{HIS}:WithExtra", "dp": "client-fixed"}, "dp = 'client-fixed' does not cover all that"),
    ],
)
def test_bad_own_strategy_is_one_line_and_nothing_starts(tmp_path: Path, keys: dict[str, Any], line: str) -> None:
    config = parse_config({"policy": "none", "clients": 3, "run-dir": str(tmp_path / "run"), **keys})
    with pytest.raises(ConfigError) as refused:
        prepare(config, silent())
    assert line in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_command_with_a_bad_own_strategy_exits_with_two(tmp_path: Path) -> None:
    done = run_in_process("run", os.devnull, "clients=3", "strategy=no_such_package:build", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: strategy: 'no_such_package:build' cannot be imported")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_failed_run_names_the_users_line_and_where_details_are(tmp_path: Path) -> None:
    words = ["policy=none", "clients=3", "rounds=1", "backend=inline", "device=cpu", "run-dir=r"]
    done = run_in_process("run", os.devnull, f"strategy={HIS}:FailsInRound", *words, cwd=tmp_path)
    assert done.returncode == 1
    error, details = done.stderr.splitlines()
    line = users_strategies.FailsInRound.aggregate_train.__code__.co_firstlineno + 1
    assert error == f"error: RuntimeError: my bug (users_strategies.py, line {line})"
    assert details == f"details: {tmp_path / 'r' / 'flower.log'}"
    assert "Traceback" in (tmp_path / "r" / "flower.log").read_text()


def test_node_without_the_package_answers_in_one_line(tmp_path: Path) -> None:
    config = quick(tmp_path, strategy="no_such_package:build", policy="none").to_user_dict()
    (reply,) = InlineGrid(client_app, 4, config).send_and_receive([messages.build_query(2, "label-counts")])
    assert reply.has_error()
    assert "strategy: 'no_such_package:build' cannot be imported" in messages.failure_reason(reply)


def test_builtin_strategy_is_one_file_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "proximal", BuiltinStrategy(f"{HIS}:PROXIMAL", "FedProx again", "mu=0.5"))
    config = parse_config({"strategy": "proximal", "clients": 3})
    build_strategy(config)
    assert client_part(config).objective.mu == 0.5  # type: ignore[attr-defined]
    assert table_rows()[-1] == ("proximal", "FedProx again", "mu=0.5", "nothing", "2")


def test_run_is_named_by_the_last_part_of_an_import_path() -> None:
    config = parse_config({"clients": 10, "policy": "none", "strategy": "mine.algo:Slow.build", "seed": 2})
    assert run_name(config) == "digits-k10-a0.1-none-build-s2"


def test_no_module_but_its_own_names_a_strategy() -> None:
    """The table in config.py has the names, and the paper's tables."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if module == "config" or module.startswith("reproduce/"):
            continue
        names = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        found += [(module, name) for name in names & STRATEGIES.keys() if module != f"strategies/{name}"]
    assert found == []


def test_changes_in_place_are_noticed() -> None:
    values = {
        "array": np.zeros(3000),
        "tensor": torch.zeros(3000),
        "parameter": torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        "record": ArrayRecord([np.zeros(3000)]),
        "nested": {"a": [np.zeros(3000), 1]},
        "number": 1,
    }
    strategy = flower.FedAvg()
    strategy.__class__ = type("Own", (flower.FedAvg,), {})
    vars(strategy).update(values)
    before = unsaved_attributes(strategy)
    assert unsaved_attributes(strategy) == before
    values["array"][1500] = values["tensor"][1500] = values["nested"]["a"][0][1500] = 1  # type: ignore[index]
    values["parameter"].data[1] = 1  # type: ignore[attr-defined]
    values["record"]["0"] = Array(np.ones(3000))  # type: ignore[index]
    strategy.number = 2  # type: ignore[attr-defined]
    after = unsaved_attributes(strategy)
    assert {name for name in after if after[name] != before[name]} == values.keys()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"2.weight": np.nan}, "holds NaN"),
        ({"2.weight": 0.0}, "is float32[1]"),
        ({"2.weight": None}, "a model without 2.weight"),
    ],
)
def test_wrong_model_of_a_strategy_names_it_and_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], line: str
) -> None:
    def aggregate(self: Any, number: int, replies: Any) -> Any:
        record, metrics = flower.FedAvg.aggregate_train(self, number, replies)
        assert record is not None
        for key, value in change.items():
            array = record.pop(key).numpy()
            if value is not None:
                record[key] = Array(np.full(array.shape if value else 1, value, array.dtype))
        return record, metrics

    monkeypatch.setattr("users_strategies.OwnAverage.aggregate_train", aggregate)
    keys = {**TINY, "strategy": f"{HIS}:OwnAverage", "model": "users_models:with_dropout"}
    with pytest.raises(RunError, match=r"^round 1: strategy = 'users_strategies:OwnAverage' returned a ") as failed:
        finish(quick(tmp_path, **keys))
    assert line in str(failed.value)
