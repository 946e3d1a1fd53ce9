"""The campaign notices a silent change, a traceback and a process that is left running."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import campaign
import psutil
import pytest
from campaign import Campaign, enter
from injections import means, wrong_value

from fedeas_flwr.commands import app
from fedeas_flwr.common import checked
from fedeas_flwr.config import KEYS


def enter_without_digests(*given: Any) -> None:
    checked.unseal = lambda record, owner: {key: record[key] for key in record if key != "digest"}
    enter(*given)


def enter_and_raise(*given: Any) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    app.main = broken
    enter(*given)


def enter_and_leave_a_process(words: list[str], folder: Path, environment: dict[str, str]) -> None:
    subprocess.Popen(["sleep", "600"], env={**os.environ, **environment}, start_new_session=True)
    enter(words, folder, environment)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(54, tmp_path_factory.mktemp("campaign"))


def test_silent_change_is_noticed(trials: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trials.run("files", 0)
    assert (found.place, found.outcome) == ("checkpoint", "survived")
    monkeypatch.setattr(trials, "enter", enter_without_digests)
    again = trials.run("files", 0)
    assert (again.place, again.how, again.outcome) == (found.place, found.how, "silent")


def test_traceback_is_noticed(trials: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials.run("values", 1).outcome == "refused"
    monkeypatch.setattr(trials, "enter", enter_and_raise)
    found = trials.run("values", 1)
    assert (found.outcome, found.said) == ("traceback", "ZeroDivisionError (exit code 1)")


def test_left_process_is_noticed_and_ended(trials: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "enter", enter_and_leave_a_process)
    monkeypatch.setattr(campaign, "GRACE", 0.2)
    found = trials.run("values", 1)
    assert found.outcome == "left running" and "sleep 600" in found.said
    assert psutil.wait_procs(trials.processes.alive(), timeout=10)[1] == []


@pytest.mark.parametrize(
    ("text", "recorded", "same"),
    [
        ("1e-3", 0.001, True),
        ("0x10", 16, True),
        ("1\nlearning-rate=9", 1, False),
        ("1", True, False),
        ("a ", "a", True),
    ],
)
def test_accepted_value_is_compared_with_the_record(text: str, recorded: Any, same: bool) -> None:
    assert means(text, recorded, "rounds") == same


def test_wrong_values_are_drawn_for_every_key() -> None:
    draws = random.Random(0)
    assert {wrong_value(draws)[0] for _ in range(3000)} >= set(KEYS)
