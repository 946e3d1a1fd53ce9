"""Tables of recorded sweeps over partitions: each setting against a base setting on the same partitions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.reproduce.paper_comparison import NONE, signed
from fedeas_flwr.reproduce.tables import Table

PARTITION = "partition-seed"


def sweep_table(folder: Path, base: str) -> Table:
    """Compare a sweep's settings with those that have ``base``, KEY=VALUE, and agree in their other keys.

    The folder holds what `fedeas sweep` writes as sweep.json, perhaps of several sweeps under several names.

    Raises
    ------
    ConfigError
        One line if no run of the folder has ``base``.
    """
    sweeps = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    sweeps = [sweep for sweep in sweeps if "runs" in sweep]
    key, _, value = base.partition("=")
    found: dict[tuple[tuple[str, str], ...], dict[int, dict[str, Any]]] = {}
    keys = dict.fromkeys(name for sweep in sweeps for name in (*sweep["grid"], key) if name != PARTITION)
    for sweep in sweeps:
        for run in sweep["runs"]:
            own = {name: run.get(name, sweep["config"].get(name)) for name in (*sweep["grid"], key)}
            setting = tuple((name, _shown(own[name])) for name in keys if name in own)
            found.setdefault(setting, {})[run[PARTITION]] = run
    if not any((key, value) in setting for setting in found):
        raise ConfigError(f"{folder} has no run with {base}")
    table = Table([*keys, "Partitions", "Images, mean", "Last-20 %", f"To {base}", "Partitions above it"])
    for setting in sorted(found, key=lambda setting: [dict(setting).get(name, "") for name in keys if name != key]):
        runs = found[setting]
        ours = [100 * run["last_20"] for run in runs.values()]
        compared = [NONE, NONE]
        if (key, value) not in setting:
            (other,) = (one for one in found if (key, value) in one and _agree(setting, one, key))
            compared = _compared([100 * (run["last_20"] - found[other][seed]["last_20"]) for seed, run in runs.items()])
        images = f"{statistics.mean(run['images'] for run in runs.values()):,.0f}"
        mean = f"{statistics.mean(ours):.1f} ± {statistics.stdev(ours):.1f}"
        table.add([*(dict(setting).get(name, "") for name in keys), str(len(runs)), images, mean, *compared])
    return table


def _agree(setting: Sequence[tuple[str, str]], base: Sequence[tuple[str, str]], key: str) -> bool:
    return all(pair in setting for pair in base if pair[0] != key)


def _compared(apart: Sequence[float]) -> list[str]:
    """Write the mean difference ± its standard error, and on how many partitions it is positive."""
    error = statistics.stdev(apart) / len(apart) ** 0.5
    return [f"{signed(statistics.mean(apart), 1)} ± {error:.1f}", f"{sum(one > 0 for one in apart)} of {len(apart)}"]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
