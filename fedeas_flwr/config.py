"""The run-config: every key of a run with its default, range and description.

Users write keys in kebab-case (TOML files, ``--run-config``, ``key=value``); the code uses snake_case. Only this module
converts between the two.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.common.hf_spec import HF, HfSpec
from fedeas_flwr.common.import_path import is_import_path
from fedeas_flwr.common.rate_schedule import CONSTANT, rate_factor
from fedeas_flwr.common.text import parse_bytes
from fedeas_flwr.partition import CLASS_COUNTS, DIRICHLET, PARTITIONERS
from fedeas_flwr.policies.interface import Policy, PolicySettings
from fedeas_flwr.policies.own import find_policy
from fedeas_flwr.policies.registry import POLICIES, check_runnable, settings_of


class BuiltinStrategy(NamedTuple):
    """A strategy that has a name: its import path, what it does, and arguments, which `strategy-args` may change."""

    path: str
    summary: str
    arguments: str = ""


_OURS, _FLOWERS = "fedeas_flwr.strategies", "flwr.serverapp.strategy"
STRATEGIES = {
    "fedavg": BuiltinStrategy(f"{_OURS}.fedavg:FEDAVG", "mean of the client models, weighted by real samples"),
    "fedprox": BuiltinStrategy(
        f"{_OURS}.fedprox:FEDPROX", "FedAvg with a proximal term that keeps clients near the received model"
    ),
    "scaffold": BuiltinStrategy(
        f"{_OURS}.scaffold:SCAFFOLD", "control variates correct the clients' steps; unweighted mean of the models"
    ),
    "moon": BuiltinStrategy(
        f"{_OURS}.moon:MOON",
        "FedAvg with a contrastive loss: features move towards the received model's and away from the client's last",
    ),
    "fedavgm": BuiltinStrategy(f"{_FLOWERS}:FedAvgM", "FedAvg with momentum on the server", "server_momentum=0.9"),
    "fedadam": BuiltinStrategy(f"{_FLOWERS}:FedAdam", "Adam on the mean update"),
    "fedadagrad": BuiltinStrategy(f"{_FLOWERS}:FedAdagrad", "Adagrad on the mean update"),
    "fedyogi": BuiltinStrategy(f"{_FLOWERS}:FedYogi", "Yogi on the mean update"),
    "fedmedian": BuiltinStrategy(f"{_FLOWERS}:FedMedian", "unweighted coordinate-wise median"),
    "fedtrimmedavg": BuiltinStrategy(f"{_FLOWERS}:FedTrimmedAvg", "unweighted coordinate-wise trimmed mean"),
    "krum": BuiltinStrategy(f"{_FLOWERS}:Krum", "the single client model nearest to the others"),
    "multikrum": BuiltinStrategy(
        f"{_OURS}.flower:multikrum", "mean of the client models nearest to the others, weighted by real samples"
    ),
    "bulyan": BuiltinStrategy(
        f"{_FLOWERS}:Bulyan", "MultiKrum, then for every weight the mean of the values nearest to the median"
    ),
    "qfedavg": BuiltinStrategy(f"{_FLOWERS}:QFedAvg", "updates weighted by the client's training loss to the power q"),
    "fedmix": BuiltinStrategy(
        f"{_OURS}.fedmix:FEDMIX", "FedAvg whose clients mix in other clients' mean images, by a first-order Taylor term"
    ),
    "fedgen": BuiltinStrategy(
        f"{_OURS}.fedgen:FEDGEN",
        "FedAvg with a feature generator: the server trains it on the clients' heads, the clients learn from it",
    ),
}
"""Values of `strategy` besides import paths. To add one, write its file in strategies/ and its line here."""
_MIN_RATE = 1e-30
"""Smallest learning rate; float32 has smaller numbers, down to 1e-38."""
SMALL_BATCH = 8
"""A batch with fewer images counts as small. With half as many images, the gradient is eight times as long as with 64
(results/short-batches)."""
SAMPLER_STEPS = {"dpm++": 20, "dpm++-logsnr": 20, "ddim": 250}
"""Default number of steps of each deterministic sampler: DPM-Solver++ (Lu et al., 2022), and DDIM with η = 0 (Song et
al., 2021) with the paper's 250 steps."""
LAUNCHER_KEYS = ("cache-limit", "backend", "actors", "ray-address", "restarts", "mps", "gpu-share")
"""Keys that the launcher of `fedeas run` reads. They have no effect under plain `flwr run`."""
KEYS_CHANGEABLE_ON_RESUME = (
    *LAUNCHER_KEYS,
    *("run-dir", "resume", "device", "checkpoint-every", "callbacks"),
    *("round-timeout", "node-wait", "failed-rounds", "max-examples", "data-change"),
)
"""Keys that may change when a run is resumed. None of them changes what a client computes on the same hardware. The
last five can change which clients are averaged, and `callbacks` which round is the last."""


def _key(name: str) -> str:
    return name.replace("_", "-")


class _Table(BaseModel):
    """Keys with their defaults, ranges and descriptions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=_key,
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_coercion(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if kind in (int, float) and isinstance(value, bool):
            raise ValueError("a number")  # pydantic would accept true as 1
        if kind is bool and not isinstance(value, bool):
            raise ValueError("true or false")  # pydantic would accept 't', 'on' or 1 as true
        return value


class GeneratorTraining(_Table):
    """The table `[generator-training]`: how clients train a diffusion model (`task` or `generator_config`)."""

    rounds: int = Field(0, ge=0, le=100_000)
    """with generator = federated: rounds of the generator's training; 0: as many as the run has"""
    participation: float = Field(0.0, ge=0, le=1)
    """with generator = federated: fraction of the clients that train the generator per round; 0: as in the run"""
    preset: Literal["auto", "digits", "cifar-small", "paper"] = "auto"
    """network, noise schedule and loss, as in `fedeas train-generator`; auto: digits for digits, otherwise
    cifar-small"""
    start: str = ""
    """folder of a trained generator with the preset's network to start from, such as a public one; its classes may
    differ; empty: random weights"""
    local_steps: int = Field(20, ge=1, le=100_000)
    """training steps per client and round"""
    batch_size: int = Field(64, ge=1, le=65_536)
    """images per training step, drawn with replacement"""
    small_clients: Literal["replace", "skip"] = "replace"
    """clients with fewer images than a batch; replace: they train as the others do, skip: they do not train, and do
    not count in the average"""
    learning_rate: float = Field(0.0, ge=0, le=10)
    """Adam step size after the warm-up; it falls to 0 after the last round by a cosine; 0: the preset's"""
    warm_up: int = Field(1, ge=0, le=100_000)
    """rounds in which the learning rate rises linearly"""
    average_moments: Literal["both", "second", "neither"] = "both"
    """which of Adam's two moments clients send with the model, to be averaged too; both triple the traffic, the second
    doubles it; the others start at 0 in every round"""
    ema_decay: float = Field(0.985, ge=0, lt=1)
    """decay per round of the server's moving average of the weights, which becomes the generator"""
    held_out: float = Field(0.0, ge=0, le=0.5)
    """fraction of each client's images that it does not train on; evaluation = federated measures the loss on them"""
    evaluate_every: int = Field(10, ge=1, le=100_000)
    """rounds between evaluations; the last round is always evaluated"""


class RunConfig(_Table):
    """The complete, validated config of one run. The defaults run the built-in digits example.

    The text under a key is its description in `fedeas keys`.
    """

    dataset: str = "digits"
    """images that the clients hold: digits, cifar10, cifar100, fashion-mnist, own:PATH for a custom folder or .npz
    file, or hf:PATH for a Hugging Face dataset"""
    data_dir: str = ""
    """folder with NAME.npz or torchvision's files; empty: the user cache"""
    protocol: Literal["clean", "paper"] = "clean"
    """clean: test on the official test set; paper: partition train and test images together, as the paper does"""
    clients: int = Field(0, ge=0, le=100_000)
    """number of clients K; 0: all clients of the federation"""
    partition: str = Field(DIRICHLET, json_schema_extra={"enum": [*PARTITIONERS]})
    """how images are distributed over the clients: dirichlet is the paper's rule, the others are flwr-datasets'; for a
    Partitioner of your own, its import path"""
    partition_args: str = ""
    """arguments of a partition other than dirichlet, such as num_classes_per_partition=2; separated by spaces"""
    alpha: float = Field(0.1, gt=0, le=1e6)
    """Dirichlet concentration α of the partition; smaller is more skewed"""
    partition_seed: int = Field(42, ge=0, lt=2**32)
    """seed of the partition"""
    seed: int = Field(1, ge=0, lt=2**31)
    """seed of everything else: initial weights, client sampling, batches, images"""
    task: Literal["classifier", "generator"] = "classifier"
    """what the federation trains: a classifier, or a class-conditional diffusion model, which is written as folder
    `generator` of the run directory"""
    generator_training: GeneratorTraining = GeneratorTraining.model_validate({})
    """how clients train a diffusion model"""

    policy: str = Field("fedeas", json_schema_extra={"enum": [*POLICIES]})
    """allocation policy: how many images of each class a client generates or, with oversample, repeats; for a policy of
    your own, its import path"""
    policy_args: str = ""
    """arguments of a policy of your own, such as quantile=0.5, or of an adaptive one, such as rounds=3,5 first=0.75;
    separated by spaces"""
    beta: float = Field(6.0, ge=0, le=1e6)
    """budget parameter β; 0 generates nothing"""
    gamma: float = Field(0.5, ge=0, le=2)
    """exponent γ of the mean class count; 0.5 is the paper's square root"""
    printed_rule: bool = False
    """follow the paper's Eq. 9 as printed: also fill classes that are not below the mean (the inverse of `allocate`'s
    `strict_mean`)"""
    total: int = Field(0, ge=0, le=10**9)
    """total number of images of a matched policy, independent of β; 0: the number that FedEAS generates at β"""

    strategy: str = Field("fedavg", json_schema_extra={"enum": [*STRATEGIES]})
    """how client models are aggregated; `fedeas strategies` describes each; for a strategy of your own, its import
    path"""
    strategy_args: str = ""
    """arguments of one of Flower's strategies or one of your own, such as eta=0.1 tau=0.001; separated by spaces"""
    fedprox_mu: float = Field(0.01, ge=0, le=1e4, json_schema_extra={"of": "fedprox"})
    """FedProx: weight μ of the proximal term"""
    scaffold_server_rate: float = Field(1.0, gt=0, le=100, json_schema_extra={"of": "scaffold"})
    """SCAFFOLD: server step size η_g"""
    scaffold_weighting: Literal["uniform", "examples"] = Field("uniform", json_schema_extra={"of": "scaffold"})
    """SCAFFOLD: a client's weight in the mean of the models; uniform: equal; examples: its number of real samples"""
    moon_mu: float = Field(5.0, ge=0, le=1e4, json_schema_extra={"of": "moon"})
    """MOON: weight μ of the contrastive term"""
    moon_temperature: float = Field(0.5, gt=0, le=1e4, json_schema_extra={"of": "moon"})
    """MOON: temperature τ of the similarities"""
    fedmix_lambda: float = Field(0.05, ge=0, lt=1, json_schema_extra={"of": "fedmix"})
    """FedMix: mixing weight λ; 0 is FedAvg"""
    disclose_mean_images: bool = Field(False, json_schema_extra={"of": "fedmix"})
    """FedMix, required: each client discloses its mean image and label proportions to all other clients"""
    fedgen_alpha: float = Field(10.0, ge=0, le=1e4, json_schema_extra={"of": "fedgen"})
    """FedGen: weight α₀ of the loss on generated features; × 0.98 per round"""
    fedgen_beta: float = Field(10.0, ge=0, le=1e4, json_schema_extra={"of": "fedgen"})
    """FedGen: weight β₀ of the agreement with the generator; × 0.98 per round"""
    fedgen_steps: int = Field(10, ge=0, le=100_000, json_schema_extra={"of": "fedgen"})
    """FedGen: training steps of the generator per round"""
    fedgen_batch: int = Field(32, ge=2, le=65_536, json_schema_extra={"of": "fedgen"})
    """FedGen: features that a client generates per step, besides those for its batch; the server uses batch-size"""
    fedgen_rate: float = Field(3e-4, gt=0, le=10, json_schema_extra={"of": "fedgen"})
    """FedGen: Adam step size of the generator; × 0.98 per round"""
    fedgen_count_noise: float = Field(0.0, ge=0, le=1e6, json_schema_extra={"of": "fedgen"})
    """FedGen: scale b of the Laplace noise on disclosed label counts, ε = 2/b; 0: no noise"""
    disclose_label_counts: bool = Field(False, json_schema_extra={"of": "fedgen"})
    """FedGen, required: each client discloses its number of images per class to the server"""
    dp: Literal["none", "server-fixed", "server-adaptive", "client-fixed", "client-adaptive"] = "none"
    """differential privacy: who clips the updates, and whether the clipping norm is fixed or adaptive"""
    dp_noise_multiplier: float = Field(1.0, ge=0, le=1e4)
    """DP: noise multiplier σ, in units of the clipping norm"""
    dp_clipping_norm: float = Field(0.1, gt=0, le=1e9)
    """DP: clipping norm C of an update; if adaptive, its initial value"""
    dp_clip_quantile: float = Field(0.5, ge=0, le=1)
    """adaptive DP: target fraction of updates to clip"""
    dp_clip_rate: float = Field(0.2, gt=0, le=100)
    """adaptive DP: step size of the clipping norm"""
    dp_count_noise: float = Field(0.0, ge=0, le=1e6)
    """adaptive DP: standard deviation of the noise on the number of clipped clients; 0: 1/20 of the number of sampled
    clients"""
    dp_delta: float = Field(1e-5, gt=0, lt=1)
    """DP: δ for which ε is reported"""
    rounds: int = Field(20, ge=1, le=100_000)
    """communication rounds T"""
    participation: float = Field(0.5, gt=0, le=1)
    """fraction of the clients that train per round"""
    local_epochs: int = Field(3, ge=1, le=10_000)
    """local epochs E per client and round"""
    batch_size: int = Field(32, ge=2, le=65_536)
    """images per training step"""
    min_batch: int = Field(2, ge=2, le=65_536)
    """skip the last batch of an epoch if it has fewer images (BatchNorm turns small batches into very large steps); a
    client with fewer images in total does not train"""
    loss: Literal["cross-entropy", "class-weighted", "logit-adjusted"] = "cross-entropy"
    """client loss; class-weighted and logit-adjusted offset the client's label skew and work with any strategy"""
    logit_adjustment_tau: float = Field(1.0, ge=0, le=100)
    """logit-adjusted loss: scale τ of the log prior; 0 is cross-entropy"""
    views: Literal["none", "flip-crop"] = "none"
    """data augmentation; flip-crop: at every use, shift an image at random and, for CIFAR only, flip it at random"""
    learning_rate: float = Field(0.05, gt=0, le=100)
    """SGD step size; of the first round, if there is a schedule"""
    learning_rate_schedule: str = CONSTANT
    """learning rate over the rounds: constant; cosine (to 0 after the last round); exponential 0.99 (× 0.99 per round);
    step 0.1 100 150 (× 0.1 after round 100, and again after round 150)"""
    momentum: float = Field(0.0, ge=0, lt=1)
    """SGD momentum, reset every round"""
    weight_decay: float = Field(0.0, ge=0, le=10)
    """SGD weight decay"""

    engine: Literal["auto", "eager", "graphed"] = "auto"
    """training engine: graphed replays CUDA graphs on a GPU; eager runs anywhere; auto chooses"""
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    """arithmetic precision of training on a GPU"""

    model: str = "small-cnn"
    """small-cnn, resnet18, or package.module:callable for a custom model"""
    stem: Literal["7x7", "3x3"] = "7x7"
    """first layer of resnet18"""
    weights: str = "none"
    """initial weights of resnet18: none (random), imagenet (pretrained), or a .safetensors file"""

    generator: str = "builtin"
    """builtin (digits), federated (trained by the clients before the first round), a folder in diffusers format,
    bank:DIR, sd-turbo, sd-turbo:DIR, or the import path of your own"""
    sampler: Literal["dpm++", "dpm++-logsnr", "ddim"] = "dpm++"
    """DPM-Solver++ with uniform timestep or uniform log-SNR spacing, or the paper's DDIM (η = 0)"""
    sampler_steps: int = Field(0, ge=0, le=1000)
    """number of sampler steps; 0: 20 for dpm++, 20 for dpm++-logsnr, 250 for ddim"""
    guidance: float = Field(1.0, ge=1, le=50)
    """classifier-free guidance scale; 1: no guidance"""
    guidance_start: float = Field(0.0, ge=0, lt=1)
    """fraction of the sampler's steps before the first one with guidance"""
    guidance_stop: float = Field(1.0, gt=0, le=1)
    """fraction of the sampler's steps after which there is no guidance; later steps take half the time"""
    guidance_rescale: float = Field(0.0, ge=0, le=1)
    """fraction to remove of the contrast that guidance adds; 0: remove nothing"""
    generation_batch: int = Field(0, ge=0, le=65_536)
    """images per forward pass of the generator; 0: 64 on a CPU, chosen by free memory on a GPU"""
    generation_precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """arithmetic precision of the generator; auto: fp32 on a CPU, bf16 on a GPU"""

    shared_images: Literal["no", "by-class", "one-seed"] = "no"
    """no: each client has its own images; by-class: image i of a class is identical on every client; one-seed: all
    clients seed the generator identically, so an image depends on its class and its position in the client's list"""
    min_class_agreement: float = Field(0.0, ge=0, le=1)
    """minimum probability that an independent classifier must give an image's class; 0: no filter"""
    cache_limit: str = ""
    """`fedeas run` only: maximum size of the image cache, such as 20GB; empty: no limit"""

    evaluation: Literal["central", "federated"] = "central"
    """central: on the server's test set; federated: on the clients' test sets (needs protocol = paper or, where clients
    train a generator, `generator-training.held-out`)"""
    gamma_hat: Literal["off", "trainable", "all-state"] = "trainable"
    """arrays on which the gradient dissimilarity Γ̂ is measured; all-state adds BatchNorm statistics and counters to
    the trainable ones"""
    threshold: float = Field(0.7, ge=0, le=1)
    """target accuracy; the summary reports the first round that reaches it"""
    min_replies: float = Field(1.0, gt=0, le=1)
    """minimum fraction of a round's clients that must reply; a round with fewer replies fails, and `failed-rounds`
    failed rounds in a row stop the run"""
    failed_rounds: int = Field(1, ge=1, le=100_000)
    """number of failed rounds in a row (see `min-replies`) that stops the run; before that, a failed round leaves the
    model unchanged"""
    max_examples: int = Field(10_000_000, ge=1, le=2**40)
    """maximum number of real samples that a client may declare; its replies must match its declaration"""
    data_change: Literal["refuse", "replan"] = "refuse"
    """what a client does if its labels change after planning; refuse: it fails; replan: it plans again"""
    node_wait: float = Field(10.0, ge=0, le=1e6)
    """seconds to wait for the federation's nodes to connect"""
    round_timeout: float = Field(0.0, ge=0, le=1e6)
    """seconds to wait for a round's replies; 0: no timeout"""
    checkpoint_every: int = Field(1, ge=1, le=100_000)
    """rounds between checkpoints"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device that models run on"""
    callbacks: str = ""
    """objects that the server calls at the start, after every round and at the end, separated by commas: tensorboard,
    wandb, mlflow, early-stop, metrics or package.module:name; arguments as in early-stop(target=0.8 patience=10)"""
    run_dir: str = ""
    """folder of this run; must be absolute with `flwr run`; empty: with `fedeas run` a folder in ./runs named by
    dataset, clients, α, policy, strategy and seed, otherwise a folder in the user cache"""
    resume: bool = False
    """resume from the checkpoint in run-dir"""

    backend: Literal["ray", "inline"] = "ray"
    """`fedeas run` only: Flower's Ray simulation, or a single process without Ray"""
    actors: int = Field(0, ge=0, le=4096)
    """`fedeas run` only: clients trained in parallel; 0: one per core on a CPU, as many as a probe finds best on a
    GPU"""
    ray_address: str = ""
    """`fedeas run` only: HOST:PORT of a Ray cluster; empty: start a local Ray"""
    restarts: int = Field(2, ge=0, le=1000)
    """`fedeas run` under Ray only: maximum number of restarts in a row without progress after a process died"""
    mps: Literal["auto", "off"] = "auto"
    """auto: use CUDA MPS, where available, for `fedeas run` under Ray and for parallel runs of a sweep on one GPU"""
    gpu_share: float = Field(0.0, ge=0, le=1)
    """`fedeas run` only: fraction of a GPU per client under Ray; 0: equal parts for all `actors`"""

    @field_validator("dataset")
    @classmethod
    def _known_dataset(cls, value: str) -> str:
        custom = value.startswith(("own:", HF)) and value not in ("own:", HF)
        if value not in CLASS_COUNTS and not custom:
            raise ValueError(
                f"must be {', '.join(CLASS_COUNTS)}, own:PATH with a custom folder or .npz file, or hf:PATH with a "
                "Hugging Face dataset"
            )
        return value

    @field_validator("partition", "strategy")
    @classmethod
    def _known_or_import_path(cls, value: str, info: ValidationInfo) -> str:
        known = PARTITIONERS if info.field_name == "partition" else STRATEGIES
        if value not in known and not is_import_path(value):
            counts = value.endswith((".csv", ".json")) and info.field_name == "partition"
            hint = "; files of counts are for `fedeas plan --counts`" if counts else ""
            raise ValueError(f"must be {', '.join(known)}, or the import path package.module:name of your own{hint}")
        return value

    @field_validator("policy")
    @classmethod
    def _runnable_policy(cls, value: str) -> str:
        check_runnable(value)
        return value

    @field_validator("learning_rate_schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        rate_factor(value, 1, 1)
        return value

    @field_validator("cache_limit")
    @classmethod
    def _size(cls, value: str) -> str:
        try:
            parse_bytes(value or "0", "cache-limit")
        except ValueError as error:
            raise ValueError(str(error).partition(": ")[2]) from None
        return value

    @field_validator("run_dir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not Path(value).is_absolute():
            raise ValueError("must be an absolute path, since Flower's processes start in another folder")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> RunConfig:
        HfSpec.parse(self.dataset)
        self._check_task()
        if self.evaluation == "federated" and self.protocol != "paper" and self.task == "classifier":
            raise ValueError(
                "evaluation = 'federated' needs protocol = 'paper': with 'clean', clients have no test data"
            )
        if self.partition_args and self.partition == DIRICHLET:
            raise ValueError(
                f"partition-args = '{self.partition_args}' needs a partition of flwr-datasets, not 'dirichlet', which "
                "has alpha and partition-seed"
            )
        if self.ray_address and self.backend != "ray":
            raise ValueError(f"ray-address = '{self.ray_address}' needs backend = 'ray', not '{self.backend}'")
        if self.resume and not self.run_dir:
            raise ValueError("resume = true needs run-dir: the folder of the run to resume")
        if self.total and "total" not in settings_of(self.policy, total_given=True):
            matched = ", ".join(name for name, policy in POLICIES.items() if "total" in policy.settings)
            raise ValueError(f"total = {self.total} needs a matched policy ({matched}), not '{self.policy}'")
        if self.policy in POLICIES and (last := max(self.find_policy().parts)) > self.rounds:
            raise ValueError(
                f"rounds = {self.rounds}: must be at least {last}: policy '{self.policy}' spends the last part of its "
                "budget in that round; policy-args = 'rounds=…' sets other rounds"
            )
        if self.learning_rate_in(self.rounds) < _MIN_RATE:
            raise ValueError(
                f"learning-rate-schedule = '{self.learning_rate_schedule}': the learning rate must stay at or above "
                f"{_MIN_RATE:g}, but would be {self.learning_rate_in(self.rounds):g} in round {self.rounds}"
            )
        if self.min_batch > self.batch_size:
            raise ValueError(f"min-batch = {self.min_batch} must be at most batch-size = {self.batch_size}")
        if self.shared_images == "one-seed" and self.generator_spec.kind == "bank":
            raise ValueError("shared-images = 'one-seed': must be no or by-class with a bank, which has no seed")
        if self.generates and self.dataset != "digits" and self.generator_spec.kind == "builtin":
            raise ValueError(
                f"generator = 'builtin' generates digits only; for {self.dataset} give a folder in diffusers format"
            )
        if self.trains_generator:
            generator_config(self)
        return self

    def _check_task(self) -> None:
        if self.task == "classifier":
            return
        for key in ("rounds", "participation"):
            if own := getattr(self.generator_training, key):
                raise ValueError(
                    f"generator-training.{key} = {own:g}: must be 0 with task = 'generator': use the key {key}"
                )
        if self.generates or self.find_policy().repeats:
            raise ValueError(
                f"policy = '{self.policy}': must be none with task = 'generator', which trains on real images"
            )
        if self.evaluation == "federated" and not self.generator_training.held_out:
            raise ValueError(
                "evaluation = 'federated' needs generator-training.held-out above 0 if clients train a generator: they "
                "evaluate it on images that they hold out"
            )
        if "early-stop" in self.callbacks:
            raise ValueError(
                f"callbacks = '{self.callbacks}': early-stop needs an accuracy, which task = 'generator' does not have"
            )
        if self.dp != "none" and self.generator_training.average_moments != "neither":
            raise ValueError(
                f"dp = '{self.dp}' needs generator-training.average-moments = neither: Adam's moments would be sent "
                "without noise"
            )

    @property
    def generates(self) -> bool:
        """Return whether any client can be asked to generate images under this config."""
        try:
            return self.find_policy().generates(self.policy_settings)
        except ConfigError:  # a record of a policy whose package is not installed here
            return True

    @property
    def trains_generator(self) -> bool:
        """Return whether the federation trains the generator before the classifier."""
        return self.task == "classifier" and self.generates and self.generator_spec.kind == "federated"

    def find_policy(self) -> Policy:
        """Return the allocation policy; raise `ConfigError` if it is not a built-in one and cannot be imported."""
        return find_policy(self.policy, self.policy_args)

    @property
    def generator_spec(self) -> GeneratorSpec:
        """Return the kind of the generator, and where it is."""
        return GeneratorSpec.parse(self.generator)

    @property
    def policy_settings(self) -> PolicySettings:
        """Return the settings that the policy depends on."""
        return PolicySettings(self.beta, self.gamma, not self.printed_rule, self.total or None)

    def learning_rate_in(self, round_number: int) -> float:
        """Return the learning rate of a round; the first is 1."""
        return self.learning_rate * rate_factor(self.learning_rate_schedule, round_number, self.rounds)

    def evaluates_in(self, round_number: int) -> bool:
        """Return whether a round is evaluated: every round of a classifier, some of a generator."""
        every = 1 if self.task == "classifier" else self.generator_training.evaluate_every
        return round_number % every == 0 or round_number == self.rounds

    def num_sampled(self, clients: int) -> int:
        """Return the number of clients, out of `clients`, that train in a round."""
        return max(1, round(self.participation * clients))

    def min_replies_for(self, num_sampled: int) -> int:
        """Return the minimum number of replies, out of `num_sampled`, that satisfies `min-replies`.

        The tolerance absorbs float error: 0.28 of 25 is 7, although the float product is slightly larger.
        """
        return max(1, math.ceil(self.min_replies * num_sampled - 1e-9))

    @property
    def min_replies_per_round(self) -> int:
        """Return the minimum number of replies of a round that satisfies `min-replies`."""
        return self.min_replies_for(self.num_sampled(self.clients))

    def to_user_dict(self) -> dict[str, Any]:
        """Return the config as users write it: kebab-case keys, plain values."""
        return flatten(self.model_dump(by_alias=True))

    def with_changes(self, **changes: Any) -> RunConfig:
        """Return a validated copy with some fields changed."""
        return parse_config({**self.to_user_dict(), **{_key(k): v for k, v in changes.items()}})


def generator_config(config: RunConfig) -> RunConfig:
    """Return the config of the run that trains the generator of a run with ``generator = "federated"``.

    It has the data, the clients, the seed and the machine's keys of that run, the recipe of `[generator-training]` and
    no run-dir. Clients evaluate it if they hold out images, otherwise whoever evaluates the classifier.
    """
    if not config.trains_generator:
        raise ConfigError(f"policy = '{config.policy}': a run that generates no images trains no generator")
    if config.dp != "none":
        raise ConfigError(
            f"dp = '{config.dp}': must be none with generator = 'federated', whose training adds no noise; give the "
            "folder of a generator"
        )
    values, recipe = config.to_user_dict(), config.generator_training
    kept = {key: values[key] for key in (*_SHARED_KEYS, *KEYS_CHANGEABLE_ON_RESUME)}
    table = {**recipe.model_dump(by_alias=True), "rounds": 0, "participation": 0.0}
    return parse_config(
        {
            **kept,
            "task": "generator",
            "policy": "none",
            "gamma-hat": "off",
            "rounds": recipe.rounds or config.rounds,
            "participation": recipe.participation or config.participation,
            "evaluation": "federated" if recipe.held_out else config.evaluation,
            "generator-training": table,
            "run-dir": "",
            "resume": False,
            "callbacks": "",
        }
    )


_SHARED_KEYS = (
    *("dataset", "data-dir", "protocol", "clients", "partition", "partition-args", "alpha", "partition-seed", "seed"),
    *("precision", "min-replies"),
)
"""Keys that the training of a generator has in common with the run that uses it, besides those of the machine."""


TABLES: dict[str, type[BaseModel]] = {"generator-training": GeneratorTraining}
"""Nested tables of the run-config. Their keys are written ``table.key``, as Flower passes them."""
_FIELDS = {
    **{key: field for name, field in RunConfig.model_fields.items() if (key := _key(name)) not in TABLES},
    **{f"{table}.{_key(name)}": field for table, model in TABLES.items() for name, field in model.model_fields.items()},
}
KEYS: tuple[str, ...] = (*_FIELDS,)
TEXT_KEYS = frozenset(key for key, field in _FIELDS.items() if field.annotation is str)
"""Keys whose value may be any text, even one that looks like a number or a date."""


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the run-config of kebab-case keys and values.

    ConfigError names in one line an unknown key, or a key, its value and what is allowed.
    """
    nested: dict[str, Any] = {}
    for key, value in flatten(values).items():
        if key not in KEYS:
            raise ConfigError(unknown_key(key, value, KEYS))
        table, dot, name = key.rpartition(".")
        (nested.setdefault(table, {}) if dot else nested)[name] = value
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as error:
        raise ConfigError("; ".join(_one_line(e) for e in error.errors())) from None


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with the keys of nested tables as ``table.key``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = key in TABLES and isinstance(value, Mapping)
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if nested else {key: value}
    return flat


def unknown_key(key: str, value: Any, known: Sequence[str], listed: str = "`fedeas keys` lists them all") -> str:
    """Return an error line for an unknown key: similar keys and, unless there is just one, where all are ``listed``."""
    with_word = [name for name in known if key in name.split("-")]
    near = [name for name in known if key == "".join(word[0] for word in name.split("-"))]  # lr: learning-rate
    near = near or difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    near = (
        near or difflib.get_close_matches(key, with_word, n=2, cutoff=0) or difflib.get_close_matches(key, known, n=2)
    )
    if not near:
        return f"unknown key '{key}' = {value!r}; {listed}"
    hint = f"did you mean {' or '.join(map(repr, near))}?"
    return f"unknown key '{key}' = {value!r}; {hint}" + (f" {listed}" if len(near) > 1 else "")


def _one_line(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    message = message.removeprefix("Input should be ").removeprefix("must be ")
    near = difflib.get_close_matches(str(error["input"]).lower(), re.findall(r"[a-z][\w-]+", message), n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]!r}?" if near and near[0] != re.split("[: ]", str(error["input"]))[0] else ""
    return f"{'.'.join(map(str, error['loc']))} = {error['input']!r}: must be {message}{hint}"
