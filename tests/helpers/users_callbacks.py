"""Custom callbacks, named in run configs by import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.request import ProxyHandler, build_opener

from fedeas_flwr.callbacks.interface import StopRun
from fedeas_flwr.config import RunConfig

CALLS: list[tuple[str, Any]] = []
"""Calls of `Notify`, in order; a test clears them."""
SCRAPED: list[str] = []
"""What `Scrape` read after each round; a test clears them."""

number = 3


class Notify:
    def on_run_start(self, config: RunConfig, rounds: Sequence[Mapping[str, Any]]) -> None:
        CALLS.append(("start", (config, list(rounds))))

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        CALLS.append(("round", record))

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        CALLS.append(("end", summary))

    def close(self) -> None:
        CALLS.append(("close", None))


class StopAt:
    def __init__(self, last: int) -> None:
        self.last = last

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        if record["round"] >= self.last:
            raise StopRun(f"enough\nafter {self.last}")


class Failing:
    def on_run_start(self, config: RunConfig) -> None:
        raise ConnectionError("no\nserver")

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        raise SystemExit(3)


class Scrape:
    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}/metrics"

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        with build_opener(ProxyHandler({})).open(self.address, timeout=10) as answer:
            SCRAPED.append(answer.read().decode())


def broken() -> None:
    raise ArithmeticError("out of\nluck")
