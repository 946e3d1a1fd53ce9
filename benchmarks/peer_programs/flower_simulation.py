"""Federated averaging in Flower's simulation: a ClientApp with a DataLoader, and a ServerApp with Flower's FedAvg.

As in Flower's PyTorch quickstart, except for two things that save time: a process builds its network once, and images
are tensors, normalised once per client and round, not PIL images that a transform converts one by one. No client
evaluates. The word after ``flower:`` is the number of clients at a time, each in its own process with an equal share of
the GPU (`client_gpus`).
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from peer_programs.job import Job, accuracy

FOLDER = "PEER_JOB"
"""Environment variable with the job's folder, which Ray hands on to its processes."""
client_app = ClientApp()
server_app = ServerApp()


@lru_cache(maxsize=1)
def opened() -> tuple[Job, nn.Module]:
    """Return this process's job and network."""
    job = Job(Path(os.environ[FOLDER]))
    return job, job.network()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on this client's images."""
    job, network = opened()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = job.client(int(context.node_config["partition-id"]))
    batch = job.settings["batch-size"]
    # BatchNorm has no variance of a last batch of one image.
    loader = DataLoader(TensorDataset(images, labels), batch, shuffle=True, drop_last=len(labels) % batch == 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=job.settings["learning-rate"])
    network.train()
    for _ in range(job.settings["local-epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(x.to(job.device)), y.to(job.device)).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the job's rounds, and evaluate the model after each of them."""
    job, network = opened()
    test, images = job.test(), 0

    def count(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        nonlocal images
        images = job.settings["local-epochs"] * sum(int(reply["metrics"][weighted_by]) for reply in replies)
        return MetricRecord({"images": images})

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        network.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(network, *test)
        if number:  # 0 is the initial model
            job.end_round(images, found)
        return MetricRecord({"accuracy": found})

    rounds, sampled = job.sampled.shape
    clients = len(job.partition)
    strategy = FedAvg(
        # A half more, since FedAvg rounds down.
        fraction_train=(sampled + 0.5) / clients if sampled < clients else 1.0,
        fraction_evaluate=0.0,
        min_available_nodes=clients,
        train_metrics_aggr_fn=count,
    )
    strategy.start(grid, ArrayRecord(network.state_dict()), num_rounds=rounds, evaluate_fn=evaluate)


def main(job: Job) -> None:
    """Run the job's rounds."""
    os.environ |= {FOLDER: str(job.folder), "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    at_once, on_gpu = int(job.settings["words"][0]), job.device == "cuda"
    start: dict[str, Any] = {"num_cpus": at_once, "include_dashboard": False}
    # Flower sends the share as float32, and 1/10 would leave room for nine.
    each: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.99 / at_once if on_gpu else 0.0}
    backend = {"init_args": start | ({"num_gpus": 1} if on_gpu else {}), "client_resources": each}
    run_simulation(server_app, client_app, num_supernodes=len(job.partition), backend_config=backend)
