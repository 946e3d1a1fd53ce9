"""The command `fedeas doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from fedeas_flwr.commands.output import FormatOption, print_unused
from fedeas_flwr.common.tables import print_table
from fedeas_flwr.common.text import MAX_LINE, counted, one_line
from fedeas_flwr.config_files import read_config, split_conf

if TYPE_CHECKING:
    from fedeas_flwr.doctor.findings import Finding


_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONF] [KEY=VALUE]...", help="config to check; default: every key at its default"),
    ] = None,
    output: FormatOption = "table",
) -> None:
    """Check whether this machine can run a config, and print what to fix; exit code 1 if there is a problem."""
    conf, overrides = split_conf(words or [])
    config = read_config(conf, overrides)
    print_unused(config, conf, overrides)
    from fedeas_flwr.doctor.findings import examine

    findings = examine(config)
    if output == "json":
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        show(findings, Console(markup=False))
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def show(findings: list[Finding], console: Console) -> None:
    """Print findings as a table that is readable without colour; long texts are wrapped."""
    rows, wrapped = [], ("check", "what was found")
    for finding in findings:
        text = Text(one_line(finding.text, MAX_LINE))
        if finding.fix:
            text.append("\n→ " + finding.fix, style="bold" if finding.state == "problem" else "")
        rows.append((Text(finding.state, style=_COLOURS[finding.state]), finding.name, text))
    print_table(console, ("state", *wrapped), rows, fold=wrapped)
    counts = {state: sum(finding.state == state for finding in findings) for state in ("problem", "note")}
    ending = ", ".join(counted(number, state) for state, number in counts.items())
    console.print(ending, highlight=False)
