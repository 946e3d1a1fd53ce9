"""Measure discovery, planning and sampling with up to 10,000 clients, and model how a round's cost grows.

    python benchmarks/scale.py --out results/scale/cpu.json

The server's real code runs with up to 10,000 clients in one process: it asks every client for its identity, then for
its two numbers of a matched budget (`uniform`), which the client computes from its label counts with the paper's
allocation; then it samples rounds. No client trains: that cost grows with the clients of a round, not with all clients,
and is measured by benchmarks/growth.py. The counts are random (one Dirichlet sample per client, α = 0.1, 500 images, 10
classes), since no dataset here has images for 10,000 clients.

`Model` combines growth.py's measurements into the formulas of results/scale/README.md. --small: 200 clients, a second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from run_records import HERE, markdown, write_record

from fedeas_flwr import allocation
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.federation import Federation
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.registry import build_strategy

CLASSES, IMAGES, ALPHA = 10, 500, 0.1
ROUNDS = 200
MEGABYTE = 2**20
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Model:
    """Cost of a round for one server, fitted to two measured rows that differ only in the number of parameters.

    With P parameters and n clients in the round, seconds and bytes beyond the fixed part are proportional to P·n: every
    model is encoded, decoded, checked and added up once.
    """

    seconds_fixed: float
    seconds_each: float
    """Seconds per parameter and client."""
    bytes_each: float
    """Bytes of memory per parameter and client: all replies of a round are held until they are averaged."""
    discover_each: float
    """Seconds per client to ask for its identity under Ray."""

    @classmethod
    def fitted(cls, rows: list[dict[str, Any]]) -> Model:
        """Return the model fitted to the rows of growth.py with the fewest and the most parameters."""
        grown = [row for row in rows if row["growth_of"] == "parameters"]
        small, large = grown[0], grown[-1]
        moved = (large["parameters"] - small["parameters"]) * large["clients_a_round"]
        seconds = (large["seconds_outside"] - small["seconds_outside"]) / moved
        under_ray = next(row for row in rows if row["backend"] == "ray")
        return cls(
            seconds_fixed=small["seconds_outside"] - seconds * small["parameters"] * small["clients_a_round"],
            seconds_each=seconds,
            bytes_each=(large["own_peak_mb"] - small["own_peak_mb"]) * MEGABYTE / moved,
            discover_each=under_ray["seconds_to_discover"] / under_ray["clients"],
        )

    def traffic(self, parameters: int, clients: int) -> float:
        """Return the bytes per round: a float32 model to every sampled client, and one back."""
        return 2.0 * 4 * parameters * clients

    def seconds(self, parameters: int, clients: int) -> float:
        """Return the seconds that one server adds to a round."""
        return self.seconds_fixed + self.seconds_each * parameters * clients

    def memory(self, parameters: int, clients: int) -> float:
        """Return the bytes that one server holds at the end of a round."""
        return self.bytes_each * parameters * clients

    def seconds_in_two_levels(self, parameters: int, clients: int) -> float:
        """Return the seconds with √n aggregators in parallel, which average √n clients each, and a root."""
        return 2 * self.seconds(parameters, round(clients**0.5))


def draw_counts(clients: int) -> Counts:
    """Return the label counts of a skewed federation."""
    random = np.random.default_rng(1)
    return np.stack([random.multinomial(IMAGES, random.dirichlet([ALPHA] * CLASSES)) for _ in range(clients)])


def counting_app(counts: Counts, config: RunConfig) -> ClientApp:
    """Return a ClientApp that answers the queries before the first round from given label counts."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        mine = counts[client : client + 1]
        question, beta = messages.read_question(message)
        if question == "identity":
            classes = messages.classes_digest(dataset_info(config.dataset).classes)
            return messages.build_query_reply(
                message, client, partitions=len(counts), examples=int(mine.sum()), classes=classes
            )
        total = int(allocation.fedeas(mine, beta, config.gamma, True).sum())
        return messages.build_query_reply(message, client, total=total, absent=int((mine == 0).sum()))

    return app


def measure(clients: int, folder: Path) -> dict[str, Any]:
    """Return the row of one federation, from its first message to the sampling of its last round."""
    config = parse_config(
        {"clients": clients, "policy": "uniform", "participation": 0.01, "run-dir": str(folder / str(clients))}
    )
    counts = draw_counts(clients)
    before = psutil.Process().memory_info().rss
    grid = InlineGrid(counting_app(counts, config), clients, {})
    federation = Federation(grid, config, build_strategy(config), RunDirectory.start(config, {}))
    row = {
        "clients": clients,
        "seconds_to_discover": timed(federation.clients.discover),
        "seconds_to_plan": timed(federation.clients.plan),
        "seconds_to_sample_a_round": timed(lambda: [federation.training.sample(n + 1) for n in range(ROUNDS)]) / ROUNDS,
        "clients_a_round": config.num_sampled(clients),
        "seconds_to_allocate": timed(lambda: allocation.fedeas(counts, config.beta, config.gamma, True)),
        "memory_mb": round((psutil.Process().memory_info().rss - before) / MEGABYTE, 1),
    }
    given = sum(share.base * CLASSES + share.extra for share in federation.clients.shares.values())
    spent = int(allocation.fedeas(counts, config.beta, config.gamma, True).sum())
    if given != spent:
        raise SystemExit(f"{clients} clients were given {given} images, but FedEAS generates {spent}")
    return {**row, "images_planned": spent}


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return round(time.perf_counter() - began, 6)


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(clients, Path(folder)) for clients in ((200,) if given.small else (100, 1000, 10_000))]
    write_record(given.out, "cpu", {"classes": CLASSES, "images": IMAGES, "alpha": ALPHA, "rounds": ROUNDS}, rows)
    head = ["clients", "ask all who they are (s)", "agree on a plan (s)", "sample a round (ms)", "memory (MB)"]
    print(markdown(head, [table_row(row) for row in rows]))
    model = Model.fitted(json.loads((HERE.parent / "results" / "growth" / "cpu.json").read_text())["rows"])
    print(markdown(MODEL_HEAD, model_rows(model)))


def table_row(row: dict[str, Any]) -> list[str]:
    """Return one row of the measured table in results/scale/README.md."""
    return [
        f"{row['clients']:,}",
        f"{row['seconds_to_discover']:.2f}",
        f"{row['seconds_to_plan']:.2f}",
        f"{1000 * row['seconds_to_sample_a_round']:.2f}",
        f"{row['memory_mb']:.0f}",
    ]


PARAMETERS = 11_000_000
MODEL_HEAD = ("clients", "in a round", "traffic a round", "one server", "its memory", "√n aggregators and a root")


def model_rows(model: Model) -> list[list[str]]:
    """Return the modelled table in results/scale/README.md: 11 million parameters, growing federation."""
    return [
        [
            f"10{power}",
            f"{clients:,}",
            f"{model.traffic(PARAMETERS, clients) / 1e9:,.1f} GB",
            f"{model.seconds(PARAMETERS, clients):,.0f} s",
            f"{model.memory(PARAMETERS, clients) / 1e9:,.0f} GB",
            f"{model.seconds_in_two_levels(PARAMETERS, clients):,.0f} s",
        ]
        for power, clients in (("³", 100), ("⁵", 1_000), ("⁷", 10_000))
    ]


if __name__ == "__main__":
    main()
