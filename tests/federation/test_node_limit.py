"""A node's own limit of generated images (`max-images`, `generate`): its plan, the record of a run, and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runners import black_bank, client_state, finish, quick, run_in_process, weights

import fedeas_flwr.federation.delivery  # noqa: F401 - it must know the true InlineGrid, whichever test comes first
from fedeas_flwr.allocation import scale_down
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts
from fedeas_flwr.runs.directory import RunDirectory

Limits = dict[int, dict[str, Any]]


@pytest.fixture
def limit_nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that adds keys to the node-configs of an inline run's clients."""

    def limit(limits: Limits) -> None:
        class Limited(InlineGrid):
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **more)
                for client, keys in limits.items():
                    self._contexts[client + 1].node_config.update(keys)

        monkeypatch.setattr("fedeas_flwr.federation.grids.InlineGrid", Limited)

    return limit


@pytest.fixture
def keys(tmp_path: Path, fresh_images: Any) -> dict[str, Any]:
    """Return the keys of a run whose generator is a bank of black images, which costs no time."""
    fresh_images("black")
    return {"generator": black_bank(tmp_path / "bank.npz", [400] * 10), "participation": 1.0, "rounds": 2}


def plans(run: RunDirectory) -> list[list[int]]:
    """Return each client's plan, as in its state after the last round."""
    return [list(client_state(run, client, len(run.rounds())).generate) for client in range(4)]


@pytest.mark.parametrize("policy", ["fedeas", "uniform", "missing-only", "waterfill", "full-balance"])
def test_limited_node_scales_its_plan_and_others_keep_theirs(
    tmp_path: Path, limit_nodes: Any, keys: dict[str, Any], policy: str
) -> None:
    config = quick(tmp_path / "r", policy=policy, **keys)
    planned = planned_allocation(config, planned_counts(config)).tolist()
    limit_nodes({1: {"max-images": 7}, 3: {"generate": "no"}})
    run = finish(config)
    assert plans(run) == [planned[0], scale_down(planned[1], 7), planned[2], [0] * 10]
    numbers = {1: sum(planned[1]) - 7, 3: sum(planned[3])}  # client 3 has all classes, so it may have no images
    lacking = [{"client": client, "images": images} for client, images in numbers.items() if images]
    assert [record["not_made"] for record in run.rounds()] == [lacking] * 2
    assert run.summary()["not_made"] == lacking
    assert run.summary()["total_generated"] == np.sum(planned) - sum(numbers.values())


def test_limit_above_the_plan_changes_nothing(tmp_path: Path, limit_nodes: Any, keys: dict[str, Any]) -> None:
    plain = finish(quick(tmp_path / "plain", **keys))
    limit_nodes({client: {"max-images": 10_000, "generate": "yes"} for client in range(4)})
    limited = finish(quick(tmp_path / "limited", **keys))
    assert weights(limited) == weights(plain)
    assert [set(record) for record in limited.rounds()] == [set(record) for record in plain.rounds()]
    assert "not_made" not in {**plain.rounds()[0], **plain.summary()}


def test_node_that_generates_nothing_opens_no_generator(tmp_path: Path, limit_nodes: Any) -> None:
    limit_nodes({client: {"generate": False} for client in range(4)})
    run = finish(quick(tmp_path / "r", generator="/nowhere", rounds=1))
    assert run.summary()["total_generated"] == 0


@pytest.mark.parametrize("later", [{"max-images": 3}, {"max-images": 20}, {"generate": "no"}, {}])
def test_changed_limit_keeps_the_plan_and_is_logged(
    tmp_path: Path, limit_nodes: Any, keys: dict[str, Any], later: dict[str, Any]
) -> None:
    limit_nodes({1: {"max-images": 7}})
    whole = finish(quick(tmp_path / "whole", **{**keys, "rounds": 3}))
    run = finish(quick(tmp_path / "r", **keys))
    limit_nodes({1: later})
    resumed = finish(quick(tmp_path / "r", **{**keys, "rounds": 3}, resume=True))
    assert weights(resumed) == weights(whole)
    assert resumed.rounds()[2]["not_made"] == run.rounds()[0]["not_made"]
    log = [line for line in (run.path / "flower.log").read_text().splitlines() if "limit" in line]
    assert any("client 1: this node's limit has changed, but the run keeps its 7 images" in line for line in log)
    assert "keeps its" not in (whole.path / "flower.log").read_text()


def test_report_says_how_many_images_were_not_made_where(
    tmp_path: Path, limit_nodes: Any, keys: dict[str, Any]
) -> None:
    config = quick(tmp_path / "r", **keys)
    planned = planned_allocation(config, planned_counts(config)).sum(axis=1).tolist()
    limit_nodes({1: {"max-images": 7}, 3: {"generate": "no"}})
    run = finish(config)
    lost = {1: planned[1] - 7, 3: planned[3]}
    where = f"client 1: {lost[1]}, client 3: {lost[3]}"
    note = f"Images not made: r, {sum(lost.values())} of {sum(planned)} planned, by the limits of nodes ({where})"
    printed = run_in_process("report", str(run.path), "--out", str(tmp_path / "out")).stdout
    assert note in printed.splitlines()
    page = (tmp_path / "out" / "report.md").read_text()
    assert f"{note}." in page and "No heat map" not in page
    assert "because nodes' limits exclude the rest" in page
    (group,) = json.loads(run_in_process("report", str(run.path), "--format", "json").stdout)["groups"]
    assert group["not_made"] == [[{"client": client, "images": images} for client, images in lost.items()]]
    again = run_in_process("resume", str(run.path)).stdout
    assert f"{sum(planned) - sum(lost.values())} images generated, {sum(lost.values())} not made" in again
