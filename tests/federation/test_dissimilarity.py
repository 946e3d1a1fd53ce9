"""Γ̂ against values by hand, its definition, and an implementation on whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from runners import finish, quick

from fedeas_flwr.federation import dissimilarity
from fedeas_flwr.federation.dissimilarity import gradient_dissimilarity

ZERO = {"w": np.zeros((1, 2), np.float32), "b": np.zeros((), np.float32)}


def at(x: float, y: float, z: float = 0.0) -> dict[str, np.ndarray]:
    return {"w": np.array([[x, y]], np.float32), "b": np.array(z, np.float32)}


def test_gradient_dissimilarity_by_hand() -> None:
    # Unit vectors (1,0,0) and (0,1,0), weights 3/4 and 1/4: mean (3/4, 1/4, 0), 1 − 10/16 = 6/16.
    assert gradient_dissimilarity(ZERO, [at(5, 0), at(0, -0.1)], [30, 10]) == pytest.approx(6 / 16)
    # Three clients, one of them along b: mean (1/2, 1/4, 1/4), 1 − 6/16.
    assert gradient_dissimilarity(ZERO, [at(1, 0), at(0, 2), at(0, 0, 3)], [2, 1, 1]) == pytest.approx(10 / 16)
    # Opposite updates have the maximum, 1; updates in the same direction have 0, whatever their length.
    assert gradient_dissimilarity(ZERO, [at(1, 1), at(-7, -7)], [1, 1]) == pytest.approx(1)
    assert gradient_dissimilarity(ZERO, [at(1, 2), at(10, 20), at(0.5, 1)], [1, 2, 3]) == pytest.approx(0, abs=1e-12)
    assert gradient_dissimilarity(at(1, 1), [at(2, 2)], [9]) == pytest.approx(0, abs=1e-12)


def test_client_without_update_has_no_direction() -> None:
    # Δ̂ = (1,0,0) and 0, halves: mean (1/2,0,0); ½·¼ + ½·¼.
    assert gradient_dissimilarity(ZERO, [at(4, 0), ZERO], [1, 1]) == pytest.approx(1 / 4)
    assert gradient_dissimilarity(ZERO, [ZERO, ZERO], [1, 1]) == 0


def random_round(clients: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]], list[int]]:
    rng = np.random.default_rng(3)
    shapes = {"conv": (4, 3, 3), "scalar": (), "fc": (10, 7), "empty": (0,)}
    common = {key: rng.normal(size=shape) for key, shape in shapes.items()}
    start = {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    ends = [
        {
            key: (start[key] - common[key] - 0.3 * rng.normal(size=shape)).astype(np.float32)
            for key, shape in shapes.items()
        }
        for _ in range(clients)
    ]
    return start, ends, [int(n) for n in rng.integers(1, 500, clients)]


def reference_dissimilarity(start: dict, ends: list[dict], weights: list[int]) -> tuple[float, float]:
    """Return Γ̂ by its definition and by the paper's identity 1 − ‖mean‖²."""
    share = np.array(weights) / sum(weights)
    moved = np.array([np.concatenate([(start[k].astype(float) - end[k]).ravel() for k in start]) for end in ends])
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)
    mean = share @ moved
    return float(share @ ((moved - mean) ** 2).sum(axis=1)), float(1 - mean @ mean)


def test_dissimilarity_equals_definition_and_identity() -> None:
    arguments = random_round(5)
    definition, identity = reference_dissimilarity(*arguments)
    assert definition == pytest.approx(identity, rel=1e-12)
    assert gradient_dissimilarity(*arguments) == pytest.approx(definition, rel=1e-10)


def test_tensors_and_small_blocks_give_the_same_value(monkeypatch: pytest.MonkeyPatch) -> None:
    start, ends, weights = random_round(5)
    whole = gradient_dissimilarity(start, ends, weights)
    tensors = [{key: torch.tensor(value) for key, value in state.items()} for state in (start, *ends)]
    assert gradient_dissimilarity(tensors[0], tensors[1:], weights) == pytest.approx(whole, rel=1e-12)
    monkeypatch.setattr(dissimilarity, "_MAX_TENSOR_ELEMENTS", 1)  # one tensor at a time
    assert gradient_dissimilarity(tensors[0], tensors[1:], weights) == pytest.approx(whole, rel=1e-12)
    monkeypatch.setattr(dissimilarity, "_BLOCK", 3)
    assert gradient_dissimilarity(start, ends, weights) == pytest.approx(whole, rel=1e-12)


def dissimilarity_of_whole_models(start: dict, ends: list[dict], weights: list[int]) -> float:
    """Return Γ̂ from the inner products of whole models in float64."""
    flat = [np.concatenate([state[key].ravel() for key in start]).astype(float) for state in (start, *ends)]
    moved = np.stack([flat[0] - end for end in flat[1:]])
    gram, share = moved @ moved.T, np.array(weights) / sum(weights)
    scaled = share / np.sqrt(np.diag(gram))
    return float(share.sum() - scaled @ gram @ scaled)


@pytest.mark.parametrize("size", [1, 2**15 - 1, 2**15, 2**15 + 1, 100_003])
@pytest.mark.parametrize("clients", [1, 2, 10])
def test_blockwise_value_equals_that_of_whole_models(size: int, clients: int) -> None:
    rng = np.random.default_rng(size)
    start = {"w": rng.normal(size=size).astype(np.float32), "n": np.array([7, 8]), "h": np.ones(3, np.float16)}
    ends = [
        {"w": (start["w"] + rng.normal(size=size)).astype(np.float32), "n": start["n"] + k, "h": start["h"]}
        for k in range(clients)
    ]
    weights = [int(n) for n in rng.integers(1, 500, clients)]
    expected = dissimilarity_of_whole_models(start, ends, weights)
    assert gradient_dissimilarity(start, ends, weights) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_tiny_dissimilarity_is_not_rounded_to_zero() -> None:
    start = {"w": np.zeros(1000, np.float32)}
    ends = [{"w": np.full(1000, 1, np.float32)}, {"w": np.full(1000, 1, np.float32)}]
    ends[1]["w"][0] = 1.001
    expected = reference_dissimilarity(start, ends, [1, 1])[0]
    assert expected < 1e-9
    assert gradient_dissimilarity(start, ends, [1, 1]) == pytest.approx(expected, rel=1e-5)


def test_value_of_equal_directions_is_not_negative() -> None:
    values = [gradient_dissimilarity(ZERO, [at(x, y)], [1]) for x in range(1, 10) for y in range(1, 10)]
    assert 0 <= min(values) <= max(values) < 1e-12


def test_rounds_record_gamma_hat_in_the_configured_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    keys = {"policy": "none", "model": "users_models:with_batchnorm", "participation": 1.0, "rounds": 3}
    trainable, all_state, off = (
        finish(quick(tmp_path / kind, gamma_hat=kind, **keys)) for kind in ("trainable", "all-state", "off")
    )
    values = [record["gamma_hat"] for record in trainable.rounds()]
    assert all(0 < value < 1 for value in values)
    assert trainable.summary()["gamma_hat"] == sorted(values)[1]
    # BatchNorm's step counters grow equally on all clients and dwarf the weights: hence the paper's small numbers.
    assert all(record["gamma_hat"] < min(values) / 10 for record in all_state.rounds())
    assert [record["gamma_hat"] for record in off.rounds()] == [None] * 3
    assert off.summary()["gamma_hat"] is None
