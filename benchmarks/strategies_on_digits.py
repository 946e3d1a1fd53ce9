"""Run every strategy on digits, with and without FedEAS, and the alternatives that generate nothing.

    python benchmarks/strategies_on_digits.py --runs runs/strategies-on-digits --out results/strategies-on-digits

The setting is the quickstart's (10 clients, α = 0.1, 20 rounds, β = 6; so last-20 is the mean of all rounds) with
`backend = "inline"`, three seeds and default keys. Finished runs are not repeated, so the same command resumes an
interrupted table. There are seeds × (2 × strategies + 4) runs of about 10 s on a slow core, two in parallel: about a
quarter of an hour in total. --seeds and --strategies select fewer.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fedeas_flwr.common.errors import RunError
from fedeas_flwr.config import STRATEGIES, RunConfig, parse_config
from fedeas_flwr.config_keys import STRATEGY_KEYS
from fedeas_flwr.launch.prepare import ensure_digits_generator
from fedeas_flwr.launch.run import launch
from fedeas_flwr.runs.directory import RunDirectory

SETTING: dict[str, Any] = {"clients": 10, "backend": "inline", "threshold": 0.9, "device": "cpu"}
FREE: dict[str, dict[str, Any]] = {
    "oversampling": {"policy": "oversample"},
    "class-weighted loss": {"loss": "class-weighted"},
    "logit-adjusted loss": {"loss": "logit-adjusted"},
    "shifts": {"views": "flip-crop"},
}
"""Alternatives without a generator, used with FedAvg; digits are shifted but not mirrored."""


@dataclass(frozen=True)
class Row:
    """One row of the table: a strategy, its method against label skew, and their keys."""

    strategy: str
    against_skew: str
    keys: dict[str, Any]

    def config(self, seed: int, folder: Path) -> RunConfig:
        """Return the run-config of one seed."""
        name = f"{self.strategy}-{self.against_skew.replace(' ', '-')}-s{seed}"
        return parse_config({**SETTING, **self.keys, "seed": seed, "run-dir": str(folder.absolute() / name)})


def rows(strategies: Sequence[str]) -> list[Row]:
    """Return the rows of the table; a strategy that discloses more needs its key."""
    found = []
    for name in strategies:
        own = {"strategy": name, **{key: True for key in STRATEGY_KEYS[name] if key.startswith("disclose-")}}
        found += [Row(name, "nothing", {**own, "policy": "none"}), Row(name, "fedeas", {**own, "policy": "fedeas"})]
    return found + [Row("fedavg", name, {"policy": "none", **keys}) for name, keys in FREE.items()]


def finished(config: RunConfig) -> bool:
    """Return whether this run has finished with the same config."""
    run = RunDirectory(Path(config.run_dir))
    try:
        return run.status()[0] == "finished" and run.config() == config
    except RunError:
        return False


def run_once(config: RunConfig) -> None:
    """Run from the start; delete what an interrupted attempt left."""
    shutil.rmtree(config.run_dir, ignore_errors=True)
    launch(config, Console(file=io.StringIO()))


def run_all(configs: Sequence[RunConfig], jobs: int, console: Console) -> None:
    """Run what is not finished, `jobs` runs in parallel."""
    todo = [config for config in configs if not finished(config)]
    console.print(f"{len(configs)} runs, {len(configs) - len(todo)} finished before")
    if not todo:
        return
    if any(config.generates for config in todo):
        ensure_digits_generator(console)  # once, not in several processes
    failed = 0
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_once, config): Path(config.run_dir).name for config in todo}
        try:
            for number, future in enumerate(as_completed(running), start=1):
                error = future.exception()
                failed += error is not None
                console.print(f"{number}/{len(todo)} {running[future]} {error or ''}", highlight=False, soft_wrap=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        sys.exit(f"{failed} of {len(todo)} runs failed; run the same command again to retry them")


def measured(row: Row, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """Return the results of a row, by seed."""
    runs = [RunDirectory(Path(row.config(seed, folder).run_dir)) for seed in seeds]
    summaries, rounds = [run.summary() for run in runs], [run.rounds() for run in runs]
    return {
        "strategy": row.strategy,
        "against_skew": row.against_skew,
        "keys": row.keys,
        "seeds": list(seeds),
        "last_20": [summary["last_20"] for summary in summaries],
        "peak": [summary["peak"] for summary in summaries],
        "images": [summary["total_generated"] for summary in summaries],
        "steps": [sum(record["steps"] for record in records) for records in rounds],
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table; steps are relative to plain FedAvg."""
    base = next((f for f in found if (f["strategy"], f["against_skew"]) == ("fedavg", "nothing")), None)
    lines = [
        "| strategy | against skew | last-20 % | images generated | steps |",
        "|---|---|---|---|---|",
    ]
    for line in found:
        steps = f"{sum(line['steps']) / sum(base['steps']):.2f} ×" if base else "–"
        cells = [
            line["strategy"],
            line["against_skew"],
            spread(line["last_20"]),
            f"{statistics.mean(line['images']):,.0f}",
            steps,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(accuracies: Sequence[float]) -> str:
    """Return mean ± sample standard deviation in percent; one seed has no deviation."""
    mean = f"{100 * statistics.mean(accuracies):.1f}"
    return f"{mean} ± {100 * statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the run directories")
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and table.md")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs")
    options = parser.parse_args()
    console, lines = Console(), rows(options.strategies)
    # Seed by seed, so that every row has a result early.
    run_all([row.config(seed, options.runs) for seed in options.seeds for row in lines], options.jobs, console)
    found = [measured(row, options.seeds, options.runs) for row in lines]
    environment = RunDirectory(Path(lines[0].config(options.seeds[0], options.runs).run_dir)).environment()
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"setting": SETTING, "environment": environment, "load": round(os.getloadavg()[0], 1), "rows": found}
    (options.out / "results.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    (options.out / "table.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
