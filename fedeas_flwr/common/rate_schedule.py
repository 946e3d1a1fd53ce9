"""The learning rate over the rounds of a run: `learning-rate-schedule = "cosine"`, `"step 0.1 100 150"` and others."""

from __future__ import annotations

import math

CONSTANT = "constant"
_ALLOWED = "constant, cosine, 'exponential FACTOR', or 'step FACTOR ROUND …' with ascending rounds; 0 < FACTOR ≤ 1"


def rate_factor(schedule: str, round_number: int, rounds: int) -> float:
    """Return the factor of the learning rate in a round, from 1 to ``rounds``; round 1 has the factor 1.

    The factors are those of torch's CosineAnnealingLR, ExponentialLR and MultiStepLR. If the schedule has another form,
    `ValueError` says which are allowed.
    """
    name, factor, steps = _parse(schedule)
    done = round_number - 1
    if name == "cosine":
        return (1 + math.cos(math.pi * done / rounds)) / 2
    return factor ** (done if name == "exponential" else sum(step <= done for step in steps))


def _parse(schedule: str) -> tuple[str, float, list[int]]:
    """Return name, factor and rounds of a schedule."""
    try:
        name, *numbers = schedule.split()
        factor, steps = float((numbers or ["1"])[0]), [int(number) for number in numbers[1:]]
    except ValueError:
        raise ValueError(f"must be {_ALLOWED}") from None
    fits = {
        CONSTANT: not numbers,
        "cosine": not numbers,
        "exponential": len(numbers) == 1,
        "step": bool(steps) and steps == sorted({step for step in steps if step > 0}),
    }
    if not (fits.get(name) and 0 < factor <= 1):
        raise ValueError(f"must be {_ALLOWED}")
    return name, factor, steps
