"""The run-config: every key a run knows, its default, its range and what it means.

Outside (TOML files, ``--run-config``, ``key=value``) keys are kebab-case; inside they are snake_case. They are
converted here and nowhere else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.text import parse_bytes
from fedeas_flwr.policies import POLICIES, PolicySettings, check_runnable

StrategyName = Literal[
    "fedavg",
    "fedprox",
    "scaffold",
    "moon",
    "fedavgm",
    "fedadam",
    "fedadagrad",
    "fedyogi",
    "fedmedian",
    "fedtrimmedavg",
    "krum",
    "multikrum",
    "bulyan",
    "qfedavg",
    "fedmix",
    "fedgen",
]
SMALL_BATCH = 8
"""Images in a batch: with half as many its gradient is eight times as long as that of 64 (results/short-batches)."""
SAMPLER_STEPS = {"dpm++": 20, "dpm++-logsnr": 20, "ddim": 250}
"""The deterministic samplers, DPM-Solver++ (Lu et al., 2022) and DDIM with η = 0 (Song et al., 2021), and how many
steps each takes unless told otherwise; 250 are the paper's."""
KEYS_CHANGEABLE_ON_RESUME = (
    "run-dir",
    "resume",
    "backend",
    "actors",
    "gpu-share",
    "ray-address",
    "mps",
    "cache-limit",
    "device",
    "node-wait",
    "round-timeout",
    "failed-rounds",
    "max-examples",
    "data-change",
    "restarts",
    "checkpoint-every",
    "tensorboard",
)
"""Keys that may differ when a run is resumed: none changes what a client computes on the same hardware.
`round-timeout`, `node-wait`, `failed-rounds`, `max-examples` and `data-change` can change who is averaged."""


def _key(name: str) -> str:
    return name.replace("_", "-")


class RunConfig(BaseModel):
    """One run, complete and validated. Defaults are the built-in digits job."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=_key, populate_by_name=True, allow_inf_nan=False
    )

    dataset: str = Field(
        "digits", description="what the clients hold: digits, cifar10, cifar100, or own:PATH, a folder or .npz of yours"
    )
    data_dir: str = Field("", description="folder with NAME.npz or torchvision's files; empty: the user's cache")
    protocol: Literal["clean", "paper"] = Field(
        "clean", description="clean: test on the official test set; paper: split train+test, as the paper did"
    )
    clients: int = Field(0, ge=0, le=100_000, description="number of clients K; 0: as many as the federation has")
    alpha: float = Field(0.1, gt=0, le=1e6, description="Dirichlet concentration; smaller is more skewed")
    partition_seed: int = Field(42, ge=0, lt=2**32, description="seed of the partition")
    seed: int = Field(1, ge=0, lt=2**31, description="seed of everything else: start, sampling, batches, images")

    policy: str = Field(
        "fedeas",
        description="how many images each client generates of each class, or repeats (oversample)",
        json_schema_extra={"enum": [*POLICIES]},
    )
    beta: float = Field(6.0, ge=0, le=1e6, description="budget parameter β; 0 generates nothing")
    gamma: float = Field(0.5, ge=0, le=2, description="exponent of the mean class count; 0.5 is the paper's root")
    printed_rule: bool = Field(False, description="fill by Eq. 9 as printed, without the below-the-mean condition")
    total: int = Field(
        0, ge=0, le=10**9, description="images of a matched policy, whatever β; 0: what FedEAS spends at β"
    )

    strategy: StrategyName = Field(
        "fedavg", description="how the clients' models become one; `fedeas strategies` lists them"
    )
    fedprox_mu: float = Field(0.01, ge=0, le=1e4, description="of fedprox: weight μ of the proximal term")
    scaffold_server_rate: float = Field(1.0, gt=0, le=100, description="of scaffold: the server's step size η_g")
    scaffold_weighting: Literal["uniform", "examples"] = Field(
        "uniform", description="of scaffold: whether the models' mean counts clients alike, or by real samples"
    )
    moon_mu: float = Field(5.0, ge=0, le=1e4, description="of moon: weight μ of the contrastive term")
    moon_temperature: float = Field(0.5, gt=0, le=1e4, description="of moon: temperature τ of the similarities")
    fedmix_lambda: float = Field(
        0.05, ge=0, lt=1, description="of fedmix: part λ of another client's mean in an image; 0 is FedAvg"
    )
    disclose_mean_images: bool = Field(
        False,
        description="of fedmix, which needs it: a client tells all others its mean image and label proportions",
    )
    fedgen_alpha: float = Field(
        10.0, ge=0, le=1e4, description="of fedgen: weight α₀ of the loss on generated features; × 0.98 a round"
    )
    fedgen_beta: float = Field(
        10.0, ge=0, le=1e4, description="of fedgen: weight β₀ of agreeing with the generator; × 0.98 a round"
    )
    fedgen_steps: int = Field(10, ge=0, le=100_000, description="of fedgen: the generator's training steps a round")
    fedgen_batch: int = Field(32, ge=2, le=65_536, description="of fedgen: features generated in a step")
    fedgen_rate: float = Field(3e-4, gt=0, le=10, description="of fedgen: the generator's Adam step; × 0.98 a round")
    fedgen_count_noise: float = Field(
        0.0, ge=0, le=1e6, description="of fedgen: scale b of Laplace noise on the disclosed counts, ε = 2/b; 0: none"
    )
    disclose_label_counts: bool = Field(
        False, description="of fedgen, which needs it: a client tells the server how many images of each class it holds"
    )
    server_learning_rate: float = Field(
        0.0, ge=0, le=1000, description="the server's step size; 0: the strategy's own default"
    )
    server_momentum: float = Field(0.9, ge=0, lt=1, description="of fedavgm; 0 with step size 1 is FedAvg")
    beta_1: float = Field(0.9, ge=0, lt=1, description="of fedadam, fedyogi: decay of the first moment")
    beta_2: float = Field(0.99, ge=0, lt=1, description="of fedadam, fedyogi: decay of the second moment")
    tau: float = Field(1e-3, gt=0, le=1, description="of fedadam, fedadagrad, fedyogi: floor of the step's divisor")
    trim_fraction: float = Field(
        0.2, ge=0, lt=0.5, description="of fedtrimmedavg: part of the replies cut off at either end, rounded down"
    )
    malicious_clients: int = Field(
        0, ge=0, le=100_000, description="of krum, multikrum, bulyan: bad replies f to withstand in a round"
    )
    selected_clients: int = Field(
        0, ge=0, le=100_000, description="of multikrum: replies that are averaged; 0: all but malicious-clients"
    )
    q: float = Field(0.1, ge=0, le=100, description="of qfedavg: how much a worse loss weighs; 0: all alike")
    dp: Literal["none", "server-fixed", "server-adaptive", "client-fixed", "client-adaptive"] = Field(
        "none", description="differential privacy: who clips the updates, and whether the norm adapts"
    )
    dp_noise_multiplier: float = Field(1.0, ge=0, le=1e4, description="of dp: noise in clipping norms, σ")
    dp_clipping_norm: float = Field(0.1, gt=0, le=1e9, description="of dp: length of an update, C; adaptive: at first")
    dp_clip_quantile: float = Field(0.5, ge=0, le=1, description="of adaptive dp: part of the updates to be clipped")
    dp_clip_rate: float = Field(0.2, gt=0, le=100, description="of adaptive dp: step size of the clipping norm")
    dp_count_noise: float = Field(
        0.0, ge=0, le=1e6, description="of adaptive dp: noise of the clipped clients' number; 0: their 20th part"
    )
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="of dp: the δ that ε is given for")
    rounds: int = Field(20, ge=1, le=100_000, description="communication rounds T")
    participation: float = Field(0.5, gt=0, le=1, description="fraction of the clients that train in a round")
    local_epochs: int = Field(3, ge=1, le=10_000, description="epochs a client trains in a round, E")
    batch_size: int = Field(32, ge=2, le=65_536, description="images in a training step")
    min_batch: int = Field(
        2,
        ge=2,
        le=65_536,
        description="a last batch of fewer images is left out (BatchNorm makes much of small ones); a client that has "
        "fewer in all does not train",
    )
    loss: Literal["cross-entropy", "class-weighted", "logit-adjusted"] = Field(
        "cross-entropy", description="a client's loss; the other two offset its own label skew, with any strategy"
    )
    logit_adjustment_tau: float = Field(
        1.0, ge=0, le=100, description="of logit-adjusted: scale τ of the log prior; 0 is cross-entropy"
    )
    views: Literal["none", "flip-crop"] = Field(
        "none", description="flip-crop: every time an image is used, shifted at random and, but for digits, mirrored"
    )
    learning_rate: float = Field(0.05, gt=0, le=100, description="SGD step size")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD momentum, fresh each round")
    weight_decay: float = Field(0.0, ge=0, le=10, description="SGD weight decay")

    engine: Literal["auto", "eager", "graphed"] = Field(
        "auto",
        description="how a client trains: graphed replays CUDA graphs, on a GPU; eager runs anywhere; auto picks",
    )
    precision: Literal["fp32", "tf32", "bf16"] = Field("tf32", description="arithmetic of training on a GPU")

    model: str = Field("small-cnn", description="small-cnn, resnet18, or package.module:callable of your own")
    stem: Literal["7x7", "3x3"] = Field("7x7", description="first layer of resnet18")
    weights: str = Field("none", description="start of resnet18: none, imagenet, or a .safetensors file")

    generator: str = Field(
        "builtin", description="builtin (digits), a folder in diffusers' format, bank:DIR, sd-turbo or sd-turbo:DIR"
    )
    sampler: Literal["dpm++", "dpm++-logsnr", "ddim"] = Field(
        "dpm++", description="DPM-Solver++ in steps even in time or in log SNR, or the paper's DDIM (η = 0)"
    )
    sampler_steps: int = Field(
        0,
        ge=0,
        le=1000,
        description="steps of the sampler; 0: " + ", ".join(f"{n} for {name}" for name, n in SAMPLER_STEPS.items()),
    )
    guidance: float = Field(1.0, ge=1, le=50, description="classifier-free guidance scale; 1 is none")
    guidance_rescale: float = Field(
        0.0, ge=0, le=1, description="part of the contrast that guidance adds which is taken away again; 0: none"
    )
    generation_batch: int = Field(
        0, ge=0, le=65_536, description="images in one forward pass; 0: 64 on a CPU, by free memory on a GPU"
    )
    generation_precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = Field(
        "auto", description="what the generator computes in; auto: fp32 on a CPU, bf16 on a GPU"
    )

    shared_images: Literal["no", "by-class", "one-seed"] = Field(
        "no",
        description="no: each client has images of its own; by-class: image i of a class is the same on all; one-seed: "
        "as if all seeded the generator alike, an image goes by its class and its place in the client's list",
    )
    min_class_agreement: float = Field(
        0.0, ge=0, le=1, description="probability of its class that an independent classifier must give; 0: any"
    )
    cache_limit: str = Field("", description="size the image cache is kept under, such as 20GB; empty: none")

    evaluation: Literal["central", "federated"] = Field(
        "central", description="central: the server's test set; federated: the clients' own (protocol paper)"
    )
    gamma_hat: Literal["off", "trainable", "all-state"] = Field(
        "trainable", description="of what Γ̂ is measured each round; all-state: BatchNorm's statistics and counters too"
    )
    threshold: float = Field(0.7, ge=0, le=1, description="accuracy whose first round the summary names")
    min_replies: float = Field(
        1.0,
        gt=0,
        le=1,
        description="minimum fraction of a round's clients that must reply; a round below it fails, and "
        "`failed-rounds` failed rounds in a row stop the run",
    )
    failed_rounds: int = Field(
        1,
        ge=1,
        le=100_000,
        description="rounds in a row below min-replies that stop the run; until then the model stays",
    )
    max_examples: int = Field(
        10_000_000, ge=1, le=2**40, description="most real samples a client may declare; its replies are held to them"
    )
    data_change: Literal["refuse", "replan"] = Field(
        "refuse", description="what a client does whose labels changed after its plan: fail by name, or plan anew"
    )
    node_wait: float = Field(10.0, ge=0, le=1e6, description="seconds to wait for the federation's nodes")
    round_timeout: float = Field(0.0, ge=0, le=1e6, description="seconds to wait for a round's replies; 0: for ever")
    checkpoint_every: int = Field(1, ge=1, le=100_000, description="rounds between checkpoints")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where models run")
    tensorboard: bool = Field(
        False, description="write the rounds to run-dir/tensorboard too; needs the extra tensorboard"
    )
    run_dir: str = Field(
        "",
        description="folder of this run, absolute under `flwr run`; empty: ./runs/NAME with `fedeas run`, else in the "
        "user's cache",
    )
    resume: bool = Field(False, description="go on from the checkpoint in run-dir")

    backend: Literal["ray", "inline"] = Field(
        "ray", description="of `fedeas run` alone: Flower's Ray simulation, or one process without Ray"
    )
    actors: int = Field(
        0,
        ge=0,
        le=4096,
        description="of `fedeas run` alone: clients at once; 0: one a core, on a GPU what a probe finds",
    )
    ray_address: str = Field(
        "", description="of `fedeas run` alone: HOST:PORT of a Ray cluster to run on; empty: a Ray of its own"
    )
    restarts: int = Field(
        2, ge=0, le=1000, description="of `fedeas run` alone, under Ray: vain restarts in a row when processes die"
    )
    mps: Literal["auto", "off"] = Field(
        "auto",
        description="on a GPU, of `fedeas run` under Ray and of several runs at once in a sweep: CUDA's MPS meanwhile, "
        "where there is one; or off",
    )
    gpu_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="of `fedeas run` alone: GPU fraction of a client under Ray; 0: one part for each of `actors`",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_coercion(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("a value of its own kind, not true or false")
        if cls.model_fields[str(info.field_name)].annotation is bool and not isinstance(value, bool):
            raise ValueError("true or false")  # pydantic would take 't', 'on' or 1 for true
        return value

    @model_validator(mode="before")
    @classmethod
    def _migrate_bool_shared_images(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read records of runs from when all clients shared images by class or not at all."""
        shared = values.get("shared-images")
        return {**values, "shared-images": "by-class" if shared else "no"} if isinstance(shared, bool) else values

    @field_validator("dataset")
    @classmethod
    def _known_dataset(cls, value: str) -> str:
        if value == "own:" or (value not in ("digits", "cifar10", "cifar100") and not value.startswith("own:")):
            raise ValueError("must be digits, cifar10, cifar100, or own:PATH with a folder or .npz file of yours")
        return value

    @field_validator("policy")
    @classmethod
    def _runnable_policy(cls, value: str) -> str:
        check_runnable(value)
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
            raise ValueError("must be an absolute path, since Flower's processes start elsewhere")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> RunConfig:
        if self.evaluation == "federated" and self.protocol != "paper":
            raise ValueError("evaluation = 'federated' needs protocol = 'paper': 'clean' leaves clients no test data")
        if self.ray_address and self.backend != "ray":
            raise ValueError(f"ray-address = '{self.ray_address}' needs backend = 'ray', not '{self.backend}'")
        if self.resume and not self.run_dir:
            raise ValueError("resume = true needs run-dir: the folder to go on in")
        if self.total and "total" not in POLICIES[self.policy].settings:
            matched = ", ".join(name for name, policy in POLICIES.items() if "total" in policy.settings)
            raise ValueError(f"total = {self.total} needs a matched policy ({matched}), not '{self.policy}'")
        if self.min_batch > self.batch_size:
            raise ValueError(f"min-batch = {self.min_batch} must be at most batch-size = {self.batch_size}")
        if self.shared_images == "one-seed" and self.generator.startswith("bank:"):
            raise ValueError("shared-images = 'one-seed': must be no or by-class with a bank, which needs no seed")
        if self.generates and self.dataset != "digits" and self.generator == "builtin":
            raise ValueError(
                f"generator = 'builtin' knows digits only; for {self.dataset} name a folder in diffusers' format"
            )
        return self

    @property
    def generates(self) -> bool:
        """Whether any client can be asked for images under this config."""
        return POLICIES[self.policy].generates(self.policy_settings)

    @property
    def policy_settings(self) -> PolicySettings:
        """What the policy depends on, as one value."""
        return PolicySettings(self.beta, self.gamma, not self.printed_rule, self.total or None)

    def num_sampled(self, clients: int) -> int:
        """How many of so many clients train in a round."""
        return max(1, round(self.participation * clients))

    def min_replies_for(self, num_sampled: int) -> int:
        """The fewest of so many that `min-replies` lets pass; 0.28 of 25 are 7, though floats make it a little more."""
        return max(1, math.ceil(self.min_replies * num_sampled - 1e-9))

    @property
    def min_replies_per_round(self) -> int:
        """The fewest replies of a round that `min-replies` lets pass."""
        return self.min_replies_for(self.num_sampled(self.clients))

    def to_user_dict(self) -> dict[str, Any]:
        """The config as users write it: kebab-case keys, plain values."""
        return self.model_dump(by_alias=True)

    def with_changes(self, **changes: Any) -> RunConfig:
        """Return a validated copy with some fields changed."""
        return parse_config({**self.to_user_dict(), **{_key(k): v for k, v in changes.items()}})


KEYS: tuple[str, ...] = tuple(_key(name) for name in RunConfig.model_fields)
TEXT_KEYS = frozenset(_key(name) for name, field in RunConfig.model_fields.items() if field.annotation is str)
"""Keys whose value may be any text: also one that looks like a number or a date."""


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate kebab-case keys and values.

    Raises
    ------
    ConfigError
        One line that names the key, the value and what is allowed.
    """
    for key in values:
        if key not in KEYS:
            raise ConfigError(unknown_key(key, values[key], KEYS))
    try:
        return RunConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_one_line(e) for e in error.errors())) from None


def unknown_key(key: str, value: Any, known: Sequence[str], listed: str = "`fedeas keys` lists them all") -> str:
    """Say that a key is not known, which was meant, and unless that is plain where all are ``listed``."""
    with_it = [name for name in known if key in name.split("-")]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    near = near or difflib.get_close_matches(key, with_it, n=2, cutoff=0) or difflib.get_close_matches(key, known, n=2)
    if not near:
        return f"unknown key '{key}' = {value!r}; {listed}"
    hint = f"did you mean {' or '.join(map(repr, near))}?"
    return f"unknown key '{key}' = {value!r}; {hint}" + (f" {listed}" if len(near) > 1 else "")


def _one_line(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return message
    message = message.removeprefix("Input should be ").removeprefix("must be ")
    return f"{_key(str(error['loc'][0]))} = {error['input']!r}: must be {message}"
