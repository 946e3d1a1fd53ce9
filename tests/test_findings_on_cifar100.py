"""What README and docs/reproduction.md say of CIFAR-100 with 100 clients is what the records say."""

from __future__ import annotations

import numpy as np
from cifar_runs import PAGE, POLICIES, README, accuracies, last_batches, record
from test_uneven_rounds import evenness

from fedeas_flwr import allocate
from fedeas_flwr.allocation import removed
from fedeas_flwr.local_data import planned_allocation, planned_counts
from fedeas_flwr.metrics import falls
from fedeas_flwr.reproduce.paper import LAST_20, PEAK, at

COLUMN, PLACE = "c100-k100-a0.1", "cifar100-k100-a0.1"
RUNS = {"fedavg": (1, 2, 3), "fedprox": (1,), "scaffold": (1,), "moon": (1,)}


def curves(method: str) -> np.ndarray:
    """Return accuracies in %, a row a seed."""
    return 100 * np.array([accuracies(record(f"{PLACE}/{method}-s{seed}")) for seed in RUNS.get(method, (1,))])


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
    seeds = curves("fedavg")[:, -20:].mean(axis=1)
    assert f"seeds of FedAvg are {seeds.max() - seeds.min():.1f} apart" in PAGE
    assert f"(FedAvg's three have a standard deviation of {seeds.std(ddof=1):.1f})" in PAGE


def test_the_policies_are_as_level_as_the_pages_say() -> None:
    last = {policy: curves(policy)[:, -20:].mean() for policy in POLICIES}
    papers = {policy: at(LAST_20, policy, COLUMN) or 0.0 for policy in POLICIES}
    order = ("missing-only", "fedeas", "uniform")
    assert sorted(last, key=last.__getitem__, reverse=True) == list(order)
    shown, theirs = (("{:.1f}, {:.1f} and {:.1f}".format(*map(each.get, order))) for each in (last, papers))
    for page in (PAGE, README):
        assert f"Missing-only, FedEAS and Uniform have {shown}, which one seed cannot tell apart" in page
        assert f"in the paper {theirs}" in page
    plain, published = curves("fedavg")[:, -20:].mean(), at(LAST_20, "fedavg", COLUMN)
    gains = [[found[policy] - base for policy in order] for found, base in ((last, plain), (papers, published))]
    said = "are {:.1f}, {:.1f} and {:.1f} points above FedAvg and".format(*gains[0])
    said += " {:.1f} apart, in the paper {:.1f}, {:.1f} and {:.1f}".format(gains[0][0] - gains[0][2], *gains[1])
    assert said in PAGE
    below = [papers[policy] - last[policy] for policy in ("fedeas", "missing-only")]
    assert "FedEAS and Missing-only are {:.1f} and {:.1f} below the paper's.".format(*below) in PAGE
    assert f"does not lead there, and is {below[0]:.1f} below the paper's" in PAGE
    assert f"FedEAS is {below[0]:.1f} below the paper's" in README
    above, lead = last["uniform"] - papers["uniform"], papers["fedeas"] - papers["uniform"]
    assert f"Uniform is {above:.1f} points above the paper's, as it is" in PAGE
    assert f"the paper's is {lead:.1f} below it" in PAGE
    assert f"and {last['uniform'] - curves('scaffold')[:, -20:].mean():.1f} below our own." in PAGE


def test_how_alike_the_policies_plans_are_is_what_the_page_says() -> None:
    gone = {}
    for place in (PLACE, "cifar10-k100-a0.1"):
        for policy in ("fedeas", "missing-only", "uniform"):
            config = record(f"{place}/{policy}-s1").config()
            counts = planned_counts(config, config.clients)
            plan = planned_allocation(config, counts)
            gone[place, policy] = f"{100 * removed(counts, plan):.1f}"
            if place == PLACE:
                assert f"{100 * (counts == 0).mean():.0f} are absent, and {plan.sum():,} images" in PAGE
                assert f"{100 * plan.sum() / (plan + counts).sum():.0f} % of the images that clients train on" in PAGE
                assert {f"{np.mean([even for _, even, _, _ in evenness(record(f'{place}/{policy}-s1'))]):.2f}"} == {
                    "0.99"
                }
                if policy == "uniform":
                    assert np.unique(plan).tolist() == [7, 8] and "come to 7 or 8 a pair of client and class" in PAGE
    here, there = (
        [gone[place, policy] for policy in ("fedeas", "missing-only", "uniform")]
        for place in (PLACE, "cifar10-k100-a0.1")
    )
    assert "FedEAS removes {} % of the imbalance, Missing-only {} % and Uniform {} %".format(*here) in PAGE
    assert "the same α {}, {} and {} %), and the rounds of all three are 0.99 even".format(*there) in PAGE


def test_what_the_differences_of_scaffold_and_moon_may_be_is_what_the_records_allow() -> None:
    columns = ("c10-k100-a0.05", "c10-k100-a0.1", "c10-k100-a0.3", COLUMN)
    for method in ("scaffold", "moon"):
        above = [
            100 * record(f"{column.replace('c10', 'cifar10')}/{method}-s1").summary()["last_20"]
            - at(LAST_20, method, column)
            for column in columns
        ]
        assert sum(one > 1 for one in above) == 3 and sum(one > 0 for one in above) == 3
    assert "With 100 clients both are above the paper's in three of four columns." in PAGE
    moons = [100 * record(f"cifar10-k100-a0.1/moon-s{seed}").summary()["last_20"] for seed in (1, 2, 3)]
    assert f"MOON's seeds on CIFAR-10 have a standard deviation of {np.std(moons, ddof=1):.1f}" in PAGE
    papers = {name: at(LAST_20, name, COLUMN) for name in ("scaffold", "uniform")}
    assert papers["scaffold"] == max(at(LAST_20, name, COLUMN) for name in (*RUNS, "fedgen", "fedmix"))
    level, ahead = papers["uniform"] - papers["scaffold"], curves("scaffold")[:, -20:].mean() - papers["uniform"]
    assert f"Uniform is level with it there ({level:.1f} above); ours is {ahead:.1f} above that Uniform" in PAGE


def test_when_scaffold_and_moon_are_ahead_of_fedavg_is_what_the_page_says() -> None:
    blocks = {method: curves(method).reshape(-1, 10, 20).mean(axis=2) for method in RUNS}
    lead = blocks["scaffold"] - blocks["fedavg"]
    assert "ahead of it in every block of 20 rounds" in PAGE and lead.min() > 0
    behind = blocks["moon"] < blocks["fedavg"]
    assert "MOON is behind FedAvg in rounds 21 to 140" in PAGE
    assert behind[:, 1:7].all() and not behind[:, 7:].any()


def test_no_round_falls_and_nobody_is_left_with_two_where_nothing_is_generated() -> None:
    assert not any(falls(list(curve / 100)) for method in RUNS for curve in curves(method))
    depths = [
        np.median(curve[max(0, i - 6) : i + 7]) - curve[i]
        for method in RUNS
        for curve in curves(method)
        for i in range(10, 200)
    ]
    assert f"none is more than {max(depths):.1f} points below the median of the 13 around it" in PAGE
    others = [record(f"cifar10-k100-a0.1/{name}-s1") for name in ("none", "fedprox", "scaffold", "moon")]
    others += [record(f"cifar10-k100-a0.1/{name}-s{seed}") for name in ("none", "moon") for seed in (2, 3)]
    fallen = [len(falls(accuracies(run))) for run in others]
    assert f"the same methods fall in {min(fallen)} to {max(fallen)} rounds" in PAGE
    assert all(2 not in last_batches(run)[1] for run in (*others, record(f"{PLACE}/fedavg-s1")))
    gamma = [record(name).summary()["gamma_hat"] for name in (f"{PLACE}/fedavg-s1", "cifar10-k100-a0.1/none-s3")]
    assert "Γ̂ of FedAvg is {:.2f}, for {:.2f}".format(*gamma) in PAGE


def test_whom_the_policies_will_leave_with_two_is_what_the_page_says() -> None:
    config = record(f"{PLACE}/fedavg-s1").config()
    counts = planned_counts(config, config.clients)
    left = {
        policy: np.flatnonzero((counts + allocate(counts, policy, beta=config.beta)).sum(axis=1) % 64 == 2)
        for policy in POLICIES
    }
    assert {policy: len(clients) for policy, clients in left.items()} == {"fedeas": 3, "uniform": 3, "missing-only": 1}
    assert "FedEAS and Uniform leave three clients each with two here, Missing-only one; one round of the three" in PAGE
    depths = {policy: falls(list(curves(policy)[0] / 100)) for policy in POLICIES}
    assert {policy: list(found) for policy, found in depths.items() if found} == {"uniform": [152]}
    there = record(f"{PLACE}/uniform-s1").rounds()[151]["clients"]
    (two,) = set(there) & set(left["uniform"].tolist())
    share = 100 * counts[two].sum() / counts[there].sum()
    said = (
        f"runs falls, Uniform's 152, by {100 * depths['uniform'][152]:.1f} points, with such a client of {share:.0f} %"
    )
    assert f"{said} of the weight." in PAGE


def test_how_much_more_even_the_clients_are_is_what_the_page_says() -> None:
    sizes, shares = {}, {}
    for name in (f"{PLACE}/fedavg-s1", "cifar10-k100-a0.1/none-s1"):
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
    assert "and {:.0f} % of a client's images in its most frequent class, for {:.0f} %".format(*shares.values()) in PAGE
