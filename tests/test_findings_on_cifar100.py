"""What README and docs/reproduction.md say of CIFAR-100 with 100 clients is what the records say."""

from __future__ import annotations

import numpy as np
from cifar_runs import PAGE, POLICIES, README, accuracies, falls_of, last_batches, record
from test_uneven_rounds import evenness

from fedeas_flwr.allocation import removed
from fedeas_flwr.metrics import falls
from fedeas_flwr.policies import allocate
from fedeas_flwr.reproduce.paper import LAST_20, PEAK, at
from fedeas_flwr.run_plan import planned_allocation, planned_counts

COLUMN, PLACE = "c100-k100-a0.1", "cifar100-k100-a0.1"
RUNS = {"fedavg": (1, 2, 3), "fedprox": (1,), "scaffold": (1, 2), "moon": (1, 2)}


def curves(method: str) -> np.ndarray:
    """Return accuracies in %, a row a seed."""
    return 100 * np.array([accuracies(record(f"{PLACE}/{method}-s{seed}")) for seed in RUNS.get(method, (1,))])


def test_how_far_the_methods_are_from_the_papers_is_what_the_pages_say() -> None:
    last = {method: curves(method)[:, -20:].mean() for method in RUNS}
    peak = {method: curves(method).max(axis=1).mean() for method in RUNS}
    for method in ("fedavg", "fedprox"):
        assert abs(last[method] - at(LAST_20, method, COLUMN)) < 0.3
        assert abs(peak[method] - at(PEAK, method, COLUMN)) < 0.3
    above = [last[method] - at(LAST_20, method, COLUMN) for method in ("scaffold", "moon")]
    apart = [np.ptp(curves(method)[:, -20:].mean(axis=1)) for method in ("scaffold", "moon")]
    for page in (PAGE, README):
        said = "are within 0.3 points of the paper's, SCAFFOLD and MOON {:.1f} and {:.1f} above with two seeds each,"
        assert f"{said} at most {{:.1f}} apart".format(*above, max(apart)) in page
    assert "SCAFFOLD's are {:.1f} apart and MOON's {:.1f}.".format(*apart) in PAGE
    assert f"SCAFFOLD is {above[0]:.1f} above the paper's," in PAGE
    papers = [at(LAST_20, method, COLUMN) - at(LAST_20, "fedavg", COLUMN) for method in ("scaffold", "moon")]
    scaffold, moon = (last[method] - last["fedavg"] for method in ("scaffold", "moon"))
    assert f"{scaffold:.1f} above FedAvg (in the paper {papers[0]:.1f})" in PAGE
    each = curves("moon")[:, -20:].mean(axis=1) - curves("fedavg")[:2, -20:].mean(axis=1)
    shown = "{:.1f}; {:.1f} and {:.1f} by seed".format(moon, *each).replace(";", " above;")
    assert f"level with FedAvg ({shown}), in the paper {-papers[1]:.1f} below it" in PAGE
    seeds = curves("fedavg")[:, -20:].mean(axis=1)
    assert f"(FedAvg's three seeds have a standard deviation of {seeds.std(ddof=1):.1f}.)" in PAGE
    for page in (PAGE, README):
        assert "On CIFAR-100 with 100 clients FedAvg (three seeds) and FedProx are within 0.3" in page


def test_the_policies_are_as_level_as_the_pages_say() -> None:
    last = {policy: curves(policy)[:, -20:].mean() for policy in POLICIES}
    papers = {policy: at(LAST_20, policy, COLUMN) or 0.0 for policy in POLICIES}
    order = ("missing-only", "fedeas", "uniform")
    assert sorted(last, key=last.__getitem__, reverse=True) == list(order)
    shown, theirs = (("{:.1f}, {:.1f} and {:.1f}".format(*map(each.get, order))) for each in (last, papers))
    for page in (PAGE, README):
        assert f"Missing-only, FedEAS and Uniform have {shown}, in the paper {theirs}: one seed shows no" in page
        below = [papers[policy] - last[policy] for policy in ("fedeas", "missing-only")]
        assert "FedEAS is {:.1f} and Missing-only {:.1f} below the paper's, with a".format(*below) in page
    plain, published = curves("fedavg")[:, -20:].mean(), at(LAST_20, "fedavg", COLUMN)
    gains = [[found[policy] - base for policy in order] for found, base in ((last, plain), (papers, published))]
    said = "are {:.1f}, {:.1f} and {:.1f} points above FedAvg and".format(*gains[0])
    said += " {:.1f} apart, in the paper {:.1f}, {:.1f} and {:.1f}".format(gains[0][0] - gains[0][2], *gains[1])
    assert said in PAGE
    assert "FedEAS and Missing-only are {:.1f} and {:.1f} below the paper's.".format(*below) in PAGE
    assert f"Uniform is {last['uniform'] - papers['uniform']:.1f} points above the paper's; it is above" in PAGE
    leads = [[found["fedeas"] - found[other] for found in (last, papers)] for other in ("missing-only", "uniform")]
    apart = curves("fedeas")[0] - curves("missing-only")[0]
    assert leads[0][0] < 0 and abs(apart.mean()) < 0.1 and "Missing-only, whose curves are level" in PAGE
    assert (
        f"are level (in the paper it is {leads[0][1]:.1f}); Uniform is {leads[1][0]:.1f} below FedEAS, in the" in PAGE
    )
    lower = int((curves("uniform")[0] < curves("fedeas")[0]).sum())
    assert f"in the paper {leads[1][1]:.1f}, and below it in {lower} of 200 rounds." in PAGE
    own = [abs(last_20_on_cifar10(policy)) for policy in ("fedeas", "missing-only")]
    assert max(own) < 1.6 and "They were within 1.6 on CIFAR-10 at this α." in PAGE
    assert f"and {last['uniform'] - curves('scaffold')[:, -20:].mean():.1f} below our own." in PAGE


def last_20_on_cifar10(policy: str) -> float:
    """How far three seeds are above the paper's, in points."""
    found = [record(f"cifar10-k100-a0.1/{policy}-s{seed}").summary()["last_20"] for seed in (1, 2, 3)]
    return 100 * float(np.mean(found)) - (at(LAST_20, policy, "c10-k100-a0.1") or 0.0)


def test_how_alike_the_policies_plans_are_is_what_the_page_says() -> None:
    order = ("fedeas", "missing-only", "uniform")
    gone, same, parts = {}, {}, {}
    for place in (PLACE, "cifar10-k100-a0.1"):
        configs = {policy: record(f"{place}/{policy}-s1").config() for policy in order}
        counts = planned_counts(configs["fedeas"], 100)
        plans = {policy: planned_allocation(config, counts) for policy, config in configs.items()}
        gone[place] = [f"{100 * removed(counts, plan):.1f}" for plan in plans.values()]
        total = plans["fedeas"].sum()
        same[place] = [100 * np.minimum(plans["fedeas"], plans[o]).sum() / total for o in ("uniform", "missing-only")]
        parts[place] = 100 * total / (plans["fedeas"] + counts).sum()
        if place == PLACE:
            assert f"Of a client's 100 classes {100 * (counts == 0).mean():.0f} are absent." in PAGE
            assert f"of FedEAS's {total:,} images" in PAGE
    here, there = same.values()
    said = "images {:.0f} % are in Uniform's plan too and {:.0f} % in Missing-only's, on CIFAR-10 with as many".format(
        *here
    )
    assert f"{said} clients and the same α {{:.0f}} and {{:.0f}} %.".format(*there) in PAGE
    assert "{:.0f} % of the images that clients train on are its own (there {:.0f} %)".format(*parts.values()) in PAGE
    here, there = gone.values()
    assert "FedEAS removes {} % of the imbalance, Missing-only {} % and Uniform {} %".format(*here) in PAGE
    assert "(there {}, {} and {} %), and the rounds of all three are 0.99 even".format(*there) in PAGE
    even = [np.mean([e for _, e, _, _ in evenness(record(f"{PLACE}/{policy}-s1"))]) for policy in order]
    assert "with {:.3f} for {:.3f} and {:.3f}, without being the most accurate".format(*even) in PAGE
    assert all(0.985 < each < 0.995 for each in even) and even[0] == max(even)


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
    papers = {name: at(LAST_20, name, COLUMN) for name in ("scaffold", "uniform")}
    assert papers["scaffold"] == max(at(LAST_20, name, COLUMN) for name in (*RUNS, "fedgen", "fedmix"))
    level, ahead = papers["uniform"] - papers["scaffold"], curves("scaffold")[:, -20:].mean() - papers["uniform"]
    assert f"Uniform is level with it there ({level:.1f} above); ours is {ahead:.1f} above that Uniform" in PAGE


def test_when_scaffold_and_moon_are_ahead_of_fedavg_is_what_the_page_says() -> None:
    blocks = {method: curves(method).reshape(-1, 10, 20).mean(axis=2) for method in RUNS}
    lead = blocks["scaffold"] - blocks["fedavg"][:2]
    assert "ahead of it in every block of 20 rounds" in PAGE and lead.min() > 0
    behind = blocks["moon"].mean(axis=0, keepdims=True) < blocks["fedavg"].mean(axis=0)
    assert "in the mean MOON is behind FedAvg until round 140" in PAGE
    assert behind[:, :7].all() and not behind[:, 7:].any()


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
    fallen = [len(falls_of(run)) for run in others]
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
