"""Tables of recorded sweeps over partitions: each setting against a base setting on the same partitions."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.reproduce.paper_comparison import NONE, signed
from fedeas_flwr.reproduce.tables import Table

PARTITION = "partition-seed"


def sweep_table(folder: Path, base: str) -> Table:
    """Return a sweep's settings, each compared with the setting that has ``base``, KEY=VALUE, and the same other keys.

    The folder holds what `fedeas sweep` writes as sweep.json, of one sweep or of several under different names.

    Raises
    ------
    ConfigError
        One line if no run of the folder has ``base``.
    """
    sweeps = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    sweeps = [sweep for sweep in sweeps if "runs" in sweep]
    key, _, value = base.partition("=")
    keys = dict.fromkeys(name for sweep in sweeps for name in (*sweep["grid"], key) if name != PARTITION)
    found: dict[tuple[str, ...], dict[int, dict[str, Any]]] = {}
    for sweep in sweeps:
        for run in sweep["runs"]:
            own = {name: run.get(name, sweep["config"].get(name)) for name in (*sweep["grid"], key)}
            setting = tuple(_shown(own.get(name, "")) for name in keys)
            found.setdefault(setting, {})[run[PARTITION]] = run
    at = list(keys).index(key)
    if not any(setting[at] == value for setting in found):
        raise ConfigError(f"{folder} has no run with {base}")
    table = Table([*keys, "Partitions", "Images, mean", "Last-20 %", f"To {base}", "Partitions above it"])
    for setting in sorted(found, key=lambda setting: setting[:at] + setting[at + 1 :]):
        runs = found[setting]
        ours = [100 * run["last_20"] for run in runs.values()]
        shown = [str(len(runs)), f"{statistics.mean(run['images'] for run in runs.values()):,.0f}"]
        shown += [f"{statistics.mean(ours):.1f} ± {statistics.stdev(ours):.1f}", NONE, NONE]
        if setting[at] != value:
            base_setting = (*setting[:at], value, *setting[at + 1 :])  # which may lack a key that only others have
            (other,) = (
                o for one, o in found.items() if all(b in ("", s) for b, s in zip(one, base_setting, strict=True))
            )
            apart = [100 * (run["last_20"] - other[seed]["last_20"]) for seed, run in runs.items()]
            mean, error = statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5
            shown[-2:] = f"{signed(mean, 1)} ± {error:.1f}", f"{sum(one > 0 for one in apart)} of {len(apart)}"
        table.add([*setting, *shown])
    return table


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
