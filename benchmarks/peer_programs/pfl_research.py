"""Federated averaging in pfl-research (pfl 0.6), as in its benchmark for CIFAR-10: all images are on the device.

Two things differ from that benchmark, both for equal accuracy. pfl averages parameters only: BatchNorm's statistics are
those of one network that all clients of a process train in turn, so the server would evaluate with those of the last
client. `WithStatistics` makes them part of the model, so that they are reset and averaged like weights. And pfl cuts a
client's images into the same batches in every epoch; `Shuffled`, for jobs of several epochs, shuffles them as the other
peers do, and leaves out a last batch of one image.

The word after ``pfl:`` is the number of processes on the GPU. pfl adds up their results with NCCL, which refuses two
processes on one GPU, so they use Gloo here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from peer_programs.job import TEST_BATCH, Job

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"


class Learner(nn.Module):
    """A network with the two methods that pfl calls."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the training loss of a batch."""
        self.train()
        return F.cross_entropy(self.network(images), labels)

    @torch.no_grad()
    def metrics(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the accuracy of a batch."""
        from pfl.metrics import Weighted

        self.eval()
        correct = (self.network(images).argmax(1) == labels).sum().item()
        return {"accuracy": Weighted(correct, len(labels))}


class InOrder:
    """The sampler of clients: those of round 1, then those of round 2 and so on. pfl copies it to a process."""

    def __init__(self, sampled: np.ndarray[Any, Any]) -> None:
        self._clients, self._next = sampled.ravel().tolist(), 0

    def __call__(self) -> int:
        client: int = self._clients[self._next % len(self._clients)]  # pfl samples ahead
        self._next += 1
        return client


def main(job: Job) -> None:
    """Run the job's rounds, in one process or, if there are to be several, in that many processes of this program."""
    count = int(job.settings["words"][0])
    if count == 1 or RANK in os.environ:
        run_rounds(job)
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "peer_programs", "pfl_research", str(job.folder)]
    threads = str(max(1, (os.cpu_count() or 1) // count))  # otherwise each process has a thread per core
    addresses = ",".join(f"localhost:{port + k}" for k in range(count))
    given = {"OMP_NUM_THREADS": threads, **os.environ, ADDRESSES: addresses}
    processes = [subprocess.Popen(words, env={**given, RANK: str(k)}) for k in range(count)]
    if any(process.wait() for process in processes):
        sys.exit("a process of pfl failed")


def use_gloo() -> None:
    """Let the processes of pfl share a GPU."""
    original = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda **given: original(**{**given, "backend": "gloo"})


def federated_dataset(job: Job) -> Any:
    """Return the clients' images on the device, for pfl."""
    from pfl.data import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset

    class Shuffled(PyTorchTensorDataset):
        def iter(self, batch_size: int | None) -> Iterator[list[torch.Tensor]]:
            images, labels = self.raw_data
            order = torch.randperm(len(labels), device=labels.device)
            batches = zip(images[order].split(batch_size), labels[order].split(batch_size), strict=True)
            return ([x, y] for x, y in batches if len(y) > 1)

    kind = PyTorchTensorDataset if job.settings["local-epochs"] == 1 else Shuffled
    clients = [tuple(tensor.to(job.device) for tensor in job.client(k)) for k in range(len(job.partition))]
    sizes = {k: len(labels) for k, (_, labels) in enumerate(clients)}
    return FederatedDataset(lambda k: kind(clients[k], user_id=k), InOrder(job.sampled), user_id_to_weight=sizes)


def server_model(job: Job) -> Any:
    """Return pfl's model of the job's network, with BatchNorm's statistics."""
    from pfl.model.pytorch import PyTorchModel

    class WithStatistics(PyTorchModel):
        @property
        def variable_map(self) -> dict[str, torch.Tensor]:
            buffers = self.pytorch_model.named_buffers()
            return {**super().variable_map, **{key: value for key, value in buffers if value.is_floating_point()}}

    learner = Learner(job.network())
    averaged = [*learner.parameters(), *(value for value in learner.buffers() if value.is_floating_point())]
    return WithStatistics(learner, torch.optim.SGD, torch.optim.SGD(averaged, lr=1.0))


def round_log(job: Job, writes: bool) -> Any:
    """Return pfl's callback that records the end of every round."""
    from pfl.callback.base import TrainingProcessCallback
    from pfl.metrics import Metrics

    class RoundLog(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            found = aggregate_metrics.to_simple_dict()["Central val | accuracy"]
            if writes:  # pfl evaluates before round 1, and not after it
                job.end_round(job.images_in(job.sampled[central_iteration]), found if central_iteration else None)
            return False, Metrics()

    return RoundLog()


def run_rounds(job: Job) -> None:
    """Run the job's rounds; with several processes, this one's part of them."""
    if RANK in os.environ:
        use_gloo()
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams

    np.random.seed(1)  # pfl: the same in all processes
    model, clients, central = server_model(job), federated_dataset(job), Dataset(list(job.test()))
    rounds, sampled = job.sampled.shape
    evaluation = NNEvalHyperParams(local_batch_size=TEST_BATCH)
    FederatedAveraging().run(
        # Clients evaluate only in round 1, which is not timed.
        NNAlgorithmParams(rounds, evaluation_frequency=rounds + 1, train_cohort_size=sampled, val_cohort_size=0),
        SimulatedBackend(clients, clients, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=job.settings["local-epochs"],
            local_learning_rate=job.settings["learning-rate"],
            local_batch_size=job.settings["batch-size"],
        ),
        evaluation,
        callbacks=[
            CentralEvaluationCallback(central, evaluation),
            round_log(job, writes=os.environ.get(RANK, "0") == "0"),
        ],
    )
