"""The command `fedeas reproduce`."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedeas_flwr.commands.output import FormatOption, check_folder, print_line, reject_options
from fedeas_flwr.commands.sweep import run_watched, validate_runs
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
        ("dataset", "clients", "alpha", "protocol", "policy", "strategy"), "choose among the cells of --list"
    ),
    "seed": "see --seeds",
    **dict.fromkeys(("run-dir", "resume"), "see --out"),
    **dict.fromkeys(
        ("partition", "partition-args", "partition-seed", "beta", "gamma", "printed-rule", "total"),
        "tables compare the paper's plans; for others use `fedeas sweep`",
    ),
}
"""Keys that --set must not change, because a cell's name or folder fixes them → what to use instead."""


def reproduce(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(help="all, table1, peak, beta, ablation, gamma, fig1 … fig5, …, or cells: 'c10-k100-a0.1/*'"),
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="columns of tables and cells, such as c10-k100-a0.1")
    ] = None,
    scale: Annotated[str, typer.Option(help="smoke: minutes, on digits; full: the paper's experiments")] = "smoke",
    runs: Annotated[
        list[Path] | None, typer.Option(help="folder with runs or exported records; may be repeated")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of the page and new runs; default: runs/reproduce-SCALE", callback=check_folder),
    ] = None,
    run: Annotated[
        bool | None, typer.Option("--run/--no-run", help="run what is missing; default: only at smoke scale")
    ] = None,
    given: Annotated[list[str] | None, typer.Option("--set", help="key=value for all runs, such as data-dir=…")] = None,
    seeds: Annotated[str, typer.Option(help="such as 1,2,3; default: one, more where an order is tested")] = "",
    jobs: Annotated[int, typer.Option(help="parallel runs; 0: one, at smoke scale one per core", min=0)] = 0,
    export: Annotated[
        Path | None, typer.Option(help="folder to export each new run's record to", callback=check_folder)
    ] = None,
    into: Annotated[Path | None, typer.Option(help="write tables between the markers of a Markdown file")] = None,
    listing: Annotated[bool, typer.Option("--list", help="list the cells with their `fedeas run` arguments")] = False,
    output: FormatOption = "table",
) -> None:
    """Reproduce the paper's tables and figures, with its numbers for comparison; run or list missing runs."""
    from fedeas_flwr.reproduce.cells import SCALES
    from fedeas_flwr.reproduce.items import choose
    from fedeas_flwr.reproduce.paper import COLUMNS

    if scale not in SCALES:
        raise ConfigError(f"scale = '{scale}': must be {' or '.join(SCALES)}")
    for folder in runs or []:
        if not folder.is_dir():
            raise ConfigError(f"runs = '{folder}': no such folder")
    names = [name for words in columns or [] for name in words.split(",")]
    more, numbers = read_words(given or []), read_seeds(seeds)
    if listing:
        reject_options(context, ("runs", "out", "run", "jobs", "export", "into"), "--list starts and reads no runs")
        print_cells(choose(what or ["*/*"], names, scale, numbers, more), output)
        return
    folder = (out or Path("runs") / f"reproduce-{scale}").absolute()
    places = [*(runs or []), folder / "runs"]
    if into:
        void = ("what", "columns", "run", "seeds", "jobs", "export", "output")
        reject_options(context, void, "--into writes only what the document asks for, from existing runs")
        write_into(into, scale, places, more)
        return
    choice = choose(what or [], names, scale, numbers, more)
    doing = scale == "smoke" if run is None else run
    if export and not doing:
        raise ConfigError(f"--export '{export}': remove the option, or give --run, without which nothing runs")
    # With JSON on stdout, progress goes to stderr.
    console = Console(stderr=output == "json", markup=False)
    results, failed = choice.find(places), False
    if doing:
        failed = run_missing(choice, results, folder / "runs", jobs or default_jobs(scale), export, console)
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
    """Return the key=value pairs of --set; raise `ConfigError` for a key that the cells set."""
    values = parse_overrides(words)
    for key, instead in SET_BY_CELLS.items():
        if key in values:
            raise ConfigError(f"--set {key}={values[key]}: every cell sets this key; {instead}")
    return values


def read_seeds(text: str) -> list[int]:
    """Return the seeds of a comma-separated list; a repeated seed would put two runs into one folder."""
    words = text.split(",") if text else []
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    if len(set(numbers)) < len(words):
        allowed = "different integers of at least 0, separated by commas"
        raise ConfigError(f"seeds = '{text}': must be {allowed}, such as 1,2,3")
    return numbers


def default_jobs(scale: str) -> int:
    """Return one per core at smoke scale, where a run has one thread; else 1: runs share a GPU well only with MPS."""
    return usable_cores() if scale == "smoke" else 1


def run_missing(
    choice: Choice, results: Results, folder: Path, jobs: int, export: Path | None, console: Console
) -> bool:
    """Run what is missing, export each run's record as it ends, and return whether a run failed after all retries."""
    from fedeas_flwr.reproduce import missing_runs
    from fedeas_flwr.runs.listing import check_export

    missing = choice.missing(results)
    if not missing:
        missing_runs.archive_finished_runs(results, folder, export)
        return False
    sweep = missing_runs.make_missing_sweep(choice, missing, folder)
    sweep.check()
    if export:
        for one in sweep.cells:
            check_export(one.run, missing_runs.record_folder(export, one.values["cell"], one.config))
    validate_runs(sweep, console)
    missing_runs.archive_finished_runs(results, folder, export)
    failed = run_watched(sweep, jobs, 1, console, lambda inner: missing_runs.ArchivingWatcher(inner, export))
    for cell in failed:
        print_line(Console(stderr=True), f"failed: {cell.name}: {cell.error}")
    return bool(failed)


def show(
    choice: Choice,
    results: Results,
    words: Sequence[str],
    folder: Path,
    options: Mapping[str, Sequence[str]],
    console: Console,
    output: str,
) -> list[Section]:
    """Write the page, print the tables or JSON and what is missing, and return the sections."""
    from fedeas_flwr.report.page import as_html, as_markdown
    from fedeas_flwr.reproduce.sections import make_sections
    from fedeas_flwr.reproduce.summary import as_json, make_page, missing_runs_command, print_tables, values_csv

    fill = partial(missing_runs_command, results.scale, options)
    sections = make_sections(choice, results, folder, fill)
    page = make_page(results, sections, options["--set"])
    record = {**as_json(results, sections), "page": ["index.md", "index.html"]}
    atomic_write(folder / "index.md", as_markdown(page).encode())
    atomic_write(folder / "index.html", as_html(page).encode())
    atomic_write(folder / "results.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    atomic_write(folder / "results.csv", values_csv(sections).encode())
    if output == "json":
        print(json.dumps({**record, "folder": str(folder)}, ensure_ascii=False))
    else:
        print_tables(sections, page.text, folder, console)
    if missing := choice.missing(results):
        number = counted(sum(map(len, missing.values())), "run")
        command, hint = fill(words, missing)
        for line in (f"Missing: {number} of {counted(len(missing), 'cell')}; to run them: {command}", hint):
            if line:
                print_line(console, line)
    if output == "table":
        print_line(console, f"page: {folder / 'index.html'}")
    return sections


def print_cells(choice: Choice, output: str) -> None:
    """Print every cell with its seeds and the command of its first run."""
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
    """Write tables between the markers ``<!-- reproduce WORDS -->`` and ``<!-- end -->`` of a document."""
    from fedeas_flwr.reproduce.documents import filled_document

    if not path.is_file():
        raise ConfigError(f"into = '{path}': no such file")
    try:
        text = path.read_bytes().decode()  # reading as text would change line endings
    except UnicodeDecodeError as error:
        raise ConfigError(f"into = '{path}': must be UTF-8, and byte {error.start} is not") from None
    filled, unreadable = filled_document(path, text, scale, places, more)
    with atomic_path(path.resolve()) as temporary:
        temporary.touch(0o600)
        temporary.write_bytes(filled.encode())
        shutil.copymode(path, temporary)
    for line in unreadable:
        print_line(Console(stderr=True), f"Unreadable: {line}")
    print(path)
