"""The commands `fedeas run`, `resume`, `evaluate` and `export`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedeas_flwr.commands.output import check_folder, console, print_line, print_unused
from fedeas_flwr.common import import_path
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import parse_overrides, read_config
from fedeas_flwr.data.datasets import short_name
from fedeas_flwr.partition import DIRICHLET
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import GENERATOR
from fedeas_flwr.runs.metrics import describe_result, score_name


def run(
    conf: Annotated[Path, typer.Argument(help="a TOML file of run-config keys, such as conf/quickstart.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …; `fedeas keys` lists the keys")] = None,
) -> None:
    """Run one federated training under Flower and wait until it ends."""
    config = read_config(conf, overrides or [])
    print_unused(config, conf, overrides or [])
    start_in_own_folder(config)


def start_in_own_folder(config: RunConfig) -> None:
    """Start a run in its run-dir, or without one in a new folder of ./runs."""
    if config.run_dir:
        start(config)
        return
    wanted = Path("runs").absolute() / run_name(config)
    with reserved_folder(wanted) as folder:
        if folder != wanted:
            again = shlex.join(["fedeas", "resume", str(wanted)])
            resumed = RunDirectory(wanted).state() == "interrupted"
            before = f"was interrupted (to resume it: {again})" if resumed else "exists"
            print_line(console, f"{wanted.name} {before}; new run: {folder.name}")
        start(config.with_changes(run_dir=str(folder)))


def resume(
    folder: Annotated[Path, typer.Argument(help="the run directory of an interrupted run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value …, such as rounds=40")] = None,
    previous: Annotated[bool, typer.Option("--previous", help="from the checkpoint before the last one")] = False,
) -> None:
    """Resume an interrupted run from its last checkpoint; the result is the same as without the interruption.

    A finished run continues if `rounds` is raised; otherwise its result is printed again.
    """
    changes, own = parse_overrides(overrides or []), {"run-dir": str(folder.absolute()), "resume": True}
    for key in own.keys() & changes.keys():
        raise ConfigError(
            f"{key} = {changes[key]!r}: remove the key, since `fedeas resume` sets it to continue in {folder}"
        )
    run = RunDirectory(folder.absolute())
    config = parse_config({**run.config().to_user_dict(), **changes, **own})
    print_unused(config, None, overrides or [])
    if not (changes or previous) and run.state() == "finished" and (run.path / "model.safetensors").exists():
        run.checked_rounds()
        print_line(console, f"already finished: {run.path}")
        print_summary(run)
    else:
        start(config, previous)


def start(config: RunConfig, previous: bool = False) -> None:
    """Prepare and launch a run, and print its summary.

    With ``previous``, it resumes from the checkpoint before its last one.
    """
    from fedeas_flwr.launch.prepare import prepare
    from fedeas_flwr.launch.run import launch

    try:
        config = prepare(config, console, previous)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped before the run started; to start it, repeat the same command") from None
    if previous:  # only now: a rejected command must change nothing
        RunDirectory(Path(config.run_dir)).return_to_previous_checkpoint()
    of_what = f"{_method(config)} · {config.strategy} · {config.dataset} · {counted(config.clients, 'client')}"
    print_line(console, f"{of_what} · {counted(config.rounds, 'round')} · {config.backend} → {config.run_dir}")
    log = Path(config.run_dir) / "flower.log"
    logged_before = log.stat().st_size if log.is_file() else 0
    try:
        finished = launch(config, console)
    except KeyboardInterrupt:
        again = shlex.join(["fedeas", "resume", config.run_dir])
        raise KeyboardInterrupt(f"stopped; resume with: {again}") from None
    except RunError as error:
        if log.is_file() and b"Traceback (most recent call last)" in log.read_bytes()[logged_before:]:
            error.add_note(f"details: {log}")
        raise
    print_summary(finished)


def print_summary(run: RunDirectory) -> None:
    """Print a finished run's accuracy, number of images, why it stopped early, gaps, privacy spent and warnings."""
    summary = run.summary()
    if "final_loss" in summary:
        print_line(console, describe_result(summary))
        print_line(console, f"generator: {run.path / GENERATOR}")
    else:
        print_line(console, _describe_accuracy(summary))
    if "stopped" in summary:
        stopped = f"stopped after round {summary['rounds']} of {run.config().rounds} by {summary['stopped']}"
        print_line(console, stopped)
    if "gaps" in summary:
        print_line(console, f"finished, with gaps: {summary['gaps']}")
    if "privacy" in summary:
        print_line(console, show_privacy(summary["privacy"]))
    for name, why in run.warnings().items():
        print_line(console, f"warning: callback {name} failed in {why}")


def _describe_accuracy(summary: dict[str, Any]) -> str:
    score, final, peak = (f"{100 * summary[key]:.1f} %" for key in ("last_20", "final", "peak"))
    images = counted(summary["total_generated"], "image")
    lacking = sum(item["images"] for item in summary.get("not_made", []))
    limited = f", {lacking:,} not made because of nodes' limits" if lacking else ""
    accuracy = f"accuracy: {score_name([summary['rounds']])} {score} · final {final} · peak {peak}"
    return f"{accuracy} · {images} generated{limited}"


def show_privacy(spent: dict[str, Any]) -> str:
    """Return one sentence on the privacy that a run with `dp` spent."""
    if spent["epsilon"] is None:
        return f"privacy: no ε can be given, since {spent['why']}"
    return f"privacy: ε = {spent['epsilon']:.2f} at δ = {spent['delta']:g}; assumes {spent['assumes']}"


def run_name(config: RunConfig) -> str:
    """Return a folder name made of the dataset, clients, α, policy, strategy and seed."""
    more = [word for word in (config.loss, config.views) if word not in ("cross-entropy", "none")]
    methods = [import_path.short_name(name) for name in (_method(config), config.strategy)]
    partition = f"a{config.alpha:g}" if config.partition == DIRICHLET else import_path.short_name(config.partition)
    words = [f"k{config.clients}", partition, *methods, *more, f"s{config.seed}"]
    return "-".join([short_name(config.dataset), *words])


def _method(config: RunConfig) -> str:
    """Return the policy or, if a generator is trained, the task."""
    return config.policy if config.task == "classifier" else config.task


@contextmanager
def reserved_folder(wanted: Path) -> Iterator[Path]:
    """Create the folder ``wanted``, or ``wanted-N`` if ``wanted`` exists, and yield the path of the new folder.

    Creating the folder reserves its name, because another run may choose the same name at the same time. After an error
    the folder is removed if it is still empty.
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
        with suppress(OSError):  # rmdir fails if the folder is not empty
            folder.rmdir()
            wanted.parent.rmdir()
        raise


def evaluate(folder: Annotated[Path, typer.Argument(help="the run directory of a finished run")]) -> None:
    """Evaluate a run's saved model on the global test set."""
    from fedeas_flwr.launch.prepare import evaluate_run

    scores = evaluate_run(RunDirectory(folder.absolute()))
    print(json.dumps(scores, indent=1))


def export(
    folder: Annotated[Path, typer.Argument(help="the run directory of a finished run")],
    to: Annotated[Path, typer.Argument(help="folder for its record, such as results/NAME", callback=check_folder)],
) -> None:
    """Copy a run's record (config, rounds, summary) without weights, images or local paths."""
    from fedeas_flwr.runs import listing

    run, record = RunDirectory(folder.absolute()), RunDirectory(to.absolute())
    again = ", replacing its earlier record" if record.has_rounds() else ""
    listing.export(run, record.path)
    print(f"exported {counted(len(run.rounds()), 'round')} → {to}{again}")
