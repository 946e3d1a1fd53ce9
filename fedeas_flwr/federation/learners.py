"""What a federation trains (`task`): a classifier, or the denoiser of a diffusion model.

`find_learner` is the only place that decides by `task`. Both learners have the initial state, a client's training and
evaluation, the server's evaluation, the scores of a round, and what is written at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fedeas_flwr.allocation import FloatArray, IntArray
from fedeas_flwr.common.devices import pick_device
from fedeas_flwr.common.npy import Arrays, to_numpy
from fedeas_flwr.common.randomness import stream, torch_seed
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.data.federated import FederatedData, federated_data
from fedeas_flwr.data.node import Node
from fedeas_flwr.federation.messages import EvaluateReport
from fedeas_flwr.generators.learn import federated
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import GENERATOR
from fedeas_flwr.strategies.interface import ClientAlgorithmResult, ClientRound
from fedeas_flwr.strategies.registry import client_part
from fedeas_flwr.training.build import EnginePool, build_network, common_inputs, local_training_config
from fedeas_flwr.training.engine import State, TrainResult, copy_state
from fedeas_flwr.training.evaluation import Evaluate, Evaluator, central_test, client_scores, evaluate_each
from fedeas_flwr.training.models import Normaliser, split_state


class Trained(NamedTuple):
    """A client's model after a round, in NumPy arrays unless models are passed by reference."""

    result: TrainResult
    trainable: Arrays
    buffers: Arrays
    algorithm: ClientAlgorithmResult


class ClassifierLearner:
    """A network that is trained with the objective of the strategy's client part, and tested by its accuracy."""

    def __init__(self) -> None:
        self._engines, self._evaluation = EnginePool(), _ThreadLocal()

    def initial_state(self, config: RunConfig) -> tuple[Arrays, Arrays]:
        """Return the initial weights and buffers."""
        return split_state(build_network(config))

    def train(self, client_round: ClientRound, images: torch.Tensor, by_reference: bool) -> Trained:
        """Train on a client's images, whose labels are `ClientRound.labels`, with the algorithm's objective."""
        config, algorithm = client_round.config, client_part(client_round.config)
        client_round = replace(client_round, steps=local_training_config(config).steps(len(client_round.labels)))
        # Not for plain cross-entropy: for a custom dataset it looks for changed files.
        classes = 0 if config.loss == "cross-entropy" else len(dataset_info(config.dataset).classes)
        number, client, labels = client_round.number, client_round.client, client_round.labels
        inputs = algorithm.prepare(client_round) | common_inputs(config, classes, labels, number, client)
        batches, given = stream(config.seed, "batches", number, client), (client_round.trainable, client_round.buffers)
        borrowed = self._engines.borrow(config, client_round.device, algorithm.objective, client_round.most_samples)
        with borrowed as engine:
            result, *trained = engine.train(*given, images, labels, batches, inputs)
        trainable, buffers = (dict(arrays) if by_reference else to_numpy(arrays) for arrays in trained)
        return Trained(result, trainable, buffers, algorithm.finish(client_round, trainable, buffers))

    def evaluate(
        self, config: RunConfig, data: FederatedData, node: Node, device: str, trainable: State, buffers: State
    ) -> EvaluateReport:
        """Count the client's own test images that the model classifies correctly."""
        images, labels = (torch.tensor(array, device=device) for array in data.test(node.part))
        normalise = Normaliser(data.dataset.mean, data.dataset.std, device)
        evaluator = Evaluator(self._network(config, device), images, labels, data.num_classes, normalise)
        result = evaluator.evaluate(trainable, buffers)
        return EvaluateReport(node.client, result.examples, result.correct, result.loss)

    def evaluate_each(
        self,
        config: RunConfig,
        data: FederatedData,
        images: torch.Tensor,
        labels: torch.Tensor,
        trainable: State,
        buffers: State,
    ) -> tuple[FloatArray, IntArray]:
        """Return a model's loss and prediction for each of a client's images, which are on the device."""
        device = str(images.device)
        network, normalise = self._network(config, device), Normaliser(data.dataset.mean, data.dataset.std, device)
        copy_state(network, trainable, buffers)
        loss, predicted = evaluate_each(network, images, labels, normalise)
        return loss.double().cpu().numpy(), predicted.cpu().numpy()

    def _network(self, config: RunConfig, device: str) -> torch.nn.Module:
        """Return this thread's network for evaluations."""
        if self._evaluation.config != config:
            self._evaluation.network, self._evaluation.config = build_network(config).to(device), config
        return self._evaluation.network

    def central_test(self, config: RunConfig, device: str) -> Evaluate:
        """Return a function that computes accuracies and loss on the global test set."""
        return central_test(config, device)

    def scores(self, reports: Sequence[EvaluateReport]) -> dict[str, Any]:
        """Return accuracies over all images and over clients, and the loss."""
        examples = sum(report.examples for report in reports)
        return {
            "accuracy": sum(report.correct for report in reports) / examples,
            "loss": sum(report.loss * report.examples for report in reports) / examples,
            **client_scores({report.client: (report.correct, report.examples) for report in reports}),
        }

    def finish(self, config: RunConfig, run: RunDirectory) -> None:
        """Write nothing: the run directory has the model."""


class _ThreadLocal(threading.local):
    """This thread's evaluation network and its config; the weights come with every message."""

    config: RunConfig | None = None
    network: torch.nn.Module


class DenoiserLearner:
    """The denoiser of a class-conditional diffusion model, tested by its loss on images that it was not trained on."""

    def __init__(self) -> None:
        self._denoisers = federated.DenoiserPool()

    def initial_state(self, config: RunConfig) -> tuple[Arrays, Arrays]:
        """Return the initial weights, and Adam's moments as buffers."""
        return federated.initial_state(config)

    def train(self, client_round: ClientRound, images: torch.Tensor, by_reference: bool) -> Trained:
        """Take the client's steps of the round."""
        given, which = (client_round.trainable, client_round.buffers), (client_round.number, client_round.client)
        with self._denoisers.borrow(client_round.config, client_round.device) as denoiser:
            result, *trained = denoiser.train(*given, images, client_round.labels, *which)
        trainable, buffers = (dict(arrays) if by_reference else to_numpy(arrays) for arrays in trained)
        return Trained(result, trainable, buffers, ClientAlgorithmResult())

    def evaluate(
        self, config: RunConfig, data: FederatedData, node: Node, device: str, trainable: State, buffers: State
    ) -> EvaluateReport:
        """Return the loss on the images that the client holds out."""
        images, labels = data.train(node.part)
        _, chosen = federated.split_held_out(config, node.client, len(labels))
        held_out, classes = (torch.tensor(array[chosen], device=device) for array in (images, labels))
        seed = torch_seed(config.seed, node.client)
        with self._denoisers.borrow(config, device) as denoiser:
            loss = denoiser.loss(trainable, held_out, classes, seed)
        return EvaluateReport(node.client, len(chosen), 0, loss)

    def central_test(self, config: RunConfig, device: str) -> Evaluate:
        """Return a function that computes the loss on the global test set."""
        test = federated_data(config, config.clients).global_test()
        images, labels = (torch.tensor(array, device=device) for array in test)
        denoiser = federated.LocalDenoiser(config, device)  # its own: it evaluates while clients train

        def evaluate(trainable: State, buffers: State) -> dict[str, Any]:
            return {"loss": denoiser.loss(trainable, images, labels, torch_seed(config.seed))}

        return evaluate

    def scores(self, reports: Sequence[EvaluateReport]) -> dict[str, Any]:
        """Return the loss over all held-out images."""
        examples = sum(report.examples for report in reports)
        return {"loss": sum(report.loss * report.examples for report in reports) / examples}

    def release(self) -> None:
        """Free the networks that this process keeps for clients."""
        self._denoisers.release()

    def finish(self, config: RunConfig, run: RunDirectory) -> None:
        """Write the generator as a folder in diffusers' format."""
        folder, loss = run.path / GENERATOR, run.summary()["final_loss"]
        federated.write_generator(folder, config, run.load_model(), run.rounds(), loss, pick_device(config.device))


CLASSIFIER, DENOISER = ClassifierLearner(), DenoiserLearner()


def find_learner(config: RunConfig) -> ClassifierLearner | DenoiserLearner:
    """Return what the run trains."""
    return DENOISER if config.task == "generator" else CLASSIFIER
