"""Oversampling: FedEAS's targets filled with copies, nothing generated, clients' weights unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from runners import client_state, finish, quick, weights

from fedeas_flwr.allocation import IntArray, budget, fedeas, imbalance, oversample
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.data.node import read_node
from fedeas_flwr.federation import messages
from fedeas_flwr.generators.client_images import local_images
from fedeas_flwr.generators.fill import repeated
from fedeas_flwr.partition import make_partition, plan_labels
from fedeas_flwr.planning import plan as plan_module
from fedeas_flwr.planning.plan import format_table
from fedeas_flwr.planning.run_plan import planned_counts
from fedeas_flwr.policies.registry import allocate
from fedeas_flwr.training.build import local_training_config


def test_oversample_by_hand() -> None:
    # N = 64, n̄ = 8; H̃ = (½·1 + ¼·2 + ⅛·3 + 2·1/16·4) / 3 = 0.625, so with γ = 1 b = ⌊8 · 0.375 · 3⌋ = 9.
    # Two classes below the mean have 4 samples and get 5 copies; absent classes have nothing to copy.
    counts = [[32, 16, 8, 4, 4, 0, 0, 0]]
    assert budget(counts, 3.0, gamma=1.0).tolist() == [9]
    assert fedeas(counts, 3.0, gamma=1.0).tolist() == [[0, 0, 0, 5, 5, 9, 9, 9]]
    assert oversample(counts, 3.0, gamma=1.0).tolist() == [[0, 0, 0, 5, 5, 0, 0, 0]]
    assert allocate(counts, "oversample", beta=3.0, gamma=1.0).tolist() == [[0] * 8]


@given(
    arrays(np.int64, array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.integers(0, 500)),
    st.floats(0, 50),
    st.booleans(),
)
def test_oversample_equals_fedeas_on_present_classes(counts: IntArray, beta: float, strict_mean: bool) -> None:
    copies, filled = oversample(counts, beta, strict_mean=strict_mean), fedeas(counts, beta, strict_mean=strict_mean)
    assert np.array_equal(copies[counts > 0], filled[counts > 0])
    assert not copies[counts == 0].any()


def test_plan_shows_copies_and_generates_nothing() -> None:
    counts = make_partition("cifar10", "paper", 20, 0.1, 42).counts(plan_labels("cifar10", "paper"), 10)
    keys = {"dataset": "cifar10", "protocol": "paper", "beta": 12.0, "gamma": 0.5, "seed": 42}
    plan, filled = (plan_module.plan(counts, policy=policy, **keys) for policy in ("oversample", "fedeas"))
    assert plan["total"] == plan["synthetic_fraction"] == 0
    assert not any(any(client["generate"]) for client in plan["clients"])
    copies = np.array([client["repeat"] for client in plan["clients"]])
    assert plan["repeated"] == copies.sum() == 3_528
    assert plan["imbalance"]["after"] == imbalance(counts, copies).score
    assert 0 < plan["imbalance"]["removed"] < filled["imbalance"]["removed"]
    assert [c["budget"] for c in plan["clients"]] == [c["budget"] for c in filled["clients"]]
    assert "repeated" not in filled
    table = format_table(plan)
    assert "To repeat:    3,528" in table
    assert "To generate:  0 samples" in table
    assert table.splitlines()[4].split()[4] == "245"


def test_images_are_repeated_evenly() -> None:
    labels = np.array([0, 1, 0, 1, 1, 2])
    chosen = repeated(labels, [5, 1, 0, 0], np.random.default_rng(0))
    times = np.bincount(chosen, minlength=6)
    assert sorted(times[[0, 2]]) == [2, 3]  # five copies of two images
    assert sorted(times[[1, 3, 4]]) == [0, 0, 1]
    assert times[5] == 0
    assert labels[chosen].tolist() == [0] * 5 + [1]
    many = np.bincount(repeated(np.zeros(100, dtype=np.int64), [250], np.random.default_rng(0)))
    assert sorted(many) == [2] * 50 + [3] * 50
    again = [repeated(labels, [5, 1, 0, 0], np.random.default_rng(seed)).tolist() for seed in range(8)]
    assert again[0] == chosen.tolist()
    assert len({tuple(sorted(one)) for one in again}) > 1  # the random stream decides which image gets one copy more
    assert repeated(labels, [0, 0, 0, 0], np.random.default_rng(0)).tolist() == []
    with pytest.raises(ValueError, match=r"repeat_per_class\[3\]=1: there is no image"):
        repeated(labels, [0, 0, 0, 1], np.random.default_rng(0))


def test_client_trains_on_its_images_and_their_copies() -> None:
    config = quick(Path("/nowhere"), policy="oversample", beta=8.0)
    data, counts = federated_data(config, 4), planned_counts(config)
    for client, copies in enumerate(oversample(counts, 8.0)):
        node = read_node({"partition-id": client, "num-partitions": 4})
        found = local_images(config, data, node, (0,) * 10, tuple(copies.tolist()), "", "", "cpu")
        images, labels = found.images, found.labels
        real, real_labels = data.train(client)
        assert np.array_equal(images[: len(real)].numpy(), real)
        assert np.array_equal(labels[: len(real)].numpy(), real_labels)
        assert np.bincount(labels[len(real) :].numpy(), minlength=10).tolist() == copies.tolist()
        own = {(image.tobytes(), int(label)) for image, label in zip(real, real_labels, strict=True)}
        assert {(i.numpy().tobytes(), int(n)) for i, n in zip(images, labels, strict=True)} == own
        assert found.made == found.rejected == 0


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_oversample_run_generates_nothing_and_resumes(tmp_path: Path, strategy: str) -> None:
    keys = {"policy": "oversample", "beta": 8.0, "participation": 1.0, "strategy": strategy}
    whole = finish(quick(tmp_path / "whole", rounds=2, **keys))
    finish(quick(tmp_path / "parts", rounds=1, **keys))
    assert weights(whole) == weights(finish(quick(tmp_path / "parts", rounds=2, resume=True, **keys)))
    plain = finish(quick(tmp_path / "plain", rounds=2, **{**keys, "policy": "none"}))
    assert weights(whole) != weights(plain)
    assert whole.summary()["total_generated"] == 0
    assert all(record["generated"] == record["made"] == 0 for record in whole.rounds())
    assert client_state(whole, 0, 2).generate == (0,) * 10


def test_copies_do_not_change_a_clients_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[messages.TrainReport] = []
    reply = messages.train_reply

    def noted(message: Message, report: messages.TrainReport, *rest: Any) -> Message:
        sent.append(report)
        return reply(message, report, *rest)

    monkeypatch.setattr(messages, "train_reply", noted)
    config = quick(tmp_path / "run", policy="oversample", beta=8.0, participation=1.0, rounds=1)
    finish(config)
    counts = planned_counts(config)
    copies = oversample(counts, 8.0)
    assert {r.client: r.examples for r in sent} == dict(enumerate(counts.sum(axis=1)))
    assert {r.client: r.steps for r in sent} == {
        k: local_training_config(config).steps(int(n)) for k, n in enumerate((counts + copies).sum(axis=1))
    }
    assert copies.sum() > 0
    assert [r.generated for r in sent] == [0] * 4


def test_oversample_with_beta_zero_is_fedavg_bitwise(tmp_path: Path) -> None:
    plain = finish(quick(tmp_path / "none", policy="none", rounds=2))
    assert weights(finish(quick(tmp_path / "zero", policy="oversample", beta=0.0, rounds=2))) == weights(plain)


def test_oversample_needs_no_generator() -> None:
    assert not quick(Path("/nowhere"), policy="oversample").generates
    assert not quick(Path("/nowhere"), policy="oversample", dataset="cifar10").generates
