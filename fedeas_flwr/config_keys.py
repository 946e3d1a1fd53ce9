"""Every run-config key in a row: its default, what it allows and what it means, as `RunConfig` itself has them.

What is allowed is said in JSON Schema's words, which pydantic makes from the very fields that it checks values by.
Which keys play a part in a run, and hence what makes two runs the same, is said by `keys_in_use`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedeas_flwr.config import SAMPLER_STEPS, RunConfig
from fedeas_flwr.policies import settings_of

_LOWER_BOUNDS = {"minimum": "≤", "exclusiveMinimum": "<"}
_UPPER_BOUNDS = {"maximum": "≤", "exclusiveMaximum": "<"}
_WORDS = ("type", "enum", *_LOWER_BOUNDS, *_UPPER_BOUNDS)
_ANY = {"integer": "n", "number": "x", "boolean": "true, false", "string": "text"}


@dataclass(frozen=True)
class Key:
    """One key of a run-config; ``allowed`` in the words of JSON Schema."""

    name: str
    default: Any
    allowed: dict[str, Any]
    meaning: str

    def allowed_shown(self) -> str:
        """What is allowed, for a person: choices, or a range in which n is a whole number and x is any."""
        if "enum" in self.allowed:
            return ", ".join(self.allowed["enum"])
        low = [f"{_show(self.allowed[word])} {sign} " for word, sign in _LOWER_BOUNDS.items() if word in self.allowed]
        high = [f" {sign} {_show(self.allowed[word])}" for word, sign in _UPPER_BOUNDS.items() if word in self.allowed]
        return "".join([*low, _ANY[self.allowed["type"]], *high])


def _show(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def run_keys() -> list[Key]:
    """All keys, in the order in which they are declared."""
    return [
        Key(name, field["default"], {word: field[word] for word in _WORDS if word in field}, field["description"])
        for name, field in RunConfig.model_json_schema()["properties"].items()
    ]


# ----------------------------------------------------------------------------------------------- of a run


_BUDGET_KEYS = {"beta": "beta", "gamma": "gamma", "strict_mean": "printed-rule", "total": "total"}
"""What a plan calls them, and the keys."""
_IMAGE_KEYS = (
    "generator",
    "sampler",
    "sampler-steps",
    "guidance",
    "guidance-rescale",
    "generation-batch",
    "generation-precision",
    "shared-images",
    "min-class-agreement",
)
_DIFFUSION_KEYS = ("sampler", "sampler-steps", "guidance", "guidance-rescale", "generation-precision")
"""Of images; a bank and SD-Turbo take no notice of them."""
GENERATION_KEYS = ("policy", *_BUDGET_KEYS.values(), *_IMAGE_KEYS)
"""Keys that say what is generated."""
STRATEGY_KEYS: dict[str, tuple[str, ...]] = {
    "fedprox": ("fedprox-mu",),
    "scaffold": ("scaffold-server-rate", "scaffold-weighting"),
    "moon": ("moon-mu", "moon-temperature"),
    "fedavgm": ("server-learning-rate", "server-momentum"),
    "fedadam": ("server-learning-rate", "beta-1", "beta-2", "tau"),
    "fedadagrad": ("server-learning-rate", "tau"),
    "fedyogi": ("server-learning-rate", "beta-1", "beta-2", "tau"),
    "fedtrimmedavg": ("trim-fraction",),
    "krum": ("malicious-clients",),
    "multikrum": ("malicious-clients", "selected-clients"),
    "bulyan": ("malicious-clients",),
    "qfedavg": ("q",),
    "fedmix": ("fedmix-lambda", "disclose-mean-images"),
    "fedgen": (
        "fedgen-alpha",
        "fedgen-beta",
        "fedgen-steps",
        "fedgen-batch",
        "fedgen-rate",
        "fedgen-count-noise",
        "disclose-label-counts",
    ),
}
"""The keys that are a strategy's own; the others take no notice of them."""
_SWITCHES = ("disclose-mean-images", "disclose-label-counts")
"""A strategy needs them on, or takes no notice of them."""
_ADAPTIVE_DP_KEYS = ("dp-clip-quantile", "dp-clip-rate", "dp-count-noise")


def keys_in_use(config: RunConfig) -> dict[str, Any]:
    """The keys that play a part in a run, and their values: without β, say, where nothing depends on it."""
    settings = settings_of(config.policy, config.total > 0)
    idle = {*_SWITCHES, *(key for name, key in _BUDGET_KEYS.items() if name not in settings)}
    idle.update(key for keys in STRATEGY_KEYS.values() for key in keys)
    idle.difference_update(key for key in STRATEGY_KEYS.get(config.strategy, ()) if key not in _SWITCHES)
    if not config.generates:
        idle.update(_IMAGE_KEYS)
    if config.guidance == 1:
        idle.add("guidance-rescale")
    kind = config.generator.partition(":")[0]
    if kind in ("bank", "sd-turbo"):
        idle.update(_DIFFUSION_KEYS)
    if kind == "bank":
        idle.add("generation-batch")
    if not config.dp.endswith("adaptive"):
        idle.update(_ADAPTIVE_DP_KEYS)
    if config.dp == "none":
        idle.update(key for key in config.to_user_dict() if key.startswith("dp-"))
    if config.loss != "logit-adjusted":
        idle.add("logit-adjustment-tau")
    if config.model != "resnet18":
        idle.add("stem")
    values = config.to_user_dict() | {"sampler-steps": config.sampler_steps or SAMPLER_STEPS[config.sampler]}
    return {key: value for key, value in values.items() if key not in idle}
