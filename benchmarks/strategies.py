"""Measure the server's time per round for each strategy, and for Γ̂.

    python benchmarks/strategies.py --out results/strategies/cpu.json
    python benchmarks/strategies.py --device cuda --out results/strategies/h200.json

Seconds to decode and aggregate the replies of ten clients, with ResNet-18's trainable arrays. With `cuda` the replies
are tensors on the GPU, as the inline backend passes them. --small uses a tiny model, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message
from flwr.clientapp import ClientApp

from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.config import STRATEGIES, RunConfig, parse_config
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.dissimilarity import gradient_dissimilarity
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.strategies.fedavg import FedAvg
from fedeas_flwr.strategies.flower import FlowerStrategyAdapter
from fedeas_flwr.strategies.interface import SendsExtra
from fedeas_flwr.strategies.privacy import WRAPPERS
from fedeas_flwr.strategies.records import CONFIG, METRICS, to_record
from fedeas_flwr.strategies.registry import build_strategy, find_algorithm
from fedeas_flwr.training.models import build_model, split_state

CLIENTS = 10


def models(device: str, small: bool) -> list[Arrays]:
    """Return the model that was sent, followed by each client's trained model."""
    name = "small-cnn" if small else "resnet18"
    sent, _ = split_state(build_model(name, 10, (32, 32, 3), seed=0))
    rng = np.random.default_rng(0)
    states: list[Arrays] = [sent]
    for _ in range(CLIENTS):
        noise = {key: rng.standard_normal(array.shape, dtype=np.float32) for key, array in sent.items()}
        states.append({key: sent[key] + np.float32(1e-3) * noise[key] for key in sent})
    if device == "cpu":
        return states
    return [{key: torch.from_numpy(array).to(device) for key, array in state.items()} for state in states]


def merging_seconds(config: RunConfig, states: list[Arrays]) -> float:
    """Return the seconds of the second round's aggregation; in the first, some strategies have no state yet."""
    strategy, grid = build_strategy(config), InlineGrid(ClientApp(), CLIENTS, {})
    for number in (1, 2):
        out = list(strategy.configure_train(number, to_record(states[0]), ConfigRecord(), grid))
        extra = strategy.expected_extra() if isinstance(strategy, SendsExtra) else {}
        replies = [_reply(message, states, extra) for message in out]
        taken = seconds(strategy.aggregate_train, number, replies)
    return taken


def _reply(message: Message, states: list[Arrays], extra: Arrays) -> Message:
    client = message.metadata.dst_node_id - 1
    report = messages.TrainReport(client, 100 + client, 0.5, 1, 0, 0, 0.0, 0.0)
    reply = messages.train_reply(message, report, states[1 + client], {}, extra)
    messages.read_train_reply(reply, client, states[0], {}, extra)
    if "clipping_norm" in message.content.config_records[CONFIG]:  # a client that clips sends this too
        reply.content.metric_records[METRICS]["norm_bit"] = 1
    return reply


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Return the wall-clock seconds of a call; the GPU is idle before and after."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measured(device: str, small: bool) -> dict[str, Any]:
    """Return the seconds of each strategy, of the DP wrappers around FedAvg, and of Γ̂."""
    states = models(device, small)
    base = {"clients": CLIENTS, "participation": 1.0, "dp-noise-multiplier": 0.5}
    found: dict[str, float] = {}
    for name in STRATEGIES:
        if find_algorithm(name).disclosure:  # it needs the clients' disclosures first
            continue
        config = parse_config({**base, "strategy": name})
        if isinstance(build_strategy(config), (FlowerStrategyAdapter, FedAvg)):
            found[name] = merging_seconds(config, states)
    for dp in WRAPPERS:
        found[f"fedavg, dp = {dp}"] = merging_seconds(parse_config({**base, "dp": dp}), states)
    weights = [100 + client for client in range(CLIENTS)]
    gradient_dissimilarity(states[0], states[1:], weights)
    found["Γ̂"] = seconds(gradient_dissimilarity, states[0], states[1:], weights)
    return {name: round(taken, 4) for name, taken in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "seconds": measured(options.device, options.small),
        "clients": CLIENTS,
        "model": "small-cnn" if options.small else "resnet18",
        "environment": describe_environment(torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu"),
        "load": round(os.getloadavg()[0], 1),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, taken in found["seconds"].items():
        print(f"{name:<32}{taken:8.3f} s")


if __name__ == "__main__":
    main()
