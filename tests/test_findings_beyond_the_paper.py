"""What README and docs/reproduction.md say of leakage, of free alternatives and of other rules is in the records."""

from __future__ import annotations

import numpy as np
import pytest
from cifar_runs import PAGE, POLICIES, README, RESULTS, accuracies, record

from fedeas_flwr.allocation import removed
from fedeas_flwr.metrics import falls
from fedeas_flwr.policies import allocate
from fedeas_flwr.reproduce.measured import meaning
from fedeas_flwr.reproduce.paper import LAST_20, at
from fedeas_flwr.run_plan import planned_allocation, planned_counts

PLACE = "cifar10-k100-a0.1"
ALTERNATIVES = " ".join((RESULTS.parent / "docs" / "alternatives.md").read_text().split())
FREE = ("logit-adjusted", "class-weighted", "oversample", "flip-crop")


def last_20(name: str, seeds: tuple[int, ...] = (1,)) -> float:
    """In %, the mean over seeds."""
    return 100 * float(np.mean([record(f"{PLACE}/{name}-s{seed}").summary()["last_20"] for seed in seeds]))


def usual(policy: str) -> float:
    """Protocol paper, three seeds."""
    return last_20(policy, (1, 2, 3))


def test_protocol_clean_differs_in_nothing_but_what_is_split_and_tested() -> None:
    held, gone = {}, {}
    for leaky, clean in (("none", "fedavg-clean"), *((policy, f"{policy}-clean") for policy in POLICIES)):
        ours, theirs = (record(f"{PLACE}/{name}-s1") for name in (clean, leaky))
        told, before = meaning(ours.config()), meaning(theirs.config())
        assert {key for key in told if told[key] != before[key]} == {"protocol"}
        assert [one["clients"] for one in ours.rounds()] == [one["clients"] for one in theirs.rounds()]
        held = {run.config().protocol: planned_counts(run.config(), 100) for run in (ours, theirs)}
        gone = {how: 100 * removed(each, allocate(each, "fedeas", beta=12.0)) for how, each in held.items()}
    more = 100 * (held["clean"].sum() / held["paper"].sum() - 1)
    assert held["clean"].sum() == 50_000 and f"with {more:.0f} % more real images and about as many generated" in PAGE
    assert (np.corrcoef(held["clean"].ravel(), held["paper"].ravel())[0, 1]) < 0.1  # another partition
    assert f"(FedEAS removes {gone['clean']:.1f} % of the imbalance, for {gone['paper']:.1f} %)" in PAGE
    assert f"deals out the 50,000 others, where `paper` leaves {held['paper'].sum():,} for training" in PAGE


def test_what_leakage_may_be_worth_is_what_the_records_say() -> None:
    plain = {"paper": usual("none"), "clean": last_20("fedavg-clean")}
    found = {policy: {"paper": usual(policy), "clean": last_20(f"{policy}-clean")} for policy in POLICIES}
    lower = [each["paper"] - each["clean"] for each in found.values()]
    assert f"FedAvg is {plain['clean'] - plain['paper']:.1f} points higher there; FedEAS, Missing-only and" in PAGE
    assert f"Uniform are {min(lower):.1f} to {max(lower):.1f} lower." in PAGE
    gains = {policy: {how: each[how] - plain[how] for how in plain} for policy, each in found.items()}
    shown = {policy: f"{each['clean']:.1f} for {each['paper']:.1f}" for policy, each in gains.items()}
    assert f"FedEAS's gain over FedAvg is {shown['fedeas']} points, Missing-only's {shown['missing-only']} and" in PAGE
    first = {policy: last_20(policy) - last_20("none") for policy in POLICIES}
    smaller = [100 * (1 - gains[policy]["clean"] / first[policy]) for policy in POLICIES]
    said = f"with seed 1 on both sides they are {min(smaller):.1f} to {max(smaller):.1f} % smaller."
    assert f"Uniform's {shown['uniform']}; {said}" in PAGE
    without = [last_20(f"{name}-clean") - last_20(name) for name in FREE[:3]]
    without.append(plain["clean"] - plain["paper"])
    said = f"without images differ by {min(without):+.1f} to {max(without):+.1f} points between the protocols"
    assert said.replace("-", "−") in PAGE
    less = gains["fedeas"]["paper"] - gains["fedeas"]["clean"]
    assert round(less) == 2 and "the gain is only 2 points smaller (one seed), so that it hardly explains 10" in PAGE
    clean, leaky = gains["fedeas"]["clean"], gains["fedeas"]["paper"]
    ahead = [found["fedeas"]["clean"] - found[other]["clean"] for other in ("uniform", "missing-only")]
    said = f"FedEAS is {clean:.1f} points above FedAvg, with it {leaky:.1f}, on another partition"
    assert f"{said}. It leads there too, by {ahead[0]:.1f} and {ahead[1]:.1f} points" in PAGE
    assert f"{said}; it leads Uniform by {ahead[0]:.1f} and Missing-only by {ahead[1]:.1f}." in README
    assert f"under it FedEAS is still {clean:.1f} points above FedAvg (one seed, above)" in README
    leads = {
        other: "{:.1f} points ({:.1f})".format(
            *(found["fedeas"][how] - found[other][how] for how in ("clean", "paper"))
        )
        for other in ("uniform", "missing-only")
    }
    assert f"FedEAS leads Uniform by {leads['uniform']} and Missing-only by" in PAGE
    assert f"and Missing-only by {leads['missing-only'].replace(' points', '')}." in PAGE


def test_what_comes_for_free_is_what_the_records_say() -> None:
    gains = [last_20(name) - usual("none") for name in FREE]
    unseen = [last_20(f"{name}-clean") - last_20("fedavg-clean") for name in FREE[:3]]
    both = [number for pair in zip(gains, unseen, strict=False) for number in pair]
    said = (
        "The logit-adjusted loss gains {:.1f} points over FedAvg (under `clean` {:.1f}), the class-weighted one {:.1f}"
    )
    said = f"{said} ({{:.1f}}), oversampling {{:.1f}} ({{:.1f}}) and flips and crops {{:.1f}}, more than any method"
    assert said.format(*both, gains[3]) in PAGE
    papers = [
        (at(LAST_20, name, "c10-k100-a0.1") or 0.0) - (at(LAST_20, "fedavg", "c10-k100-a0.1") or 0.0)
        for name in ("fedprox", "scaffold", "moon", "fedgen", "fedmix")
    ]
    assert f"in the paper's column, whose best gains {max(papers):.1f}." in PAGE and min(gains) > max(papers)
    told = (
        "gains {:.1f} points over FedAvg, class weights {:.1f}, oversampling {:.1f}, flips and crops {:.1f}, and FedEAS"
    )
    assert told.format(*gains) in ALTERNATIVES
    assert f"with its 33,650 images {usual('fedeas') - usual('none'):.1f} (one seed, three" in ALTERNATIVES
    ahead = usual("fedeas") - last_20("logit-adjusted"), last_20("fedeas-clean") - last_20("logit-adjusted-clean")
    assert "FedEAS is {:.1f} points above the logit-adjusted loss, and {:.1f} under `clean`".format(*ahead) in PAGE
    clean = [last_20(f"{name}-clean") - last_20("fedavg-clean") for name in ("logit-adjusted", "fedeas")]
    leaky = [gains[0], usual("fedeas") - usual("none")]
    parts = [100 * few / many for few, many in (leaky, clean)]
    assert "that loss gets {:.0f} and {:.0f} % of what FedEAS's images get".format(*parts) in PAGE
    said = "a logit-adjusted loss {:.1f} points, FedEAS {:.1f} (under `clean` {:.1f} and {:.1f})".format(*leaky, *clean)
    assert said in PAGE and said in README


def test_what_other_rules_do_on_cifar_is_what_the_records_say() -> None:
    names = {"waterfill": (1,), "fedeas-g1": (1,), "fedeas-g0.75": (1,), "fedeas": (1, 2, 3), "fedeas-g0.25": (1,)}
    curves = {
        name: [100 * np.array(accuracies(record(f"{PLACE}/{name}-s{seed}"))) for seed in seeds]
        for name, seeds in names.items()
    }
    last = {name: np.mean([curve[-20:].mean() for curve in each]) for name, each in curves.items()}
    gone = []
    for name in reversed(names):
        config = record(f"{PLACE}/{name}-s1").config()
        counts = planned_counts(config, 100)
        gone.append(removed(counts, planned_allocation(config, counts)))
    assert gone == sorted(gone) and max(last, key=last.__getitem__) == "fedeas-g0.75"
    seeds = [curve[-20:].mean() for curve in curves["fedeas"]]
    spread = np.std(seeds, ddof=1)
    said = f"The best is γ = 0.75, {last['fedeas-g0.75'] - last['fedeas']:.1f} above the paper's rule, whose seeds have"
    assert f"{said} a standard deviation of {spread:.1f} and whose second has {seeds[1]:.1f}:" in PAGE
    assert last["waterfill"] < last["fedeas-g0.75"] < seeds[1]
    others = [last[name] for name in names if "-g" in name]
    said = f"with other exponents than the paper's ends at {min(others):.1f} to {max(others):.1f} (one seed each):"
    assert f"{said} with larger ones it learns a little sooner, with a smaller one later." in PAGE
    late = {name: sorted(np.median(curve[100:]) for curve in each) for name, each in curves.items()}
    three = sorted(late[name][0] for name in ("waterfill", "fedeas-g1", "fedeas-g0.75"))
    said = f"the three have medians of {three[0]:.1f} to {three[-1]:.1f}, the paper's rule {late['fedeas'][0]:.1f} to"
    assert f"{said} {late['fedeas'][-1]:.1f} by seed.)" in PAGE
    first = {name: sorted(int((curve >= 70).argmax()) + 1 for curve in each) for name, each in curves.items()}
    sooner = ("waterfill", "fedeas-g1", "fedeas-g0.75")
    rounds = [*(first[name][0] for name in sooner), first["fedeas"][0], first["fedeas"][-1]]
    said = "Waterfill first has 70 % in round {}, γ = 1 in {}, γ = 0.75 in {}, FedEAS in {} to {} by seed".format(
        *rounds
    )
    assert f"{said}, γ = 0.25 in {first['fedeas-g0.25'][0]};" in PAGE
    early = {name: sorted(curve[:60].mean() for curve in each) for name, each in curves.items()}
    means = [*(early[name][0] for name in sooner), early["fedeas"][0], early["fedeas"][-1]]
    said = "in rounds 1 to 60 their means are {:.1f}, {:.1f}, {:.1f}, {:.1f} to {:.1f}".format(*means)
    assert f"{said} and {early['fedeas-g0.25'][0]:.1f}." in PAGE
    assert early["fedeas-g0.25"][0] < early["fedeas"][0] and means[:4] == sorted(means[:4], reverse=True)
    assert early["fedeas"][-1] < early["fedeas-g0.75"][0]
    shown = f"({last['waterfill']:.1f}, and {last['fedeas']:.1f} ± {spread:.1f})"
    assert f"ends where FedEAS ends {shown} and learns a little sooner" in PAGE
    assert f"ends where FedEAS ends {shown} and learns sooner, with one seed." in README
    ahead = curves["waterfill"][0] - curves["fedeas"][0]
    assert (ahead[:60] > 0).all()
    said = f"above FedEAS's seed 1 in each of these 60 rounds, by {ahead[:60].mean():.1f} points in the mean."
    assert f"With the same clients Waterfill is {said}" in PAGE
    drops = {name: [falls(list(curve / 100)) for curve in each] for name, each in curves.items()}
    counts = [len(found) for found in drops["fedeas"]]
    others = [len(found) for name, each in drops.items() for found in each if name != "fedeas"]
    said = "FedEAS's runs fall in {}, {} and {} rounds, the others in".format(*counts)
    assert f"{said} {min(others)} to {max(others)}; before round 61 only γ = 1 does, in round 11." in PAGE
    early_falls = [(name, number) for name, each in drops.items() for found in each for number in found if number < 61]
    assert early_falls == [("fedeas-g1", 11)]


@pytest.mark.parametrize("name", ["waterfill", "fedeas-g0.25", "fedeas-g0.75", "fedeas-g1", *FREE])
def test_other_rules_and_free_alternatives_differ_in_their_key_alone(name: str) -> None:
    base = "none" if name in FREE and name != "oversample" else "fedeas"
    ours, theirs = (meaning(record(f"{PLACE}/{each}-s1").config()) for each in (name, base))
    keys = {"logit-adjusted": {"loss"}, "class-weighted": {"loss"}, "flip-crop": {"views"}}
    wanted = keys.get(name) or ({"beta", "gamma"} if "-g" in name else {"policy"})
    assert {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]} == wanted


def test_fedgen_and_fedprox_are_as_near_to_the_papers_as_the_page_says() -> None:
    fedgen, fedavg = (100 * np.array(accuracies(record(f"{PLACE}/{name}-s1"))) for name in ("fedgen", "none"))
    papers = [at(LAST_20, name, "c10-k100-a0.1") or 0.0 for name in ("fedavg", "fedgen")]
    assert abs(fedgen[-20:].mean() - papers[1]) < 1 and "FedProx, SCAFFOLD and FedGen (one) are within a point" in PAGE
    below = usual("none") - fedgen[-20:].mean()
    said = f"FedGen is {below:.1f} below FedAvg, in the paper {papers[0] - papers[1]:.1f}, and slow:"
    assert f"{said} {fedgen[:20].mean():.1f} for {fedavg[:20].mean():.1f} in rounds 1 to 20." in PAGE
    there = {name: 100 * record(f"cifar10-k100-a0.3/{name}-s1").summary()["last_20"] for name in ("fedprox", "none")}
    above = there["fedprox"] - (at(LAST_20, "fedprox", "c10-k100-a0.3") or 0.0)
    assert f"FedProx is {above:.1f} above and level with FedAvg" in PAGE
    assert abs(there["fedprox"] - there["none"]) < 0.3


def test_fedmix_is_as_near_to_fedavg_as_the_page_says() -> None:
    fedmix, fedavg = (100 * np.array(accuracies(record(f"{PLACE}/{name}-s1"))) for name in ("fedmix", "none"))
    papers = [at(LAST_20, name, "c10-k100-a0.1") or 0.0 for name in ("fedmix", "fedavg")]
    below = papers[0] - fedmix[-20:].mean(), usual("none") - fedmix[-20:].mean()
    assert "FedMix is {:.1f} below the paper's, and {:.1f} below FedAvg, with which".format(*below) in PAGE
    assert abs(papers[0] - papers[1]) < 0.1 and "the paper has it level" in PAGE
    under = (fedavg - fedmix).reshape(10, 20).mean(axis=1)
    assert record(f"{PLACE}/none-s1").config().precision == "tf32"
    said = "Its curve is FedAvg's (of seed 1, in tf32),"
    assert f"{said} {under.min():.1f} to {under.max():.1f} points lower in every 20 rounds" in PAGE
    columns = ("c10-k100-a0.05", "c10-k100-a0.3")
    theirs = [(at(LAST_20, "fedavg", place) or 0.0) - (at(LAST_20, "fedmix", place) or 0.0) for place in columns]
    assert "the paper has it {:.1f} and {:.1f} below FedAvg at α = 0.05 and 0.3; those".format(*theirs) in PAGE
    clients = [[one["clients"] for one in record(f"{PLACE}/{name}-s1").rounds()] for name in ("fedmix", "none")]
    assert clients[0] == clients[1]
