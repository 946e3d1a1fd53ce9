"""Differential privacy with Flower's wrappers: server wrapper, ε, and clipping on the client.

A wrapper clips every client's update to norm C and adds noise of standard deviation σ·C/n to the aggregate of n
clients. That is the Gaussian mechanism only if one client can move the aggregate by at most C/n, so the aggregate must
be an unweighted mean. With `dp`, clients therefore have equal weights (weighted by N_k, a large client would move the
mean further than the noise covers), every sampled client must reply, and ε is reported only if all of that holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.npy import Arrays
from fedeas_flwr.config import RunConfig
from fedeas_flwr.strategies.fedavg import FedAvg
from fedeas_flwr.strategies.records import ARRAYS, BUFFERS, CONFIG, METRICS, encoded, to_in_process

WRAPPERS: dict[str, Callable[..., flower.Strategy]] = {
    "server-fixed": flower.DifferentialPrivacyServerSideFixedClipping,
    "server-adaptive": flower.DifferentialPrivacyServerSideAdaptiveClipping,
    "client-fixed": flower.DifferentialPrivacyClientSideFixedClipping,
    "client-adaptive": flower.DifferentialPrivacyClientSideAdaptiveClipping,
}
ASSUMES = (
    "one client's update present or zero, RDP over all rounds without amplification by sampling, trained parameters "
    "alone, a noise-key that nobody but the server reads"
)
"""Assumptions behind ε, as the summary of a run lists them."""

Handler = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Handler], Message]
MODS: dict[str, Mod] = {"client-fixed": fixedclipping_mod, "client-adaptive": adaptiveclipping_mod}

# ------------------------------------------------------------------------------------------------- server


def with_privacy(strategy: flower.Strategy, config: RunConfig) -> flower.Strategy:
    """Wrap a strategy in the wrapper that `dp` names; return it unchanged without `dp`.

    Raise `ConfigError` if the wrapper's noise would not cover this config.
    """
    if config.dp == "none":
        return strategy
    if config.min_replies < 1:
        raise ConfigError(
            f"min-replies = {config.min_replies:g}: must be 1 with dp = '{config.dp}', whose noise is for all clients"
        )
    sampled = config.num_sampled(config.clients)
    if config.dp in ("server-fixed", "client-fixed"):
        return WRAPPERS[config.dp](strategy, config.dp_noise_multiplier, config.dp_clipping_norm, sampled)
    count_noise = config.dp_count_noise or sampled / 20  # Andrew et al. 2021, as Flower's own default
    if config.dp_noise_multiplier >= 2 * count_noise:
        raise ConfigError(
            f"dp-noise-multiplier = {config.dp_noise_multiplier:g}: must be below {2 * count_noise:g}, twice the "
            f"dp-count-noise ({count_noise:g} for the {sampled} clients of a round), with dp = '{config.dp}'"
        )
    adaptive = WRAPPERS[config.dp](
        strategy,
        config.dp_noise_multiplier,
        sampled,
        config.dp_clipping_norm,
        config.dp_clip_quantile,
        config.dp_clip_rate,
        config.dp_count_noise or None,
    )
    # C ← C·exp(−η(b − γ)) is for b = the fraction of updates that were *not* clipped (Andrew et al. 2021, Algorithm 1).
    # Flower 1.41 counts the clipped ones, so its norm moves away from the quantile; the opposite sign corrects it.
    adaptive.clip_norm_lr = -config.dp_clip_rate  # type: ignore[attr-defined]
    return adaptive


def describe_noise(config: RunConfig, trainable: Arrays) -> str:
    """Return one line that compares the noise of `dp` with the updates; empty without noise.

    The mean of n updates has a norm of at most C, its noise one of σ·C·√d/n with d parameters. Over T rounds the
    updates move the model by at most T·C, if all have one direction, and the noise by √T times its norm in a round.
    Raise `ConfigError` if the noise moves a generator further than all updates together can.
    """
    if config.dp == "none" or config.dp_noise_multiplier == 0:
        return ""
    parameters, sampled = sum(array.size for array in trainable.values()), config.num_sampled(config.clients)
    ratio, longest = config.dp_noise_multiplier * math.sqrt(parameters) / sampled, math.sqrt(config.rounds)
    text = (
        f"the noise has {ratio:.3g} times the largest norm of a mean of {sampled} updates (σ√d/n with "
        f"d = {parameters:,} parameters), and over {config.rounds} rounds {ratio / longest:.3g} times that of all "
        "updates together"
    )
    if config.task == "generator" and ratio > 1.01 * longest:  # 1 %, because the bound below is rounded
        raise ConfigError(
            f"dp-noise-multiplier = {config.dp_noise_multiplier:g}: must be at most "
            f"{config.dp_noise_multiplier * longest / ratio:.3g} with task = 'generator': {text}"
        )
    return f"dp = '{config.dp}': {text}"


def gaussian_epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """Return ε of ``releases`` Gaussian mechanisms at δ.

    A Gaussian mechanism of multiplier σ is (α, α/(2σ²))-RDP, T of them compose to (α, αρ) with ρ = T/(2σ²), and that is
    (αρ + ln(1/δ)/(α−1), δ)-DP (Mironov 2017, Corollary 3, Propositions 1 and 3); the best α is 1 + √(ln(1/δ)/ρ).
    """
    rho = releases / (2 * noise_multiplier**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def privacy_spent(
    config: RunConfig, wrapper: flower.Strategy, releases: int, trainable: Arrays, buffers: Arrays
) -> dict[str, Any]:
    """Return ε after ``releases`` noisy models with δ and its assumptions, or no ε and the reason."""
    why = _no_epsilon(config, wrapper, trainable, buffers)
    if why:
        return {"epsilon": None, "why": why}
    clipping = "" if config.dp == "server-fixed" else ", clients that clip as they are told"
    epsilon = gaussian_epsilon(config.dp_noise_multiplier, releases, config.dp_delta)
    return {"epsilon": epsilon, "delta": config.dp_delta, "assumes": ASSUMES + clipping}


def _no_epsilon(config: RunConfig, wrapper: Any, trainable: Arrays, buffers: Arrays) -> str:
    if config.dp_noise_multiplier == 0:
        return "dp-noise-multiplier = 0 adds no noise"
    if config.dp in ("server-adaptive", "client-adaptive"):
        return "Flower scales the noise by the next round's clipping norm, not by the one that updates were clipped to"
    if type(wrapper.strategy).aggregate_train is not FedAvg.aggregate_train:
        return f"strategy = '{config.strategy}' does not take the mean of equal weights that the noise is for"
    if buffers:
        return f"the model's buffers, such as {next(iter(buffers))}, are averaged without noise"
    scalars = [key for key, array in trainable.items() if len(array.shape) == 0]
    return f"Flower does not clip scalars such as {scalars[0]}" if scalars else ""


# ------------------------------------------------------------------------------------------------- client


def clips_update(train: Handler) -> Handler:
    """Clip the update in the reply of ``train`` if `dp` is client-side; the message carries the norm."""

    @wraps(train)
    def wrapped(message: Message, context: Context) -> Message:
        mod = MODS.get(str(context.run_config.get("dp", "none")))
        return train(message, context) if mod is None else _clipped(mod, train, message, context)

    return wrapped


def _clipped(mod: Mod, train: Handler, message: Message, context: Context) -> Message:
    """Run ``train`` inside Flower's mod, which must see the arrays and metrics only; return the clipped reply."""
    whole = message.content
    sent, buffers = whole.array_records[ARRAYS], []

    def train_hiding_buffers(message: Message, context: Context) -> Message:
        message.content = whole
        reply = train(message, context)
        if reply.has_content():
            records = reply.content.array_records
            buffers.append(records[BUFFERS])
            arrays, metrics = encoded(records[ARRAYS]), reply.content.metric_records[METRICS]
            reply.content = RecordDict({ARRAYS: arrays, METRICS: metrics})
        return reply

    message.content = RecordDict({ARRAYS: encoded(sent), CONFIG: whole.config_records[CONFIG]})
    reply = mod(message, context, train_hiding_buffers)
    if reply.has_content():
        clipped = to_in_process(reply.content.array_records[ARRAYS], sent)
        metrics = reply.content.metric_records[METRICS]
        reply.content = RecordDict({ARRAYS: clipped, BUFFERS: buffers[0], METRICS: metrics})
    return reply
