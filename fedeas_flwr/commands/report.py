"""The command `fedeas report`: compare runs as a table, an HTML page, Markdown or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedeas_flwr.commands.output import FormatOption, check_file, check_folder
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.text import MAX_TEXT, one_line
from fedeas_flwr.runs.listing import find_runs


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories, or folders that contain runs")],
    page: Annotated[
        Path | None, typer.Option("--html", help="write one HTML page with all figures", callback=check_file)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for report.md and its figures as PNG and SVG", callback=check_folder)
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="KEY=VALUE", help="add paired differences to these runs, such as policy=fedeas")
    ] = "",
    output: FormatOption = "table",
) -> None:
    """Compare runs as a table, an HTML page or Markdown; runs that differ only in their seed share a row."""
    if missing := [folder for folder in runs if not folder.is_dir()]:
        raise RunError(f"{missing[0]} is not a folder")
    from fedeas_flwr.report.groups import group_runs
    from fedeas_flwr.report.json_export import as_data, paired_data
    from fedeas_flwr.report.notes import notes_on
    from fedeas_flwr.report.paired import pair_runs, parse_reference
    from fedeas_flwr.report.writing import print_comparison, write_report

    reference = parse_reference(against) if against else None
    unreadable: list[str] = []
    found = list(find_runs(runs, unreadable=unreadable))
    if not found:
        nowhere = f"no run directory was found in or below {', '.join(map(str, runs))}"
        raise RunError(f"nothing to report: {'; '.join([nowhere, *unreadable])}")
    groups, left_out = group_runs(found)
    left_out += unreadable
    paired = pair_runs(groups, *reference) if reference else None
    written = write_report(groups, left_out, page, out, paired)
    if output == "json":
        data = {"groups": as_data(groups), "left_out": left_out} | ({"paired": paired_data(paired)} if paired else {})
        print(json.dumps(data, indent=1, ensure_ascii=False))
        return
    print_comparison(groups, Console(markup=False), paired)
    for note in [*(paired.text if paired else ()), *notes_on(groups), *(f"Left out: {reason}" for reason in left_out)]:
        print(one_line(note, MAX_TEXT))
    for path in written:
        print(f"written: {path}")
