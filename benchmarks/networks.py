"""Train ten of torchvision's networks for two rounds each, as whole runs, and say how each of them ran.

    python benchmarks/networks.py --out results/networks/h200.json --set data-dir=data

The networks have random weights, and images keep their 32×32 pixels. `how` is what the run's log says of the engine:
"in CUDA graphs" where nothing else is reported. Needs a CUDA GPU and CIFAR-10.
"""

from __future__ import annotations

import argparse
import io
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torchvision
from rich.console import Console
from run_records import let_children_import_models, markdown, write_record
from torch import nn

from fedeas_flwr.config import RunConfig
from fedeas_flwr.config_files import read_config
from fedeas_flwr.launch.run import launch

NETWORKS = (
    "resnet18", "resnet50", "mobilenet_v2", "vgg11_bn", "shufflenet_v2_x1_0", "densenet121", "efficientnet_b0",
    "regnet_y_400mf", "convnext_tiny", "vit_b_16",
)  # fmt: skip
CIFAR = Path(__file__).resolve().parents[1] / "conf" / "cifar10-k100.toml"
SHORT = ["policy=none", "weights=none", "rounds=2", "local-epochs=1", "actors=5", "backend=inline", "gamma-hat=off"]


def __getattr__(name: str) -> Any:
    """Return a builder of one of the networks, so that `model=networks:NAME` finds it."""
    if name not in NETWORKS:
        raise AttributeError(name)

    def build(num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        size = {"image_size": image_shape[0]} if name.startswith("vit") else {}
        network: nn.Module = getattr(torchvision.models, name)(num_classes=num_classes, **size)
        return network

    return build


def outcome(name: str, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Run a network to its end; return how it trained, or why it did not."""
    began = time.perf_counter()
    config = config.with_changes(model=f"networks:{name}", run_dir=str(folder / name))
    try:
        run = launch(config, Console(file=io.StringIO()))
    except Exception as error:  # any of the networks may fail in its own way
        return {"network": name, "how": f"failed: {error}", "seconds": round(time.perf_counter() - began, 1)}
    rounds = run.rounds()
    said = re.findall(r"from here on (.*)|(.* not fused.*)", (run.path / "flower.log").read_text(encoding="utf-8"))
    return {
        "network": name,
        "how": "; ".join(dict.fromkeys(filter(None, sum(said, ())))) or "in CUDA graphs",
        "rounds": len(rounds),
        "failures": sum(len(one["failures"]) for one in rounds),
        "train_loss": [round(one["train_loss"], 3) for one in rounds],
        "accuracy": [round(one["accuracy"], 3) for one in rounds],
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the run")
    options = parser.parse_args()
    let_children_import_models()
    config = read_config(CIFAR, [*SHORT, *options.set])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks.split(","):
            rows.append(outcome(name, config, Path(folder)))
            print(rows[-1], flush=True)
    write_record(options.out, "cuda", {"run": [CIFAR.name, *SHORT]}, rows)
    head = ["network", "how", "rounds", "failures", "train_loss", "accuracy", "seconds"]
    print(markdown(head, [[str(row.get(key, "–")) for key in head] for row in rows]))


if __name__ == "__main__":
    main()
