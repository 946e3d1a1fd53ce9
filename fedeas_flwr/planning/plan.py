"""The plan of a policy for given label counts, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedeas_flwr import allocation
from fedeas_flwr.allocation import IntArray, checked_counts
from fedeas_flwr.common.text import counted, shortened
from fedeas_flwr.policies.adaptive import Adaptive
from fedeas_flwr.policies.interface import ClientView, PolicySettings
from fedeas_flwr.policies.own import check_policy, find_policy
from fedeas_flwr.policies.registry import POLICIES, REFERENCES, allocate, checked_plan, settings_of

MAX_CLASSES_SHOWN = 20
MAX_HEAD_LENGTH = 16
MAX_NAME_LENGTH = 40


def plan(
    counts: npt.ArrayLike,
    *,
    dataset: str | None,
    protocol: str | None,
    policy: str,
    beta: float,
    gamma: float,
    seed: int | None,
    strict_mean: bool = True,
    total: int | None = None,
    clients: Sequence[str] = (),
    policy_args: str = "",
    rounds: int | None = None,
) -> dict[str, Any]:
    """Return what every client would generate under a policy, and the imbalance before and after, ready for JSON.

    ``dataset``, ``protocol`` and ``seed`` name the origin of the counts, None for a file; ``clients`` are the clients'
    names, if they have any; ``policy_args`` are the arguments of a policy given by its import path; ``rounds`` is the
    length of the run, None for one that reaches all parts of the plan; the other arguments are those of
    `policies.registry.allocate`. In the plan, ``beta`` and ``gamma`` are None if nothing depends on them (see
    `settings_of`), a client's ``budget`` if the policy has no budgets; ``imbalance.removed`` and ``synthetic_fraction``
    are fractions. A policy that repeats images generates nothing; its clients also have ``repeat``, the number of
    copies per class, and the plan has their sum, ``repeated``. Under a policy that plans in parts, ``parts`` has the
    number of images of each. Under an adaptive one the plan is the first part, and the clients also have ``at_most``,
    the largest number of images that each can have after the last one.
    """
    counts, rule = checked_counts(counts), None if policy in REFERENCES else find_policy(policy, policy_args)
    view = ClientView(counts, PolicySettings(beta, gamma, strict_mean, total))
    if rule and policy not in POLICIES:
        check_policy(rule, counts, view.settings)
    settings = settings_of(rule or policy, total is not None)
    keys: dict[str, Any] = {"beta": beta, "gamma": gamma, "strict_mean": strict_mean, "total": total}
    begins = [first for first in (rule.parts if rule else (1,)) if rounds is None or first <= rounds]
    wholes = [int(allocate(counts, rule or policy, **keys, round=first).sum()) for first in begins]
    steps = np.diff([0, *wholes]).tolist()
    parts = [{"round": first, "images": images} for first, images in zip(begins, steps, strict=True)]
    adapts = isinstance(rule, Adaptive) and len(parts) > 1
    generate = allocate(counts, rule or policy, **keys, round=1 if adapts else rounds)
    repeats = rule is not None and rule.repeats
    repeat = checked_plan(rule, view) if rule and repeats else allocation.none(counts)
    budgets = rule.budget(view) if rule else None
    samples, entropy = counts.sum(axis=1).tolist(), allocation.normalised_entropy(counts).tolist()
    real, made, later = int(counts.sum()), int(generate.sum()), wholes[-1] - wholes[0]
    full = allocation.full_balance(counts)
    at_most = generate.sum(axis=1) + np.minimum(later, np.maximum(0, full - generate).sum(axis=1))
    return {
        "dataset": dataset,
        "protocol": protocol,
        "policy": policy,
        "beta": beta if "beta" in settings else None,
        "gamma": gamma if "gamma" in settings else None,
        "seed": seed,
        "clients": [
            {
                "client": k,
                **({"name": clients[k]} if clients else {}),
                "samples": samples[k],
                "entropy": entropy[k],
                "budget": None if budgets is None else int(budgets[k]),
                "generate": row,
                **({"repeat": repeat[k].tolist()} if repeats else {}),
                **({"at_most": int(at_most[k])} if adapts else {}),
            }
            for k, row in enumerate(generate.tolist())
        ],
        "total": made,
        **({"parts": parts} if len(parts) > 1 else {}),
        "full_balance_total": int(full.sum()),
        "imbalance": {
            "before": allocation.imbalance(counts).score,
            "after": allocation.imbalance(counts, generate + repeat).score,
            "removed": allocation.removed(counts, generate + repeat),
        },
        "synthetic_fraction": made / (real + made) if real + made > 0 else 0.0,
        **({"repeated": int(repeat.sum())} if repeats else {}),
    }


def format_table(plan: dict[str, Any], names: Sequence[str] = ()) -> str:
    """Return a plan as plain text: one line per client, then the totals.

    Up to twenty classes have a column each, under their names if given; of more classes, only the number that get
    samples and the range of samples are shown.
    """
    classes = len(plan["clients"][0]["generate"])
    heads = [_head(name) for name in names or map(str, range(classes))]
    one_by_one = [heads, *([f"{n:,}" if n else "." for n in row] for row in _added(plan))]
    shown = one_by_one if classes <= MAX_CLASSES_SHOWN else _summarised(plan)
    header = ["client", "samples", "entropy", "budget", "repeat" if "repeated" in plan else "generate", *shown[0]]
    rows = [
        [
            shortened(client.get("name", ""), MAX_NAME_LENGTH) or str(client["client"]),
            f"{client['samples']:,}",
            f"{client['entropy']:.3f}",
            "-" if client["budget"] is None else f"{client['budget']:,}",
            f"{sum(added):,}",
            *more,
        ]
        for client, added, more in zip(plan["clients"], _added(plan), shown[1:], strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    return "\n".join([_title(plan), "", table[0], "-" * len(table[0]), *table[1:], "", *_totals(plan)])


def generated(plan: dict[str, Any]) -> IntArray:
    """Return a plan's images to generate, [K, C]."""
    return np.array([client["generate"] for client in plan["clients"]], dtype=np.int64)


def _added(plan: dict[str, Any]) -> list[list[int]]:
    """Return the samples that each client gets per class, generated or repeated."""
    return [client.get("repeat", client["generate"]) for client in plan["clients"]]


def _head(name: str) -> str:
    """Return a class's column title: a number gets a prefix, since it looks like a count, and a long name is cut."""
    return shortened(f"c{name}" if name.isdecimal() else name, MAX_HEAD_LENGTH)


def _summarised(plan: dict[str, Any]) -> list[list[str]]:
    rows = [[n for n in row if n] for row in _added(plan)]
    return [["classes", "each"]] + [[str(len(row)), _range(row)] for row in rows]


def _range(numbers: list[int]) -> str:
    if not numbers:
        return "."
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,}-{most:,}"


def _title(plan: dict[str, Any]) -> str:
    source = "given counts"
    if plan["dataset"] is not None:
        source = f"{plan['dataset']}, protocol {plan['protocol']}, partition-seed {plan['seed']}"
    set_to = ", ".join(f"{name} {plan[name]:g}" for name in ("beta", "gamma") if plan[name] is not None)
    return f"Policy {plan['policy']}{f' ({set_to})' if set_to else ''} on {source}"


def _totals(plan: dict[str, Any]) -> list[str]:
    score, full = plan["imbalance"], plan["full_balance_total"]
    part = f"; the plan is {plan['total'] / full:.1%} of it" if full else ""
    repeat = "To repeat:    {:,} of the clients' own samples; classes that a client lacks stay empty"
    parts = [f"{part['images']:,} before round {part['round']}" for part in plan.get("parts", [])]
    whole = sum(part["images"] for part in plan.get("parts", []))
    chosen = f"; {whole:,} in total. This plan is the first part; clients choose the classes of the others in the run"
    shared = "Shared:       {:,} images are generated for all clients together (shared-images)"
    return [
        *([repeat.format(plan["repeated"])] if "repeated" in plan else []),
        f"To generate:  {counted(plan['total'], 'sample')}, {plan['synthetic_fraction']:.1%} of the training data",
        *([f"In parts:     {', '.join(parts)}{chosen if 'at_most' in plan['clients'][0] else ''}"] if parts else []),
        *([shared.format(plan["shared_total"])] if "shared_total" in plan else []),
        f"Full balance: {counted(full, 'sample')}{part}",
        f"Imbalance:    {score['before']:.4f} -> {score['after']:.4f}, {score['removed']:.1%} removed",
    ]
