"""The ClientApp: plan once, generate what is missing, train on real and synthetic images, reply.

The same code runs under Ray, inline and on a SuperNode. A client knows its own data, the run-config and what the
message says; what it keeps between rounds is in federation/client_state.py and generators/cache.py. In module state
there are only copies that spare work: engines and networks to test with.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.federated import FederatedData, local_data
from fedeas_flwr.data.node import Node, read_node
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.client_state import ClientState, ClientStore
from fedeas_flwr.federation.messages import EvaluateReport, TrainReport
from fedeas_flwr.generators.client_images import local_images
from fedeas_flwr.policies import POLICIES, ClientView, MatchedPolicy, images_to_generate
from fedeas_flwr.runs.checkpoints import to_numpy
from fedeas_flwr.strategies.interface import ClientRound
from fedeas_flwr.strategies.privacy import clips_update
from fedeas_flwr.strategies.registry import ALGORITHMS, client_part
from fedeas_flwr.training.build import EnginePool, loss_and_view_inputs, network, recipe
from fedeas_flwr.training.evaluation import Evaluator
from fedeas_flwr.training.models import Normaliser

logger = logging.getLogger(__name__)
app = ClientApp()
Handler = Callable[[Message, Context], Message]


def reply_with_errors(handler: Handler) -> Handler:
    """Answer with the reason in one line instead of raising: every grid then tells the server the same."""

    @wraps(handler)
    def wrapped(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except (Exception, SystemExit) as error:  # a model that leaves must not take an inline run with it
            return messages.error_reply(message, error)

    return wrapped


@app.query()
@reply_with_errors
def query(message: Message, context: Context) -> Message:
    """Say who this is and, for a matched policy, the whole numbers that it asks for.

    Arrays leave only in answer to the question of the run's own strategy, and only if the run-config allows it.
    """
    config, node = _open(context)
    client, data = node.client, local_data(config, node)
    question, at = messages.read_question(message)
    if question == "identity":
        examples, classes = len(data.partition.train[node.part]), messages.classes_digest(data.dataset.classes)
        return messages.build_query_reply(
            message, client, partitions=node.partitions, examples=examples, classes=classes
        )
    policy = POLICIES[config.policy]
    if isinstance(policy, MatchedPolicy) and question in policy.questions:
        view = ClientView(data.label_counts(node.part), config.policy_settings)
        (numbers,) = policy.reply(view, question, at).tolist()
        return messages.build_query_reply(
            message, client, **dict(zip(policy.questions[question], numbers, strict=True))
        )
    disclosure = ALGORITHMS[config.strategy].disclosure
    if disclosure is not None and question == disclosure.question:
        return messages.disclose(message, client, disclosure.answer(config, *data.train(node.part)))
    raise ValueError(f"question = '{question}': must be identity, or what the policy or the strategy asks")


@app.train()
@reply_with_errors
@clips_update
def train_client(message: Message, context: Context) -> Message:
    """Train the received model on this client's images, real and synthetic."""
    config, node = _open(context)
    client, data = node.client, local_data(config, node)
    task = messages.read_task(message)
    device = configure_torch(config.device, config.precision)
    live = messages.is_in_process(message)
    store = ClientStore(node.state_folder(config, context.run_id, task.run), in_memory=live)
    state = store.load(task.accepted_round)
    policy, settings = POLICIES[config.policy], replace(config.policy_settings, beta=task.beta)
    view = ClientView(data.label_counts(node.part), settings, [task.share])

    began = time.perf_counter()
    if state.generate is None or data_changed(config, data, node, state):  # the former: first participation
        (plan,), (counts,) = images_to_generate(policy, view).tolist(), view.counts.tolist()
        state = replace(state, generate=tuple(plan), counts=tuple(counts))
    generate = state.generate or ()
    copies = tuple(policy.plan(view)[0].tolist()) if policy.repeats else ()
    found = local_images(config, data, node, generate, copies, task.service, state.generator, device)
    images, labels = found.images, found.labels
    generated_at = time.perf_counter()

    part, (trainable, buffers) = client_part(config), messages.read_model(message)
    local = ClientRound(
        config=config,
        number=task.round,
        client=client,
        device=device,
        trainable=trainable,
        buffers=buffers,
        extra=messages.read_extra(message),
        memory=state.memory,
        labels=labels,
        steps=recipe(config).steps(len(labels)),
    )
    inputs = part.prepare(local) | loss_and_view_inputs(config, labels, task.round, client)
    batches = stream(config.seed, "batches", task.round, client)
    with _engines.borrow(config, device, part.objective) as engine:
        result, *trained = engine.train(trainable, buffers, images, labels, batches, inputs)
    trainable, buffers = (dict(s) if live else to_numpy(s) for s in trained)
    finished = part.finish(local, trainable, buffers)
    needed = (task.accepted_round, task.checkpointed_round)
    kept = replace(state, memory=finished.memory, generator=found.generator)
    store.save(task.round, kept, needed)
    report = TrainReport(
        client=client,
        examples=len(data.partition.train[node.part]),
        loss=result.loss,
        steps=result.steps,
        generated=sum(generate),
        made=found.made,
        seconds_generating=generated_at - began,
        seconds_training=time.perf_counter() - generated_at,
        rejected=found.rejected,
    )
    extra = finished.extra if live else to_numpy(finished.extra)
    return messages.train_reply(message, report, trainable, buffers, extra)


@app.evaluate()
@reply_with_errors
def evaluate_client(message: Message, context: Context) -> Message:
    """Test the global model on this client's own test images."""
    config, node = _open(context)
    data = local_data(config, node)
    device = configure_torch(config.device, config.precision)
    model = _evaluation_model(config, device)
    images, labels = (torch.tensor(array, device=device) for array in data.test(node.part))
    normalise = Normaliser(data.dataset.mean, data.dataset.std, device)
    result = Evaluator(model, images, labels, data.num_classes, normalise).evaluate(*messages.read_model(message))
    return messages.evaluate_reply(message, EvaluateReport(node.client, result.examples, result.correct, result.loss))


def data_changed(config: RunConfig, data: FederatedData, node: Node, state: ClientState) -> bool:
    """Whether this client's label counts are others than those its plan was made for.

    Raises
    ------
    ValueError
        If they are and the run-config does not allow to plan anew: an average of clients that are no longer what they
        declared is not the run that was asked for. The counts themselves are not told.
    """
    client, now = node.client, tuple(data.label_counts(node.part)[0].tolist())
    if state.counts is None or state.counts == now:
        return False
    if config.data_change == "refuse":
        raise ValueError(
            f"data-change = 'refuse': the labels of client {client} are not those it planned with, {sum(state.counts)} "
            f"samples then and {sum(now)} now; 'replan' lets it plan anew"
        )
    logger.warning("client %d: its labels changed, so that it plans anew", client)
    return True


def _open(context: Context) -> tuple[RunConfig, Node]:
    node = read_node(context.node_config)
    return node.apply(parse_config(context.run_config)), node


_own = threading.local()
_engines = EnginePool()


def _evaluation_model(config: RunConfig, device: str) -> torch.nn.Module:
    """This thread's network for testing, kept like the engines; its weights come with every message."""
    if getattr(_own, "tested_config", None) != config:
        _own.tested, _own.tested_config = network(config).to(device), config
    model: torch.nn.Module = _own.tested
    return model
