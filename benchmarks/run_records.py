"""What the benchmarks of whole runs have in common: rounds timed from a run's own log, and the JSON they leave."""

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
    """Wall-clock of every round but the first, from the end of one to the end of the next, its checkpoint included.

    The phases in rounds.jsonl leave out what comes after them (the record, the checkpoint); the log's times do not.
    """
    ends = [when for when, text in _log(run) if text.startswith("[round ")]
    return [(end - begin).total_seconds() for begin, end in pairwise(ends)]


def seconds_to_discover(run: RunDirectory) -> float:
    """From the start of the server to the last client's answer to who it is."""
    lines = _log(run)
    began = next(when for when, text in lines if text.startswith("Run directory"))
    return (next(when for when, text in lines if text.startswith("Federation of")) - began).total_seconds()


def _log(run: RunDirectory) -> list[tuple[datetime, str]]:
    pattern = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) [A-Z]+ (.*)")
    found = (pattern.match(line) for line in (run.path / "flower.log").read_text(encoding="utf-8").splitlines())
    return [(datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S,%f"), m[2]) for m in found if m]


def let_children_import_models() -> None:
    """Put this folder on the path of the processes a run starts: the models here are given by import path."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def parser_for_a_run(about: str | None) -> argparse.ArgumentParser:
    """What a benchmark of one run's clients asks for; `asked_run` reads which run that is."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--config", type=Path, help="a run's file, instead of digits")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of that run")
    return parser


def asked_run(options: argparse.Namespace) -> RunConfig:
    """The run that the options name, ten clients with digits if none."""
    return read_config(options.config, options.set) if options.config else parse_config({"clients": 10})


def write_record(out: Path, device: str, setting: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write what was measured, on what, by which command."""
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
    """A table, to print and to paste."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"
