"""The ClientApp: plan once, generate missing images, train on real and synthetic images, reply.

The same code runs under Ray, inline and on a SuperNode. A client uses its own data, the run-config and the message;
federation/client_state.py and generators/cache.py keep its state between rounds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedeas_flwr.allocation import scale_down
from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.npy import to_numpy
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.common.text import one_line
from fedeas_flwr.config import RunConfig, generator_config, parse_config
from fedeas_flwr.data.federated import FederatedData, local_data
from fedeas_flwr.data.node import OWN_IMAGES, Node, is_simulated_node, read_node
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_state import ClientState, ClientStore
from fedeas_flwr.federation.flower_internals import forward_messages_at_once
from fedeas_flwr.federation.learners import CLASSIFIER, DENOISER, find_learner
from fedeas_flwr.federation.messages import TrainReport, TrainTask
from fedeas_flwr.generators.client_images import local_images
from fedeas_flwr.generators.federated import (
    expected_weights,
    federated_training,
    received_folder,
    with_folder,
    write_received,
)
from fedeas_flwr.policies.adaptive import EVALUATE, Adaptive, MeasuredImages
from fedeas_flwr.policies.interface import ClientView, Policy, Progress
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import answer_question, checked_plan, images_to_generate
from fedeas_flwr.runs.class_scores import ClassScores, Evaluated
from fedeas_flwr.strategies.interface import ClientRound
from fedeas_flwr.strategies.privacy import Handler, clips_update
from fedeas_flwr.strategies.registry import find_algorithm

logger = logging.getLogger(__name__)
app = ClientApp()
forward_messages_at_once()


def reply_with_errors(handler: Handler) -> Handler:
    """Reply with a one-line reason instead of raising, so that the server sees the same failure on every grid.

    A SuperNode also logs it: its operator may not see the server's log.
    """

    @wraps(handler)
    def wrapped(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except (Exception, SystemExit) as error:  # a model that calls sys.exit() must not end an inline run
            if not is_simulated_node(context.node_config):
                _show_log()
                logger.error("%s: %s", type(error).__name__, one_line(error))
            return messages.error_reply(message, error)

    return wrapped


@app.query()
@reply_with_errors
def query(message: Message, context: Context) -> Message:
    """Reply with the client's id and, for a matched policy, the whole numbers that it asks for.

    Arrays leave the client only in reply to the question of the run's own strategy, and only if the run-config allows
    the disclosure.
    """
    config, node = _open(context)
    client, data = node.client, local_data(config, node)
    question, at = messages.read_question(message)
    if question == "identity":
        if node.partitions and not node.simulated:
            logger.warning("client %d: trains on %s %s; %s", client, node.trains_on, config.dataset, OWN_IMAGES)
        examples, classes = len(data.partition.train[node.part]), messages.classes_digest(data.dataset.classes)
        numbers = {"partitions": node.partitions, "examples": examples, "classes": classes}
        return messages.build_query_reply(message, client, **numbers)
    policy = config.find_policy()
    if isinstance(policy, Adaptive) and question == EVALUATE:
        evaluate_classes(policy, message, context)
        return messages.build_query_reply(message, client)
    if isinstance(policy, MatchedPolicy) and question in policy.questions:
        view = ClientView(data.label_counts(node.part), config.policy_settings)
        if isinstance(policy, Adaptive) and messages.has_task(message):
            task = messages.read_task(message)
            _, scores = _files(config, node, context, task)
            view = _view(config, data, node, task, scores.latest(task.round))
        return messages.build_query_reply(message, client, **answer_question(policy, view, question, at))
    disclosure = find_algorithm(config.strategy).disclosure
    if disclosure is not None and question == disclosure.question:
        return messages.disclose(message, client, disclosure.answer(config, *data.train(node.part)))
    raise ValueError(f"question = '{question}': must be identity, or a question of the policy or the strategy")


@app.train()
@reply_with_errors
@clips_update
def train_client(message: Message, context: Context) -> Message:
    """Train the received model on this client's real and synthetic images."""
    task, config, node, data, device = _open_task(message, context)
    trainable, buffers = messages.read_model(message)
    by_reference = messages.is_in_process(message)

    # 1. Load the client's state after the last round whose reply the server used.
    store, scores = _files(config, node, context, task, by_reference)
    state = store.load(task.accepted_round)
    started = time.perf_counter()

    # 2. Plan how many images to generate per class.
    policy = config.find_policy()
    adaptive = policy if isinstance(policy, Adaptive) else None
    view = _view(config, data, node, task, scores.latest(task.round) if adaptive else None)
    state = planned(config, node, policy, view, state)

    # 3. Generate the planned images that the cache lacks, or repeat real ones (oversample).
    copies = tuple(checked_plan(policy, view)[0].tolist()) if policy.repeats else ()
    local = local_images(config, data, node, state.generate, copies, task.service, state.generator, device)
    images, labels = local.images, local.labels
    if adaptive and (fraction := adaptive.held_out(task.round)):
        trained_on = ~_held_out(config, node, len(data.partition.train[node.part]), len(labels), fraction)
        images, labels = images[trained_on], labels[trained_on]
    generated = time.perf_counter()

    # 4. Train the classifier with the algorithm's objective, or the denoiser.
    client_round = ClientRound(
        config=config,
        number=task.round,
        client=node.client,
        device=device,
        trainable=trainable,
        buffers=buffers,
        extra=messages.read_extra(message),
        memory=state.memory,
        labels=labels,
        most_samples=data.largest * 3 // 2 if config.generates else data.largest,
    )
    trained = find_learner(config).train(client_round, images, by_reference)

    # 5. Save the state after this round, and reply.
    new_state = replace(state, memory=trained.algorithm.memory, generator=local.generator)
    still_needed = task.accepted_round, task.checkpointed_round, task.previous_checkpointed_round
    store.save(task.round, new_state, still_needed)
    report = TrainReport(
        client=node.client,
        examples=len(data.partition.train[node.part]),
        loss=trained.result.loss,
        steps=trained.result.steps,
        generated=sum(state.generate),
        made=local.made,
        seconds_generating=generated - started,
        seconds_training=time.perf_counter() - generated,
        rejected=local.rejected,
        not_made=state.not_made,
    )
    extra = trained.algorithm.extra if by_reference else to_numpy(trained.algorithm.extra)
    return messages.train_reply(message, report, trained.trainable, trained.buffers, extra)


@app.evaluate()
@reply_with_errors
def evaluate_client(message: Message, context: Context) -> Message:
    """Evaluate the global model on images that this client does not train on."""
    config, node = _open(context, messages.read_trained(message))
    data, device = local_data(config, node), configure_torch(config.device, config.precision)
    report = find_learner(config).evaluate(config, data, node, device, *messages.read_model(message))
    return messages.evaluate_reply(message, report)


def evaluate_classes(policy: Adaptive, message: Message, context: Context) -> None:
    """Evaluate the received model on this client's images, and keep the scores of its classes on the client."""
    task, config, node, data, device = _open_task(message, context)
    store, scores = _files(config, node, context, task, messages.is_in_process(message))
    state, model = store.load(task.accepted_round), messages.read_model(message)
    local = local_images(config, data, node, state.generate, (), task.service, state.generator, device)
    loss, predictions = CLASSIFIER.evaluate_each(config, data, local.images, local.labels, *model)
    before, real = scores.latest(task.round - 1), len(data.partition.train[node.part])
    labels = local.labels.cpu().numpy()
    measured = MeasuredImages(
        labels=labels,
        loss=loss,
        wrong=predictions != labels,
        changed=before.changes(predictions, state.generate) if before else np.full(len(labels), np.nan),
        synthetic=np.arange(len(labels)) >= real,
        held_out=_held_out(config, node, real, len(labels), policy.held_out(task.round - 1)).numpy(),
    )
    (plan,) = checked_plan(policy, _view(config, data, node, task, before))
    progress = Progress(task.share.base, plan, policy.score(measured, data.num_classes))
    scores.write(Evaluated(task.round, progress, state.generate, predictions))
    shown = " ".join(f"{score:.3g}" for score in progress.scores)
    logger.info("client %d: scores of its classes before round %d: %s", node.client, task.round, shown)


def planned(config: RunConfig, node: Node, policy: Policy, view: ClientView, state: ClientState) -> ClientState:
    """Return the state with the plan: a new one in the first round of each part of it, or after the data changed.

    The node's limit comes last, so that no other client's plan depends on it. If the limit changes, the plan stays:
    with other images, later rounds would train on other data than earlier ones, and a resumed run would differ from one
    that was not interrupted. The changed limit applies to the next run.
    """
    (counts,) = view.counts.tolist()
    if state.part >= view.round and not data_changed(config, node.client, state, counts):
        kept = sum(state.generate)
        if node.limited(kept + state.not_made) != kept:
            text = "client %d: this node's limit has changed, but the run keeps its %d images"
            logger.warning(text, node.client, kept)
        return state
    (plan,) = images_to_generate(policy, view).tolist()
    generate = scale_down(plan, node.limited(sum(plan)))
    not_made = sum(plan) - sum(generate)
    limited = f", {sum(generate):,} within this node's limit" if not_made else ""
    logger.info("client %d: %s images planned%s", node.client, f"{sum(plan):,}", limited)
    return replace(state, generate=tuple(generate), not_made=not_made, counts=tuple(counts), part=view.round)


def data_changed(config: RunConfig, client: int, state: ClientState, counts: Sequence[int]) -> bool:
    """Return whether this client's label counts differ from those of its plan.

    Raise ValueError if they differ and `data-change` is "refuse": an average of clients that are no longer what they
    declared is not the requested run. The error does not contain the counts, only their sums.
    """
    if state.counts == tuple(counts):
        return False
    if config.data_change == "refuse":
        raise ValueError(
            f"data-change = 'refuse': the labels of client {client} differ from those of its plan, "
            f"{sum(state.counts)} samples then and {sum(counts)} now; 'replan' lets it plan again"
        )
    logger.warning("client %d: its labels changed, planning again", client)
    return True


def _view(
    config: RunConfig, data: FederatedData, node: Node, task: TrainTask, evaluated: Evaluated | None
) -> ClientView:
    """Return a policy's input for a task; ``evaluated`` is the client's evaluation under an adaptive policy."""
    settings, part = replace(config.policy_settings, beta=task.beta), config.find_policy().part(task.round)
    progress = [evaluated.progress] if evaluated else []
    return ClientView(data.label_counts(node.part), settings, [task.share], part, progress)


def _files(
    config: RunConfig, node: Node, context: Context, task: TrainTask, in_memory: bool = False
) -> tuple[ClientStore, ClassScores]:
    """Return this client's files of the run: its states, and its evaluations of the model."""
    folder, owner = node.state_folder(config, context.run_id, task.run), f"{task.run}/{node.client}"
    return ClientStore(folder, owner, in_memory), ClassScores(folder, owner)


def _held_out(config: RunConfig, node: Node, real: int, images: int, fraction: float) -> torch.Tensor:
    """Return a mask of the images that the client does not train on: a ``fraction`` of the ``real`` ones, the first."""
    mask = torch.zeros(images, dtype=torch.bool)
    chosen = stream(config.seed, "held out of training", node.client).permutation(real)[: round(fraction * real)]
    mask[torch.from_numpy(chosen)] = True
    return mask


def _open_task(message: Message, context: Context) -> tuple[TrainTask, RunConfig, Node, FederatedData, str]:
    """Return a message's task, and the config, node, data and device for it."""
    task = messages.read_task(message)
    config, node = _open(context, task.task)
    data, device = local_data(config, node), configure_torch(config.device, config.precision)
    if config.trains_generator:
        config = _with_generator(config, node, task, message)
    return task, config, node, data, device


def _open(context: Context, task: str = "") -> tuple[RunConfig, Node]:
    """Return the run-config and the node; for the ``task`` generator of a classifier's run, that training's config."""
    node, config = read_node(context.node_config), _parse_once(tuple(context.run_config.items()))
    if not node.simulated:
        _show_log()
    if task not in ("", config.task):
        config = federated_training(_with_clients(config, node)) if node.simulated else generator_config(config)
    return node.apply(config), node


def _with_clients(config: RunConfig, node: Node) -> RunConfig:
    """Return a simulation's config with its number of clients, which only the server knows if the key is 0."""
    return config if config.clients else config.with_changes(clients=node.partitions)


def _with_generator(config: RunConfig, node: Node, task: TrainTask, message: Message) -> RunConfig:
    """Return the config with the folder of the generator that the federation trained.

    A node on another machine than the server writes that folder when it receives the weights.
    """
    if node.simulated:
        DENOISER.release()  # this process may have trained the generator
        return with_folder(_with_clients(config, node))
    folder = received_folder(task.run)
    if messages.has_generator(message):
        training = generator_config(config)
        write_received(folder, training, messages.read_generator(message, expected_weights(training)))
    return config.with_changes(generator=str(folder))


def _show_log() -> None:
    """Show this package's log as Flower shows its own: on a node, nobody else shows it."""
    package, flower = logging.getLogger("fedeas_flwr"), logging.getLogger("flwr")
    package.setLevel(logging.INFO)
    for handler in flower.handlers:
        package.addHandler(handler)


@lru_cache(maxsize=4)
def _parse_once(run_config: tuple[tuple[str, Any], ...]) -> RunConfig:
    """Return the validated run-config, which is the same in every message of a run."""
    return parse_config(dict(run_config))
