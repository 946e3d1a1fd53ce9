"""Callbacks by name and import path: what is refused, when they are called, and what their failure does."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import users_callbacks
from rich.console import Console
from runners import finish, quick, run_in_process, weights

from fedeas_flwr.callbacks.registry import BUILTIN, open_callbacks
from fedeas_flwr.commands import run as run_command
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.import_path import import_object
from fedeas_flwr.runs.listing import export


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "tensorbord",
            "callbacks = 'tensorbord': must be tensorboard, wandb, mlflow, early-stop, metrics or .* 'tensor",
        ),
        (
            "early-stop(target=1",
            "callbacks = 'early-stop(target=1': must be names or import paths, separated by commas",
        ),
        ("early-stop(target=1),", "callbacks = 'early-stop(target=1),': must be names"),
        ("no_such_module:Notify", "callbacks: 'no_such_module:Notify' cannot be imported (ModuleNotFoundError: "),
        ("users_callbacks:Nothing", "callbacks: 'users_callbacks:Nothing' cannot be imported (AttributeError: "),
        (
            "users_callbacks:number",
            "callbacks: 'users_callbacks:number' raised TypeError: 'int' object is not callable",
        ),
        ("users_callbacks:broken", "callbacks: 'users_callbacks:broken' raised ArithmeticError: out of luck"),
        (
            "builtins:dict",
            "callbacks: 'builtins:dict' returned {}, without any of on_run_start, on_round_end, on_run_end",
        ),
        ("users_callbacks:StopAt", "callbacks: 'users_callbacks:StopAt' needs last; give it in callbacks"),
        ("users_callbacks:StopAt(first=1)", "callbacks: 'users_callbacks:StopAt' has no argument 'first'; it has last"),
        ("early-stop(0.8)", "callbacks: arguments of early-stop = '0.8': must be NAME=VALUE"),
        (
            "early-stop(target=0.9, patience=2)",
            "callbacks: arguments of early-stop = 'target=0.9, patience=2': must be NAME=VALUE, separated by spaces",
        ),
        ("early-stop", "callbacks = 'early-stop': needs target, patience or both"),
        ("early-stop(target=80)", "callbacks = 'early-stop(target=80)': target must be 0 < x ≤ 1"),
        ("early-stop(patience=0)", "callbacks = 'early-stop(patience=0)': patience must be a whole number ≥ 1"),
        ("metrics(port=70000)", "callbacks = 'metrics(port=70000)': port must be 0 ≤ n ≤ 65,535"),
    ],
)
def test_bad_callbacks_are_one_line(value: str, line: str) -> None:
    pattern = "^" + ".*".join(map(re.escape, line.split(".*")))
    with pytest.raises(ConfigError, match=pattern) as raised:
        open_callbacks(value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_one_line_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedeas_flwr.common.import_path.find_spec", lambda package: None)
    line = rf"^callbacks = '{name}': needs the package {name}, pip install 'fedeas-flwr\[{name}\]'$"
    with pytest.raises(ConfigError, match=line):
        open_callbacks(name)


def test_builtin_callbacks_exist_and_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(callable(import_object(path, "callbacks")) for path in BUILTIN.values())
    monkeypatch.setattr("fedeas_flwr.common.import_path.find_spec", lambda package: object())
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    assert open_callbacks("").names == []
    opened = open_callbacks(" tensorboard,early-stop( target=0.8 patience=3 ) , wandb(mode=offline),mlflow(uri=/m)")
    assert opened.names == ["tensorboard", "early-stop", "wandb", "mlflow"] and opened.need_network == []
    online = open_callbacks("wandb, mlflow(uri=http://localhost:5000), metrics")
    assert online.need_network == ["wandb", "mlflow", "metrics"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert open_callbacks("wandb").need_network == []
    with pytest.raises(ConfigError, match=r"^callbacks = 'mlflow\(uri=\)': uri, or MLFLOW_TRACKING_URI, must be"):
        open_callbacks("mlflow")
    with pytest.raises(ConfigError, match=r"^callbacks = 'wandb\(mode=of\)': mode must be online, offline, disabled$"):
        open_callbacks("wandb(mode=of)")


def test_a_bad_callback_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "conf.toml").write_text('clients = 2\npolicy = "none"\nbackend = "inline"\n')
    done = run_in_process("run", "conf.toml", "callbacks=users_callbacks:broken", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    raised = "error: callbacks: 'users_callbacks:broken' raised ArithmeticError: out of luck"
    assert done.stderr == f"{raised} (users_callbacks.py, line {users_callbacks.broken.__code__.co_firstlineno + 1})\n"


def test_callbacks_get_config_records_and_summary(tmp_path: Path) -> None:
    users_callbacks.CALLS.clear()
    config = quick(tmp_path / "r", policy="none", rounds=2, callbacks="users_callbacks:Notify")
    run = finish(config)
    (_, (seen, before)), *rounds, (_, summary), closed = users_callbacks.CALLS
    assert [kind for kind, _ in users_callbacks.CALLS] == ["start", "round", "round", "end", "close"]
    assert seen.run_dir == str(run.path) and seen.clients == 4 and before == []
    assert [record for _, record in rounds] == run.rounds() and summary == run.summary() and closed[1] is None

    users_callbacks.CALLS.clear()
    finish(config.with_changes(resume=True, rounds=3))
    (_, (seen, before)), *rest = users_callbacks.CALLS
    assert seen.resume and before == run.rounds()[:2]
    assert rest[0] == ("round", run.rounds()[2]) and len(rest) == 3


def test_a_failing_callback_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = finish(quick(tmp_path / "plain", policy="none", rounds=2))
    run = finish(quick(tmp_path / "failing", policy="none", rounds=2, callbacks="users_callbacks:Failing"))
    assert weights(run) == weights(plain) and run.status() == ("finished", "")
    logged = [line for line in (run.path / "flower.log").read_text().splitlines() if "WARNING" in line]
    failure = "callback users_callbacks:Failing failed in on_run_start: ConnectionError: no server"
    failure += f" (users_callbacks.py, line {users_callbacks.Failing.on_run_start.__code__.co_firstlineno + 1})"
    assert len(logged) == 1 and logged[0].endswith(failure)
    shown = io.StringIO()
    monkeypatch.setattr(run_command, "console", Console(file=shown, width=60))
    run_command.print_summary(run)
    assert shown.getvalue().splitlines()[-1] == f"warning: {failure}"


def test_callbacks_are_closed_if_the_run_fails(tmp_path: Path) -> None:
    users_callbacks.CALLS.clear()
    config = quick(tmp_path / "r", policy="none", clients=4, strategy="krum", callbacks="users_callbacks:Notify")
    with pytest.raises(Exception, match="krum"):
        finish(config)
    assert [kind for kind, _ in users_callbacks.CALLS] == ["close"]


def test_an_exported_record_names_no_callback(tmp_path: Path) -> None:
    run = finish(quick(tmp_path / "r", policy="none", rounds=2, callbacks="users_callbacks:StopAt(last=1)"))
    run.save_summary(run.summary() | {"stopped": "mypackage:Stop: see /home/me/why"})
    export(run, tmp_path / "record")
    record = type(run)(tmp_path / "record")
    assert record.config().callbacks == "" and record.stop_reason() == "mypackage:Stop: see …"


def test_the_guides_own_callback_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
    (tmp_path / "track.py").write_text(guide.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CHAT_WEBHOOK", "http://localhost/hook")
    sent: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: sent.append(request))
    callbacks = open_callbacks("track:Notify(above=0.5)")
    assert callbacks.need_network == ["track:Notify"]
    for last_20 in (0.4, 0.75):
        callbacks.end_run({"last_20": last_20})
    assert [request.data for request in sent] == [b'{"text": "finished with 75.0 %"}'] and callbacks.warnings == {}
    assert all(f"| `{name}` |" in guide for name in BUILTIN)
