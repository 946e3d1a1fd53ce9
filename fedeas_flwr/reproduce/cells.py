"""Every cell of the paper's tables and of ours: a column, a method, and the run-config of the two.

A cell's name is ``COLUMN/METHOD``, such as ``c10-k100-a0.1/fedeas``. At scale ``full`` it is the paper's experiment; at
scale ``smoke`` the same cell takes a few seconds on the built-in digits.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.config import SMALL_BATCH, RunConfig, parse_config
from fedeas_flwr.planning.budget_path import BudgetPath, bisect_last_true
from fedeas_flwr.planning.run_plan import planned_counts
from fedeas_flwr.reproduce.paper import COLUMNS, LAST_20, at

SCALES = ("smoke", "full")
DEFAULT_COLUMN = "c10-k100-a0.1"
"""Column with several seeds, and with our tables on leakage, on training without a generator and on other rules."""
BETA_SWEEP_COLUMN = "c10-k20-a0.1"
"""Column of the paper's β sweep, ablation, Γ̂ table and figures."""
BETAS = (4, 8, 12, 16, 20)

Keys = dict[str, Any]
Variants = Mapping[str, Mapping[str, Sequence[str]]]
"""Column → method → its variants, each the suffix of a name in `VARIANTS`."""

# As conf/cifar10-k20.toml and conf/cifar10-k100.toml
FULL: Keys = {
    "protocol": "paper",
    "beta": 12.0,
    "rounds": 200,
    "local-epochs": 10,
    "batch-size": 64,
    "learning-rate": 0.001,
    "model": "resnet18",
    "weights": "imagenet",
    "threshold": 0.7,
}

GUIDED: Keys = {"sampler": "dpm++-logsnr", "guidance": 1.5}
"""How images are sampled in the columns that were run last: chosen by the images' quality and by runs on another
partition (results/notes/sampling-and-guidance.md). In the other columns: the sampler's defaults, without guidance."""
GUIDED_COLUMNS = ("c10-k20-a0.05", "c10-k20-a0.3", "c100-k20-a0.1")

# Enough rounds for every client to train once, so that policies with one budget generate equally many images.
SMOKE: Keys = {
    "dataset": "digits",
    "protocol": "paper",
    "beta": 4.0,
    "rounds": 10,
    "local-epochs": 1,
    "learning-rate": 0.15,
    "sampler-steps": 2,
    "threshold": 0.8,
    "backend": "inline",
    "checkpoint-every": 10,
}
SMOKE_CLIENTS = {20: 6, 100: 10}
SMOKE_BETA = 1 / 3
"""Factor on the paper's β at smoke scale, where clients hold fewer images; β = 4, not 12, satisfies the paper's two
conditions there."""


@dataclass(frozen=True)
class Column:
    """A federation: a dataset, its number of clients and the partition's α."""

    name: str
    dataset: str
    clients: int
    alpha: float

    def title(self, scale: str) -> str:
        """Return the column's head; at smoke scale, it names the column of the paper that the digits replace."""
        name = f"{self.dataset.replace('cifar', 'CIFAR-')}, K = {self.clients}, α = {self.alpha:g}"
        return name if scale == "full" else f"for {name}"

    def keys(self, scale: str) -> Keys:
        """Return the run-config keys that the column decides; ten clients train per round (three at smoke scale)."""
        if scale == "full":
            own = {"dataset": self.dataset, "clients": self.clients, "participation": 10 / self.clients}
            return {**FULL, **own, "alpha": self.alpha, "generator": f"generators/{self.dataset}"}
        clients = SMOKE_CLIENTS[self.clients]
        # There is one built-in dataset, so another partition of it stands in for CIFAR-100.
        seed = 42 if self.dataset == "cifar10" else 43
        return {**SMOKE, "clients": clients, "participation": 3 / clients, "alpha": self.alpha, "partition-seed": seed}


def column(name: str) -> Column:
    """Return the column of a name, or raise `ConfigError`."""
    if name not in COLUMNS:
        raise ConfigError(f"column '{name}': must be one of {', '.join(COLUMNS)}")
    dataset, clients, alpha = name.split("-")
    return Column(name, f"cifar{dataset[1:]}", int(clients[1:]), float(alpha[1:]))


@dataclass(frozen=True)
class Method:
    """A row of a table: the strategy, the policy and other keys.

    With an exponent ``gamma`` of its own, β is chosen so that the rule spends FedEAS's total.
    """

    name: str
    label: str
    keys: Keys = field(hash=False)


def _method(name: str, label: str, **keys: Any) -> Method:
    return Method(name, label, {key.replace("_", "-"): value for key, value in keys.items()})


def variants(methods: Variants, columns: Sequence[str] = COLUMNS) -> list[tuple[str, str, str]]:
    """Return column, method and suffix of each method itself, with an empty suffix, and of its variants."""
    named = [(place, name, ends) for place in methods if place in columns for name, ends in methods[place].items()]
    return [(place, name, end) for place, name, ends in named for end in ("", *ends)]


def variant_names(methods: Variants) -> list[str]:
    """Return the names of the cells of `variants`."""
    return [f"{place}/{name}{end}" for place, name, end in variants(methods)]


VARIANTS: dict[str, tuple[str, Keys]] = {
    "-clean": ("protocol clean", {"protocol": "clean"}),
    "-shared": ("shared images", {"shared-images": "by-class"}),
    "-one-seed": ("one seed for all", {"shared-images": "one-seed"}),
    f"-min{SMALL_BATCH}": ("no small batch", {"min-batch": SMALL_BATCH}),
    "-logsnr": ("steps uniform in log SNR", {"sampler": "dpm++-logsnr"}),
    "-guided": ("guidance 1.5", {"guidance": 1.5}),
    "-logsnr-guided": ("guidance 1.5, steps uniform in log SNR", GUIDED),
}
"""Suffix of a variant's name → what its label adds, and its keys."""
_AT_ONE_TOTAL = ("uniform", "missing-only", "fedeas")
_NO_SMALL_BATCH = (f"-min{SMALL_BATCH}",)
_WITHOUT_GENERATOR = ("oversample", "class-weighted", "logit-adjusted", "flip-crop")
CLEAN = (*("fedavg", "fedeas", "missing-only", "uniform", "full-balance"), *_WITHOUT_GENERATOR, "fedeas+logit-adjusted")
SHARED: Variants = {
    DEFAULT_COLUMN: dict.fromkeys(_AT_ONE_TOTAL, ("-shared", "-one-seed")),
    **{
        place: {"uniform": ("-one-seed",)}
        for place in (BETA_SWEEP_COLUMN, "c10-k100-a0.05", "c10-k100-a0.3", "c100-k100-a0.1")
    },
}
BATCHED: Variants = {
    DEFAULT_COLUMN: dict.fromkeys(_AT_ONE_TOTAL, _NO_SMALL_BATCH),
    BETA_SWEEP_COLUMN: dict.fromkeys(
        ("missing-only", "scaffold", "fedeas-b8", "uniform-b4", "uniform-b16"), _NO_SMALL_BATCH
    ),
    "c10-k100-a0.05": dict.fromkeys(("uniform", "scaffold"), _NO_SMALL_BATCH),
    "c10-k100-a0.3": {"fedmix": _NO_SMALL_BATCH},
}
DRAWN: Variants = {
    DEFAULT_COLUMN: {"fedeas": ("-logsnr",)},
    "c100-k100-a0.1": {
        "uniform": ("-logsnr-guided",),
        **dict.fromkeys(("missing-only", "fedeas"), ("-logsnr", "-guided", "-logsnr-guided")),
    },
}
RULES = ("fedeas-g0.25", "fedeas", "fedeas-g0.75", "fedeas-g1", "waterfill")

_PLAIN = {"policy": "none"}
_METHODS = (
    _method("fedavg", "FedAvg", **_PLAIN),
    _method("fedprox", "FedProx", **_PLAIN, strategy="fedprox"),
    _method("scaffold", "SCAFFOLD", **_PLAIN, strategy="scaffold"),
    _method("moon", "MOON", **_PLAIN, strategy="moon"),
    _method("fedgen", "FedGen", **_PLAIN, strategy="fedgen", disclose_label_counts=True),
    # The supplement, Section D, has FedMix "following the original CIFAR-10 setup" in all columns: λ = 0.05 on
    # CIFAR-100 too, where FedMix's authors use 0.1.
    _method("fedmix", "FedMix", **_PLAIN, strategy="fedmix", disclose_mean_images=True, fedmix_lambda=0.05),
    _method("uniform", "Uniform", policy="uniform"),
    _method("missing-only", "Missing-only", policy="missing-only"),
    _method("full-balance", "Full-Balance", policy="full-balance"),
    _method("fedeas", "FedEAS", policy="fedeas"),
    *(
        _method(f"{name}-b{beta}", label, policy=name, beta=float(beta))
        for name, label in (("fedeas", "FedEAS"), ("uniform", "Uniform"))
        for beta in BETAS
        if beta != FULL["beta"]
    ),
    # These β give the totals of the paper's ablation; its text names others.
    _method("without-entropy", "w/o entropy", policy="without-entropy", beta=6.0),
    _method("linear", "Linear rule", policy="linear", beta=0.6),
    _method("fedeas+scaffold", "FedEAS + SCAFFOLD", policy="fedeas", strategy="scaffold"),
    _method("fedeas-sd-turbo", "FedEAS, SD-Turbo's images", policy="fedeas", generator="sd-turbo"),
    _method("uniform-sd-turbo", "Uniform, SD-Turbo's images", policy="uniform", generator="sd-turbo"),
    _method("oversample", "Oversampling", policy="oversample"),
    _method("class-weighted", "Class-weighted loss", **_PLAIN, loss="class-weighted"),
    _method("logit-adjusted", "Logit-adjusted loss", **_PLAIN, loss="logit-adjusted"),
    _method("flip-crop", "Flips and crops", **_PLAIN, views="flip-crop"),
    _method("fedeas+logit-adjusted", "FedEAS, logit-adjusted loss", policy="fedeas", loss="logit-adjusted"),
    _method("waterfill", "Waterfill", policy="waterfill"),
    *(_method(f"fedeas-g{g:g}", f"FedEAS, γ = {g:g}", policy="fedeas", gamma=g) for g in (0.25, 0.75, 1.0)),
)
_VARIED = {(name, end) for table in (SHARED, BATCHED, DRAWN) for _, name, end in variants(table)}
_VARIED |= {(name, "-clean") for name in CLEAN}
METHODS = {one.name: one for one in _METHODS} | {
    f"{one.name}{end}": Method(f"{one.name}{end}", f"{one.label}, {words}", one.keys | keys)
    for one in _METHODS
    for end, (words, keys) in VARIANTS.items()
    if (one.name, end) in _VARIED
}


@dataclass(frozen=True)
class Cell:
    """One cell of a table, as an experiment."""

    column: Column
    method: Method

    @property
    def name(self) -> str:
        """Return ``COLUMN/METHOD``."""
        return f"{self.column.name}/{self.method.name}"

    def own_keys(self) -> tuple[str, ...]:
        """Return the keys that the cell's name decides, which no `--set` may change; the generator's may be changed."""
        return tuple(key for key in self.method.keys if key != "generator")

    def config(self, scale: str, seed: int, more: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the run-config of one seed; ``more`` are keys of all runs, such as where the data is."""
        own = self.method.keys
        keys = {**self.column.keys(scale), **own}
        if scale == "full" and self.column.name in GUIDED_COLUMNS and self.method.name in _AT_ONE_TOTAL:
            keys |= GUIDED
        if scale == "smoke" and self.method.name != "linear" and "beta" in own:
            keys["beta"] = round(keys["beta"] * SMOKE_BETA, 3)
        if self.method.name == "fedgen" and scale == "smoke":
            keys |= {"fedgen-alpha": 1.0, "fedgen-beta": 1.0}  # with smoke's learning rate the default of 10 gives NaN
        if self.column.name == BETA_SWEEP_COLUMN:
            keys["gamma-hat"] = "all-state"  # the form of the paper's table; training does not depend on it
        if "gamma" in own:
            keys["beta"] = matched_beta(self.column, scale, own["gamma"])
        given = {key: value for key, value in (more or {}).items() if key not in own}
        return parse_config({**keys, "seed": seed, **given})

    def seeds(self, scale: str) -> tuple[int, ...]:
        """Return the seeds to run: several where policies are ranked."""
        several = ("fedavg", "fedeas", "missing-only", "uniform")
        if self.column.name != DEFAULT_COLUMN or self.method.name not in several:
            return (1,)
        if scale == "full":
            return (1, 2, 3)
        return (1, 2) if self.method.name in ("fedeas", "missing-only") else (1,)


@lru_cache
def matched_beta(place: Column, scale: str, gamma: float) -> float:
    """Return the largest β, to six digits, at which the rule with another exponent spends at most FedEAS's total."""
    config = parse_config({**place.keys(scale), "policy": "none"})
    counts = planned_counts(config)
    total = BudgetPath(counts).at(config.beta).images
    path = BudgetPath(counts, gamma=gamma)
    beta = bisect_last_true(lambda value: path.at(value).images <= total, path.end)
    step = 10.0 ** (math.floor(math.log10(beta)) - 5)  # rounded down, to stay within the total
    return float(f"{math.floor(beta / step) * step:.6g}")


def cell(name: str) -> Cell:
    """Return the cell of a name ``COLUMN/METHOD``."""
    place, _, method = name.partition("/")
    return Cell(column(place), METHODS[method])


def all_cells() -> list[Cell]:
    """Return all cells, most useful to run first."""
    policies = ("fedavg", "fedeas", "missing-only", "uniform", "full-balance")
    main_methods = (*policies, "scaffold", "fedprox", "moon")
    others = ("c10-k100-a0.05", "c10-k100-a0.3", "c10-k20-a0.05", "c10-k20-a0.3")
    cifar100 = ("c100-k100-a0.1", "c100-k20-a0.1")
    shared = variant_names(SHARED)
    sweep = [f"{name}-b{beta}" for beta in BETAS if beta != FULL["beta"] for name in ("fedeas", "uniform")]
    names = [
        *_pairs([DEFAULT_COLUMN, BETA_SWEEP_COLUMN], main_methods),
        *(name for name in shared if name.startswith("c10-")),
        *_pairs([BETA_SWEEP_COLUMN], (*sweep, "without-entropy", "linear")),
        *variant_names(BATCHED),
        *_pairs([*others, *cifar100], main_methods),
        *shared,
        *reversed(variant_names(DRAWN)),
        *_pairs([DEFAULT_COLUMN, BETA_SWEEP_COLUMN, *others, *cifar100], ("fedgen", "fedmix")),
        "c10-k20-a0.3/fedeas+scaffold",
        *_pairs([DEFAULT_COLUMN], (*CLEAN, *(f"{name}-clean" for name in CLEAN))),
        *_pairs([DEFAULT_COLUMN], [name for name in ("waterfill", *RULES) if name not in policies]),
        *_pairs([BETA_SWEEP_COLUMN], ("fedeas-sd-turbo", "uniform-sd-turbo")),
    ]
    return [cell(name) for name in dict.fromkeys(names)]


def _pairs(columns: Sequence[str], methods: Sequence[str]) -> list[str]:
    """Return the names of all cells of these columns and methods but Full-Balance where the paper leaves it out."""
    pairs = itertools.product(columns, methods)
    return [f"{c}/{m}" for c, m in pairs if m != "full-balance" or at(LAST_20, m, c) is not None]


def matching(pattern: str) -> list[Cell]:
    """Return the cells whose names match a pattern with ``*``; raise `ConfigError` if there is none."""
    found = [one for one in all_cells() if fnmatch.fnmatchcase(one.name, pattern)]
    if not found:
        raise ConfigError(f"cell '{pattern}': there is none of that name; `fedeas reproduce --list` names them")
    return found


def run_command_args(one: Cell, scale: str, seed: int, more: Mapping[str, Any] | None = None) -> list[str]:
    """Return the `fedeas run` command of a cell: a file of conf/ and the keys that differ from it."""
    if scale == "full":
        conf = f"conf/cifar10-k{one.column.clients}.toml"
        base = column(f"c10-k{one.column.clients}-a0.1").keys("full") | {"policy": "fedeas"}
    else:
        conf, base = "conf/quickstart.toml", {"clients": 10, "policy": "fedeas", "threshold": 0.9}
    before, now = parse_config(base).to_user_dict(), one.config(scale, seed, more).to_user_dict()
    changed = {key: value for key, value in now.items() if before[key] != value}
    changes = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changed.items()]
    return ["fedeas", "run", conf, *changes]
