"""The `fedeas` command: run, resume, evaluate, export, train-generator, keys, strategies.

The other commands are in `commands/`, a file each; generate and cache in its images.py.

An error ends in one line on stderr and an exit code (`exit_code`), never in a traceback. Heavy imports (torch, flwr)
happen inside the commands that need them: `fedeas plan` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import click
import typer
from rich.console import Console

from fedeas_flwr.commands.deploy import deploy_app
from fedeas_flwr.commands.doctor import doctor
from fedeas_flwr.commands.help import CLICK_SUGGESTS, THE_WAY, InOrderOfUse
from fedeas_flwr.commands.images import cache_app, generate
from fedeas_flwr.commands.output import FormatOption, can_be_folder, console
from fedeas_flwr.commands.plan import plan
from fedeas_flwr.commands.quickstart import quickstart_command
from fedeas_flwr.commands.report import report
from fedeas_flwr.commands.reproduce import reproduce
from fedeas_flwr.commands.runs import runs_app
from fedeas_flwr.commands.sweep import sweep
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import parse_overrides, read_config
from fedeas_flwr.data import dataset_info, short_name
from fedeas_flwr.errors import ConfigError, RunError, RunFailedError, is_out_of_memory
from fedeas_flwr.keys import run_keys
from fedeas_flwr.one_line import one_line
from fedeas_flwr.paths import DISK_ERRORS, cache_hint
from fedeas_flwr.project import read_project
from fedeas_flwr.runs import RunDirectory
from fedeas_flwr.sizes import counted
from fedeas_flwr.terminal import print_table, table_width

app = typer.Typer(
    cls=InOrderOfUse,
    help="Budget-aware synthetic augmentation for federated learning, on Flower.",
    epilog=THE_WAY,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    suggest_commands=not CLICK_SUGGESTS,
)
app.command("quickstart", short_help="Four runs on built-in data, a table and a page")(quickstart_command)
app.command(short_help="Who would generate how much; choose β from limits")(plan)
app.add_typer(cache_app, name="cache", short_help="Look after generated images: ls, verify, prune")
app.add_typer(runs_app, name="runs", short_help="Look after runs: ls, show, csv, prune, rm")
app.command(short_help="Do a grid of runs; started again, what is left of it")(sweep)
app.command(short_help="The paper's tables and figures, its numbers beside ours")(reproduce)
app.command(short_help="Make images to look at, to measure, to use as a bank")(generate)
app.command(short_help="Compare and plot runs: a table, a page, Markdown")(report)
app.add_typer(deploy_app, name="deploy", short_help="A federation of real machines: init, register, check")
app.command(short_help="What this machine can do for a run, and what to mend")(doctor)
WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What an operating system says to a path that should have been another; a full disk it says otherwise."""
_FOUR_COLUMNS = 120
"""Characters that a terminal needs for one of them to be of sentences."""


def main() -> None:
    """Run the command line; every foreseeable failure is one line."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, _terminated)
    # On its way out the interpreter would look through all that torch and diffusers have made, several times.
    atexit.register(gc.freeze)
    sys.path.insert(0, os.getcwd())  # where models of the user's own are looked for
    try:
        code = app(standalone_mode=False)  # typer turns Ctrl-C into a code of its own, and returns it
        if isinstance(code, int):
            sys.exit(code)
    except Exception as error:
        if not (isinstance(error, (click.ClickException, RunError, ValueError, OSError)) or is_out_of_memory(error)):
            raise
        print("error: " + one_line(_told(error), None), file=sys.stderr)
        sys.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """2 where what was given is wrong, so that nothing was begun; 1 where what was begun has failed."""
    if isinstance(error, OSError):
        return 2 if isinstance(error, WRONG_PATHS) else 1
    return 1 if isinstance(error, RunFailedError) or is_out_of_memory(error) else 2


def _told(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror:
        unnamed = "standard output or a temporary file: " if error.errno in DISK_ERRORS else ""
        place = f"{error.filename}: " if error.filename else unnamed
        return f"{place}{error.strerror}{cache_hint(error)}"
    return str(error) or type(error).__name__


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedeas {read_project().version}")
        raise typer.Exit


@app.callback()
def of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before any command."""


# -------------------------------------------------------------------------------------------------- run


@app.command(short_help="Run one federated training")
def run(
    conf: Annotated[Path, typer.Argument(help="a TOML file of run-config keys, such as conf/quickstart.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …; `fedeas keys` lists them")] = None,
) -> None:
    """Run one federated training under Flower and wait for its end."""
    config = read_config(conf, overrides or [])
    if config.run_dir:
        start(config)
        return
    wanted = Path("runs").absolute() / run_name(config)
    with reserved_folder(wanted) as folder:
        if folder != wanted and RunDirectory(wanted).state() == "interrupted":
            again = shlex.join(["fedeas", "resume", str(wanted)])
            console.print(f"{wanted.name} was interrupted; to go on with it: {again}", highlight=False, soft_wrap=True)
        start(config.with_changes(run_dir=str(folder)))


@app.command(short_help="Go on with an interrupted run")
def resume(
    folder: Annotated[Path, typer.Argument(help="the run directory of an interrupted run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …, such as rounds=40")] = None,
) -> None:
    """Go on with an interrupted run from its last checkpoint; the result is as if it had not been.

    A finished one goes on if it is given more rounds, and else tells its result again.
    """
    changes, own = parse_overrides(overrides or []), {"run-dir": str(folder.absolute()), "resume": True}
    for key in own.keys() & changes.keys():
        raise ConfigError(f"{key} = {changes[key]!r}: leave it out, `fedeas resume` goes on in {folder}")
    run = RunDirectory(folder.absolute())
    config = parse_config({**run.config().outside(), **changes, **own})
    if not changes and run.state() == "finished" and (run.path / "model.safetensors").exists():
        run.checked_rounds()
        console.print(f"finished already: {run.path}", highlight=False, soft_wrap=True)
        tell(run)
    else:
        start(config)


def start(config: RunConfig) -> RunDirectory:
    """Prepare what a run needs, with progress, then run it and print where the result is."""
    from fedeas_flwr.launch import launch
    from fedeas_flwr.prepare import prepare

    try:
        config = prepare(config, console)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped before the run began: give the same command again") from None
    console.print(
        f"{config.policy} · {config.strategy} · {config.dataset} · {counted(config.clients, 'client')} "
        f"· {counted(config.rounds, 'round')} · {config.backend} → {config.run_dir}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        finished = launch(config, console)
    except KeyboardInterrupt:
        again = shlex.join(["fedeas", "resume", config.run_dir])
        raise KeyboardInterrupt(f"stopped; go on with: {again}") from None
    tell(finished)
    return finished


def tell(run: RunDirectory) -> None:
    """Print what a finished run came to."""
    summary = run.summary()
    last, peak = (f"{100 * summary[key]:.1f} %" for key in ("last_20", "peak"))
    images = counted(summary["total_generated"], "image")
    told = f"last-{min(20, summary['rounds'])} accuracy {last} · peak {peak} · {images} generated"
    console.print(told, highlight=False)
    if "privacy" in summary:
        console.print(show_privacy(summary["privacy"]), highlight=False, soft_wrap=True)


def show_privacy(spent: dict[str, Any]) -> str:
    """What a run with `dp` spent, as one sentence."""
    if spent["epsilon"] is None:
        return f"privacy: no ε can be given, since {spent['why']}"
    return f"privacy: ε = {spent['epsilon']:.2f} at δ = {spent['delta']:g}; assumes {spent['assumes']}"


def run_name(config: RunConfig) -> str:
    """A folder name that says what the run is."""
    more = [word for word in (config.loss, config.views) if word not in ("cross-entropy", "none")]
    words = [f"k{config.clients}", f"a{config.alpha:g}", config.policy, config.strategy, *more, f"s{config.seed}"]
    return "-".join([short_name(config.dataset), *words])


@contextmanager
def reserved_folder(wanted: Path) -> Iterator[Path]:
    """Make ``wanted``, or with a number behind it if it is taken; of what fails before it begins nothing is left.

    It is made and not only looked for: another run may want the same name at this very moment.
    """
    wanted.parent.mkdir(parents=True, exist_ok=True)
    folder, number = wanted, 1
    while True:
        try:
            folder.mkdir()
            break
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # a folder that is not empty stays
            folder.rmdir()
            wanted.parent.rmdir()
        raise


@app.command(short_help="Test a run's saved model")
def evaluate(folder: Annotated[Path, typer.Argument(help="the run directory of a finished run")]) -> None:
    """Test a run's saved model on its global test set."""
    from fedeas_flwr.prepare import evaluate_run

    scores = evaluate_run(RunDirectory(folder.absolute()))
    print(json.dumps(scores, indent=1))


@app.command(short_help="Copy a run's record, without weights and paths")
def export(
    folder: Annotated[Path, typer.Argument(help="the run directory of a finished run")],
    to: Annotated[Path, typer.Argument(help="where its record goes, such as results/NAME", callback=can_be_folder)],
) -> None:
    """Copy a run's record (config, rounds, summary) without weights, images or paths of this machine."""
    from fedeas_flwr import exporting

    run, again = RunDirectory(folder.absolute()), RunDirectory(to.absolute()).is_record()
    exporting.export(run, to.absolute())
    print(f"exported {counted(len(run.rounds()), 'round')} → {to}" + (", where its record was before" if again else ""))


# ------------------------------------------------------------------------------------------- generators


@app.command("train-generator", short_help="Train a diffusion model to generate with")
def train_generator(
    dataset: Annotated[str, typer.Option(help="digits, cifar10, cifar100 or own:PATH; only its train split is seen")],
    out: Annotated[
        Path, typer.Option(help="folder of the model, its checkpoint and its pictures", callback=can_be_folder)
    ],
    minutes: Annotated[float | None, typer.Option(help="stop after so many minutes in all")] = None,
    steps: Annotated[int | None, typer.Option(help="stop after so many steps in all; else the preset's")] = None,
    preset: Annotated[
        str, typer.Option(help="digits, cifar-small or paper; else by dataset and device, or as begun")
    ] = "",
    data_dir: Annotated[str, typer.Option(help="where CIFAR is looked for; empty: the user's cache")] = "",
    seed: Annotated[int, typer.Option(help="of the initial weights and all draws", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile, on a GPU")] = True,
    half: Annotated[bool, typer.Option("--half", help="write float16 weights")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the checkpoint in --out")] = False,
    start: Annotated[Path | None, typer.Option(help="begin with a generator's weights; of other classes, too")] = None,
    checkpoint_every: Annotated[float, typer.Option(help="seconds between checkpoints")] = 300.0,
) -> None:
    """Train a class-conditional diffusion model; Ctrl-C saves a checkpoint."""
    from fedeas_flwr.devices import pick_device
    from fedeas_flwr.generators.presets import find_preset
    from fedeas_flwr.generators.training_run import preset_begun_with
    from fedeas_flwr.generators.training_run import train_generator as train
    from fedeas_flwr.progress import show_training

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = '{device}': must be auto, cpu or cuda")
    where, out = pick_device(device), out.absolute()
    dataset_info(dataset)  # refuses what there is not
    chosen = find_preset(preset or (preset_begun_with(out) if resume else ""), dataset, where)

    def say_which() -> None:
        if not (preset or resume) and dataset != "digits":
            why = "the small one: cifar-small is for a GPU" if where == "cpu" else "for images on a GPU"
            console.print(f"preset {chosen.name}, {why}; --preset takes another", highlight=False, soft_wrap=True)

    finished = train(
        dataset,
        out,
        chosen,
        steps=steps,
        minutes=minutes,
        data_dir=data_dir,
        seed=seed,
        device=where,
        compiled=compiled,
        half=half,
        resume=resume,
        start=start,
        checkpoint_every=checkpoint_every,
        begun=say_which,
        report=show_training(console, chosen.batch),
    )
    if not finished:
        raise KeyboardInterrupt(f"stopped; go on with the same command and --resume ({out})")
    console.print(f"generator: {out}", highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------- what there is


@app.command(short_help="List every run-config key")
def keys(output: FormatOption = "table") -> None:
    """List every run-config key: default, allowed values (n is a whole number, x any) and meaning."""
    head: tuple[str, ...] = ("key", "default", "allowed", "meaning")
    rows: list[tuple[Any, ...]] = [(key.name, key.default, key.allowed, key.meaning) for key in run_keys()]
    if output == "table":
        rows = [(key.name, json.dumps(key.default), key.allowed_shown(), key.meaning) for key in run_keys()]
        if table_width(Console()) < _FOUR_COLUMNS:
            head, rows = ("key", "default", "meaning, allowed"), [(*row[:2], f"{row[3]}\n{row[2]}") for row in rows]
    _print_rows(head, rows, output, fold=head[1:])


@app.command(short_help="List every strategy, and what it discloses")
def strategies(output: FormatOption = "table") -> None:
    """List every strategy: what it does, its keys, what a client discloses, and what it costs."""
    from fedeas_flwr.strategies import TABLE_HEAD, table_rows

    _, told, keys, *others = TABLE_HEAD
    _print_rows(TABLE_HEAD, table_rows(), output, fold=[told, *others], listed=keys)


def _print_rows(
    head: Sequence[str], rows: Sequence[Sequence[Any]], output: str, fold: Sequence[str], listed: str = ""
) -> None:
    """Print rows as a table or JSON; ``listed`` is a column of several names, a line each, so that none is broken."""
    if output == "json":
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=1, ensure_ascii=False))
        return
    lines = [
        [cell.replace(", ", ",\n") if name == listed else cell for name, cell in zip(head, row, strict=True)]
        for row in rows
    ]
    print_table(Console(), head, lines, fold=fold)
