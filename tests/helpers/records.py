"""Fake run records, as `fedeas export` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedeas_flwr.config import RunConfig
from fedeas_flwr.reproduce import paper
from fedeas_flwr.reproduce.cells import all_cells, cell
from fedeas_flwr.reproduce.items import ITEMS, choose
from fedeas_flwr.reproduce.results import Results, find_results
from fedeas_flwr.runs.metrics import summarise


def write_record(
    folder: Path,
    config: RunConfig,
    accuracies: Sequence[float],
    *,
    images: int = 0,
    gamma_hat: float | None = None,
    seconds: float = 1.0,
) -> Path:
    """Write a finished run with these accuracies per round; every client takes part in every round."""
    rounds: list[dict[str, Any]] = [
        {
            "round": number,
            "accuracy": accuracy,
            "gamma_hat": gamma_hat,
            "clients": list(range(config.clients)),
            "failures": [],
            "generated": images,
            "seconds": {"clients": seconds, "end_wait": 0.5},
        }
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": config.to_user_dict(), "environment": {}}))
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    (folder / "summary.json").write_text(json.dumps(summarise(rounds, config.threshold)))
    return folder


def record(folder: Path, name: str, seed: int = 1, accuracies: Any = None, scale: str = "full", **more: Any) -> Path:
    """Write a run of a cell and return its folder; the default number of images is the paper's."""
    config = cell(name).config(scale, seed, more.pop("keys", None))
    place, _, method = name.partition("/")
    images = more.pop("images", paper.images(method, place) or 0)
    rounds = accuracies or ([0.5] * config.rounds)
    return write_record(folder, config, rounds, images=images, **more)


def found_in(folder: Path, scale: str = "full", **more: Any) -> Results:
    return find_results(all_cells() if scale == "full" else smoke_cells(), scale, [folder], more)


def smoke_cells() -> list[Any]:
    return choose(list(ITEMS), [], "smoke").needed()
