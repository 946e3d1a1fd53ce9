"""Check that the engines take the same steps: compare one client's trained weights with the same steps in float64.

    python benchmarks/parity.py --out results/parity/h200.json --config conf/cifar10-k100.toml \\
        --set data-dir=data --set weights=resnet18-imagenet.safetensors --epochs 1,10

Two float32 results of the same steps differ by the order of their sums, and a network with ReLUs amplifies this in
every step. Float64 is the reference: an engine that takes different steps is farther from it than plain PyTorch in
float32. A distance is the norm of the difference of all trained weights, relative to the norm of their change in
training. The client has the median size of the federation; its batches and initial weights are those of round 1.
Without --config: digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from run_records import asked_run, markdown, parser_for_a_run, write_record

from fedeas_flwr.common.devices import configure_torch
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.runs.listing import portable_config
from fedeas_flwr.training.build import build_engine, build_network, local_training_config
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import Engine, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import CROSS_ENTROPY

EXACT, PLAIN = "eager, float64", "eager, fp32"
DISTANCES = {"from_float64": (EXACT,), "from_eager_fp32": (EXACT, PLAIN), "largest_from_eager_fp32": (EXACT, PLAIN)}
"""Distance → engines without it: its reference, and those that train before its reference."""


class InFloat64(Normaliser):
    """A normaliser that returns float64."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().__call__(pixels).double()


def engines(config: RunConfig, device: str) -> dict[str, Engine]:
    """Return the reference and the engines to compare; their precision is set just before each trains."""
    info = dataset_info(config.dataset)
    exact = EagerEngine(
        build_network(config).double(), local_training_config(config), InFloat64(info.mean, info.std, device), device
    )
    if device == "cpu":  # the steps of the graphs, without graphs
        normalise = Normaliser(info.mean, info.std, device)
        plain = build_engine(config, device, CROSS_ENTROPY)
        steps = GraphedEngine(build_network(config), local_training_config(config), normalise, "fp32", device)
        return {EXACT: exact, PLAIN: plain, "graphed, fp32": steps}
    found: dict[str, Engine] = {EXACT: exact}
    for engine in ("eager", "graphed"):
        for precision in ("fp32", "tf32", "bf16"):
            asked = config.with_changes(engine=engine, precision=precision)
            found[f"{engine}, {precision}"] = build_engine(asked, device, CROSS_ENTROPY)
    return found


def compare(config: RunConfig, device: str) -> list[dict[str, Any]]:
    """Return a row per engine: the distance of its weights from those of float64 and of eager float32."""
    data = federated_data(config, config.clients)
    sizes = [len(part) for part in data.partition.train]
    client = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])
    images, labels = (torch.from_numpy(array).to(device) for array in data.train(client))
    start, exactly = read_state(build_network(config)), read_state(build_network(config).double())
    rows, ends = list[dict[str, Any]](), dict[str, torch.Tensor]()
    for name, engine in engines(config, device).items():
        configure_torch(device, name.rsplit(" ", 1)[-1])
        batches = stream(config.seed, "batches", 1, client)
        result, trained, _ = engine.train(*(start if rows else exactly), images, labels, batches)
        ends[name] = flat(trained)
        wanted, plain = ends[EXACT], ends.get(PLAIN, ends[name])
        way = (wanted - flat(start[0])).norm()
        rows.append(
            {
                "engine": name,
                "epochs": config.local_epochs,
                "client": client,
                "samples": sizes[client],
                "steps": result.steps,
                "loss": result.loss,
                "from_float64": float((ends[name] - wanted).norm() / way),
                "from_eager_fp32": float((ends[name] - plain).norm() / way),
                "largest_from_eager_fp32": float((ends[name] - plain).abs().max()),
            }
        )
    return rows


def flat(weights: Any) -> torch.Tensor:
    return torch.cat([torch.as_tensor(value).flatten() for value in weights.values()]).double().cpu()


def show(distance: float) -> str:
    return f"{distance:.1e}" if distance else "0"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table that is printed and shown in the docs."""
    cells = [
        [row["engine"], str(row["epochs"]), str(row["steps"]), f"{row['loss']:.4f}"]
        + [show(row[key]) if row["engine"] not in unmeasured else "–" for key, unmeasured in DISTANCES.items()]
        for row in rows
    ]
    head = ["Engine", "Epochs", "Steps", "Loss", "From float64", "From eager, fp32", "Its largest, of one weight"]
    return markdown(head, cells)


def main() -> None:
    parser = parser_for_a_run(__doc__)
    parser.add_argument("--epochs", default="1", help="numbers of epochs, separated by commas")
    options = parser.parse_args()
    base = asked_run(options)
    device, rows = configure_torch(options.device), list[dict[str, Any]]()
    for epochs in map(int, options.epochs.split(",")):
        rows += compare(base.with_changes(local_epochs=epochs), device)
    print(table(rows))
    write_record(options.out, device, portable_config(base), rows)


if __name__ == "__main__":
    main()
