"""The ClientApp: plan once, generate what is missing, train on real and synthetic images, reply.

The same code runs under Ray, inline and on a SuperNode. A client knows its own data, the run-config and what the
message says; everything it keeps between rounds is on disk (client_state.py, cache.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedeas_flwr import allocation, messages
from fedeas_flwr.cache import ImageCache
from fedeas_flwr.client_state import ClientStore
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data import dataset_info
from fedeas_flwr.generators import Generator, configured_generator, describe_generator
from fedeas_flwr.generators.classifier import ensure_recognised, independent_classifier
from fedeas_flwr.generators.service import ServiceGenerator
from fedeas_flwr.local_data import FederatedData, Images, Labels, federated_data
from fedeas_flwr.messages import EvaluateReport, Share, TrainReport
from fedeas_flwr.models import load_state, split_state
from fedeas_flwr.streams import stream
from fedeas_flwr.training import Normaliser, Recipe, evaluate, network, pick_device, train
from fedeas_flwr.waterfill import waterfill_count, waterfill_fill

app = ClientApp()
Handler = Callable[[Message, Context], Message]


def reports_errors(handler: Handler) -> Handler:
    """Answer with the reason in one line instead of raising: every grid then tells the server the same."""

    @wraps(handler)
    def wrapped(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except Exception as error:
            return messages.error_reply(message, error)

    return wrapped


@app.query()
@reports_errors
def query(message: Message, context: Context) -> Message:
    """Say who this is and, for a matched budget, two whole numbers: FedEAS's total here and the absent pairs."""
    config, client, data = _open(context)
    question, level = messages.read_question(message)
    if question == "identity":
        return messages.answer(message, client)
    counts = _counts(data, client)
    if question == "plan":
        total = allocation.fedeas(counts, config.beta, config.gamma, not config.printed_rule).sum()
        return messages.answer(message, client, total=int(total), absent=int((counts == 0).sum()))
    if question == "waterfill":
        return messages.answer(message, client, count=int(waterfill_count(counts, level)[0]))
    raise ValueError(f"question = '{question}': must be identity, plan or waterfill")


@app.train()
@reports_errors
def train_client(message: Message, context: Context) -> Message:
    """Train the received model on this client's images, real and synthetic."""
    config, client, data = _open(context)
    task = messages.read_task(message)
    device = pick_device(config.device)
    store = ClientStore(Path(task.state_dir) / str(client))
    state = store.load(task.accepted_round)

    began = time.perf_counter()
    if state.generate is None:  # first participation
        state = replace(state, generate=plan_client(config, data, client, task.beta, task.share))
    synthetic, made, rejected = _synthetic(config, client, state.generate or (), device, task.service)
    generated_at = time.perf_counter()

    images, labels = data.train(client)
    real = len(labels)
    model = _network(config)
    load_state(model, *messages.read_model(message))
    result = train(
        model,
        np.concatenate([images, synthetic[0]]),
        np.concatenate([labels, synthetic[1]]),
        Recipe(config.local_epochs, config.batch_size, config.learning_rate, config.momentum, config.weight_decay),
        Normaliser(data.dataset.mean, data.dataset.std, device),
        stream(config.seed, "batches", task.round, client),
        device,
    )
    needed = (task.accepted_round, task.checkpointed_round)
    store.save(task.round, replace(state, steps=state.steps + result.steps), needed)
    report = TrainReport(
        client=client,
        examples=real,
        loss=result.loss,
        steps=result.steps,
        generated=len(synthetic[1]),
        made=made,
        seconds_generating=generated_at - began,
        seconds_training=time.perf_counter() - generated_at,
        rejected=rejected,
    )
    return messages.train_reply(message, report, *split_state(model))


@app.evaluate()
@reports_errors
def evaluate_client(message: Message, context: Context) -> Message:
    """Test the global model on this client's own test images."""
    config, client, data = _open(context)
    device = pick_device(config.device)
    model = _network(config)
    load_state(model, *messages.read_model(message))
    normalise = Normaliser(data.dataset.mean, data.dataset.std, device)
    result = evaluate(model, *data.test(client), data.num_classes, normalise, device)
    return messages.evaluate_reply(message, EvaluateReport(client, result.examples, result.correct, result.loss))


def plan_client(config: RunConfig, data: FederatedData, client: int, beta: float, share: Share) -> tuple[int, ...]:
    """How many images of each class this client generates: its own counts, β and its share are all it needs."""
    counts = _counts(data, client)
    strict_mean = not config.printed_rule
    if config.policy in ("uniform", "missing-only"):
        eligible = allocation.eligible_pairs(counts, absent_only=config.policy == "missing-only")[0]
        row = allocation.spread(eligible, share.base, share.extra)
    elif config.policy == "waterfill":
        samples = waterfill_count(counts, share.level) + share.extra
        row = waterfill_fill(counts, samples)[0]
    elif config.policy == "greedy":  # the one policy that needs everybody's counts: simulation alone
        total = config.total or None
        row = allocation.allocate(
            data.counts(), "greedy", beta=beta, gamma=config.gamma, strict_mean=strict_mean, total=total
        )[client]
    else:
        row = allocation.allocate(counts, config.policy, beta=beta, gamma=config.gamma, strict_mean=strict_mean)[0]
    return tuple(int(n) for n in row)


def _open(context: Context) -> tuple[RunConfig, int, FederatedData]:
    config = parse_config(context.run_config)
    client, clients = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return config, client, federated_data(config, clients)


def _counts(data: FederatedData, client: int) -> Labels:
    return np.bincount(data.train_labels(client), minlength=data.num_classes)[None, :].astype(np.int64)


def _synthetic(
    config: RunConfig, client: int, wanted: tuple[int, ...], device: str, service: str
) -> tuple[tuple[Images, Labels], int, int]:
    """This client's synthetic images and labels, how many were made just now, and how many were left out."""
    if sum(wanted) == 0:
        shape = dataset_info(config.dataset).image_shape
        return (np.empty((0, *shape), np.uint8), np.empty(0, np.int64)), 0, 0
    about = describe_generator(config)
    own = partial(_own_generator, tuple(about.items()), device)
    generator = ServiceGenerator(service, config.dataset) if service else own()
    cache, least = ImageCache(), config.min_class_agreement
    if least == 0:
        images, labels, made = cache.ensure(generator, seed=config.seed, client=client, wanted=wanted, about=about)
        return (images, labels), made, 0
    judge = independent_classifier(config.dataset, config.data_dir, device)
    images, labels, made, rejected = ensure_recognised(
        cache, generator, judge, least, seed=config.seed, client=client, wanted=wanted, about=about
    )
    return (images, labels), made, rejected


@lru_cache(maxsize=1)
def _own_generator(keys: tuple[tuple[str, Any], ...], device: str) -> Generator:
    return configured_generator(parse_config(dict(keys)), device)


@lru_cache(maxsize=1)
def _network(config: RunConfig) -> torch.nn.Module:
    """The run's network, kept for the life of the process; its weights are loaded anew for every message."""
    return network(config)
