"""What README and docs/reproduction.md say of CIFAR-100 with 100 clients is what the records say."""

from __future__ import annotations

import numpy as np
from cifar_runs import PAGE, README, accuracies, last_batches, record

from fedeas_flwr.local_data import planned_counts
from fedeas_flwr.metrics import falls
from fedeas_flwr.reproduce.paper import LAST_20, PEAK, at

COLUMN = "c100-k100-a0.1"
RUNS = {"fedavg": (1, 2), "fedprox": (1,), "scaffold": (1,), "moon": (1,)}


def curves(method: str) -> np.ndarray:
    """Return accuracies in %, a row a seed."""
    return 100 * np.array([accuracies(record(f"cifar100-k100-a0.1/{method}-s{seed}")) for seed in RUNS[method]])


def test_how_far_the_methods_are_from_the_papers_is_what_the_pages_say() -> None:
    last = {method: curves(method)[:, -20:].mean() for method in RUNS}
    peak = {method: curves(method).max(axis=1).mean() for method in RUNS}
    for method in ("fedavg", "fedprox"):
        assert abs(last[method] - at(LAST_20, method, COLUMN)) < 0.3
        assert abs(peak[method] - at(PEAK, method, COLUMN)) < 0.3
    assert {f"{last[method] - at(LAST_20, method, COLUMN):.1f}" for method in ("scaffold", "moon")} == {"2.5"}
    assert "are within 0.3 points of the paper's, SCAFFOLD and MOON 2.5 above." in PAGE
    assert "are within 0.3 points of the paper's, SCAFFOLD and MOON 2.5 above." in README
    papers = [at(LAST_20, method, COLUMN) - at(LAST_20, "fedavg", COLUMN) for method in ("scaffold", "moon")]
    scaffold, moon = (last[method] - last["fedavg"] for method in ("scaffold", "moon"))
    assert f"{scaffold:.1f} above FedAvg (in the paper {papers[0]:.1f})" in PAGE
    assert f"level with FedAvg ({moon:.1f} above), in the paper {-papers[1]:.1f} below it" in PAGE
    one, two = curves("fedavg")[:, -20:].mean(axis=1)
    assert f"seeds of FedAvg are {abs(one - two):.1f} apart" in PAGE


def test_when_scaffold_and_moon_are_ahead_of_fedavg_is_what_the_page_says() -> None:
    blocks = {method: curves(method)[0].reshape(10, 20).mean(axis=1) for method in RUNS}
    assert "ahead of it from the second block of 20 rounds on" in PAGE
    assert (blocks["scaffold"] - blocks["fedavg"])[1:].min() > 1
    behind = blocks["moon"] < blocks["fedavg"]
    assert "it is behind FedAvg in rounds 21 to 140 and still rises" in PAGE
    assert behind[1:7].all() and not behind[7:].any() and np.argmax(blocks["moon"]) == 9


def test_no_round_falls_and_nobody_is_left_with_two() -> None:
    assert not any(falls(list(curve / 100)) for method in RUNS for curve in curves(method))
    assert 2 not in last_batches(record("cifar100-k100-a0.1/fedavg-s1"))[1]
    sizes, shares = {}, {}
    for name in ("cifar100-k100-a0.1/fedavg-s1", "cifar10-k100-a0.1/none-s1"):
        config = record(name).config()
        counts = planned_counts(config, config.clients)
        sizes[name] = counts.sum(axis=1)
        shares[name] = 100 * float(np.median(counts.max(axis=1) / sizes[name]))
    assert (
        "{:,} to {:,} images each, for {:,} to {:,},".format(
            *(end for each in sizes.values() for end in (each.min(), each.max()))
        )
        in PAGE
    )
    assert (
        "and {:.0f} % of a client's images are of its most frequent class, for {:.0f} %".format(*shares.values())
        in PAGE
    )
