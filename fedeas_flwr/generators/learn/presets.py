"""Presets of `fedeas train-generator`: a network, a noise schedule and training settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Preset:
    """Settings to train a class-conditional diffusion model."""

    name: str
    unet: Mapping[str, Any] = field(hash=False)
    """Settings of `UNet2DModel` except size, channels and classes, which the dataset determines."""
    beta_schedule: Literal["squaredcos_cap_v2", "linear"]
    prediction: Literal["v_prediction", "epsilon"]
    min_snr: float | None
    """γ of min-SNR weighting (Hang et al., 2023); None weights all noise levels equally."""
    batch: int
    learning_rate: float
    warm_up: int
    """Steps of the learning rate's linear warm-up."""
    decay: Literal["cosine", "tail", "never"]
    """Decay of the learning rate over the planned steps or minutes; ``tail``: cosine in the last fifth only."""
    ema_decay: float
    """Decay of the weights' exponential moving average, which is saved."""
    flips: bool
    """Whether images are mirrored at random."""
    steps: int
    label_dropout: float = 0.1
    """Probability that a label is replaced by "no label", for guidance."""
    log_every: int = 20
    """Steps between two points of the loss curve."""
    cpu_threads: int | None = None
    """Number of threads if the weights must not depend on the process: it changes the last bits. None: any number."""

    @property
    def schedule(self) -> dict[str, str]:
        """The prediction and the noise schedule, as arguments of diffusers' schedulers."""
        return {"prediction_type": self.prediction, "beta_schedule": self.beta_schedule}

    @property
    def multiple(self) -> int:
        """Divisor of an image's sides: every block of the network but the last halves them."""
        return int(2 ** (len(self.unet["block_out_channels"]) - 1))

    def check_size(self, height: int, width: int) -> None:
        """Raise ValueError if the network cannot halve the sides often enough; name the presets that can."""
        if not (height % self.multiple or width % self.multiple):
            return
        fitting = [name for name, other in PRESETS.items() if not (height % other.multiple or width % other.multiple)]
        advice = f"use preset {' or '.join(fitting)}" if fitting else "resize them, since no preset fits"
        raise ValueError(
            f"preset: {self.name} needs images with sides of multiples of {self.multiple}; these are "
            f"{height}×{width}: {advice}"
        )


DIGITS = Preset(
    name="digits",
    # Small enough to converge in a minute on two slow cores; wider or with attention it does not.
    unet={
        "layers_per_block": 1,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "add_attention": False,
        "norm_num_groups": 8,  # the default, 32, would leave one channel per group
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

# The paper gives 1,000 timesteps, the multipliers 1, 2, 4, 8, batch, learning rate and steps; the others are usual.
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
    """Return a preset by name or, if it is empty, by dataset and device.

    Without a GPU the default is always ``digits``, since a step of ``cifar-small``, one of 10,000, takes minutes on a
    CPU.
    """
    name = name or ("digits" if dataset == "digits" or device == "cpu" else "cifar-small")
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is not known; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
