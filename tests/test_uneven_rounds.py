"""Rounds that fall on CIFAR, and how even their labels are: docs/reproduction.md says of them what the records say."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from cifar_runs import (
    PAGE,
    POLICIES,
    accuracies,
    falls_of,
    last_batches,
    record,
    runs_at_other_alphas,
    runs_with_own_images,
    runs_without_images,
)

from fedeas_flwr.allocation import normalised_entropy, oversample
from fedeas_flwr.metrics import falls
from fedeas_flwr.run_plan import planned_allocation, planned_counts
from fedeas_flwr.runs import RunDirectory


def evenness(run: RunDirectory) -> list[tuple[int, float, float, bool]]:
    """By round from the 11th on: H̃ of its labels, the heaviest client's weight, and whether one is left with two."""
    return list(_evenness(run.path))


@cache
def _evenness(path: Path) -> tuple[tuple[int, float, float, bool], ...]:
    run = RunDirectory(path)
    config, (_, left) = run.config(), last_batches(run)
    counts = planned_counts(config, config.clients)
    held = counts + planned_allocation(config, counts)
    own, real = held / held.sum(axis=1, keepdims=True), counts.sum(axis=1)
    found = []
    for one in run.rounds()[10:]:
        clients = one["clients"]
        weights = real[clients] / real[clients].sum()
        parts = np.round(1e9 * weights @ own[clients]).astype(np.int64)
        found.append((one["round"], float(normalised_entropy([parts])[0]), float(weights.max()), 2 in left[clients]))
    return tuple(found)


def test_rounds_fall_where_their_labels_are_uneven_as_the_page_says() -> None:
    plain = runs_without_images(100)
    policies = [run for run in (*runs_with_own_images(), *runs_at_other_alphas()) if run.config().clients == 100]
    assert f"of the {len(plain)} runs of FedAvg, FedProx and MOON" in PAGE
    assert f"and of the {len(policies)} of the policies there" in PAGE
    seen, fallen = np.zeros((5, 3), int), np.zeros((5, 3), int)
    for run in (*plain, *policies):
        depths = falls_of(run)
        for number, even, heaviest, two in evenness(run):
            if not two:
                place = int(np.digitize(even, [0.75, 0.8, 0.85, 0.9])), 2 if run in policies else int(heaviest >= 0.3)
                seen[place] += 1
                fallen[place] += number in depths
    of_plain = [(number in falls_of(run), two) for run in plain for number, _, _, two in evenness(run)]
    fell = sum(fell for fell, _ in of_plain)
    said = f"with 100 clients {of_plain.count((True, False))} of the {fell} falls of FedAvg, FedProx and MOON are so"
    assert said in PAGE
    ends = (fallen[0, 1], seen[0, 1], fallen[4, 0], seen[4, 0])
    assert "large part of the round: {} of {} of the worst, {} of {} of the best.".format(*ends) in PAGE
    names = ("under 0.75", "0.75 to 0.80", "0.80 to 0.85", "0.85 to 0.90", "0.90 and more")
    for name, rounds, number in zip(names, seen, fallen, strict=True):
        cells = " | ".join(f"{rounds[i]:,} | {number[i]}" for i in range(3))
        assert f"| {name} | {cells} |" in PAGE
    light = {
        alpha: [
            number in falls_of(run)
            for run in plain
            for number, even, heaviest, two in evenness(run)
            if run.config().alpha == alpha and even < 0.85 and heaviest < 0.3 and not two
        ]
        for alpha in (0.05, 0.1)
    }
    said = f"{sum(light[0.05])} of {len(light[0.05])} do; at α = 0.1 {sum(light[0.1])} of {len(light[0.1])})"
    assert said in PAGE
    names = (*(f"{alpha}/scaffold-s1" for alpha in ("0.05", "0.1", "0.3")), "0.05/scaffold-s2")
    scaffold = [
        (number in falls_of(run), even < 0.75 and heaviest >= 0.3)
        for run in (record(f"cifar10-k100-a{name}") for name in names)
        for number, even, heaviest, two in evenness(run)
        if not two
    ]
    worst = [fell for fell, is_worst in scaffold if is_worst]
    said = (
        f"falls less: in {sum(fell for fell, _ in scaffold)} of {len(scaffold)} rounds, in {sum(worst)} of {len(worst)}"
    )
    assert f"{said} of the worst." in PAGE, said
    few = [
        (even >= 0.9, number in falls_of(run))
        for run in runs_without_images(20)
        for number, even, _, two in evenness(run)
        if not two
    ]
    counts = [few.count((False, True)), sum(not even for even, _ in few), few.count((True, True))]
    said = "With 20 clients {} of {} rounds of FedAvg, FedProx and MOON under 0.90 fall, and {} of".format(*counts)
    assert f"{said} {sum(even for even, _ in few)} others." in PAGE


def test_the_rounds_of_a_run_made_since_that_fall_are_its_least_even() -> None:
    run = record("cifar10-k100-a0.3/moon-s2")
    depths, found = falls_of(run), evenness(run)
    fallen = {number: even for number, even, _, two in found if number in depths and not two}
    least = sorted(found, key=lambda one: one[1])[:2]
    assert sorted(fallen) == sorted(number for number, *_ in least) == [159, 160]
    said = "two fall, 159 and 160, which are the least even of all its rounds, with {:.2f} and {:.2f}."
    assert said.format(fallen[159], fallen[160]) in PAGE
    others = [record(f"cifar10-k100-a0.3/{name}-s1") for name in ("none", "fedprox", "moon")]
    lower = sorted(number for number, even, _, _ in evenness(others[0]) if even < min(fallen.values()))
    assert lower == [54, 123, 190] and not any(set(lower) & falls_of(other).keys() for other in others)
    assert "seed 1 has three rounds less even still, 54, 123 and 190, and none of its three runs falls there" in PAGE
    (third,) = depths.keys() - fallen.keys()
    real, left = last_batches(run)
    there = run.rounds()[third - 1]["clients"]
    share = 100 * real[10] / real[there].sum()
    assert (
        left[10] == 2 and 10 in there and f"third fall, {third}, is of the other kind: client 10, {share:.0f} %" in PAGE
    )


def test_how_even_rounds_are_is_what_the_page_says() -> None:
    def of(name: str) -> list[float]:
        return [even for _, even, _, _ in evenness(record(name))]

    folders = {policy: [f"a{alpha}/{policy}-s1" for alpha in ("0.05", "0.1", "0.3")] for policy in POLICIES}
    folders["none"] = ["a0.05/fedavg-s1", "a0.1/none-s1", "a0.3/none-s1"]
    means = {policy: [np.mean(of(f"cifar10-k100-{name}")) for name in names] for policy, names in folders.items()}
    shown = {policy: "{:.2f}, {:.2f} and {:.2f}".format(*of_columns) for policy, of_columns in means.items()}
    assert f"FedAvg has {shown['none']} at α = 0.05, 0.1 and 0.3 with 100 clients; Uniform {shown['uniform']};" in PAGE
    assert f"Missing-only {shown['missing-only']}; FedEAS {shown['fedeas']} with as many images" in PAGE
    for column in range(3):
        assert means["fedeas"][column] > max(means[policy][column] for policy in ("uniform", "missing-only"))
    assert min(of("cifar10-k100-a0.1/full-balance-s1")) > 0.9999
    small = [np.mean(of(f"cifar10-k20-a0.1/{name}-s1")) for name in ("uniform-b4", "fedavg")]
    late = [100 * np.median(accuracies(record(f"cifar10-k20-a0.1/{n}-s1"))[-60:]) for n in ("uniform-b4", "fedavg")]
    said = f"β = 4 has {small[0]:.2f}, hardly more than FedAvg's {small[1]:.2f}, and is {late[0] - late[1]:.0f} points"
    assert f"{said} above it in the median of its last 60 rounds" in PAGE
    least = min(of("cifar10-k100-a0.3/none-s1"))
    hundred = [one for seed in (1, 2, 3) for one in evenness(record(f"cifar100-k100-a0.1/fedavg-s{seed}"))]
    lowest, heaviest = min(even for _, even, _, _ in hundred), max(weight for _, _, weight, _ in hundred)
    assert f"nothing generated is {least:.2f} even in its worst round, and CIFAR-100, with {lowest:.2f}." in PAGE
    said = f"none of them is less even than {lowest:.2f}, no client is more than {100 * heaviest:.0f} % of one."
    assert said in PAGE


def test_which_methods_without_images_fall_in_uneven_rounds_is_what_the_page_says() -> None:
    names = ("none", "fedmix", "fedgen", "flip-crop", "oversample", "class-weighted", "scaffold", "logit-adjusted")
    runs = {name: record(f"cifar10-k100-a0.1/{name}-s1") for name in names}
    who = [one["clients"] for one in runs["none"].rounds()]
    assert all([one["clients"] for one in run.rounds()] == who for run in runs.values())
    uneven = [number for number, even, _, _ in evenness(runs["none"]) if even < 0.85]
    assert f"{len(uneven)} rounds of seed 1 under 0.85 among them, are as before" in PAGE
    fell = [sum(number in falls_of(run) for number in uneven) for run in runs.values()]
    config = runs["oversample"].config()
    counts = planned_counts(config, 100)
    held = counts + oversample(counts, config.beta)
    own, real = held / held.sum(axis=1, keepdims=True), counts.sum(axis=1)
    mixed = [real[who[number - 1]] @ own[who[number - 1]] / real[who[number - 1]].sum() for number in uneven]
    low = int((normalised_entropy(np.round(1e9 * np.array(mixed)).astype(np.int64)) < 0.85).sum())
    said = (
        "Of these {} FedAvg falls in {}, FedMix in {}, FedGen in {}, flips and crops in {}, oversampling in {} (its"
        " copies make all"
    )
    said += f" but {low} of the 72 more even than 0.85), the class-weighted loss in {{}}, SCAFFOLD in {{}}, and the"
    assert f"{said} logit-adjusted loss in none.".format(len(uneven), *fell[:-1]) in PAGE and fell[-1] == 0
    clean = [
        record(f"cifar10-k100-a0.1/{name}-clean-s1")
        for name in ("fedavg", "oversample", "class-weighted", "logit-adjusted")
    ]
    there = [number for number, even, _, _ in evenness(clean[0]) if even < 0.85]
    fell = [sum(number in falls_of(run) for number in there) for run in clean]
    said = f"Under `clean` FedAvg falls in {fell[0]} of {len(there)} such rounds, oversampling in {fell[1]}, the"
    assert f"{said} class-weighted loss in {fell[2]}, the logit-adjusted loss in none." in PAGE and fell[3] == 0
    of_weights = [len(falls_of(run)) for run in (runs["class-weighted"], clean[2])]
    said = "does nothing for classes that a client lacks, still falls in {} rounds in all, under `clean` in {}, of"
    depths = falls_of(clean[2])
    deepest = max(depths, key=depths.__getitem__)
    (even,) = (even for number, even, _, _ in evenness(clean[2]) if number == deepest)
    said += f" which the deepest, {deepest}, by {100 * depths[deepest]:.0f} points, is in an even round ({even:.2f}) in"
    assert f"{said} which FedAvg does not fall:".format(*of_weights) in PAGE
    assert deepest not in falls_of(clean[0])
    both = [accuracies(record(f"cifar10-k100-a0.1/logit-adjusted{end}-s1")) for end in ("", "-clean")]
    assert not any(falls(curve) for curve in both) and "No round of its two runs falls, nor" in PAGE
    depths = [100 * (np.median(curve[i - 6 : i + 7]) - curve[i]) for curve in both for i in range(10, 200)]
    assert f"nor is any more than {max(depths):.1f} points below the median around it" in PAGE
    assert "No round of its two runs falls." in PAGE
