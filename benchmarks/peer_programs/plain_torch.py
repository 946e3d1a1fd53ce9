"""Federated averaging as a plain PyTorch loop: one client after another, images and models on the device."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from peer_programs.job import Job, accuracy

State = dict[str, torch.Tensor]


def train(network: nn.Module, images: torch.Tensor, labels: torch.Tensor, job: Job) -> None:
    """Train the network on a client's images, shuffled in every epoch."""
    batch, optimizer = job.settings["batch-size"], torch.optim.SGD(network.parameters(), job.settings["learning-rate"])
    network.train()
    for _ in range(job.settings["local-epochs"]):
        for rows in torch.randperm(len(labels), device=labels.device).split(batch):
            if len(rows) > 1:  # BatchNorm has no variance of one image
                optimizer.zero_grad()
                F.cross_entropy(network(images[rows]), labels[rows]).backward()
                optimizer.step()


def main(job: Job) -> None:
    """Run the job's rounds."""
    network, test = job.network(), job.test()
    clients = [tuple(tensor.to(job.device) for tensor in job.client(k)) for k in range(len(job.partition))]
    model: State = {key: value.clone() for key, value in network.state_dict().items()}
    for sampled in job.sampled:
        total = sum(len(clients[k][1]) for k in sampled)
        mean = {key: torch.zeros_like(value, dtype=torch.float32) for key, value in model.items()}
        for k in sampled:
            network.load_state_dict(model)
            train(network, *clients[k], job)
            for key, value in network.state_dict().items():
                mean[key] += value * (len(clients[k][1]) / total)
        model = mean
        network.load_state_dict(model)
        job.end_round(job.images_in(sampled), accuracy(network, *test))
