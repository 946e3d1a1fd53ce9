"""Measure the gradient norm by batch size at the initial weights, down to batches of two images.

    python benchmarks/short_batches.py --out results/short-batches/cpu.json --config conf/cifar10-k100.toml \\
        --set data-dir=data --set weights=resnet18-imagenet.safetensors

The last batch of an epoch has the remaining images. With BatchNorm on maps of one pixel, two images give two numbers
per channel; if these are close, dividing by their standard deviation amplifies the difference in every layer. Without
--config: digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from run_records import asked_run, markdown, parser_for_a_run, write_record
from torch.nn import functional as F

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.runs.listing import portable_config
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.models import Normaliser

SIZES = (2, 3, 4, 8, 16, 32, 64)


def measure(config: RunConfig, device: str, sizes: Sequence[int], draws: int) -> list[dict[str, Any]]:
    """Return a row per batch size: the gradient norm over all layers, for random batches of the largest client."""
    data, info = federated_data(config, config.clients), dataset_info(config.dataset)
    largest = int(np.argmax([len(part) for part in data.partition.train]))
    images, labels = (torch.from_numpy(array).to(device) for array in data.train(largest))
    model, normalise = build_network(config).to(device).train(), Normaliser(info.mean, info.std, device)
    rows = []
    for size in sizes:
        lengths = []
        for chosen in (stream(config.seed, "batches", size, n).permutation(len(labels))[:size] for n in range(draws)):
            loss = F.cross_entropy(model(normalise(images[chosen])), labels[chosen])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            lengths.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
        rows.append({"size": size, "draws": draws, "median": float(np.median(lengths)), "largest": max(lengths)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table that is printed."""
    usual = rows[-1]["median"]
    head = [
        "Images in the batch",
        "Gradient's length, median",
        "× the last row's",
        "Largest",
        "× the last row's median",
    ]
    return markdown(
        head,
        [
            [
                str(row["size"]),
                f"{row['median']:.1f}",
                f"{row['median'] / usual:.1f}",
                f"{row['largest']:.1f}",
                f"{row['largest'] / usual:.1f}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = parser_for_a_run(__doc__)
    parser.add_argument("--draws", type=int, default=40, help="batches of each size")
    options = parser.parse_args()
    config = asked_run(options)
    device = configure_torch(options.device, "fp32")
    rows = measure(config, device, [size for size in SIZES if size <= config.batch_size], options.draws)
    print(table(rows))
    write_record(options.out, device, portable_config(config), rows)


if __name__ == "__main__":
    main()
