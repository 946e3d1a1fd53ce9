"""Helpers of the benchmarks of whole runs: round times from a run's log, common options, and JSON records."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fedeas_flwr.common.project import describe_environment
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import read_config
from fedeas_flwr.runs.directory import RunDirectory

HERE = Path(__file__).resolve().parent


def round_seconds(run: RunDirectory) -> list[float]:
    """Return the wall-clock seconds of every round but the first, from end to end, including its checkpoint.

    The phases in rounds.jsonl exclude the record and the checkpoint; the times in the log include them.
    """
    return [end - begin for begin, end in pairwise(round_ends(run))]


def round_ends(run: RunDirectory) -> list[float]:
    """Return the time of every round's end, in seconds of the system's clock."""
    return [when.timestamp() for when, text in _log(run) if text.startswith("[round ")]


def seconds_to_discover(run: RunDirectory) -> float:
    """Return the seconds from the server's start until every client has sent its identity."""
    lines = _log(run)
    began = next(when for when, text in lines if text.startswith("Run directory"))
    return (next(when for when, text in lines if text.startswith("Federation of")) - began).total_seconds()


def _log(run: RunDirectory) -> list[tuple[datetime, str]]:
    pattern = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) [A-Z]+ (.*)")
    found = (pattern.match(line) for line in (run.path / "flower.log").read_text(encoding="utf-8").splitlines())
    return [(datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S,%f"), m[2]) for m in found if m]


def let_children_import_models() -> None:
    """Add this folder and the project's to PYTHONPATH for the processes of a run, which import the models by name.

    The project may not be installed, and found only by the relative path that this process was started with.
    """
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def parser_for_a_run(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark of one run's clients; `asked_run` reads the run-config."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--config", type=Path, help="run-config to use instead of digits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of --config")
    return parser


def asked_run(options: argparse.Namespace) -> RunConfig:
    """Return the run-config that the options name; default: digits with ten clients."""
    return read_config(options.config, options.set) if options.config else parse_config({"clients": 10})


def write_record(out: Path, device: str, setting: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the measurements with command, environment and load as JSON."""
    record = {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "environment": describe_environment(torch.cuda.get_device_name(0) if device == "cuda" else "cpu"),
        "load": round(os.getloadavg()[0], 1),
        "setting": setting,
        "rows": list(rows),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"
