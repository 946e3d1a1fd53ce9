"""What to train: a network, a noise schedule and a recipe, under a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Preset:
    """One way to train a class-conditional diffusion model.

    Attributes
    ----------
    name
        As `fedeas train-generator --preset` takes it.
    unet
        Settings of `UNet2DModel`, but for what the dataset decides: size, channels, classes.
    beta_schedule
        ``squaredcos_cap_v2`` (cosine) or ``linear``, over 1,000 timesteps.
    prediction
        ``v_prediction`` or ``epsilon``.
    min_snr
        γ of min-SNR weighting (Hang et al., 2023); None weighs all noise levels alike.
    batch, learning_rate, warm_up
        Images in a step, Adam's rate, and the steps in which it rises to that.
    decay
        How the rate falls over the planned length, counted in steps or in time: along a ``cosine``, only in the
        last fifth (``tail``), or ``never``.
    ema_decay
        Of the weights' moving average, which is what is saved.
    flips
        Whether images are mirrored at random.
    steps
        Length unless told otherwise.
    label_dropout
        How often the label is replaced by "no label", for guidance.
    log_every
        Steps between two points of the loss curve.
    cpu_threads
        Fixed where the weights must be the same in any process: sums split among threads differ in the last bits.
    """

    name: str
    unet: Mapping[str, Any] = field(hash=False)
    beta_schedule: Literal["squaredcos_cap_v2", "linear"]
    prediction: Literal["v_prediction", "epsilon"]
    min_snr: float | None
    batch: int
    learning_rate: float
    warm_up: int
    decay: Literal["cosine", "tail", "never"]
    ema_decay: float
    flips: bool
    steps: int
    label_dropout: float = 0.1
    log_every: int = 20
    cpu_threads: int | None = None

    @property
    def multiple(self) -> int:
        """What an image's sides are multiples of: all blocks of the network but the last halve them."""
        return int(2 ** (len(self.unet["block_out_channels"]) - 1))

    def check_size(self, height: int, width: int) -> None:
        """Refuse images that the network cannot halve as often as it does, naming the presets that can."""
        if not (height % self.multiple or width % self.multiple):
            return
        fitting = [name for name, other in PRESETS.items() if not (height % other.multiple or width % other.multiple)]
        which = ", ".join(fitting) or "no preset"
        advice = "take one of these" if fitting else "bring them to another size"
        raise ValueError(
            f"preset: {self.name} needs images with sides of multiples of {self.multiple}; these are "
            f"{height}×{width}, which {which} can have: {advice}"
        )


DIGITS = Preset(
    name="digits",
    # As small as still learns in a minute on two slow cores: wider or with attention it has not converged by then.
    unet={
        "layers_per_block": 1,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "add_attention": False,
        "norm_num_groups": 8,  # the default, 32, would leave one channel to a group
    },
    beta_schedule="squaredcos_cap_v2",
    prediction="v_prediction",
    min_snr=None,
    batch=64,
    learning_rate=3e-3,
    warm_up=20,
    decay="cosine",
    ema_decay=0.97,
    flips=False,
    steps=250,
    log_every=1,
    cpu_threads=2,
)

CIFAR_SMALL = Preset(
    name="cifar-small",
    unet={
        "layers_per_block": 2,
        "block_out_channels": (96, 192, 288),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 48,
        "dropout": 0.1,
        "resnet_time_scale_shift": "scale_shift",
    },
    beta_schedule="squaredcos_cap_v2",
    prediction="v_prediction",
    min_snr=5.0,
    batch=512,
    learning_rate=4e-4,
    warm_up=500,
    decay="tail",
    ema_decay=0.9995,
    flips=True,
    steps=10_000,
)

# The paper names 1,000 timesteps, the multipliers 1, 2, 4, 8, the batch, the rate and the steps; the rest is usual.
PAPER = Preset(
    name="paper",
    unet={
        "layers_per_block": 2,
        "block_out_channels": (64, 128, 256, 512),
        "down_block_types": ("DownBlock2D", "DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D"),
        "attention_head_dim": 32,
    },
    beta_schedule="linear",
    prediction="epsilon",
    min_snr=None,
    batch=128,
    learning_rate=8e-5,
    warm_up=0,
    decay="never",
    ema_decay=0.9995,
    flips=True,
    steps=300_000,
    log_every=100,
)

PRESETS = {preset.name: preset for preset in (DIGITS, CIFAR_SMALL, PAPER)}


def find_preset(name: str, dataset: str, device: str) -> Preset:
    """Return a preset by name.

    Parameters
    ----------
    name
        ``digits``, ``cifar-small`` or ``paper``; empty is the one that suits dataset and device: without a GPU always
        the small one, since a step of the next, of 10,000, takes minutes there.
    dataset, device
        What it is for, and where.

    Returns
    -------
    Preset
    """
    name = name or ("digits" if dataset == "digits" or device == "cpu" else "cifar-small")
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is not known; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
