"""A job as files, the same for every peer: hyperparameters, images, partition, sampled clients and initial weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from peer_programs.networks import build

TEST_BATCH = 1000


class Job:
    """A job's folder, as benchmarks/peers.py writes it.

    Attributes
    ----------
    settings : dict
        Content of job.json: the peer's own words and the hyperparameters, by the names of the run-config.
    device : str
        Device of the networks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings: dict[str, Any] = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        parts = np.load(folder / "partition.npz")
        self.partition = np.split(parts["indices"], np.cumsum(parts["sizes"])[:-1])
        self.sampled = np.load(folder / "sampled.npy")
        """Clients of every round, [rounds, clients a round]; Flower samples by itself."""

    def client(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a client's images, normalised float32 [N, C, H, W] on the CPU, and its labels."""
        return self._read("train", np.sort(self.partition[client]))

    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the test images and labels on the job's device."""
        images, labels = self._read("test", slice(None))
        return images.to(self.device), labels.to(self.device)

    def _read(self, part: str, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images = np.load(self.folder / f"x_{part}.npy", mmap_mode="r")[rows]
        labels = np.load(self.folder / f"y_{part}.npy", mmap_mode="r")[rows]
        pixels = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(self.settings[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
        return ((pixels - mean) / std).contiguous(), torch.tensor(labels)

    def network(self) -> nn.Module:
        """Return the network with the job's initial weights, on the job's device."""
        network = build(self.settings["model"], self.settings["classes"], self.settings["image_shape"])
        network.load_state_dict(torch.load(self.folder / "initial.pt"))
        return network.to(self.device)

    def images_in(self, clients: Any) -> int:
        """Return how many images these clients train on in a round, all epochs together."""
        return int(self.settings["local-epochs"] * sum(len(self.partition[int(client)]) for client in clients))

    def end_round(self, images: int, accuracy: float | None) -> None:
        """Append a line to rounds.jsonl: the time now, the images that were trained on, and the accuracy after it."""
        line = {"end": time.time(), "images": images, "accuracy": accuracy}
        with (self.folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@torch.no_grad()
def accuracy(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the fraction of images that the network classifies correctly."""
    network.eval()
    batches = zip(images.split(TEST_BATCH), labels.split(TEST_BATCH), strict=True)
    correct = sum((network(x).argmax(1) == y).sum() for x, y in batches)
    return float(correct) / len(labels)
