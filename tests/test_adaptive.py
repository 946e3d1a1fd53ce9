"""Adaptive policies: FedEAS's total in parts, the later ones where the global model is still wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployments import Lab
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from label_counts import betas, tables
from lossy import federation
from runners import (
    CHEAP,
    black_bank,
    client_state,
    finish,
    pass_models_by_reference,
    quick,
    run_in_process,
    small,
    weights,
)

from fedeas_flwr import client_app
from fedeas_flwr.allocation import IntArray
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_keys import identity
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.learners import find_learner
from fedeas_flwr.federation.training_round import TooFewRepliesError, TrainingRounds
from fedeas_flwr.federation.with_fedeas import with_fedeas
from fedeas_flwr.planning.run_plan import planned_counts
from fedeas_flwr.policies.adaptive import EVALUATE, Adaptive, InParts, MeasuredImages
from fedeas_flwr.policies.built_in import FEDEAS
from fedeas_flwr.policies.interface import EMPTY_SHARE, ClientView, PolicySettings, Progress, Share
from fedeas_flwr.policies.own import find_policy
from fedeas_flwr.policies.registry import POLICIES, allocate
from fedeas_flwr.report.document import purchase_section
from fedeas_flwr.report.groups import group_runs
from fedeas_flwr.report.purchases import purchases_of
from fedeas_flwr.runs.checkpoints import Checkpoint
from fedeas_flwr.runs.class_scores import Evaluated
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import export
from fedeas_flwr.strategies.records import METRICS
from fedeas_flwr.waterfill import waterfill_level

ADAPTIVE = [name for name, policy in POLICIES.items() if isinstance(policy, Adaptive)]
KEYS: dict[str, Any] = {"clients": 3, "rounds": 4, "beta": 6.0, "policy_args": "rounds=2,3 first=0.5"}


def adaptive(name: str = "adaptive", arguments: str = "") -> Adaptive:
    found = find_policy(name, arguments)
    assert isinstance(found, Adaptive)
    return found


# ------------------------------------------------------------------------------------------------------ the rules


@settings(max_examples=30)
@given(tables(), betas)
def test_last_part_is_fedeas_and_no_part_takes_images_back(counts: IntArray, beta: float) -> None:
    policy, view = find_policy("fedeas-in-parts"), ClientView(counts, PolicySettings(beta))
    plans = [policy.plan(replace(view, round=first)) for first in policy.parts]
    assert len(plans) == 3 and np.array_equal(plans[-1], FEDEAS.plan(view))
    assert all((later >= earlier).all() for earlier, later in pairwise(plans))
    for name in (*ADAPTIVE, "fedeas-in-parts"):
        once = find_policy(name, "rounds=")
        assert once.parts == (1,) and np.array_equal(once.plan(view), plans[-1])


@settings(max_examples=60)
@given(tables(clients=5), betas, st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_clients_spend_any_part_exactly(counts: IntArray, beta: float, total: int, seed: int) -> None:
    policy, keys, rng = adaptive(), PolicySettings(beta), np.random.default_rng(seed)
    counts[0, 0] += 1  # somebody must have images
    first = policy.plan(ClientView(counts, keys))
    scores = rng.exponential(1.0, counts.shape) * (rng.random(counts.shape) < 0.8)
    views = [
        ClientView(row[None], keys, [Share()], 3, [Progress(0, first[k], scores[k])]) for k, row in enumerate(counts)
    ]

    def demand(level: float) -> IntArray:
        found = [int(policy.reply(view, "price", level)[0, 0]) for view in views]
        for row, images in zip(counts, found, strict=True):
            assert images <= policy.max_reply(int(row.sum()), counts.shape[1], keys, "price", level)[0]
        return np.array(found)

    bought = waterfill_level(total, demand).samples
    assert bought.sum() == total
    for k, (view, images) in enumerate(zip(views, bought.tolist(), strict=True)):
        share = Share(base=images)
        (plan,) = policy.plan(replace(view, shares=[share]))
        assert (plan >= first[k]).all() and plan.sum() == first[k].sum() + images
        assert plan.sum() <= policy.max_total(int(counts[k].sum()), counts.shape[1], keys, share)


def test_images_go_to_the_classes_with_the_highest_scores() -> None:
    counts, scores = np.array([[40, 2, 2, 2]]), np.array([1.0, 4.0, 2.0, 0.0])
    planned = np.zeros(4, dtype=np.int64)
    view = ClientView(counts, PolicySettings(6.0), [Share(base=12)], 3, [Progress(0, planned, scores)])
    assert adaptive().plan(view).tolist() == [[0, 9, 3, 0]]  # filled to 11 and 5, in the proportion of the scores
    more = replace(view, shares=[Share(base=200)])  # full balance is 76 images without class 3, 114 with it
    assert adaptive().plan(more).tolist() == [[31, 69, 69, 31]]


def test_rest_goes_to_the_class_that_is_worth_most_then() -> None:
    planned, scores = np.zeros(3, dtype=np.int64), np.array([0.0, 1.0, 1.0])
    view = ClientView(np.array([[20, 1, 0]]), PolicySettings(6.0), [Share(base=2)], 3, [Progress(0, planned, scores)])
    assert adaptive().plan(view).tolist() == [[0, 1, 1]]  # one fills class 2 up to class 1, and the next is class 1's


def test_client_with_a_false_total_has_no_negative_share() -> None:
    def query(question: str, beta: float) -> dict[int, tuple[int, ...]]:
        return {0: (9 if beta == 6.0 else 4,), 1: (5 if beta == 6.0 else 7,)}

    assert adaptive().split_total(query, 10, PolicySettings(6.0)) == {0: Share(extra=5), 1: Share()}


def test_parts_are_due_until_they_are_bought() -> None:
    policy, shares = adaptive(arguments="rounds=3,5"), [Share(extra=7), Share(extra=4)]
    assert [policy.due(shares, number) for number in range(1, 7)] == [0, 0, 5, 5, 11, 11]
    assert policy.due([Share(base=5, extra=7), Share(extra=4)], 4) == 0
    assert not any(policy.evaluates_before(number) for number in range(1, 7))
    twice = adaptive("adaptive-disagreement", "rounds=3,5")
    assert [number for number in range(1, 7) if twice.evaluates_before(number)] == [2, 4]


def test_scores_by_class() -> None:
    none = np.zeros(5, dtype=bool)
    images = MeasuredImages(
        labels=np.array([0, 0, 1, 1, 1]),
        loss=np.array([1.0, 3.0, 0.5, 0.5, 0.5]),
        wrong=np.array([False, True, False, False, True]),
        changed=np.array([1.0, 0.0, np.nan, np.nan, np.nan]),
        synthetic=np.array([False, False, False, True, True]),
        held_out=none,
    )
    # Each class has one image more, with the largest mean; a class without images has that one only.
    assert adaptive().score(images, 3).tolist() == [(4 + 2) / 3, (1.5 + 2) / 4, 2.0]
    assert adaptive("adaptive-accuracy").score(images, 2).tolist() == [(1 + 0.5) / 3, (1 + 0.5) / 4]
    assert adaptive("adaptive-disagreement").score(images, 2).tolist() == [0.5, 0.5]
    assert images.agreement().tolist() == [1, 1, 0.5, 0.5, 0.5]
    assert adaptive("adaptive-agreement").score(images, 2).tolist() == [2.0, (0.75 + 2) / 4]
    # Held-out images count as much as all others of their class.
    held = replace(images, held_out=np.array([True, False, True, False, False]), loss=np.array([1.0, 3, 2, 0, 1]))
    assert adaptive().score(held, 2).tolist() == [2.0, (3 * 1.25 + 2) / 4]
    nothing = MeasuredImages(*(np.zeros(0, dtype=kind) for kind in (int, float, bool, float, bool, bool)))
    assert adaptive().score(nothing, 2).tolist() == [1.0, 1.0]


def test_changed_predictions_compare_the_same_images() -> None:
    before = Evaluated(2, Progress(0, np.zeros(2), np.zeros(2)), (1, 1), np.array([0, 1, 1, 0]))
    now = np.array([0, 0, 1, 1])
    assert before.changes(now, (1, 1)).tolist() == [0, 1, 0, 1]
    np.testing.assert_array_equal(before.changes(np.array([0, 0, 1]), (0, 1)), [0, 1, np.nan])  # real images only
    assert np.isnan(before.changes(now, (0, 0))).all()  # the client's real images changed


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("rounds=5,3", "policy-args: rounds = 5,3: must be rounds from 2 on, ascending, such as 3,5"),
        ("rounds=1", "policy-args: rounds = 1: must be rounds from 2 on"),
        ("rounds=soon", "policy-args: rounds = soon: must be rounds from 2 on"),
        ("first=1.5", "policy-args: first = 1.5: must be a number from 0 to 1"),
        ("held_out=no", "policy-args: held_out = no: must be a number from 0 to 1"),
        ("often=3", "policy-args: 'adaptive' has no argument 'often'; it has first, held_out, rounds"),
        ("rounds=3,30", "rounds = 20: must be at least 30: policy 'adaptive' spends the last part of its budget"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"policy": "adaptive", "policy-args": arguments})
    assert str(error.value).startswith(line)


def test_other_apps_reject_plans_in_parts() -> None:
    with pytest.raises(ValueError, match=r"^policy='adaptive': must be one of none, fedeas.* waterfill"):
        with_fedeas(None, 6.0, "adaptive")  # type: ignore[type-var]


# --------------------------------------------------------------------------------------------------------- in runs


def config_of(folder: Path, name: str = "run", **more: Any) -> RunConfig:
    """Return the config of a run whose clients buy twice, with black images of a bank."""
    bank = black_bank(folder / "bank.npz", [150] * 10)
    return quick(folder / name, **{"policy": "adaptive", **KEYS, "generator": bank, **more})


def bought_in(run: RunDirectory) -> dict[int, dict[str, Any]]:
    return {record["round"]: record["bought"] for record in run.rounds() if "bought" in record}


def fedeas_total(config: RunConfig) -> int:
    return int(allocate(planned_counts(config), "fedeas", beta=config.beta).sum())


@pytest.mark.parametrize("policy", ["adaptive", "fedeas-in-parts"])
def test_one_part_is_fedeas_bit_for_bit(tmp_path: Path, policy: str) -> None:
    keys = {"rounds": 2, "participation": 1.0, "policy_args": "rounds="}
    same = finish(config_of(tmp_path, "fedeas", **keys, policy="fedeas"))
    once = finish(config_of(tmp_path, policy, **keys, policy=policy))
    assert weights(once) == weights(same) and bought_in(once) == {}


@pytest.mark.parametrize("policy", ["adaptive", "adaptive-disagreement"])
def test_every_part_is_spent_to_the_unit(tmp_path: Path, policy: str) -> None:
    run = finish(config := config_of(tmp_path, policy=policy, participation=1.0))
    total, first = fedeas_total(config), int(allocate(planned_counts(config), "fedeas", beta=3.0).sum())
    found = bought_in(run)
    assert list(found) == [2, 3] and [sum(item["clients"].values()) for item in found.values()] == [
        (total - first) // 2,
        total - first - (total - first) // 2,
    ]
    assert [item["images"] for item in found.values()] == [sum(item["clients"].values()) for item in found.values()]
    assert [record["generated"] for record in run.rounds()] == [first, first + found[2]["images"], total, total]
    assert run.summary()["total_generated"] == total
    # A later part extends the earlier ones, class by class.
    for client in range(3):
        before, after = (np.array(client_state(run, client, number).generate) for number in (3, 4))
        assert (after >= before).all() and (client_state(run, client, 4).part, before.sum()) == (3, after.sum())


def test_generator_is_needed_until_all_clients_have_their_last_part(tmp_path: Path) -> None:
    config = config_of(tmp_path, participation=1.0)
    made, rounds = federation(config, app_that(lambda *_: False, [])), []
    made.on_generation_done = lambda: rounds.append(made._round_in_progress)
    made.fit(Checkpoint(0, *find_learner(config).initial_state(config)), lambda *_: {"accuracy": 0.5, "loss": 1.0})
    assert rounds == [3, 4]


def test_clients_not_sampled_catch_up_when_they_train(tmp_path: Path) -> None:
    run = finish(config := config_of(tmp_path, participation=0.34, rounds=12))
    trained = {client for record in run.rounds() for client in record["clients"] if record["round"] >= 3}
    assert trained == {0, 1, 2} and run.summary()["total_generated"] == fedeas_total(config)


def test_resumed_run_buys_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"policy": "adaptive-disagreement", "policy_args": "rounds=3,4 held_out=0.2", "participation": 0.7}
    whole, train_round = finish(config_of(tmp_path, "whole", **keys)), TrainingRounds.train_round

    def interrupt(self: TrainingRounds, state: Checkpoint) -> Any:
        if state.round == interrupted_after:
            raise KeyboardInterrupt
        return train_round(self, state)

    for interrupted_after in (1, 2):  # between the two evaluations, and after a purchase
        monkeypatch.setattr(TrainingRounds, "train_round", interrupt)
        stopped = config_of(tmp_path, f"stopped-{interrupted_after}", **keys)
        with pytest.raises(KeyboardInterrupt):
            finish(stopped)
        monkeypatch.setattr(TrainingRounds, "train_round", train_round)
        resumed = finish(stopped.with_changes(resume=True))
        assert weights(resumed) == weights(whole) and bought_in(resumed) == bought_in(whole)


def test_models_passed_by_reference_give_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"policy_args": "rounds=2,3 held_out=0.2"}
    same = finish(config_of(tmp_path, "bytes", **keys))
    pass_models_by_reference(monkeypatch)
    assert weights(finish(config_of(tmp_path, "reference", **keys))) == weights(same)


def test_held_out_images_are_trained_on_from_the_last_part(tmp_path: Path) -> None:
    keys = {"participation": 1.0, "beta": 0.1, "batch_size": 16}  # a β without images, so the steps count real ones
    plain, held = (
        finish(config_of(tmp_path, name, **keys, policy_args=f"rounds=2,4 {more}"))
        for name, more in (("plain", ""), ("held", "held_out=0.5"))
    )
    steps = [[record["steps"] for record in run.rounds()] for run in (plain, held)]
    assert all(0.4 * a < b < 0.6 * a for a, b in zip(*(row[:3] for row in steps), strict=True))
    assert steps[0][3] == steps[1][3]


def app_that(fails: Any, seen: list[tuple[str, dict[str, Any]]]) -> ClientApp:
    """Return clients that fail if ``fails(client, question, number of the question)``; ``seen`` gets all replies."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        question, client = messages.read_question(message)[0], int(context.node_config["partition-id"])
        number = sum(question == asked for asked, _ in seen)
        found = client_app.query(message, context)
        assert [*found.content] == [METRICS]
        seen.append((question, dict(found.content.metric_records[METRICS])))
        if fails(client, question, number):
            raise TimeoutError("the reply was lost")
        return found

    app.train()(client_app.train_client)
    return app


def fit(config: RunConfig, app: ClientApp) -> RunDirectory:
    made = federation(config, app)
    start = Checkpoint(0, *find_learner(config).initial_state(config))
    made.fit(start, lambda trainable, buffers: {"accuracy": 0.5, "loss": 1.0})
    return made.run


def test_only_whole_numbers_leave_a_client(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    fit(config_of(tmp_path, participation=1.0), app_that(lambda *_: False, seen))
    names = {"identity": {"client-id", "partitions", "examples", "classes"}, "plan": {"client-id", "total"}}
    names |= {EVALUATE: {"client-id"}, "price": {"client-id", "count"}}
    assert {question for question, _ in seen} == set(names)
    for question, numbers in seen:
        assert set(numbers) == names[question] and all(type(number) is int for number in numbers.values())


@pytest.mark.parametrize("lost", [EVALUATE, "price"])
def test_others_spend_the_part_of_a_client_that_does_not_answer(tmp_path: Path, lost: str) -> None:
    config = config_of(tmp_path, participation=1.0, min_replies=0.5)
    first, last = (0, 3) if lost == EVALUATE else (9, 12)  # in the middle of the search for the price
    fails = lambda client, question, number: (client, question) == (1, lost) and first <= number < last  # noqa: E731
    run = fit(config, app_that(fails, []))
    found = bought_in(run)
    assert "1" not in found[2]["clients"] and {"0", "2"} <= set(found[2]["clients"])
    assert all(sum(item["clients"].values()) == item["images"] for item in found.values())
    assert run.rounds()[-1]["generated"] == fedeas_total(config)


def test_lost_client_restarts_the_search_for_the_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 demands at level 0 as many images as the two others get more at level -1, where it is lost."""
    reply = Adaptive.reply

    def few(self: Adaptive, view: ClientView, question: str, argument: float) -> IntArray:
        if question != "price":
            return reply(self, view, question, argument)
        return np.array([[2 + int(max(0.0, -argument))]])

    def fails(client: int, question: str, number: int) -> bool:
        return (client, question, number) == (0, "price", 3)

    config = config_of(tmp_path, participation=1.0, min_replies=0.5)
    monkeypatch.setattr(Adaptive, "reply", few)
    found = bought_in(fit(config, app_that(fails, [])))
    assert set(found[2]["clients"]) == {"1", "2"}
    assert all(sum(item["clients"].values()) == item["images"] for item in found.values())


def test_clients_evaluate_in_all_rounds_that_the_policy_needs(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    keys = {
        "rounds": 3,
        "policy": "adaptive-disagreement",
        "policy_args": "rounds=3",
        "participation": 0.34,
        "batch_size": 512,
    }
    fit(config_of(tmp_path, **keys), app_that(lambda *_: False, seen))
    assert [question for question, _ in seen].count(EVALUATE) == 2 * 3  # before rounds 2 and 3


def test_client_whose_node_reconnected_buys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_round = TrainingRounds.train_round

    def reconnect(self: TrainingRounds, state: Checkpoint) -> Any:
        outcome = train_round(self, state)
        if state.round == 0:
            grid._contexts[77] = grid._contexts.pop(2)
        return outcome

    monkeypatch.setattr(TrainingRounds, "train_round", reconnect)
    keys = {"rounds": 2, "policy_args": "rounds=2", "participation": 0.34, "batch_size": 512}
    config = config_of(tmp_path, **keys, min_replies=0.5, node_wait=0.0)
    made = federation(config, app_that(lambda *_: False, []))
    grid: Any = made.grid
    made.fit(Checkpoint(0, *find_learner(config).initial_state(config)), lambda *_: {"accuracy": 0.5, "loss": 1.0})
    assert set(bought_in(made.run)[2]["clients"]) == {"0", "1", "2"}


def test_client_that_is_offline_counts_as_failed_in_a_purchase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not sampled in the round that follows."""
    train_round = TrainingRounds.train_round

    def disconnect(self: TrainingRounds, state: Checkpoint) -> Any:
        outcome = train_round(self, state)
        grid._contexts.pop(1 + min({0, 1, 2} - {*self.sample(2)}))
        return outcome

    monkeypatch.setattr(TrainingRounds, "train_round", disconnect)
    keys = {"rounds": 2, "policy_args": "rounds=2", "participation": 0.34, "batch_size": 512}
    config = config_of(tmp_path, **keys, node_wait=0.0)
    made = federation(config, app_that(lambda *_: False, []))
    grid: Any = made.grid
    with pytest.raises(TooFewRepliesError, match=r"round 2: 1 of 3 clients failed .* its node is offline"):
        made.fit(Checkpoint(0, *find_learner(config).initial_state(config)), lambda *_: {"accuracy": 0.5, "loss": 1.0})


def test_rejected_client_buys_nothing_after_a_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path, participation=1.0)
    made = federation(config, app_that(lambda *_: False, []))
    made.clients.shares[1] = EMPTY_SHARE  # as the checkpoint stores a client whose reply was rejected
    made.fit(Checkpoint(0, *find_learner(config).initial_state(config)), lambda *_: {"accuracy": 0.5, "loss": 1.0})
    assert [sorted(item["clients"]) for item in bought_in(made.run).values()] == [["0", "2"]] * 2


def test_all_clients_rejected_keep_their_first_parts(tmp_path: Path) -> None:
    config = config_of(tmp_path, participation=1.0, policy="adaptive-disagreement")
    made = federation(config, app_that(lambda *_: False, []))
    made.clients.shares.update(dict.fromkeys(range(3), EMPTY_SHARE))
    made.fit(Checkpoint(0, *find_learner(config).initial_state(config)), lambda *_: {"accuracy": 0.5, "loss": 1.0})
    first = allocate(planned_counts(config), "fedeas", beta=3.0).sum()
    assert not bought_in(made.run) and [record["generated"] for record in made.run.rounds()] == [first] * 4


def test_part_that_could_not_be_bought_is_bought_before_the_next_round(tmp_path: Path) -> None:
    def fails(client: int, question: str, number: int) -> bool:
        return question == EVALUATE and number < 3

    config = config_of(tmp_path, participation=1.0, failed_rounds=2)
    run = fit(config, app_that(fails, []))
    assert [bool(record["clients"]) for record in run.rounds()] == [True, False, True, True]
    assert list(bought_in(run)) == [3] and run.rounds()[-1]["generated"] == fedeas_total(config)
    with pytest.raises(TooFewRepliesError, match=r"round 2: 3 of 3 clients failed .* evaluate: TimeoutError"):
        fit(config_of(tmp_path, "once", participation=1.0), app_that(fails, []))


def test_late_client_has_a_first_part_and_may_buy(tmp_path: Path) -> None:
    config = config_of(tmp_path, participation=1.0)
    made = federation(config, app_that(lambda *_: False, []))
    del made.clients.shares[2]  # as of a client that joined after the total was split
    made.fit(Checkpoint(0, *find_learner(config).initial_state(config)), lambda *_: {"accuracy": 0.5, "loss": 1.0})
    counts = planned_counts(config)
    whole, first = (allocate(counts, "fedeas", beta=beta).sum(axis=1) for beta in (6.0, 3.0))
    assert made.run.rounds()[-1]["generated"] == whole[:2].sum() + first[2]
    assert "2" in bought_in(made.run)[2]["clients"]


def test_false_count_costs_only_that_client_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = Adaptive.reply

    def boast(self: Adaptive, view: ClientView, question: str, argument: float) -> IntArray:
        found = reply(self, view, question, argument)
        return found + 10**9 if question == "price" and view.counts.sum() == largest else found

    config = config_of(tmp_path, participation=1.0, min_replies=0.5)
    largest = planned_counts(config).sum(axis=1).max()
    monkeypatch.setattr(Adaptive, "reply", boast)
    run = fit(config, app_that(lambda *_: False, []))
    assert all(len(item["clients"]) == 2 for item in bought_in(run).values())
    assert run.rounds()[-1]["generated"] == fedeas_total(config)


@pytest.mark.slow
@pytest.mark.flower
def test_ray_inline_and_supernodes_buy_the_same_images(
    tmp_path: Path, digits_generator: Path, fresh_images: Callable[[str], None]
) -> None:
    keys = {**CHEAP, "clients": 2, "participation": 1.0, "rounds": 2, "local_epochs": 1, "beta": 4.0}
    keys |= {"policy": "adaptive", "policy_args": "rounds=2"}
    fresh_images("inline")
    inline = finish(small(tmp_path / "inline", **keys))
    fresh_images("ray")
    ray = finish(small(tmp_path / "ray", **keys, backend="ray", actors=2))
    with Lab(tmp_path, 2, digits_generator) as lab:
        lab.restart_superlink()
        lab.register()
        for number in range(2):
            lab.start_node(number)
        deployed = lab.follow(lab.submit(**keys, min_replies=1.0))
    assert bought_in(inline) == bought_in(ray) == bought_in(deployed) and list(bought_in(inline)) == [2]
    assert weights(inline) == weights(ray) == weights(deployed)


# ------------------------------------------------------------------------------------------------ plan and report


def test_plan_shows_the_first_part_and_bounds(tmp_path: Path) -> None:
    words = ["plan", "policy=adaptive", "policy-args=rounds=3,5 first=0.5", "clients=10"]
    plan = json.loads(run_in_process(*words, "--format", "json").stdout)
    assert [part["round"] for part in plan["parts"]] == [1, 3, 5]
    assert sum(part["images"] for part in plan["parts"]) == 893
    generate = [sum(client["generate"]) for client in plan["clients"]]
    assert sum(generate) == plan["total"] == plan["parts"][0]["images"] == 413
    assert all(
        first <= client["at_most"] <= first + 480 for first, client in zip(generate, plan["clients"], strict=True)
    )
    shown = run_in_process(*words).stdout
    assert "In parts:     413 before round 1, 240 before round 3, 240 before round 5; 893 in total." in shown


def test_report_shows_what_was_bought_when(tmp_path: Path) -> None:
    run = finish(config := config_of(tmp_path, participation=1.0))
    groups, _ = group_runs([run])
    section = purchase_section(groups)
    assert section is not None and [picture.name for picture in section.pictures] == ["bought-1"]
    bought = bought_in(run)
    assert [row[1:3] for row in section.tables[0].rows] == [[str(n), str(item["images"])] for n, item in bought.items()]
    (found,) = purchases_of(groups)
    planned = np.sum([client_state(run, client, config.rounds).generate for client in range(3)], axis=0)
    assert found.by_class is not None and found.by_class.sum(axis=0).tolist() == planned.tolist()
    assert found.by_class.sum(axis=1).tolist()[1:] == [item["images"] for item in bought.values()]
    export(run, tmp_path / "record")
    files = sorted((tmp_path / "record").iterdir())
    (of_record,) = purchases_of(group_runs([RunDirectory(tmp_path / "record")])[0])
    assert of_record.by_class is None and sorted((tmp_path / "record").iterdir()) == files
    for path in run.path.glob("clients/*/scores-*"):
        path.unlink()
    without = purchase_section(groups)
    assert without is not None and not without.pictures and "not here" in without.text[-1]


def test_arguments_are_part_of_a_run_that_uses_them() -> None:
    assert "policy-args" in identity(parse_config({"policy": "adaptive"}))
    assert "policy-args" not in identity(parse_config({"policy": "waterfill", "policy-args": "rounds=3"}))
    assert isinstance(POLICIES["adaptive"], InParts)
