"""Measure the norm of a client's first control variate, with and without the short last batch of its epochs.

    python benchmarks/first_controls.py --out results/short-batches/controls-cpu.json --clients 2,7 \\
        --config conf/cifar10-k20.toml --set data-dir=data --set weights=resnet18-imagenet.safetensors

In its first round a SCAFFOLD client trains as with FedAvg, and its control variate becomes (x − y)/(Tη), the mean of
its gradients. short_batches.py measures gradients by batch size; this script measures their mean over a round, which is
subtracted in every step of the next one. Without --config: digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from run_records import asked_run, markdown, parser_for_a_run, write_record

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.runs.listing import portable_config
from fedeas_flwr.training.build import build_engine, build_network, local_training_config
from fedeas_flwr.training.engine import read_state
from fedeas_flwr.training.objective import CROSS_ENTROPY

LEAST = (2, 8)


def measure(config: RunConfig, device: str, clients: Sequence[int]) -> list[dict[str, Any]]:
    """Return the norm of (x − y)/(Tη) over all layers after a round from the initial weights, for each client."""
    data = federated_data(config, config.clients)
    rows: list[dict[str, Any]] = []
    for client in clients:
        images, labels = (torch.from_numpy(array).to(device) for array in data.train(client))
        for least in LEAST:
            asked = config.with_changes(min_batch=least)
            last = local_training_config(asked).batches(len(labels))[1]
            if rows and rows[-1]["client"] == client and rows[-1]["last"] == last:
                continue  # the last batch is long enough, so the steps are the same
            engine, (trainable, buffers) = build_engine(asked, device, CROSS_ENTROPY), read_state(build_network(asked))
            batches = stream(config.seed, "batches", 1, client)
            result, trained, _ = engine.train(trainable, buffers, images, labels, batches)
            moved = torch.stack([(trained[name].cpu() - start).norm() for name, start in trainable.items()]).norm()
            norm = float(moved) / (result.steps * config.learning_rate)
            rows.append({"client": client, "samples": len(labels), "last": last, "steps": result.steps, "length": norm})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table that is printed."""
    head = ["Client", "Images", "Images in the last batch", "Steps", "Length of its control variate"]
    cells = [
        (row["client"], f"{row['samples']:,}", row["last"] or "none", row["steps"], f"{row['length']:.1f}")
        for row in rows
    ]
    return markdown(head, [[str(cell) for cell in row] for row in cells])


def main() -> None:
    parser = parser_for_a_run(__doc__)
    parser.add_argument("--clients", default="0", help="client ids, separated by commas")
    options = parser.parse_args()
    config = asked_run(options)
    device = configure_torch(options.device, "fp32")
    rows = measure(config, device, [int(word) for word in options.clients.split(",")])
    print(table(rows))
    write_record(options.out, device, portable_config(config), rows)


if __name__ == "__main__":
    main()
