"""Rounds that fall on CIFAR, and last batches of two: docs/reproduction.md says of them what the records say."""

from __future__ import annotations

import json

import numpy as np
from cifar_runs import (
    PAGE,
    POLICIES,
    README,
    RESULTS,
    accuracies,
    falls_of,
    last_batches,
    record,
    runs_at_other_alphas,
    runs_at_other_budgets,
    runs_that_generate_since,
    runs_with_own_images,
)

from fedeas_flwr.config import FEW
from fedeas_flwr.metrics import falls
from fedeas_flwr.reproduce.measured import meaning
from fedeas_flwr.reproduce.paper import BETA_SWEEP
from fedeas_flwr.run_plan import planned_allocation, planned_counts
from fedeas_flwr.runs import RunDirectory
from fedeas_flwr.training import recipe


def depth(run: RunDirectory, number: int) -> float:
    """How far a round is below the median of those around it, in points."""
    around = accuracies(run)[max(0, number - 7) : number + 6]
    return 100 * (float(np.median(around)) - accuracies(run)[number - 1])


def test_what_longer_last_batches_do_is_what_the_records_say() -> None:
    usual, longer = (record(f"cifar10-k100-a0.1/fedeas{name}-s1") for name in ("", "-min8"))
    theirs, ours = meaning(usual.config()), meaning(longer.config())
    assert {key for key in ours if ours[key] != theirs[key]} == {"min-batch"}
    assert [len(falls_of(run)) for run in (usual, longer)] == [2, 0]
    curves = [100 * np.array(accuracies(run)) for run in (longer, usual)]
    assert [one["clients"] for one in usual.rounds()] == [one["clients"] for one in longer.rounds()]
    there = [f"{curve[63]:.1f} and {curve[153]:.1f}" for curve in curves]
    assert (
        f"has {there[0]} in rounds 64 and 154, where with the same clients the paper's rule falls to {there[1]};"
        in PAGE
    )
    last, first = (
        [f(curve) for curve in curves] for f in (lambda c: c[-20:].mean(), lambda c: int((c >= 70).argmax()) + 1)
    )
    assert f"{last[0]:.1f} against {last[1]:.1f} in last-20, and 70 % in round {first[0]} against {first[1]}" in PAGE


def test_rounds_fall_where_clients_with_a_last_batch_of_two_weigh_much() -> None:
    first, more = runs_with_own_images(), (*runs_at_other_alphas(), *runs_at_other_budgets().values())
    seen, fallen, all_seen, all_fallen = ([0] * 5 for _ in range(4))
    after, deepest, few, heavy = 0, 0.0, [0, 0], [0, 0]
    for run in (*first, *more):
        (real, left), depths = last_batches(run), falls_of(run)
        deepest = max([deepest, *depths.values()])
        for one in run.rounds()[10:]:
            number, clients = one["round"], np.array(one["clients"])
            share, of_few = (
                real[clients[chosen]].sum() / real[clients].sum()
                for chosen in (left[clients] == 2, (left[clients] > 2) & (left[clients] < 8))
            )
            kind = 0 if not share else int(np.digitize(share, [0.05, 0.08, 0.12])) + 1
            all_seen[kind] += 1
            all_fallen[kind] += number in depths
            if run in more:
                continue
            seen[kind] += 1
            fallen[kind] += number in depths
            after += not share and number in depths and any(before in depths for before in range(number - 3, number))
            for counted, holds in ((few, not share and of_few >= 0.08), (heavy, share >= 0.08)):
                counted[0] += holds and number in depths
                counted[1] += holds
    names = ("no such client", "up to 5 %", "5 to 8 %", "8 to 12 %", "over 12 %")
    notes = (f", of which {after} within three rounds after a fall", "", "", "", "")
    for name, rounds, number, note, *of_all in zip(names, seen, fallen, notes, all_seen, all_fallen, strict=True):
        assert f"| {name} | {rounds:,} | {number}{note} | {of_all[0]:,} | {of_all[1]} |" in PAGE
    assert f"of the {len(first)} runs of FedEAS, Missing-only, Uniform and Full-Balance" in PAGE
    assert f"together with the {len(more)} of those policies at other α and β and in the ablation" in PAGE
    assert f"have rounds that do, by up to {100 * deepest:.0f} points against that median" in PAGE
    assert f"make {few[0]} round of {few[1]} fall; with two, {heavy[0]} of {heavy[1]}." in PAGE


def test_it_is_the_last_batches_and_not_the_clients() -> None:
    """Where a run falls, those of other policies, with the same clients of which none is left with two, do not."""
    runs, most, always = runs_with_own_images(), 0.0, set()
    for run in runs:
        _, left = last_batches(run)
        for number in falls_of(run):
            clients = run.rounds()[number - 1]["clients"]
            if not (two := {client for client in clients if left[client] == 2}):
                continue
            always |= {(run.config().clients, client) for client in two}
            for other in runs:
                beside = other.rounds()[number - 1]["clients"] == clients and other.config().seed == run.config().seed
                if other.path != run.path and beside and all(last_batches(other)[1][clients] != 2):
                    most = max(most, depth(other, number))
    assert f"they are at most {most:.1f} points below" in PAGE
    # 62 and 89 are the only others, and each time with one of the named ones.
    assert always == {(20, 11), *((100, client) for client in (44, 53, 62, 66, 70, 89))}
    assert "few of them (44, 53, 66 and 70 at K = 100, 11 at K = 20)" in PAGE
    names = [f"cifar10-k100-a0.1/{name}-{how}-s1" for name in POLICIES for how in ("shared", "one-seed")]
    columns = [f"cifar10-{place}/uniform-one-seed-s1" for place in ("k20-a0.1", "k100-a0.05", "k100-a0.3")]
    shared = [record(name) for name in (*names, *columns, "shared-images/uniform-s1")]
    there = [(run, number) for run in shared for number in falls_of(run)]
    without = [all(last_batches(run)[1][run.rounds()[number - 1]["clients"]] != 2) for run, number in there]
    assert f"they fall {len(there)} times, {sum(without)} of them without such a client" in PAGE
    deep = []
    for run in runs:
        curve = accuracies(run)
        for number in (number for number, points in falls(curve).items() if points > 0.15):
            before = float(np.median(curve[number - 7 : number - 1]))
            deep.append(next(later for later in range(1, 200) if curve[number - 1 + later] >= before))
    assert len(deep) == 6 and f"took {min(deep)} to {max(deep)} rounds to be back" in PAGE


def test_falls_at_other_alphas_are_what_the_page_says() -> None:
    seen, fallen, alone, of_fedavg = {"heavy": 0, "none": 0}, {"heavy": 0, "none": 0}, 0, 0
    for alpha, plain in (("0.05", "fedavg"), ("0.3", "none")):
        runs = {policy: record(f"cifar10-k100-a{alpha}/{policy}-s1") for policy in POLICIES}
        with_fedavg = falls_of(record(f"cifar10-k100-a{alpha}/{plain}-s1"))
        for run in runs.values():
            (real, left), depths = last_batches(run), falls_of(run)
            of_fedavg += sum(number in with_fedavg for number in depths)
            for one in run.rounds()[10:]:
                number, clients = one["round"], np.array(one["clients"])
                share = real[clients[left[clients] == 2]].sum() / real[clients].sum()
                if kind := "heavy" if share > 0.12 else "" if share else "none":
                    seen[kind] += 1
                    fallen[kind] += number in depths
                if share > 0.12 and number in depths:
                    alone += all(depth(other, number) <= 1 for other in runs.values() if other is not run)
    said = f"{fallen['heavy']} of {seen['heavy']} rounds fall where clients left with two weigh over 12 %, and"
    assert (
        f"{said} {fallen['none']} of {seen['none']} without one. In {alone} of the {fallen['heavy']} no other" in PAGE
    )
    *first, second = runs_at_other_alphas()
    total = sum(len(falls_of(run)) for run in first)
    assert f"FedAvg falls in {of_fedavg} of these columns' {total} fallen rounds too" in PAGE
    (real, left), depths, heaviest = last_batches(second), falls_of(second), []
    for number in depths:
        clients = second.rounds()[number - 1]["clients"]
        if all(left[clients] != 2):
            heaviest.append(100 * real[clients].max() / real[clients].sum())
    assert f"second seed at α = 0.05 falls in {len(depths)} rounds, in {len(heaviest)} of them without such" in PAGE
    assert f"there one client is {min(heaviest):.0f} to {max(heaviest):.0f} % of the round," in PAGE
    heavy = [
        one["round"]
        for one in second.rounds()[10:]
        if 100 * real[one["clients"]].max() / real[one["clients"]].sum() >= min(heaviest)
    ]
    assert f"as in {len(heavy)} rounds in all, of which {sum(number in depths for number in heavy)} fall:" in PAGE


def test_how_many_falls_have_a_last_batch_of_two_is_what_the_page_says_in_short() -> None:
    with_two, deep, total, seen, rounds, light, largest = 0, [], 0, 0, 0, 0, 0.0
    for run in (*runs_with_own_images(), *runs_at_other_alphas(), *runs_at_other_budgets().values()):
        (real, left), depths = last_batches(run), falls_of(run)
        largest = max(largest, float(np.max(-np.diff(accuracies(run)[9:]))))
        for one in run.rounds()[10:]:
            clients = np.array(one["clients"])
            share = real[clients[left[clients] == 2]].sum() / real[clients].sum()
            light += 0 < share < 0.01 and one["round"] in depths
            has, fell = any(left[client] == 2 for client in one["clients"]), one["round"] in depths
            rounds, seen, total, with_two = rounds + 1, seen + has, total + fell, with_two + (has and fell)
            deep += [has] if depths.get(one["round"], 0) > 0.1 else []
    said = f"{with_two} of {total} falls, and {sum(deep)} of the {len(deep)} of more than 10 points, are among the"
    assert f"{said} {seen:,} of {rounds:,} rounds with a client that ends" in PAGE
    assert light == 3 and "(three of the 66 with one of under 1 % of the weight;" in PAGE and with_two == 66
    assert f"Single rounds fall, by up to {100 * largest:.0f} points." in PAGE


def test_runs_made_since_fall_as_those_before() -> None:
    runs, rounds, seen, fallen, with_two, after, plain = runs_that_generate_since(), 0, 0, 0, 0, 0, set()
    of_fedavg = falls_of(record("cifar10-k100-a0.1/fedavg-clean-s1"))
    for run in runs:
        (_, left), depths = last_batches(run), falls_of(run)
        for one in run.rounds()[10:]:
            number, two = one["round"], 2 in left[one["clients"]]
            rounds, seen = rounds + 1, seen + two
            if number in depths:
                fallen, with_two = fallen + 1, with_two + two
                after += not two and number - 1 in depths
                if not two and number - 1 not in depths:
                    assert run.config().protocol == "clean" and number in of_fedavg
                    plain |= {number}
    assert (len(runs), fallen, with_two, after, plain) == (9, 10, 6, 1, {53, 191})
    assert (
        "The next nine runs that generate were made after this was written" in PAGE
        and "They fall ten times. Six of" in PAGE
    )
    assert f"Six of these are among their {seen} rounds with a client that is left with two" in PAGE
    assert "and three are rounds 53 and 191 of `clean`, where its FedAvg falls too" in PAGE
    usual, others = 100 * with_two / seen, 100 * (fallen - with_two) / (rounds - seen)
    said = (
        f"of their other {rounds - seen:,} rounds these four. That is {usual:.1f} % for {others:.1f} %; in the 31 runs"
    )
    before = (*runs_with_own_images(), *runs_at_other_alphas(), *runs_at_other_budgets().values())
    pairs = [
        (2 in last_batches(run)[1][one["clients"]], one["round"] in falls_of(run))
        for run in before
        for one in run.rounds()[10:]
    ]
    rates = [100 * pairs.count((has, True)) / sum(two == has for two, _ in pairs) for has in (True, False)]
    assert f"{said} above it is {rates[0]:.1f} % for {rates[1]:.1f} %." in PAGE and len(before) == 31
    hundred = [run for run in runs if run.config().dataset == "cifar100"]
    where = [2 in last_batches(run)[1][one["clients"]] for run in hundred for one in run.rounds()[10:]]
    assert f"CIFAR-100 has {sum(where)} of the {seen} rounds and one of the falls." in PAGE
    assert sum(len(falls_of(run)) for run in hundred) == 1
    worst = record("cifar10-k100-a0.1/missing-only-clean-s1")
    (real, left), depths = last_batches(worst), falls_of(worst)
    number = max(depths, key=lambda number: depths[number])
    clients = worst.rounds()[number - 1]["clients"]
    assert [client for client in clients if left[client] == 2] == [43]
    share = 100 * real[43] / real[clients].sum()
    beside = [record(f"cifar10-k100-a0.1/{name}-clean-s1") for name in ("fedavg", "fedeas", "uniform", "oversample")]
    beside.append(record("cifar10-k100-a0.1/logit-adjusted-clean-s1"))
    assert all(run.rounds()[number - 1]["clients"] == clients for run in beside)
    most = max(depth(run, number) for run in beside)
    said = f"with client 43, of {share:.0f} % of the weight, falls by {100 * depths[number]:.0f} points, where no other"
    assert (
        f"{said} run of `clean` with the same clients is more than {most:.1f} below)" in PAGE and number + 1 in depths
    )


def test_the_falls_of_the_sweep_are_those_of_a_client_that_is_left_with_two() -> None:
    plain = {policy: record(f"cifar10-k20-a0.1/{policy}-s1") for policy in ("fedeas", "uniform")}
    runs = {**plain, **runs_at_other_budgets()}
    clients = [one["clients"] for one in plain["fedeas"].rounds()]
    assert all([one["clients"] for one in run.rounds()] == clients for run in runs.values())
    depths = {name: falls_of(run) for name, run in runs.items()}
    two = {name: [client for client in range(20) if last_batches(run)[1][client] == 2] for name, run in runs.items()}
    assert {name for name in two if not two[name]} == {
        *("fedeas-b4", "fedeas-b16", "uniform", "uniform-b20", "without-entropy", "linear")
    }
    assert "| FedEAS β = 4, 16; Uniform β = 12, 20; both variants | nobody | – | – | 0 |" in PAGE
    assert not any(depths[name] for name in runs if not two[name])
    total, with_it, at_once = 0, 0, {}
    for name, (client,) in ((name, found) for name, found in two.items() if found):
        run, real = runs[name], last_batches(runs[name])[0]
        config, counts = run.config(), planned_counts(run.config(), 20)
        held = (counts + planned_allocation(config, counts)).sum(axis=1)[client]
        there = [number for number in range(11, 201) if client in clients[number - 1]]
        shares = [100 * real[client] / real[clients[number - 1]].sum() for number in there]
        policy = {"fedeas": "FedEAS", "uniform": "Uniform"}[config.policy]
        label = f"{policy} β = {config.beta:g} | client {client}, of {held:,}"
        share = f"{min(shares):.0f} to {max(shares):.0f} % | {len(there)}"
        fallen = [number for number in depths[name] if number in there]
        deepest = f"{len(fallen)} | {100 * max(depths[name].values()):.1f}" if fallen else "– | –"
        assert f"| {label} | {share} | {len(depths[name])} | {deepest} |" in PAGE
        total, with_it = total + len(depths[name]), with_it + len(fallen)
        if fallen:
            for number in depths[name]:
                others = [each for each in runs if not set(two[each]) & set(clients[number - 1]) and each != name]
                at_once |= {(each, number): depth(runs[each], number) for each in others}
    assert f"{total} falls, {with_it} of them with a client that is left with two." in PAGE
    deepest = sorted((100 * points for points in depths["uniform-b16"].values()), reverse=True)
    assert f"with 3 to 6 %, makes Uniform at β = 16 fall by {deepest[0]:.0f} and {deepest[1]:.0f} points" in PAGE
    assert 129 in depths["fedeas-b8"] and 14 not in clients[128] and 128 in depths["fedeas-b8"] and 14 in clients[127]
    assert at_once.pop(("fedeas-b8", 129)) > 5
    assert f"are at most {max(at_once.values()):.1f} points below the median around (but for that round 129)" in PAGE
    collapse = accuracies(runs["uniform-b4"])[189:191]
    assert f"round 191 at β = 4 is {100 * (collapse[0] - collapse[1]):.0f} below the round before" in PAGE


def test_runs_that_fall_deeply_end_higher_as_the_page_says() -> None:
    def median(name: str, first: int, last: int) -> float:
        curve = accuracies(record(f"cifar10-k20-a0.1/{name}-s1"))
        return 100 * float(np.median(curve[first - 1 : last]))

    names = ("fedeas-b8", "fedeas", "without-entropy", "linear", "uniform", "uniform-b16", "uniform-b20", "uniform-b4")
    early, late = ({name: median(name, *when) for name in names} for when in ((41, 58), (161, 190)))
    ahead = late["fedeas-b8"] - late["fedeas"]
    said = f"in rounds 41 to 58 ({early['fedeas-b8']:.1f} and {early['fedeas']:.1f}, medians) and {ahead:.1f} above it"
    assert said in PAGE
    leads = [at["fedeas-b8"] - at[name] for at in (early, late) for name in ("without-entropy", "linear")]
    assert "it is {:.1f} and {:.1f} ahead first and {:.1f} and {:.1f} then.".format(*leads) in PAGE
    first, then = ([at[name] for name in ("uniform", "uniform-b16", "uniform-b20")] for at in (early, late))
    assert "in rounds 41 to 58 ({:.1f}, {:.1f} and {:.1f}) and after its falls".format(*first) in PAGE
    assert "62 above both ({:.1f}, {:.1f} and {:.1f}).".format(*then) in PAGE and first == sorted(first)
    depths = falls_of(record("cifar10-k20-a0.1/uniform-b16-s1"))
    assert [number for number, points in depths.items() if points > 0.1] == [59, 62]
    near = [at["uniform"] - at["uniform-b4"] for at in (late, early)]
    assert "as near to β = 12 as {:.1f}, from {:.1f}.".format(*near) in PAGE


def test_uniform_at_beta_4_without_short_batches_is_what_the_page_says() -> None:
    usual, longer = (record(f"cifar10-k20-a0.1/uniform-b4{end}-s1") for end in ("", "-min8"))
    theirs, ours = meaning(usual.config()), meaning(longer.config())
    assert {key for key in ours if ours[key] != theirs[key]} == {"min-batch"}
    assert [one["clients"] for one in usual.rounds()] == [one["clients"] for one in longer.rounds()]
    _, left = last_batches(usual)
    assert {client: left[client] for client in np.flatnonzero((left > 1) & (left < FEW))} == {3: 7, 13: 2}
    before, after = (100 * np.array(accuracies(run)) for run in (usual, longer))
    last = after[-20:].mean(), before[-20:].mean()
    assert not falls(after / 100) and "No round of it falls, and last-20 is {:.1f} for {:.1f}.".format(*last) in PAGE
    assert "Uniform at β = 4 with 20 clients has {:.1f} for {:.1f}".format(*last) in PAGE
    fedeas, papers = 100 * np.array(accuracies(record("cifar10-k20-a0.1/fedeas-b4-s1"))), BETA_SWEEP["uniform-b4"][0]
    lead, above = fedeas[-20:].mean() - last[0], last[0] - papers
    assert f"(below) it has {last[0]:.1f}, {above:.1f} above the paper's, and FedEAS's lead is {lead:.1f}." in PAGE
    collapsed = fedeas[-20:].mean() - last[1]
    said = f"At β = 4 it is {collapsed:.1f} by a collapse of Uniform's, and {lead:.1f} over Uniform without"
    assert f"{said} batches of fewer than 8 (paper 5.3)." in PAGE
    assert f"by a collapse; without batches of fewer than 8 images {above:.1f} above)" in README
    gained = before - after
    said = f"it is {gained[100:190].mean():.1f} points higher in rounds 101 to 190, falls included, and"
    assert f"{said} {gained[180:190].mean():.1f} in the ten rounds before the last collapse." in PAGE
    assert "Before its last collapse Uniform at β = 4 is 4 points higher with them" in PAGE
    assert min(falls(before / 100)) == 31
    medians = [np.median(gained[start : start + 10]) for start in (20, 180)]
    said = "from {:.1f} in rounds 21 to 30 (median), before any fall, to {:.1f} in rounds 181 to 190"
    assert said.format(*medians) in PAGE
    assert f"without them it is {(fedeas - after)[100:190].mean():.1f} below (FedEAS keeps" in PAGE
    assert last_batches(record("cifar10-k20-a0.1/fedeas-b4-s1"))[1][2] == 6
    assert usual.environment()["code"] != longer.environment()["code"]


def test_what_is_said_of_scaffold_at_20_clients_is_what_the_records_say() -> None:
    run, plain = record("cifar10-k20-a0.1/scaffold-s1"), record("cifar10-k20-a0.1/fedavg-s1")
    config, rounds = run.config(), run.rounds()
    held = planned_counts(config, config.clients).sum(axis=1)
    assert (held[2], held[7], held[17], held[2] % config.batch_size) == (130, 431, 595, 2)
    measured = json.loads((RESULTS / "short-batches" / "controls-cpu.json").read_text())
    length = {(row["client"], row["last"]): f"{row['length']:.1f}" for row in measured["rows"]}
    ours, theirs = np.array(accuracies(run)), np.array(accuracies(plain))
    assert [one["clients"] for one in rounds] == [one["clients"] for one in plain.rounds()]
    shown = f"The paper has 60.2, ours {100 * run.summary()['last_20']:.1f}: below FedAvg in"
    assert f"{shown} {(ours < theirs).sum()} of 200 rounds, with three collapses" in PAGE
    spread = [one["gamma_hat"] for one in rounds]
    tenfold = [number for number in range(2, 201) if spread[number - 1] > 10 * spread[number - 2]]
    assert tenfold == [60, 83, 184]
    assert f"its control variate is {length[2, 2]} long, {length[2, 0]} without the batches of two" in PAGE
    assert f"with 431 and 595 images, are {length[7, 47]} and {length[17, 19]} (" in PAGE


def test_what_is_said_of_scaffold_without_short_batches_is_what_the_records_say() -> None:
    run, other, plain = (record(f"cifar10-k20-a0.1/{name}-s1") for name in ("scaffold", "scaffold-min8", "fedavg"))
    config, ours, mended, theirs = run.config(), *(np.array(accuracies(each)) for each in (run, other, plain))
    held = planned_counts(config, config.clients).sum(axis=1)
    usual, larger = meaning(config), meaning(other.config())
    assert {key for key in larger if larger[key] != usual[key]} == {"min-batch"}
    short = {client: each % config.batch_size for client, each in enumerate(held) if each % config.batch_size < 8}
    assert short == {2: 2, 12: 3} and np.ceil(held[12] / config.batch_size) == 40
    gained, short_of = 100 * (mended - ours), 60.16 - 100 * mended[-20:].mean()
    said = f"it has {100 * mended[-20:].mean():.1f}, peak {100 * mended.max():.1f}: above FedAvg in"
    fallen = [len(falls_of(each)) for each in (other, run)]
    assert f"{said} {(mended > theirs).sum()} rounds, {fallen[0]} falls for {fallen[1]}." in PAGE
    assert min(one["round"] for one in run.rounds() if 2 in one["clients"]) == 3
    assert abs(gained[:3]).max() < 0.2 and gained[3] > 1.9
    assert f"first counts: {100 * mended[5]:.1f} and {100 * ours[5]:.1f} in round 6." in PAGE
    moon = record("cifar10-k20-a0.1/moon-s1").rounds()[0]["accuracy"]
    assert moon == plain.rounds()[0]["accuracy"] and run.environment().get("code") is None
    assert f"last-20 is {gained[-20:].mean():.1f} points higher" in PAGE
    assert f"over rounds 21 to 200 it is {gained[20:].mean():.1f}." in PAGE
    best = max(100 * mended[start : start + 20].mean() for start in range(181))
    assert f"The {short_of:.1f} points that are left are not the window's: the best 20 rounds have {best:.1f}." in PAGE
    behind = [mended[start : start + 20].mean() < theirs[start : start + 20].mean() for start in (0, 20, 40, 60)]
    assert behind == [True, True, True, False]
    assert f"no control variate counts yet, has {100 * mended[0]:.1f} for {100 * theirs[0]:.1f}:" in PAGE
    steps = [recipe(other.config()).steps(int(each)) for each in held]
    assert f"clients take from {min(steps)} to {max(steps)} steps a round" in PAGE
    left = {alpha: last_batches(record(f"cifar10-k100-a{alpha}/scaffold-s1")) for alpha in ("0.1", "0.3")}
    assert not any(left["0.1"][1] == 2) and left["0.3"][0][left["0.3"][1] == 2].tolist() == [450]
    assert not falls_of(record("cifar10-k100-a0.3/scaffold-s1"))
    assert "At α = 0.3 one is (450 images), and no round falls" in PAGE
    assert f"(`min-batch = 8`) it has {100 * mended[-20:].mean():.1f}, and with" in README


def test_fedavg_falls_as_often_as_the_page_says() -> None:
    runs = [record(f"cifar10-k100-a0.1/none-s{seed}") for seed in (1, 2, 3)]
    counts = [len(falls_of(run)) for run in runs]
    assert f"falls in {counts[0]}, {counts[1]} and {counts[2]} rounds of its three seeds" in PAGE


def test_the_lengths_of_gradients_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "short-batches" / "cpu.json").read_text())["rows"]
    two, usual = rows[0], rows[-1]
    assert (two["size"], two["draws"], usual["size"]) == (2, 40, 64)
    assert (
        f"the gradient is {two['median'] / usual['median']:.0f} times as long as that of 64 in the median of 40" in PAGE
    )
    assert f"and up to {two['largest'] / usual['median']:.0f} times" in PAGE
