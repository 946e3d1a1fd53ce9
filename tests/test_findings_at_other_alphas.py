"""What docs/reproduction.md says of α = 0.05 and 0.3 is what the records say."""

from __future__ import annotations

import numpy as np
from cifar_runs import PAGE, README, accuracies, falls_of, last_batches, record

from fedeas_flwr.config import FEW
from fedeas_flwr.metrics import falls
from fedeas_flwr.reproduce.measured import meaning
from fedeas_flwr.reproduce.paper import FEDEAS_AND_SCAFFOLD_PEAK, LAST_20, PEAK, at, images


def test_uniforms_last_rounds_at_alpha_005_are_what_the_page_says() -> None:
    run, fedeas, missing = (record(f"cifar10-k100-a0.05/{name}-s1") for name in ("uniform", "fedeas", "missing-only"))
    (real, left), curve = last_batches(run), 100 * np.array(accuracies(run))
    others = [100 * np.array(accuracies(other)) for other in (fedeas, missing)]
    counts = [len(falls_of(each)) for each in (missing, run, fedeas, record("cifar10-k100-a0.05/fedavg-s1"))]
    assert "in {1} and {0} rounds for {2} (FedAvg in {3}; seed 1)".format(*counts) in PAGE
    shares = []
    for number in range(180, 184):
        clients = run.rounds()[number - 1]["clients"]
        assert [client for client in clients if left[client] == 2] == [92]
        assert min(other[number - 1] for other in others) > 69
        shares.append(100 * real[92] / real[clients].sum())
    assert f"left with two images and {min(shares):.0f} to {max(shares):.0f} % of the weight" in PAGE
    assert f"accuracy goes from {curve[178]:.1f} to {curve[182]:.1f}, while" in PAGE
    assert {181, 182} <= set(falls_of(record("cifar10-k100-a0.05/fedavg-s1")))
    lead = others[0] - curve
    shown = f"{lead[-20:].mean():.1f} points here, {lead[100:180].mean():.1f} in rounds 101 to 180 and"
    assert f"lead over Uniform is {shown} {lead[100:].mean():.1f} over rounds 101 to 200." in PAGE
    assert f"in rounds 101 to 180 it is {lead[100:180].mean():.1f}.)" in PAGE


def test_uniform_without_short_batches_at_alpha_005_is_what_the_page_says() -> None:
    usual, longer = (record(f"cifar10-k100-a0.05/uniform{end}-s1") for end in ("", "-min8"))
    theirs, ours = meaning(usual.config()), meaning(longer.config())
    assert {key for key in ours if ours[key] != theirs[key]} == {"min-batch"}
    assert [one["clients"] for one in usual.rounds()] == [one["clients"] for one in longer.rounds()]
    before, after = (100 * np.array(accuracies(run)) for run in (usual, longer))
    assert f"rounds 180 to 183 have {after[179:183].min():.1f} to {after[179:183].max():.1f} with the" in PAGE
    fallen, plain = falls(before / 100), falls_of(record("cifar10-k100-a0.05/fedavg-s1"))
    _, left = last_batches(usual)
    with_two = [number for number in fallen if any(left[usual.rounds()[number - 1]["clients"]] == 2)]
    assert [len(fallen), len(with_two), len(fallen.keys() & plain.keys())] == [9, 6, 4]
    assert "nine rounds fall, six with a client left with two and four where FedAvg falls too; without, one," in PAGE
    assert list(falls(after / 100)) == [170] and 170 in plain
    last = [curve[-20:].mean() for curve in (after, before)]
    assert "Last-20 is {:.1f} for {:.1f}; before".format(*last) in PAGE
    assert "and Uniform at α = 0.05 {:.1f} for {:.1f},".format(*last) in PAGE
    assert {f"{curve[100:180].mean():.1f}" for curve in (before, after)} == {"66.1"}
    assert "the two are level, with 66.1 each in rounds 101 to 180." in PAGE
    lead = 100 * np.array(accuracies(record("cifar10-k100-a0.05/fedeas-s1"))) - after
    said = "is {:.1f} points ahead of it in last-20 and {:.1f} over rounds 101 to 200"
    assert said.format(lead[-20:].mean(), lead[100:].mean()) in PAGE


def test_what_is_said_of_missing_only_at_alpha_005_is_what_the_records_say() -> None:
    found = [record(f"cifar10-k100-a0.05/missing-only-s{seed}").summary() for seed in (1, 2)]
    last, peak = ([100 * one[key] for one in found] for key in ("last_20", "peak"))
    papers, best = (at(table, "missing-only", "c10-k100-a0.05") for table in (LAST_20, PEAK))
    assert papers is not None and best is not None
    said = f"Missing-only is {np.mean(last) - papers:.1f} above in last-20, {last[0] - papers:.1f} and"
    assert f"{said} {last[1] - papers:.1f} with its two seeds, and {np.mean(peak) - best:.1f} in its peak." in PAGE
    under = [high - low for high, low in zip(peak, last, strict=True)]
    assert f"its last-20 is {best - papers:.1f} below its peak, ours {under[0]:.1f} and {under[1]:.1f}." in PAGE


def test_what_is_said_of_learners_at_alpha_005_is_what_the_records_say() -> None:
    runs = {name: record(f"cifar10-k100-a0.05/{name}-s1") for name in ("fedavg", "fedprox", "moon", "scaffold")}
    curves = {name: 100 * np.array(accuracies(run)) for name, run in runs.items()}
    papers = {name: at(LAST_20, name, "c10-k100-a0.05") or 0.0 for name in runs}
    apart = {name: curve[-20:].mean() - papers[name] for name, curve in curves.items()}
    means = [curves["moon"][start : start + 20].mean() for start in range(20, 181)]
    said = f"So is MOON, but means of 20 rounds after the 20th go from {min(means):.1f} to {max(means):.1f}."
    assert f"FedAvg and FedProx are within 0.6. {said}" in PAGE
    assert max(abs(apart[name]) for name in ("fedavg", "fedprox", "moon")) < 0.6


def test_what_is_said_of_scaffold_at_alpha_005_is_what_the_records_say() -> None:
    names = ("fedavg-s1", "scaffold-s1", "scaffold-s2", "scaffold-min8-s1")
    runs = {name: record(f"cifar10-k100-a0.05/{name}") for name in names}
    plain, first, second, longer = (100 * np.array(accuracies(run)) for run in runs.values())
    last = [curve[-20:].mean() for curve in (first, second)]
    papers = {name: at(LAST_20, name, "c10-k100-a0.05") or 0.0 for name in ("fedavg", "scaffold")}
    below, theirs = plain[-20:].mean() - np.mean(last), papers["fedavg"] - papers["scaffold"]
    said = f"{below:.1f} points below FedAvg, in the paper {theirs:.1f}, and {np.mean(last) - papers['scaffold']:.1f}"
    assert "SCAFFOLD has {:.1f} and {:.1f} with two seeds: ".format(*last) + f"{said} above the paper's." in PAGE
    assert (
        f"at α = 0.05 is {below:.1f} points below FedAvg (two seeds), in the paper {theirs:.1f}, and, without" in PAGE
    )
    lost, ends = [], []
    for curve in (first, second, longer):
        blocks = curve.reshape(10, 20).mean(axis=1)
        lost.append(blocks[2] - blocks[3:].min())
        ends += [float(f([curve[start : start + 20].mean() for start in range(20, 181)])) for f in (min, max)]
        assert curve is longer or 35.5 < blocks[2] < 37.5
    assert [round(each) for each in lost] == [11, 8, 5]
    assert "to 36 to 37 in rounds 41 to 60 and then lose eleven and eight points" in PAGE
    assert "the 20th go from {:.1f} to {:.1f} and from {:.1f} to {:.1f}.".format(*ends[:4]) in PAGE
    real, left = last_batches(runs["scaffold-s1"])
    assert [client for client in range(100) if left[client] == 2] == [12, 30, 52, 80]
    assert all(real[[12, 30, 52, 80]] == 66)
    small = left[(left > 1) & (left < FEW)]
    assert (len(small), small.min(), small.max()) == (9, 2, 7) and "nine clients, of 2 to 7 images" in PAGE
    ours, usual = (meaning(runs[name].config()) for name in ("scaffold-min8-s1", "scaffold-s1"))
    assert {key for key in ours if ours[key] != usual[key]} == {"min-batch"}
    drawn = [[one["clients"] for one in runs[name].rounds()] for name in ("scaffold-min8-s1", "scaffold-s1")]
    assert drawn[0] == drawn[1] and len(falls(longer / 100)) == len(falls(first / 100)) == 10
    under = (plain - longer)[-20:].mean()
    said = f"it has {longer[-20:].mean():.1f}, {under:.1f} below FedAvg, is above the run with them in"
    assert f"{said} {(longer > first).sum()} of 200 rounds, and loses five points after round 60 in place of" in PAGE
    later = (plain - longer)[20:].mean()
    assert f"without batches of fewer than 8, {under:.1f} below (one; {later:.1f} over rounds 21 to 200)." in PAGE
    parted = [(longer - first)[rounds].mean() for rounds in (slice(0, 80), slice(80, 200))]
    assert "they are {:.1f} apart in rounds 1 to 80 and {:.1f} in rounds 81 to 200.".format(*parted) in PAGE
    codes = [runs[name].environment()["code"] for name in names[1:]]
    assert codes[0] != codes[1] == codes[2] and "the second seed, of the later one, is as low" in PAGE
    said = f"({np.mean(last):.1f}) than to the one without ({longer[-20:].mean():.1f}); with 20 clients it is the other"
    assert f"is nearer to the runs with these batches {said} way round" in PAGE
    few = [100 * record(f"cifar10-k20-a0.1/scaffold{end}-s1").summary()["last_20"] for end in ("", "-min8")]
    assert "(60.2; {:.1f} and {:.1f}).".format(*few) in PAGE
    assert f"at α = 0.05 {longer[-20:].mean():.1f} for {np.mean(last):.1f}." in README
    assert f"So they cost SCAFFOLD {(longer - first)[-20:].mean():.0f} points here, with one seed" in PAGE


def test_what_is_said_of_learners_at_alpha_03_is_what_the_records_say() -> None:
    names = {"fedavg": "none-s1", "scaffold": "scaffold-s1", "moon": "moon-s1", "again": "moon-s2"}
    curves = {one: 100 * np.array(accuracies(record(f"cifar10-k100-a0.3/{name}"))) for one, name in names.items()}
    last = {name: curve[-20:].mean() for name, curve in curves.items()}
    papers = {name: at(LAST_20, name, "c10-k100-a0.3") or 0.0 for name in ("fedavg", "scaffold", "moon")}
    gains = [found["scaffold"] - found["fedavg"] for found in (last, papers)]
    assert "SCAFFOLD is {:.1f} above FedAvg, in the paper {:.1f}.".format(*gains) in PAGE
    above = [last[name] - papers["moon"] for name in ("moon", "again")]
    above += [curves[name].max() - (at(PEAK, "moon", "c10-k100-a0.3") or 0.0) for name in ("moon", "again")]
    said = "MOON is {:.1f} and {:.1f} points above the paper's with two seeds, its peak {:.1f} and {:.1f}."
    assert said.format(*above) in PAGE
    moon, again, plain = (curves[name].reshape(10, 20).mean(axis=1) for name in ("moon", "again", "fedavg"))
    assert (moon[1:] < plain[1:]).all() and (again[1:] < plain[1:]).all()
    said = "{:.1f}, {:.1f} and {:.1f}, and {:.1f}, {:.1f} and {:.1f} in the last three blocks of 20 rounds, FedAvg"
    assert f"{said} (seed 1) {{:.1f}}, {{:.1f}} and {{:.1f}}.".format(*moon[-3:], *again[-3:], *plain[-3:]) in PAGE
    for name in ("moon", "again"):
        means = [curves[name][start : start + 20].mean() for start in range(181)]
        assert max(means) == means[-1] and "No 20 rounds of either are better than the last:" in PAGE


def test_what_is_said_of_fedeas_with_scaffold_is_what_the_record_says() -> None:
    run, column = record("cifar10-k20-a0.3/fedeas+scaffold-s1"), "c10-k20-a0.3"
    found, curve = run.summary(), 100 * np.array(accuracies(run))
    said = f'"under matched full-epoch training": {FEDEAS_AND_SCAFFOLD_PEAK} %. That this is a peak with K = 20 is told'
    assert f"{said} by the two numbers beside it. Ours is {curve.max():.2f}, in round {found['peak_round']}" in PAGE
    assert f"Last-20 is {curve[-20:].mean():.1f}." in PAGE
    assert (
        found["total_generated"] == images("fedeas", column) and f"{found['total_generated']:,} images, which" in PAGE
    )
    left = sorted(last_batches(run)[1].tolist())
    assert 2 not in left and not falls(list(curve / 100))
    assert [each for each in left if 1 < each < FEW] == [4, 6, 7, 7] and "(four have one of 4 to 7)" in PAGE
    blocks = curve.reshape(10, 20).mean(axis=1)
    assert "{:.1f}, {:.1f}, {:.1f} and {:.1f} at the end".format(*blocks[-4:]) in PAGE
    alone = [at(PEAK, name, column) for name in ("scaffold", "fedeas")]
    assert "below the paper's SCAFFOLD alone ({:.1f}; FedEAS alone {:.1f}).".format(*alone) in PAGE
    assert curve.max() < (alone[0] or 0.0)


def test_scaffold_alone_is_as_low_as_the_pages_say() -> None:
    column = "c10-k20-a0.3"
    runs = [record(f"cifar10-k20-a0.3/{name}-s1") for name in ("scaffold", "fedeas+scaffold")]
    assert [one["clients"] for one in runs[0].rounds()] == [one["clients"] for one in runs[1].rounds()]
    alone, together = (100 * np.array(accuracies(run)) for run in runs)
    high, last = (at(table, "scaffold", column) or 0.0 for table in (PEAK, LAST_20))
    small = 100 * record("cifar10-k20-a0.1/scaffold-min8-s1").summary()["last_20"]
    low = (at(LAST_20, "scaffold", "c10-k20-a0.1") or 0.0) - small
    said = f"its peak is {alone.max():.1f}, in the paper {high:.1f}, and its last-20 {alone[-20:].mean():.1f} for"
    said += f" {last:.1f}: {last - alone[-20:].mean():.1f} below, about as far as with 20 clients at α = 0.1 without"
    assert f"{said} small batches ({low:.1f})." in PAGE
    assert f"At α = 0.3 it is {last - alone[-20:].mean():.1f} below, and" in PAGE
    assert not falls_of(runs[0]) and 2 not in last_batches(runs[0])[1]
    gains = together.max() - alone.max(), FEDEAS_AND_SCAFFOLD_PEAK - high
    assert "FedEAS adds {:.1f} points to the peak, in the paper {:.1f}, and is".format(*gains) in PAGE
    assert (together > alone).all() and "above SCAFFOLD alone in all 200 rounds." in PAGE
    said = f"has a peak of {together.max():.1f}, in the paper {FEDEAS_AND_SCAFFOLD_PEAK:.1f}"
    short = f"{said}. SCAFFOLD alone is as low: {alone.max():.1f}, in the paper {high:.1f}; FedEAS adds"
    assert f"{short} {gains[0]:.1f} to that, in the paper {gains[1]:.1f}." in PAGE
    assert f"{said}; SCAFFOLD alone is as low, {alone.max():.1f} ({high:.1f}; one seed each;" in README
    above = []
    for data, alpha, seeds in (("10", 0.05, (1, 2)), ("10", 0.1, (1,)), ("10", 0.3, (1,)), ("100", 0.1, (1, 2))):
        ours = [record(f"cifar{data}-k100-a{alpha}/scaffold-s{seed}").summary()["last_20"] for seed in seeds]
        above.append(100 * np.mean(ours) - (at(LAST_20, "scaffold", f"c{data}-k100-a{alpha}") or 0.0))
    assert f"With 100 clients our SCAFFOLD is {-min(above):.1f} below to {max(above):.1f} above the paper's." in PAGE


def test_what_the_weighting_of_scaffolds_mean_brings_is_what_the_records_say() -> None:
    runs = [record(f"cifar10-k20-a0.3/fedeas+scaffold{how}-s1") for how in ("", "-examples")]
    usual, ours = (meaning(run.config()) for run in runs)
    assert {key for key in ours if ours[key] != usual[key]} == {"scaffold-weighting"}
    alike, by_samples = (100 * np.array(accuracies(run)) for run in runs)
    more = by_samples - alike
    numbers = by_samples.max(), by_samples[-20:].mean(), by_samples.max() - alike.max(), more[-20:].mean()
    said = "FedEAS with SCAFFOLD has a peak of {:.1f} and a last-20 of {:.1f}, {:.1f} and {:.1f} more."
    assert said.format(*numbers) in PAGE
    assert "FedEAS with SCAFFOLD has {:.1f} more in the peak and {:.1f} in last-20;".format(*numbers[2:]) in PAGE
    assert 0.4 < numbers[3] < 0.6 and "brings half a point with FedEAS;" in PAGE
    assert runs[0].environment()["code"] != runs[1].environment()["code"]
    numbers = more[:20].mean(), more[20:].mean(), FEDEAS_AND_SCAFFOLD_PEAK - by_samples.max()
    said = "It learns sooner, by {:.1f} points in rounds 1 to 20 and {:.1f} after them, and {:.1f} points are left."
    assert said.format(*numbers) in PAGE
