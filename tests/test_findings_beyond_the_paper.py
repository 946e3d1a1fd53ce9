"""What README and docs/reproduction.md say of leakage, of free alternatives and of other rules is in the records."""

from __future__ import annotations

import numpy as np
import pytest
from cifar_runs import PAGE, POLICIES, README, accuracies, record

from fedeas_flwr.allocation import removed
from fedeas_flwr.local_data import planned_allocation, planned_counts
from fedeas_flwr.reproduce.measured import meaning
from fedeas_flwr.reproduce.paper import LAST_20, at

PLACE = "cifar10-k100-a0.1"
FREE = ("logit-adjusted", "class-weighted", "oversample", "flip-crop")


def last_20(name: str, seeds: tuple[int, ...] = (1,)) -> float:
    """In %, the mean over seeds."""
    return 100 * float(np.mean([record(f"{PLACE}/{name}-s{seed}").summary()["last_20"] for seed in seeds]))


def usual(policy: str) -> float:
    """Protocol paper, three seeds."""
    return last_20(policy, (1, 2, 3))


def test_protocol_clean_differs_in_nothing_but_what_is_split_and_tested() -> None:
    held = {}
    for leaky, clean in (("none", "fedavg-clean"), *((policy, f"{policy}-clean") for policy in POLICIES)):
        ours, theirs = (record(f"{PLACE}/{name}-s1") for name in (clean, leaky))
        told, before = meaning(ours.config()), meaning(theirs.config())
        assert {key for key in told if told[key] != before[key]} == {"protocol"}
        assert [one["clients"] for one in ours.rounds()] == [one["clients"] for one in theirs.rounds()]
        held = {run.config().protocol: planned_counts(run.config(), 100).sum() for run in (ours, theirs)}
    assert held["clean"] == 50_000
    assert f"deals out the 50,000 others, where `paper` leaves {held['paper']:,} for training" in PAGE


def test_what_leakage_may_be_worth_is_what_the_records_say() -> None:
    plain = {"paper": usual("none"), "clean": last_20("fedavg-clean")}
    found = {policy: {"paper": usual(policy), "clean": last_20(f"{policy}-clean")} for policy in POLICIES}
    lower = [each["paper"] - each["clean"] for each in found.values()]
    assert f"FedAvg is {plain['clean'] - plain['paper']:.1f} points higher there; FedEAS, Missing-only and" in PAGE
    assert f"Uniform are {min(lower):.1f} to {max(lower):.1f} lower." in PAGE
    gains = {policy: {how: each[how] - plain[how] for how in plain} for policy, each in found.items()}
    shown = {policy: f"{each['clean']:.1f} for {each['paper']:.1f}" for policy, each in gains.items()}
    assert f"FedEAS's gain over FedAvg is {shown['fedeas']} points, Missing-only's {shown['missing-only']} and" in PAGE
    assert f"Uniform's {shown['uniform']}: about a twelfth of what they gain" in PAGE
    assert all(1 / 13.5 < 1 - each["clean"] / each["paper"] < 1 / 11 for each in gains.values())
    clean, leaky = gains["fedeas"]["clean"], gains["fedeas"]["paper"]
    assert f"FedEAS is {clean:.1f} points above FedAvg, with it {leaky:.1f}; the policies' order is the same" in PAGE
    assert f"FedEAS is {clean:.1f} points above FedAvg, with it {leaky:.1f}" in README
    leads = {
        other: "{:.1f} points ({:.1f})".format(
            *(found["fedeas"][how] - found[other][how] for how in ("clean", "paper"))
        )
        for other in ("uniform", "missing-only")
    }
    assert f"FedEAS leads Uniform by {leads['uniform']} and Missing-only by" in PAGE
    assert f"and Missing-only by {leads['missing-only'].replace(' points', '')}." in PAGE
    for how in ("clean", "paper"):
        assert found["fedeas"][how] > found["uniform"][how] > found["missing-only"][how]


def test_what_comes_for_free_is_what_the_records_say() -> None:
    gains = [last_20(name) - usual("none") for name in FREE]
    said = "The logit-adjusted loss gains {:.1f} points over FedAvg, the class-weighted one {:.1f}, oversampling {:.1f}"
    assert f"{said} and flips and crops {{:.1f}}, more than any method".format(*gains) in PAGE
    papers = [
        (at(LAST_20, name, "c10-k100-a0.1") or 0.0) - (at(LAST_20, "fedavg", "c10-k100-a0.1") or 0.0)
        for name in ("fedprox", "scaffold", "moon", "fedgen", "fedmix")
    ]
    assert f"in the paper, whose best gains {max(papers):.1f}." in PAGE and min(gains) > max(papers)
    ahead = usual("fedeas") - last_20("logit-adjusted"), last_20("fedeas-clean") - last_20("logit-adjusted-clean")
    assert "FedEAS is {:.1f} points above the logit-adjusted loss, and {:.1f} under `clean`".format(*ahead) in PAGE
    clean = [last_20(f"{name}-clean") - last_20("fedavg-clean") for name in ("logit-adjusted", "fedeas")]
    leaky = [gains[0], usual("fedeas") - usual("none")]
    parts = [100 * few / many for few, many in (leaky, clean)]
    assert "that loss gets {:.0f} and {:.0f} % of what its images get".format(*parts) in PAGE
    said = "a logit-adjusted loss {:.1f} points, FedEAS {:.1f} (under `clean` {:.1f} and {:.1f})".format(*leaky, *clean)
    assert said in PAGE and said in README


def test_what_other_rules_do_on_cifar_is_what_the_records_say() -> None:
    names = {"waterfill": (1,), "fedeas-g1": (1,), "fedeas": (1, 2, 3), "fedeas-g0.25": (1,)}
    curves = {
        name: [100 * np.array(accuracies(record(f"{PLACE}/{name}-s{seed}"))) for seed in seeds]
        for name, seeds in names.items()
    }
    last = [np.mean([curve[-20:].mean() for curve in curves[name]]) for name in reversed(names)]
    gone = []
    for name in reversed(names):
        config = record(f"{PLACE}/{name}-s1").config()
        counts = planned_counts(config, 100)
        gone.append(removed(counts, planned_allocation(config, counts)))
    assert last == sorted(last) and gone == sorted(gone)
    spread = np.std([curve[-20:].mean() for curve in curves["fedeas"]], ddof=1)
    said = (
        f"but by {last[-1] - last[0]:.1f} points in all, where FedEAS's seeds have a standard deviation of {spread:.1f}"
    )
    assert said in PAGE
    first = {name: sorted(int((curve >= 70).argmax()) + 1 for curve in each) for name, each in curves.items()}
    rounds = [first["waterfill"][0], first["fedeas-g1"][0], first["fedeas"][0], first["fedeas"][-1]]
    said = "Waterfill first has 70 % in round {}, γ = 1 in {}, FedEAS in {} to {} by seed".format(*rounds)
    assert f"{said}, γ = 0.25 in {first['fedeas-g0.25'][0]};" in PAGE
    early = {name: sorted(curve[:60].mean() for curve in each) for name, each in curves.items()}
    means = [early["waterfill"][0], early["fedeas-g1"][0], early["fedeas"][0], early["fedeas"][-1]]
    said = "in rounds 1 to 60 their means are {:.1f}, {:.1f}, {:.1f} to {:.1f}".format(*means)
    assert f"{said} and {early['fedeas-g0.25'][0]:.1f}." in PAGE
    assert early["fedeas-g0.25"][0] < early["fedeas"][0] < early["fedeas"][-1] < early["fedeas-g1"][0]
    shown = f"({last[-1]:.1f}, and {np.mean([c[-20:].mean() for c in curves['fedeas']]):.1f} ± {spread:.1f})"
    assert f"ends where FedEAS ends {shown} and learns a little sooner" in PAGE
    assert f"ends where FedEAS ends {shown}" in README


@pytest.mark.parametrize("name", ["waterfill", "fedeas-g0.25", "fedeas-g1", *FREE])
def test_other_rules_and_free_alternatives_differ_in_their_key_alone(name: str) -> None:
    base = "none" if name in FREE and name != "oversample" else "fedeas"
    ours, theirs = (meaning(record(f"{PLACE}/{each}-s1").config()) for each in (name, base))
    keys = {"logit-adjusted": {"loss"}, "class-weighted": {"loss"}, "flip-crop": {"views"}}
    wanted = keys.get(name) or ({"beta", "gamma"} if "-g" in name else {"policy"})
    assert {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]} == wanted
