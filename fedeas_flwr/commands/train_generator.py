"""The command `fedeas train-generator`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedeas_flwr.commands.output import DATASETS, check_folder, console, print_line, reject_options
from fedeas_flwr.commands.run import start_in_own_folder
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import RunConfig, generator_config, parse_config
from fedeas_flwr.config_files import parse_overrides, read_config, read_values
from fedeas_flwr.data.datasets import dataset_info


def train_generator(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="with --federated: key=value …; `fedeas keys` lists the keys")
    ] = None,
    federated: Annotated[
        Path | None,
        typer.Option(
            metavar="CONF",
            help="train by a federation, on each client's own images, as a run with the keys of this TOML file",
        ),
    ] = None,
    dataset: Annotated[str, typer.Option(help=f"{DATASETS}; uses only the train split")] = "",
    out: Annotated[
        Path | None, typer.Option(help="folder for the model, its checkpoint and its plots", callback=check_folder)
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="stop after this many minutes in total")] = None,
    steps: Annotated[
        int | None, typer.Option(help="stop after this many steps in total; default: the preset's")
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="digits, cifar-small or paper; default: chosen by dataset and device; with --resume, as before"
        ),
    ] = "",
    data_dir: Annotated[str, typer.Option(help="folder with CIFAR or Fashion-MNIST; default: the user cache")] = "",
    seed: Annotated[int, typer.Option(help="seed of the initial weights and all random numbers", min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    half: Annotated[bool, typer.Option("--half", help="write float16 weights")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the checkpoint in --out")] = False,
    start: Annotated[
        Path | None, typer.Option(help="folder of a trained generator to start from; its classes may differ")
    ] = None,
    only: Annotated[
        int,
        typer.Option(
            min=0, help="train on so many images, the first of each class, and write them to only.npz; 0: all of them"
        ),
    ] = 0,
    checkpoint_every: Annotated[float, typer.Option(help="seconds between checkpoints")] = 300.0,
) -> None:
    """Train a class-conditional diffusion model; Ctrl-C saves a checkpoint.

    With --federated it is a run: --out is the run directory, which gets a folder `generator`, and `fedeas resume`
    continues it.
    """
    if federated is not None:
        names = {parameter.name for parameter in context.command.params} - {"overrides", "federated", "out"}
        reject_options(context, names, "a key of the run-config sets it with --federated")
        config = federated_config(federated, overrides or [])
        start_in_own_folder(config.with_changes(run_dir=str(out.absolute())) if out else config)
        return
    if overrides:
        raise ConfigError(f"{overrides[0]}: key=value needs --federated")
    if not dataset or out is None:
        raise ConfigError("give --dataset and --out, or --federated")
    from fedeas_flwr.common.devices import configure_torch
    from fedeas_flwr.generators.learn.presets import find_preset
    from fedeas_flwr.generators.learn.run import read_preset_name
    from fedeas_flwr.generators.learn.run import train_generator as train
    from fedeas_flwr.launch.progress import show_training, showing_log

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = '{device}': must be auto, cpu or cuda")
    asked, device, out = device, configure_torch(device), out.absolute()
    dataset_info(dataset)  # raises for an unknown dataset
    chosen = find_preset(preset or (read_preset_name(out) if resume else ""), dataset, device)

    def print_preset() -> None:
        if not (preset or resume) and dataset != "digits":
            text = f"preset {chosen.name}, the default on {device}; choose another with --preset"
            print_line(console, text)

    with showing_log(console):
        verdict = train(
            dataset,
            out,
            chosen,
            steps=steps,
            minutes=minutes,
            data_dir=data_dir,
            seed=seed,
            device=device,
            half=half,
            resume=resume,
            start=start,
            only=only,
            checkpoint_every=checkpoint_every,
            on_start=print_preset,
            report=show_training(console, chosen.batch),
        )
    if verdict is None:
        raise KeyboardInterrupt(f"stopped; resume with the same command and --resume ({out})")
    again = ["--data-dir", data_dir] if data_dir else []
    again += ["--seed", str(seed)] if seed else []
    again += ["--device", asked] if asked != "auto" else []
    again += ["--half"] if half else []
    again += ["--only", str(only)] if only else []
    longer = chosen.steps if verdict.steps < chosen.steps else 2 * verdict.steps
    resume_words = ["train-generator", "--dataset", dataset, "--out", str(out), *again, "--resume", f"--steps={longer}"]
    run_words = ["run", "conf/quickstart.toml", f"dataset={dataset}", f"generator={out}"]
    run_words += [f"data-dir={data_dir}"] if data_dir else []
    command = shlex.join(["fedeas", *(resume_words if verdict.warns else run_words)])
    for line in (
        f"generator: {out}",
        f"verdict: {verdict.text}",
        f"look at: {out / 'samples.png'}",
        f"next: {command}",
    ):
        print_line(console, line)


def federated_config(conf: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the config of the training alone; the file may be that of a run that trains its generator first.

    Overrides are for the training: with ``rounds=60`` it has 60 rounds, whatever the file says.
    """
    if read_values(conf).get("generator") != "federated":
        given = parse_overrides(overrides)
        added = {"task": "generator", "policy": "none"}
        return read_config(conf, [*(f"{key}={value}" for key, value in added.items() if key not in given), *overrides])
    recipe = [word for word in overrides if word.startswith("generator-training.")]
    training = generator_config(read_config(conf, recipe)).to_user_dict()
    return parse_config(training | read_values(None, [word for word in overrides if word not in recipe]))
