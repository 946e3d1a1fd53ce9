"""Tables of the run-config's keys: what each allows and means, and which of them identify a run.

Allowed values are in JSON Schema terms, which pydantic derives from the fields that it validates with.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fedeas_flwr.config import KEYS_CHANGEABLE_ON_RESUME, SAMPLER_STEPS, STRATEGIES, TABLES, RunConfig
from fedeas_flwr.partition import uses_alpha
from fedeas_flwr.policies.adaptive import InParts
from fedeas_flwr.policies.registry import POLICIES, settings_of

_LOWER_BOUNDS = {"minimum": "≤", "exclusiveMinimum": "<"}
_UPPER_BOUNDS = {"maximum": "≤", "exclusiveMaximum": "<"}
_WORDS = ("type", "enum", *_LOWER_BOUNDS, *_UPPER_BOUNDS)
_SCHEMA: dict[str, dict[str, Any]] = {
    **{key: field for key, field in RunConfig.model_json_schema()["properties"].items() if key not in TABLES},
    **{
        f"{table}.{key}": field
        for table, model in TABLES.items()
        for key, field in model.model_json_schema()["properties"].items()
    },
}
_ANY = {"integer": "n", "number": "x", "boolean": "true, false", "string": "text"}


@dataclass(frozen=True)
class Key:
    """One key of the run-config; ``allowed`` holds its JSON Schema terms."""

    name: str
    default: Any
    allowed: dict[str, Any]
    meaning: str

    def allowed_shown(self) -> str:
        """Return the allowed values as text: choices, or a range where n is an integer and x any number."""
        if "enum" in self.allowed:
            return ", ".join(self.allowed["enum"])
        low = [f"{_show(self.allowed[word])} {sign} " for word, sign in _LOWER_BOUNDS.items() if word in self.allowed]
        high = [f" {sign} {_show(self.allowed[word])}" for word, sign in _UPPER_BOUNDS.items() if word in self.allowed]
        return "".join([*low, _ANY[self.allowed["type"]], *high])


def _show(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def run_keys() -> list[Key]:
    """Return all keys in the order of their declaration."""
    return [
        Key(
            name,
            field["default"],
            {word: field[word] for word in _WORDS if word in field},
            field["description"].replace("\n", " "),
        )
        for name, field in _SCHEMA.items()
    ]


# ------------------------------------------------------------------------------------------- keys of a run


PARTITION_KEYS = (
    *("dataset", "data-dir", "protocol", "clients"),
    *("partition", "partition-args", "alpha", "partition-seed"),
)
"""Keys that determine which client holds which images."""
_BUDGET_KEYS = {"beta": "beta", "gamma": "gamma", "strict_mean": "printed-rule", "total": "total"}
"""Setting of a policy → its key."""
_GUIDANCE_KEYS = ("guidance-start", "guidance-stop", "guidance-rescale")
"""Keys without effect if there is no guidance."""
DIFFUSION_KEYS = ("sampler", "sampler-steps", "guidance", *_GUIDANCE_KEYS, "generation-precision")
"""Image keys that apply to diffusion models in a folder only."""
_IMAGE_KEYS = ("generator", *DIFFUSION_KEYS, "generation-batch", "shared-images", "min-class-agreement")
GENERATION_KEYS = ("policy", "policy-args", *_BUDGET_KEYS.values(), *_IMAGE_KEYS)
"""Keys that determine which images are generated."""
STRATEGY_KEYS = {
    strategy: tuple(name for name, field in _SCHEMA.items() if field.get("of") == strategy) for strategy in STRATEGIES
}
"""Strategy → the keys that only this strategy reads."""
_SWITCHES = ("disclose-mean-images", "disclose-label-counts")
"""Switches that a strategy either requires to be true or ignores."""
_CLASSIFIER_KEYS = (
    *("local-epochs", "batch-size", "min-batch", "loss", "views", "learning-rate", "learning-rate-schedule"),
    *("momentum", "weight-decay", "engine", "precision", "model", "stem", "weights", "threshold"),
)
"""Keys without effect if the federation trains a generator."""
_ADAPTIVE_DP_KEYS = ("dp-clip-quantile", "dp-clip-rate", "dp-count-noise")


def keys_in_use(config: RunConfig) -> dict[str, Any]:
    """Return the keys that affect a run, with their values: without β, for example, if the policy ignores it."""
    unused = {*_SWITCHES, *unused_keys(config)}
    values = config.to_user_dict() | {"sampler-steps": config.sampler_steps or SAMPLER_STEPS[config.sampler]}
    return {key: value for key, value in values.items() if key not in unused}


def unused_keys(config: RunConfig) -> dict[str, str]:
    """Return the keys that do not affect a run, each with what it would need."""
    settings = settings_of(config.policy, config.total > 0)
    need = "total = 0" if config.total else f"another policy than {config.policy!r}"
    unused = {key: need for name, key in _BUDGET_KEYS.items() if name not in settings}
    for strategy, keys in STRATEGY_KEYS.items():
        if strategy != config.strategy:
            unused |= dict.fromkeys(keys, f"strategy = {strategy!r}")
    if config.policy in POLICIES and not isinstance(POLICIES[config.policy], InParts):
        unused["policy-args"] = "an adaptive policy or one of your own"
    if not uses_alpha(config.partition):
        unused["alpha"] = "a Dirichlet partition"
    if config.guidance == 1:
        unused |= dict.fromkeys(_GUIDANCE_KEYS, "guidance above 1")
    if not config.generator_spec.is_diffusion:
        unused |= dict.fromkeys(DIFFUSION_KEYS, "a diffusion model as generator")
    if config.generator_spec.kind == "bank":
        unused["generation-batch"] = "a generator that is no bank"
    if not config.generates:
        unused |= dict.fromkeys(_IMAGE_KEYS, "a policy that generates images")
    if not config.dp.endswith("adaptive"):
        unused |= dict.fromkeys(_ADAPTIVE_DP_KEYS, "an adaptive dp")
    if config.dp == "none":
        unused |= {key: "dp other than 'none'" for key in _SCHEMA if key.startswith("dp-")}
    if config.task == "classifier":
        unused["task"] = "another value"
        if not config.trains_generator:
            unused |= {key: "generator = 'federated'" for key in _SCHEMA if key.startswith("generator-training.")}
    else:
        unused |= dict.fromkeys(_CLASSIFIER_KEYS, "task = 'classifier'")
    if config.loss != "logit-adjusted":
        unused["logit-adjustment-tau"] = "loss = 'logit-adjusted'"
    if config.model != "resnet18":
        unused["stem"] = "model = 'resnet18'"
    return unused


PATH_KEYS = ("generator", "weights", "generator-training.start")
"""Keys besides `dataset` and `data-dir` whose values may be paths: a run records them as absolute ones."""


def identity(config: RunConfig, free: Collection[str] = ()) -> dict[str, Any]:
    """Return the keys that identify a run, with their values; two runs are the same if these are equal.

    They are the keys in use, without those that may change on resume and the ``free`` ones.
    """
    ignored = {*KEYS_CHANGEABLE_ON_RESUME, *free}
    return {key: value for key, value in keys_in_use(config).items() if key not in ignored}
