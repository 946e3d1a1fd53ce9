"""The methods of a callback, and how one ends a run.

A callback is an object with at least one of the first three methods. The ServerApp calls them:

on_run_start(config)   before the first round, with the validated `RunConfig`; `config.run_dir` is the run's folder. If
                       the method also has a parameter ``rounds``, it gets the records of the rounds already done, which
                       a resumed run has.
on_round_end(record)   after each round, with its record as in rounds.jsonl, while the next round trains if possible
on_run_end(summary)    after the last round, with the content of summary.json
close()                at the end, also if the run failed or was interrupted

The attribute ``needs_network = True`` keeps a Ray run out of a private network namespace. The object is also created to
check the config, so files and connections are opened in `on_run_start`, not in `__init__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

METHODS = ("on_run_start", "on_round_end", "on_run_end")


class StopRun(Exception):
    """Raised by `on_round_end` with a reason: the run ends, finished, and this round is its last.

    Raised by `on_run_start` of a resumed run, it ends the run after the rounds already done.
    """


def curves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record by name: ``seconds/clients``, ``per_class_accuracy/3``; lists are skipped."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from curves(value, f"{name}/")
        elif key == "per_class_accuracy":
            yield from curves({str(label): accuracy for label, accuracy in enumerate(value)}, f"{name}/")
        elif isinstance(value, (int, float)) and key not in ("round", "worst_client"):
            yield name, float(value)
