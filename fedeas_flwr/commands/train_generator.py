"""The command `fedeas train-generator`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedeas_flwr.commands.output import can_be_folder, console
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.data.datasets import dataset_info


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
    from fedeas_flwr.common.devices import configure_torch
    from fedeas_flwr.generators.learn.presets import find_preset
    from fedeas_flwr.generators.learn.run import read_preset_name
    from fedeas_flwr.generators.learn.run import train_generator as train
    from fedeas_flwr.launch.progress import show_training

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = '{device}': must be auto, cpu or cuda")
    where, out = configure_torch(device), out.absolute()
    dataset_info(dataset)  # refuses what there is not
    chosen = find_preset(preset or (read_preset_name(out) if resume else ""), dataset, where)

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
