"""The command `fedeas plan`: images per client and class, and the choice of β."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from click.core import ParameterSource
from rich.console import Console

from fedeas_flwr.commands.images import batch_speed, estimate_generation, show_estimate
from fedeas_flwr.commands.output import FormatOption, check_folder, reject_options
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.launch.progress import show_tries

if TYPE_CHECKING:
    from fedeas_flwr.planning.beta_selection import Limits


DEFAULT_BETA = 12.0


def plan(
    context: typer.Context,
    dataset: Annotated[str, typer.Option(help="digits, cifar10, cifar100 or own:PATH")] = "cifar10",
    protocol: Annotated[str, typer.Option(help="paper or clean")] = "paper",
    clients: Annotated[int, typer.Option(help="number of clients K")] = 20,
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration")] = 0.1,
    policy: Annotated[str, typer.Option(help="fedeas, uniform, missing-only, full-balance, greedy, waterfill …")] = (
        "fedeas"
    ),
    beta: Annotated[float | None, typer.Option(help="budget parameter β; default: 12, or chosen by the limits")] = None,
    gamma: Annotated[float, typer.Option(help="exponent of the mean class count")] = 0.5,
    seed: Annotated[int, typer.Option(help="seed of the partition")] = 42,
    printed_rule: Annotated[bool, typer.Option("--printed-rule", help="apply Eq. 9 as printed in the paper")] = False,
    total: Annotated[int | None, typer.Option(help="total images of a matched policy; default: FedEAS's total")] = None,
    counts: Annotated[
        Path | None,
        typer.Option(
            help="label counts as .json or .csv: one row per client, one column per class; a .csv may have a header, "
            "and a first column named client, id, index or nothing is ignored"
        ),
    ] = None,
    output: FormatOption = "table",
    estimate: Annotated[
        bool, typer.Option("--estimate", help="estimate seconds and disk space by timing one batch")
    ] = False,
    generator: Annotated[
        str, typer.Option(help="with --estimate or --max-seconds: builtin, FOLDER, bank:DIR, sd-turbo")
    ] = "builtin",
    min_removed: Annotated[
        float | None, typer.Option(help="choose β: minimum fraction of the imbalance removed")
    ] = None,
    max_synthetic: Annotated[float | None, typer.Option(help="choose β: maximum fraction of synthetic images")] = None,
    max_images: Annotated[int | None, typer.Option(help="choose β: maximum number of images")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="choose β: maximum seconds, by timing one batch")] = None,
    grid: Annotated[str, typer.Option(help="candidate β, such as 4,8,12,16,20; default: any")] = "",
    figures: Annotated[
        Path | None, typer.Option(help="folder for four PNG figures in the paper's layout", callback=check_folder)
    ] = None,
) -> None:
    """Plan how many images each client generates, from label counts alone; choose β from limits."""
    from fedeas_flwr.data.datasets import dataset_info
    from fedeas_flwr.planning import beta_selection, counts_file
    from fedeas_flwr.planning import plan as plan_module
    from fedeas_flwr.planning.budget_path import BudgetPath
    from fedeas_flwr.planning.run_plan import partition_counts

    limits, betas = beta_selection.Limits(min_removed, max_synthetic, max_images, max_seconds), read_grid(grid)
    _check_settings(context, policy, total)
    _check_beta_or_limits(limits, beta, grid)
    if not estimate and max_seconds is None:
        reject_options(context, ["generator"], "it has no effect without --estimate or --max-seconds")
    names: Sequence[str]
    if counts:
        _check_given_counts(context, "--max-seconds" if max_seconds is not None else "--estimate" if estimate else "")
        found, names = counts_file.read_counts(counts)
    else:
        names = dataset_info(dataset).classes  # first: its error lists every allowed dataset
        progress = show_tries(Console(stderr=True))
        found = partition_counts(dataset, protocol, clients, alpha, seed, progress=progress)
    choice = None
    if limits.given():
        speed = batch_speed(generator, dataset, found.shape[1]) if max_seconds is not None else None
        choice = beta_selection.choose(BudgetPath(found, policy, gamma, not printed_rule), limits, betas, speed)
        if choice.recommended is None:
            answer = json.dumps({"choice": choice.as_json()})
            print(answer if output == "json" else beta_selection.format_choice(choice))
            raise typer.Exit(1)
        beta = choice.recommended
    result = plan_module.plan(
        found,
        dataset=None if counts else dataset,
        protocol=None if counts else protocol,
        policy=policy,
        beta=DEFAULT_BETA if beta is None else beta,
        gamma=gamma,
        seed=None if counts else seed,
        strict_mean=not printed_rule,
        total=total,
    )
    if estimate:
        result["estimate"] = estimate_generation(result, generator, dataset)
    if choice:
        result["choice"] = choice.as_json()
    parts = [plan_module.format_table(result, names)]
    parts += [show_estimate(result["estimate"])] if estimate else []
    parts += [beta_selection.format_choice(choice)] if choice else []
    if figures:
        from fedeas_flwr.report.plan_figures import draw_plan

        drawn = draw_plan(BudgetPath(found, policy, gamma, not printed_rule), result["beta"], figures, choice)
        parts.append(f"Figures:      {', '.join(map(str, drawn))}")
    print(json.dumps(result) if output == "json" else "\n".join(parts))


def _check_settings(context: typer.Context, policy: str, total: int | None) -> None:
    """Raise `ConfigError` for an option that has no effect with this policy or with a total."""
    from fedeas_flwr.policies import settings_of

    settings = settings_of(policy, total is not None)
    if total is not None and "total" not in settings:
        raise ConfigError(f"total = {total}: remove the option, since policy {policy} sets its own")
    options = {"beta": "beta", "gamma": "gamma", "strict_mean": "printed_rule"}
    why = "--total sets the number of images" if total is not None else f"policy {policy} has its own"
    if not settings:
        why = f"policy {policy} has nothing to set"
    reject_options(context, [option for name, option in options.items() if name not in settings], why)


def _check_beta_or_limits(limits: Limits, beta: float | None, grid: str) -> None:
    """Raise `ConfigError` for β given together with limits, or a grid given without limits."""
    from fedeas_flwr.planning.beta_selection import option

    if limits.given() and beta is not None:
        raise ConfigError(f"beta = {beta:g}: remove the option, since the limits choose it")
    if grid and not limits.given():
        names = ", ".join(map(option, vars(limits)))
        raise ConfigError(f"grid = '{grid}': needs a limit to choose by; give one or more of {names}")


def _check_given_counts(context: typer.Context, timed_by: str) -> None:
    """Raise `ConfigError` for options that --counts replaces, or for timing a generator without its dataset."""
    if timed_by and context.get_parameter_source("dataset") is not ParameterSource.COMMANDLINE:
        raise ConfigError(f"{timed_by} with --counts needs --dataset and --generator")
    void = ("protocol", "clients", "alpha", "seed", *([] if timed_by else ["dataset"]))
    reject_options(context, void, "--counts gives the label counts")


def read_grid(text: str) -> list[float]:
    """Return the numbers of a comma-separated list."""
    try:
        return [float(word) for word in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"grid = '{text}': must be numbers separated by commas, such as 4,8,12,16,20") from None
