"""Metrics of a run's rounds: last-20 mean, peak, rounds to a threshold, drops, gaps, median Γ̂, efficiency η."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedeas_flwr.common.text import MAX_NAMED, counted, numbered
from fedeas_flwr.config import RunConfig

WALL_CLOCK = ("clients", "aggregate", "end_wait")
"""Phases that run one after the other on the server; their sum is the wall-clock time of the rounds.

``end_wait`` is the time a round was blocked by end-of-round work: by the previous round's (Γ̂, evaluation, record,
checkpoint) if it was still running when this round's clients had finished, and by its own Γ̂ and evaluation when they do
not run in the background.
"""
STARTUP = "startup"
"""Phase before the first round of each start of a run, from the launch on. Older versions did not record it."""
BACKGROUND_PHASES = ("gamma_hat", "evaluate")
"""Γ̂ and evaluation, mostly in the background of the next round: do not add them to the other phases."""
UNSAVED, LOST = "unsaved_state", "lost_state"
"""Keys of a round's record: the attributes of a user's strategy that have changed and that a resume does not restore,
and, in the first round after a resume, those that it did not restore."""


def last_20(accuracies: Sequence[float]) -> float:
    """Return the mean accuracy of the last min(20, T) rounds, the paper's main metric."""
    return float(np.mean(accuracies[-20:]))


def score_name(lengths: Iterable[int]) -> str:
    """Return the name of `last_20` for runs of these numbers of rounds; with at most 20, it is the mean of them all."""
    return " or ".join(dict.fromkeys("last-20" if rounds > 20 else "mean of all rounds" for rounds in lengths))


def rounds_to_threshold(accuracies: Sequence[float], threshold: float) -> int | None:
    """Return the first round (from 1) that reaches the threshold, or ``None``."""
    return next((i for i, a in enumerate(accuracies, start=1) if a >= threshold), None)


def accuracy_drops(accuracies: Sequence[float]) -> dict[int, float]:
    """Return the rounds after the tenth that are over 0.05 below the median of the 13 around them, and by how much."""
    medians = (np.median(accuracies[max(0, i - 6) : i + 7]) for i in range(len(accuracies)))
    depths = {i: float(m) - a for i, (m, a) in enumerate(zip(medians, accuracies, strict=True), start=1)}
    return {number: depth for number, depth in depths.items() if number > 10 and depth > 0.05}


# Sec. 4.3 and Supp. F of the paper: η = Δ accuracy · 10³ / images generated.
def efficiency(gain: float, images: float) -> float | None:
    """Return η, points over the same strategy without generation per 1,000 images; ``None`` without images."""
    return 1000 * gain / images if images else None


def images_not_made(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return each limited client and how many images of its plan it did not make, as of the client's last round."""
    found: dict[int, dict[str, int]] = {}
    for record in rounds:
        limited = {item["client"]: item for item in record.get("not_made", [])}
        found = {client: item for client, item in found.items() if client not in record["clients"]} | limited
    return [found[client] for client in sorted(found)]


def took_no_steps(record: Mapping[str, Any]) -> bool:
    """Return whether clients replied in a classifier's round, but none took a training step; see `round_warnings`."""
    return record.get("steps") == 0 and "accuracy" in record and bool(record["clients"])


def round_warnings(record: Mapping[str, Any], config: RunConfig) -> dict[str, str]:
    """Return the warnings about a round, by kind; a run shows the first of each kind."""
    found, start = {}, f"round {record['round']}: "
    if took_no_steps(record):
        found["steps"] = (
            f"{start}no client took a training step: all that replied have fewer images than min-batch = "
            f"{config.min_batch}"
        )
    if changed := record.get(UNSAVED):
        found[UNSAVED] = (
            f"{start}strategy = {config.strategy!r} changed {', '.join(changed)}, which a resume does not restore: "
            "implement state() and load_state()"
        )
    if lost := record.get(LOST):
        found[LOST] = f"{start}resumed without {', '.join(lost)} of strategy = {config.strategy!r}"
    return found


def describe_gaps(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return in one line which clients are missing in which rounds, those missing most often first; or nothing."""
    missing: dict[int, list[int]] = {}
    for record in rounds:
        for client in {failure["client"] for failure in record["failures"]}:
            missing.setdefault(client, []).append(record["round"])
    parts = []
    if missing:
        often = sorted(missing, key=lambda client: (-len(missing[client]), client))
        where = [f"client {client} in {numbered('round', missing[client])}" for client in often[:MAX_NAMED]]
        where += [counted(len(often) - MAX_NAMED, "more client")] if len(often) > MAX_NAMED else []
        replies = counted(sum(len(record["failures"]) for record in rounds), "reply", "replies")
        affected = sum(bool(record["failures"]) for record in rounds)
        parts.append(f"{replies} missing in {affected} of {counted(len(rounds), 'round')} ({'; '.join(where)})")
    if not_joined := {record["round"]: record["not_joined"] for record in rounds if record.get("not_joined")}:
        clients = counted(max(not_joined.values()), "client")
        parts.append(f"{clients} not joined in {numbered('round', list(not_joined))}")
    return "; ".join(parts)


def summarise(rounds: Sequence[Mapping[str, Any]], threshold: float) -> dict[str, Any]:
    """Return the summary of a run's round records."""
    scores = _accuracy_scores(rounds, threshold) if "accuracy" in rounds[-1] else _loss_scores(rounds)
    dissimilarities = [r["gamma_hat"] for r in rounds if r.get("gamma_hat") is not None]
    phases = sorted({phase for r in rounds for phase in r["seconds"]})
    not_made, gaps = images_not_made(rounds), describe_gaps(rounds)
    return {
        "rounds": len(rounds),
        **scores,
        "total_generated": int(rounds[-1]["generated"]),
        **({"not_made": not_made} if not_made else {}),
        "gamma_hat": float(np.median(dissimilarities)) if dissimilarities else None,
        "failures": sum(len(r["failures"]) for r in rounds),
        **({"gaps": gaps} if gaps else {}),
        "seconds": {phase: round(sum(r["seconds"].get(phase, 0.0) for r in rounds), 3) for phase in phases},
    }


def _accuracy_scores(rounds: Sequence[Mapping[str, Any]], threshold: float) -> dict[str, Any]:
    accuracies = [float(r["accuracy"]) for r in rounds]
    return {
        "last_20": last_20(accuracies),
        "peak": max(accuracies),
        "peak_round": int(np.argmax(accuracies)) + 1,
        "final": accuracies[-1],
        "threshold": threshold,
        "rounds_to_threshold": rounds_to_threshold(accuracies, threshold),
    }


def _loss_scores(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last and the lowest loss; None before the first evaluation (`evaluate-every`)."""
    losses = [(float(r["loss"]), int(r["round"])) for r in rounds if r["loss"] is not None]
    best, number = min(losses, default=(None, None))
    return {"final_loss": losses[-1][0] if losses else None, "best_loss": best, "best_loss_round": number}


def describe_result(summary: Mapping[str, Any]) -> str:
    """Return a run's final and best score, and for a classifier its number of images, in one line."""
    rounds, images = counted(summary["rounds"], "round"), counted(summary["total_generated"], "image")
    if "final_loss" in summary and summary["final_loss"] is None:
        return f"not evaluated after {rounds}"
    if "final_loss" in summary:
        best = f"best {summary['best_loss']:.5f} in round {summary['best_loss_round']}"
        return f"held-out loss {summary['final_loss']:.5f} after {rounds} ({best})"
    peak = f"peak {100 * summary['peak']:.1f} % in round {summary['peak_round']}"
    return f"accuracy {100 * summary['final']:.1f} % after {rounds} ({peak}), {images} generated"
