"""What the pages say of images drawn otherwise, with guidance, in more steps or in steps spread otherwise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from cifar_runs import PAGE, README, RESULTS, accuracies, falls_of, last_batches, record

from fedeas_flwr.metrics import falls
from fedeas_flwr.reproduce.cells import DRAWINGS
from fedeas_flwr.reproduce.measured import meaning
from fedeas_flwr.reproduce.paper import LAST_20, at

COLUMN, PLACE, TEN = "c100-k100-a0.1", "cifar100-k100-a0.1", "cifar10-k100-a0.1"
GENERATORS = " ".join((RESULTS.parent / "docs" / "generators.md").read_text().split())
GUIDANCE = DRAWINGS["-guided"][1]["guidance"]


def curve(name: str, place: str = PLACE) -> np.ndarray:
    """Return accuracies in %."""
    return 100 * np.array(accuracies(record(f"{place}/{name}-s1")))


def report(dataset: str, how: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"quality-{dataset}" / how / "report.json").read_text())
    return found


def test_what_guided_images_are_is_what_the_page_says() -> None:
    plain, guided = (report("cifar100", f"g{guidance}-n20") for guidance in ("1", "1.5"))
    assert plain["samples"] == guided["samples"] == 5_000
    known = 100 * plain["classifier_test_accuracy"]
    found, drawn = (100 * each["class_agreement"] for each in (plain, guided))
    said = f"which knows {known:.1f} % of CIFAR-100's test images, finds {found:.1f} % to be of the class that was"
    assert f"Of 5,000 of its images an independent classifier, {said} asked for." in PAGE
    assert f"With a guidance of {GUIDANCE} it is {drawn:.1f} %, and their distance" in PAGE
    assert found < known < drawn and "knows more of the guided images than of real ones" in PAGE
    assert f"finds {drawn:.0f} % of the class asked for in place of {found:.0f}" in PAGE
    yardstick = plain["classifier_frechet_distance_of_test_images"]
    far, near = (each["classifier_frechet_distance"] for each in (plain, guided))
    assert f"features; {yardstick:.1f} for the test images) goes from {far:.1f} to {near:.1f} (" in PAGE
    copies = [100 * each["near_copies"] for each in (guided, plain)]
    said = "{:.1f} % are near copies of a training image, for {:.1f} % (of real test images".format(*copies)
    assert f"{said} {100 * plain['near_copies_expected']:.0f} % are as near)" in PAGE
    distances = [each["nearest_train_image_median"] for each in (guided, plain)]
    distances.append(plain["nearest_train_image_median_of_test_images"])
    assert "distance to the nearest is {:.1f}, for {:.1f} (test images {:.1f})".format(*distances) in PAGE


def test_what_more_steps_do_is_what_the_pages_say() -> None:
    few, many = (report("cifar100", f"g1-n{steps}") for steps in (20, 100))
    assert (many["sampler-steps"], many["guidance"], many["samples"]) == (100, 1.0, few["samples"])
    far, near = (each["classifier_frechet_distance"] for each in (few, many))
    agreement = [100 * each["class_agreement"] for each in (many, few)]
    said = "the distance is {:.1f} for {:.1f} and the agreement hardly higher, {:.1f} for {:.1f} % (`g1-n100/`; by a"
    said = said.format(near, far, *agreement)
    assert f"{said} classifier trained anew, which knows {100 * many['classifier_test_accuracy']:.1f} %" in PAGE
    spread = report("cifar100", "g1-n20-dpm++-logsnr")
    assert (spread["sampler"], spread["guidance"], spread["samples"]) == ("dpm++-logsnr", 1.0, few["samples"])
    level, guided = (one["classifier_frechet_distance"] for one in (spread, report("cifar100", "g1.5-n20")))
    said = f"20 have a distance of {level:.1f} and an agreement of {100 * spread['class_agreement']:.1f} %"
    known = 100 * spread["classifier_test_accuracy"]
    assert f"{said} (`g1-n20-dpm++-logsnr/`, a third classifier, {known:.1f} %)." in PAGE
    said = f"brings CIFAR-100's distance from {far:.1f} to {level:.1f}, more steps to {near:.1f}, guidance to"
    assert f"{said} {guided:.1f}." in GENERATORS
    assert near < level < guided < far and f"Guided images, farther from the real ones ({guided:.1f})," in PAGE
    assert all(f"{one['classifier_frechet_distance_of_test_images']:.1f}" == "1.3" for one in (few, spread))
    assert "by two classifiers, with 1.3 each for test images" in GENERATORS
    ten = [report("cifar10", f"g1-n20{how}") for how in ("", "-dpm++-logsnr")]
    said = "the distance goes from {:.1f} to {:.1f}".format(*(one["classifier_frechet_distance"] for one in ten))
    said += " and the agreement from {:.1f} to {:.1f} %".format(*(100 * one["class_agreement"] for one in ten))
    real = ten[0]["classifier_frechet_distance_of_test_images"]
    assert f"{said} (`results/quality-cifar10/`; {real:.1f} for test images;" in PAGE


PAIRS = (f"{PLACE}/fedeas", f"{PLACE}/missing-only", f"{TEN}/fedeas")


def later(one: np.ndarray) -> float:
    """Return the mean over rounds 21 to 200."""
    return float(one[20:].mean())


@pytest.mark.parametrize("name", PAIRS)
def test_runs_with_steps_even_in_log_snr_differ_as_the_page_says(name: str) -> None:
    runs = [record(f"{name}{how}-s1") for how in ("", "-logsnr")]
    usual, ours = (meaning(run.config()) for run in runs)
    assert {key for key in ours if key in usual and ours[key] != usual[key]} == {"sampler"}
    assert [one["clients"] for one in runs[0].rounds()] == [one["clients"] for one in runs[1].rounds()]
    assert [run.config().precision for run in runs] == ["tf32" if TEN in name else "bf16", "bf16"]
    assert runs[0].environment().get("code") != runs[1].environment()["code"]  # the oldest does not name its own
    said = "That pair also differs in precision, bf16 for tf32, of the images bf16 for float32, and all three in the"
    assert f"{said} state of the code." in PAGE


def test_what_steps_even_in_log_snr_bring_is_what_the_pages_say() -> None:
    pairs = [[100 * np.array(accuracies(record(f"{name}{how}-s1"))) for how in ("-logsnr", "")] for name in PAIRS]
    last = [one[-20:].mean() for pair in pairs for one in pair]
    assert "FedEAS (`fedeas-logsnr-s1`) has {:.1f} for {:.1f}, Missing-only".format(*last[:2]) in PAGE
    assert "(`missing-only-logsnr-s1`) {:.1f} for {:.1f}, with a fall of".format(*last[2:4]) in PAGE
    gains = [f"{later(ours - usual):.1f}" for ours, usual in pairs]
    ahead = [(ours > usual).sum() for ours, usual in pairs]
    said = f"they are {gains[0]} and {gains[1]} points higher, in {ahead[0]} and {ahead[1]} of 200 rounds."
    assert f"over rounds 21 to 200 {said}" in PAGE
    said = f"over rounds 21 to 200 FedEAS is {gains[0]} points higher on CIFAR-100 and {gains[2]} on CIFAR-10,"
    assert f"{said} Missing-only {gains[1]} (one seed each)." in PAGE
    assert f"{gains[0]}, {gains[1]} and {gains[2]} points over rounds 21 to 200, in" in GENERATORS
    said = (
        f"they have {last[0]:.1f} and {last[2]:.1f}: {gains[0]} and {gains[1]} points more over rounds 21 to 200, and"
    )
    assert f"{said} FedEAS on CIFAR-10 {gains[2]} (one seed each)." in README
    seeds = [100 * np.array(accuracies(record(f"{TEN}/fedeas-s{seed}"))) for seed in (1, 2, 3)]
    low, high = min(map(later, seeds)), max(map(later, seeds))
    said = f"has {later(pairs[2][0]):.1f} over rounds 21 to 200, three seeds without {low:.1f} to {high:.1f};"
    calm = (pairs[2][0] - pairs[2][1])[np.r_[20:140, 160:200]].mean()
    said += f" with the same seed it is {gains[2]} higher ({calm:.1f} without rounds 141 to 160, where the other run"
    assert f"{said} falls), in {ahead[2]} of 200 rounds." in PAGE and 154 in falls_of(record(f"{TEN}/fedeas-s1"))
    assert f"In last-20 it has {last[4]:.1f} for {last[5]:.1f}, within the spread of the seeds." in PAGE
    assert min(one[-20:].mean() for one in seeds) < last[4] < max(one[-20:].mean() for one in seeds)


def test_where_runs_with_steps_even_in_log_snr_fall_is_what_the_page_says() -> None:
    fallen = {}
    for name in PAIRS:
        run = record(f"{name}-logsnr-s1")
        two = set(np.flatnonzero(last_batches(run)[1] == 2).tolist())
        fallen[name] = falls_of(run)
        assert all(two & set(run.rounds()[number - 1]["clients"]) for number in fallen[name])
    assert [list(found) for found in fallen.values()] == [[], [195], [61]]
    said = f"with a fall of {100 * fallen[PAIRS[1]][195]:.1f} points in the window (round 195, with the client"
    assert f"{said} that is left with two images)" in PAGE
    assert "Missing-only's here in round 195 and CIFAR-10's FedEAS in 61, both with such a client.)" in PAGE


def test_guided_images_are_ahead_of_those_even_in_log_snr_as_the_pages_say() -> None:
    ahead = [later(curve(f"{method}-guided") - curve(f"{method}-logsnr")) for method in ("fedeas", "missing-only")]
    assert "bring FedEAS and Missing-only another {:.1f} and {:.1f} points, though".format(*ahead) in PAGE
    whole = {f"{later(curve(f'{method}-guided') - curve(method)):.1f}" for method in ("fedeas", "missing-only")}
    assert len(whole) == 1
    assert f"over rounds 21 to 200 FedEAS and Missing-only are {whole.pop()} points better each, and" in GENERATORS
    agreement = [100 * report("cifar100", f"g{guidance}-n20")["class_agreement"] for guidance in ("1.5", "1")]
    assert "{:.0f} % of their class with 1.5 for {:.0f} % without;".format(*agreement) in GENERATORS
    assert "are {:.1f} and {:.1f} points ahead of those even in log SNR over rounds 21 to 200".format(*ahead) in PAGE
    assert "and still {:.1f} and {:.1f} better than with well spread steps".format(*ahead) in GENERATORS


def test_what_guided_images_bring_is_what_the_pages_say() -> None:
    runs = [record(f"{PLACE}/fedeas{how}-s1") for how in ("", "-guided")]
    usual, ours = (meaning(run.config()) for run in runs)
    differing = {key for key in ours if key in usual and ours[key] != usual[key]}
    assert differing == {"guidance"} and ours["guidance"] == GUIDANCE and ours["guidance-rescale"] == 0
    clients = [one["clients"] for one in runs[1].rounds()]
    assert [one["clients"] for one in runs[0].rounds()] == clients
    assert runs[0].environment()["code"] != runs[1].environment()["code"]
    without, with_it = curve("fedeas"), curve("fedeas-guided")
    last, before, papers = with_it[-20:].mean(), without[-20:].mean(), at(LAST_20, "fedeas", COLUMN) or 0.0
    said = (
        f"has {last:.1f} for {before:.1f}: {last - before:.1f} of the {papers - before:.1f} points that were missing."
    )
    assert f"{said} It is above the run without guidance in {(with_it > without).sum()} of 200 rounds." in PAGE
    plain, other = (100 * record(f"{PLACE}/missing-only{how}-s1").summary()["last_20"] for how in ("", "-guided"))
    theirs = at(LAST_20, "missing-only", COLUMN) or 0.0
    said = f"they have {last:.1f} and {other:.1f}, {papers - last:.1f} and {theirs - other:.1f} below (one seed)."
    assert said in PAGE and f"with guided images (`guidance = {GUIDANCE}`) {said}" in README
    said = f"has {other:.1f} for {plain:.1f}, {other - plain:.1f} of the {theirs - plain:.1f} that were missing, and is"
    assert f"{said} above the run without in all 200 rounds." in PAGE
    assert (curve("missing-only-guided") > curve("missing-only")).all()
    above = other - last, (with_it - curve("missing-only-guided"))[180:199].mean(), papers - theirs
    said = "Missing-only is {:.1f} above, by FedEAS's round 200 alone ({:.1f} below without it), in the paper {:.1f}"
    assert f"{said} below.".format(*above) in PAGE
    lower = [int(number) for number in np.flatnonzero(with_it <= without) + 1]
    two = set(np.flatnonzero(last_batches(runs[1])[1] == 2).tolist())
    assert lower == [34, 127, 200] and all(two & set(clients[number - 1]) for number in lower)
    depths = [np.median(with_it[number - 7 : number + 6]) - with_it[number - 1] for number in lower]
    assert "34, 127 and 200, have a client that is left with two images, and are" in PAGE
    assert "{:.1f}, {:.1f} and {:.1f} points below the median around them.".format(*depths) in PAGE
    assert max(depths) < 5 and not falls(list(with_it / 100)) and "FedEAS's has two that are nearly falls" in PAGE
    assert f"the model that is left has {with_it[-1]:.1f}, without guidance {without[-1]:.1f}." in PAGE
