"""The command `fedeas reproduce`."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedeas_flwr.commands.output import FormatOption, can_be_folder, refuse_given
from fedeas_flwr.commands.sweep import validate_runs, watching
from fedeas_flwr.common.cores import usable_cores
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_path, atomic_write
from fedeas_flwr.common.text import counted
from fedeas_flwr.config_files import parse_overrides

if TYPE_CHECKING:
    from fedeas_flwr.reproduce.items import Choice
    from fedeas_flwr.reproduce.results import Results
    from fedeas_flwr.reproduce.sections import Section


SET_BY_CELLS = {
    **dict.fromkeys(
        ("dataset", "clients", "alpha", "protocol", "policy", "strategy"), "choose cells, which --list names"
    ),
    "seed": "see --seeds",
    **dict.fromkeys(("run-dir", "resume"), "see --out"),
}
"""Keys that no --set may change, since a cell's name or folder says them → what to do instead."""


def reproduce(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(help="all, table1, peak, beta, ablation, gamma, fig1 … fig5, …, or cells: 'c10-k100-a0.1/*'"),
    ] = None,
    columns: Annotated[list[str] | None, typer.Option(help="of tables and cells, such as c10-k100-a0.1")] = None,
    scale: Annotated[str, typer.Option(help="smoke: minutes, on digits; full: the paper's experiments")] = "smoke",
    runs: Annotated[list[Path] | None, typer.Option(help="folder with runs or exported records; several")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of the page and of new runs; else runs/reproduce-…", callback=can_be_folder),
    ] = None,
    run: Annotated[bool | None, typer.Option("--run/--no-run", help="do missing runs; else only at smoke")] = None,
    given: Annotated[list[str] | None, typer.Option("--set", help="key=value of all runs, such as data-dir=…")] = None,
    seeds: Annotated[str, typer.Option(help="such as 1,2,3; else one, and more where order is to be told")] = "",
    jobs: Annotated[int, typer.Option(help="runs at once; 0: one, at smoke one a core", min=0)] = 0,
    export: Annotated[
        Path | None, typer.Option(help="folder that gets each new run's record", callback=can_be_folder)
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="write tables into a Markdown file that has places for them")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="name the cells, with the words of `fedeas run`")] = False,
    output: FormatOption = "table",
) -> None:
    """The paper's tables and figures from runs, its numbers beside ours; missing runs are done or named."""
    from fedeas_flwr.reproduce.cells import SCALES
    from fedeas_flwr.reproduce.items import choose
    from fedeas_flwr.reproduce.paper import COLUMNS

    if scale not in SCALES:
        raise ConfigError(f"scale = '{scale}': must be {' or '.join(SCALES)}")
    for folder in runs or []:
        if not folder.is_dir():
            raise ConfigError(f"runs = '{folder}': there is no such folder")
    names = [name for words in columns or [] for name in words.split(",")]
    more, numbers = read_words(given or []), read_seeds(seeds)
    if listing:
        refuse_given(context, ("runs", "out", "run", "jobs", "export", "into"), "--list does no runs and reads none")
        print_cells(choose(what or ["*/*"], names, scale, numbers, more), output)
        return
    folder = (out or Path("runs") / f"reproduce-{scale}").absolute()
    places = [*(runs or []), folder / "runs"]
    if into:
        void = ("what", "columns", "run", "seeds", "jobs", "export", "output")
        refuse_given(context, void, "--into writes what the document asks for, from the runs that there are")
        write_into(into, scale, places, more)
        return
    choice = choose(what or [], names, scale, numbers, more)
    doing = scale == "smoke" if run is None else run
    if export and not doing:
        raise ConfigError(f"--export '{export}': leave it out or say --run, no run is done without")
    # With JSON on stdout, what goes on is told on stderr.
    console = Console(stderr=output == "json", markup=False)
    results, failed = choice.find(places), False
    if doing:
        failed = do_missing(choice, results, folder / "runs", jobs or default_jobs(scale), export, console)
        results = choice.find(places)
    options = {
        "--columns": [] if choice.columns == COLUMNS else [",".join(choice.columns)],
        "--runs": [str(path) for path in runs or []],
        "--out": [str(out)] if out else [],
        "--seeds": [seeds] if seeds else [],
        "--jobs": [str(jobs)] if jobs else [],
        "--export": [str(export)] if export else [],
        "--set": given or [],
    }
    words = [word for word in what or [] if word not in COLUMNS]
    sections = show(choice, results, words, folder, options, console, output)
    if failed or (doing and any(section.missing for section in sections)):
        raise typer.Exit(1)


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Read the key=value words that hold for all runs; a relative path is meant from here."""
    values = parse_overrides(words)
    for key, instead in SET_BY_CELLS.items():
        if key in values:
            raise ConfigError(f"--set {key}={values[key]}: every cell sets its own; {instead}")
    return values


def read_seeds(text: str) -> list[int]:
    """Read numbers separated by commas; one that is there twice would be two runs in one folder."""
    words = text.split(",") if text else []
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    if len(set(numbers)) < len(words):
        allowed = "whole numbers of at least 0, each once, separated by commas"
        raise ConfigError(f"seeds = '{text}': must be {allowed}, such as 1,2,3")
    return numbers


def default_jobs(scale: str) -> int:
    """One a core at smoke, where a run is one thread; on a GPU one, since several share it well only under MPS."""
    return usable_cores() if scale == "smoke" else 1


# --------------------------------------------------------------------------------------------------------- the runs


def do_missing(
    choice: Choice, results: Results, folder: Path, jobs: int, export: Path | None, console: Console
) -> bool:
    """Do the runs that are missing, each as it ends a record in ``export``; tell whether one failed for good."""
    from fedeas_flwr.launch.sweep_jobs import run_sweep
    from fedeas_flwr.reproduce.missing_runs import (
        ArchivingWatcher,
        archive_finished_runs,
        make_missing_sweep,
        record_folder,
    )
    from fedeas_flwr.runs.listing import check_export

    missing = choice.missing(results)
    if not missing:
        archive_finished_runs(results, folder, export)
        return False
    filling = make_missing_sweep(choice, missing, folder)
    filling.check()
    if export:
        for one in filling.cells:
            check_export(one.run, record_folder(export, one.values["cell"], one.config))
    validate_runs(filling, console)
    archive_finished_runs(results, folder, export)
    prepare = partial(prepare_generator, choice.scale, [cell.config.generates for cell in filling.cells], console)
    try:
        with watching(console) as watcher:
            failed = run_sweep(filling, jobs, 1, ArchivingWatcher(watcher, export), prepare)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; go on with: {shlex.join(['fedeas', *sys.argv[1:]])}") from None
    for cell in failed:
        _warn(f"failed: {cell.name}: {cell.error}")
    return bool(failed)


def prepare_generator(scale: str, generating: Sequence[bool], console: Console) -> None:
    """Train the built-in generator here, where it is seen, and not in the first run that needs it."""
    if scale == "smoke" and any(generating):
        from fedeas_flwr.launch.prepare import ensure_digits_generator

        ensure_digits_generator(console)


def _warn(text: str) -> None:
    Console(stderr=True).print(text, highlight=False, soft_wrap=True, markup=False)


# ------------------------------------------------------------------------------------------------------- the result


def show(
    choice: Choice,
    results: Results,
    words: Sequence[str],
    folder: Path,
    options: Mapping[str, Sequence[str]],
    console: Console,
    output: str,
) -> list[Section]:
    """Write the page, print the tables or JSON, and say what is missing."""
    from fedeas_flwr.reproduce.page import write_page
    from fedeas_flwr.reproduce.sections import make_sections
    from fedeas_flwr.reproduce.summary import as_json, fill_command, make_page, print_tables, values_csv

    fill = partial(fill_command, results.scale, options)
    sections = make_sections(choice, results, folder, fill)
    page = make_page(results, sections, options["--set"])
    written = write_page(page, folder)
    record = {**as_json(results, sections), "page": [path.name for path in written]}
    atomic_write(folder / "results.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    atomic_write(folder / "results.csv", values_csv(sections).encode())
    if output == "json":
        print(json.dumps({**record, "folder": str(folder)}, ensure_ascii=False))
    else:
        print_tables(sections, page.text, console)
    if missing := choice.missing(results):
        number = counted(sum(map(len, missing.values())), "run")
        command, beside = fill(words, missing)
        for line in (f"Missing: {number} of {counted(len(missing), 'cell')}; to do them: {command}", beside):
            if line:
                console.print(line, highlight=False, soft_wrap=True, markup=False)
    if output == "table":
        console.print(f"page: {written[1]}", highlight=False, soft_wrap=True)
    return sections


def print_cells(choice: Choice, output: str) -> None:
    """Name every cell with its seeds and the words that do its first run."""
    from fedeas_flwr.reproduce.cells import run_command_args

    rows = []
    for one in choice.needed():
        seeds = choice.seeds or one.seeds(choice.scale)
        command = shlex.join(run_command_args(one, choice.scale, seeds[0], choice.more))
        rows.append({"cell": one.name, "seeds": list(seeds), "command": command})
    if output == "json":
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['cell']}  seeds {','.join(map(str, row['seeds']))}\n    {row['command']}")


def write_into(path: Path, scale: str, places: Sequence[Path], more: Mapping[str, Any]) -> None:
    """Write tables between a document's ``<!-- reproduce WORDS -->`` and ``<!-- end -->``."""
    from fedeas_flwr.reproduce.summary import filled_document

    if not path.is_file():
        raise ConfigError(f"into = '{path}': there is no such file")
    try:
        text = path.read_bytes().decode()  # as it is: reading as text would lose its line ends
    except UnicodeDecodeError as error:
        raise ConfigError(f"into = '{path}': must be UTF-8, and byte {error.start} is not") from None
    filled, unreadable = filled_document(path, text, scale, places, more)
    with atomic_path(path.resolve()) as temporary:
        temporary.touch(0o600)
        temporary.write_bytes(filled.encode())
        shutil.copymode(path, temporary)
    for line in unreadable:
        _warn(f"Unreadable: {line}")
    print(path)
