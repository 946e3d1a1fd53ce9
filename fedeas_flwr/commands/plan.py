"""The command `fedeas plan`: images per client and class, and the choice of β."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedeas_flwr.commands.images import batch_speed, estimate_generation, numbers, show_estimate
from fedeas_flwr.commands.output import DATASETS, FormatOption, check_folder, reject_options
from fedeas_flwr.commands.quickstart import QUICKSTART
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import read_values, split_conf
from fedeas_flwr.launch.progress import show_tries
from fedeas_flwr.policies.matched import MatchedPolicy
from fedeas_flwr.policies.registry import POLICIES, REFERENCES, settings_of

_OPTIONS = {
    **{key: key for key in ("dataset", "protocol", "clients", "alpha", "policy", "beta", "gamma", "total")},
    "generator": "generator",
    "seed": "partition-seed",
    "printed_rule": "printed-rule",
}
"""Option → the run-config key that it sets."""
_PARTITION_KEYS = ("protocol", "clients", "partition", "partition-args", "alpha", "partition-seed")


def plan(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONF] [KEY=VALUE]...", help="config to plan; default: conf/quickstart.toml"),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help=DATASETS)] = None,
    protocol: Annotated[str | None, typer.Option(help="paper or clean")] = None,
    clients: Annotated[int | None, typer.Option(help="number of clients K")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet concentration")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="fedeas, uniform, missing-only, full-balance, greedy, waterfill …, or package.module:name"),
    ] = None,
    beta: Annotated[float | None, typer.Option(help="budget parameter β; the limits below choose it")] = None,
    gamma: Annotated[float | None, typer.Option(help="exponent of the mean class count")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the partition")] = None,
    printed_rule: Annotated[
        bool | None, typer.Option("--printed-rule", help="apply Eq. 9 as printed in the paper")
    ] = None,
    total: Annotated[int | None, typer.Option(help="total images of a matched policy; default: FedEAS's total")] = None,
    counts: Annotated[
        Path | None,
        typer.Option(
            help="label counts as .json or .csv: one row per client, one column per class, or rows of client, class "
            "and count; a .csv may have a header, and a first column named such as client, site_id or name has the "
            "clients' names"
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="with --counts: header of the first column if it has the clients' names, or none")
    ] = None,
    output: FormatOption = "table",
    estimate: Annotated[
        bool, typer.Option("--estimate", help="estimate seconds and disk space by timing one batch")
    ] = False,
    generator: Annotated[
        str | None, typer.Option(help="with --estimate or --max-seconds: builtin, FOLDER, bank:DIR, sd-turbo")
    ] = None,
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
    """Plan how many images each client generates, from label counts alone; choose β from limits.

    The plan is that of `fedeas run` with the same CONF and KEY=VALUE. --dataset, --protocol, --clients, --alpha,
    --policy, --beta, --gamma, --total and --generator set the key of that name, --seed the key partition-seed.
    """
    from fedeas_flwr.data.datasets import dataset_info
    from fedeas_flwr.planning import beta_selection, counts_file
    from fedeas_flwr.planning import plan as plan_module
    from fedeas_flwr.planning.budget_path import BudgetPath
    from fedeas_flwr.planning.run_plan import absent_classes_warning, planned_counts, stored_images

    limits = beta_selection.Limits(min_removed, max_synthetic, max_images, max_seconds)
    betas = numbers("--grid", grid, float) if grid else []
    timed_by = "--max-seconds" if max_seconds is not None else "--estimate" if estimate else ""
    conf, overrides = split_conf(words or [])
    given = _given(read_values(None, overrides), context.params)
    values = (QUICKSTART if conf is None else read_values(conf)) | {key: value for key, (value, _) in given.items()}
    chosen = str(values.get("policy", parse_config({}).policy))
    _check_settings(given, chosen, values)
    if limits.given():
        _reject(given, ["beta"], "the limits choose it")
    elif grid:
        names_of_limits = ", ".join(map(beta_selection.option, vars(limits)))
        raise ConfigError(f"grid = '{grid}': needs a limit to choose by; give one or more of {names_of_limits}")
    if not timed_by:
        reject_options(context, ["generator"], "it has no effect without --estimate or --max-seconds")
    config = _plan_config(values, chosen, bool(timed_by))
    classes: Sequence[str]
    if counts:
        if timed_by and "dataset" not in values:
            raise ConfigError(f"{timed_by} with --counts needs --dataset and --generator")
        _reject(given, [*_PARTITION_KEYS, *([] if timed_by else ["dataset"])], "--counts gives the label counts")
        found, classes, names = counts_file.read_counts(counts, id_column)
    else:
        reject_options(context, ["id_column"], "it has no effect without --counts")
        if not config.clients:
            raise ConfigError("clients = 0: a plan needs the number of clients, such as clients=10")
        classes, names = dataset_info(config.dataset).classes, []
        found = planned_counts(config, show_tries(Console(stderr=True)))
    names_of_all = classes or [str(c) for c in range(found.shape[1])]
    if warning := absent_classes_warning(found, names_of_all, counts or config.dataset):
        print(f"warning: {warning}", file=sys.stderr)
    choice, chosen_beta, strict_mean = None, config.beta, not config.printed_rule
    if limits.given():
        speed = batch_speed(config, found.shape[1]) if max_seconds is not None else None
        choice = beta_selection.choose(BudgetPath(found, chosen, config.gamma, strict_mean), limits, betas, speed)
        if choice.recommended is None:
            answer = json.dumps({"choice": choice.as_json()})
            print(answer if output == "json" else beta_selection.format_choice(choice))
            raise typer.Exit(1)
        chosen_beta = choice.recommended
    result = plan_module.plan(
        found,
        dataset=None if counts else config.dataset,
        protocol=None if counts else config.protocol,
        policy=chosen,
        beta=chosen_beta,
        gamma=config.gamma,
        seed=None if counts else config.partition_seed,
        strict_mean=strict_mean,
        total=config.total or None,
        clients=names,
        policy_args=config.policy_args,
        rounds=config.rounds,
    )
    made = stored_images(config, plan_module.generated(result))  # under an adaptive policy, the first part
    if config.shared_images != "no":
        result["shared_total"] = int(made.sum())
    if estimate:
        result["estimate"] = estimate_generation(made, config)
    if choice:
        result["choice"] = choice.as_json()
    parts = [plan_module.format_table(result, classes)]
    parts += [show_estimate(result["estimate"])] if estimate else []
    parts += [beta_selection.format_choice(choice)] if choice else []
    if figures:
        from fedeas_flwr.report.plan_figures import draw_plan

        drawn = draw_plan(BudgetPath(found, chosen, config.gamma, strict_mean), result["beta"], figures, choice)
        parts.append(f"Figures:      {', '.join(map(str, drawn))}")
    if conf is None and not counts:
        print("no config given: all other keys are those of conf/quickstart.toml", file=sys.stderr)
    print(json.dumps(result) if output == "json" else "\n".join(parts))


Given = Mapping[str, tuple[Any, str]]
"""Key → its value on the command line, and how the user wrote it: ``--beta`` or ``beta = 3``."""


def _given(overrides: Mapping[str, Any], options: Mapping[str, Any]) -> Given:
    """Return the keys set on the command line; raise `ConfigError` for a key that is set twice."""
    given = {key: (value, f"{key} = {value!r}") for key, value in overrides.items()}
    for option, key in _OPTIONS.items():
        if options[option] is not None:
            written = f"--{option.replace('_', '-')}"
            if key in given:
                raise ConfigError(f"{written}: remove the option, since {given[key][1]} is given")
            given[key] = (options[option], written)
    return given


def _plan_config(values: Mapping[str, Any], policy: str, timed: bool) -> RunConfig:
    """Return the config of a plan, checked as that of a run, except that a plan needs no generator.

    The reference policies are for plans only: the config then has a matched policy, whose settings are the same.
    """
    matched = next(name for name, each in POLICIES.items() if isinstance(each, MatchedPolicy))
    changes = {"policy": matched} if policy in REFERENCES else {}
    return parse_config({**values, **changes, **({} if timed else {"generator": "not used"})})


def _reject(given: Given, keys: Collection[str], why: str) -> None:
    """Raise `ConfigError` for a key that was given on the command line but would be ignored."""
    for _, written in (given[key] for key in keys if key in given):
        raise ConfigError(f"{written}: remove the {'option' if written.startswith('--') else 'key'}, since {why}")


def _check_settings(given: Given, policy: str, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a key that has no effect with this policy or with a total."""
    total = values.get("total", 0)
    settings = settings_of(policy, bool(total))
    if "total" in given and total and "total" not in settings:
        raise ConfigError(f"total = {total}: remove the option, since policy {policy} sets its own")
    keys = {"beta": "beta", "gamma": "gamma", "strict_mean": "printed-rule"}
    why = f"policy {policy} has its own"
    if total and "total" in settings:
        why = f"{given['total'][1] if 'total' in given else f'total = {total}'} sets the number of images"
    if not settings:
        why = f"policy {policy} has nothing to set"
    _reject(given, [key for name, key in keys.items() if name not in settings], why)
