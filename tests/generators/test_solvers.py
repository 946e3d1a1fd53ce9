"""Solvers against a distribution whose denoiser and whose exact solution are known in closed form."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedeas_flwr.generators.diffusion.denoising import make_solver

ROOT = Path(__file__).parents[2]
COSINE = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction", "num_train_timesteps": 1000}
LINEAR = {"beta_schedule": "linear", "prediction_type": "epsilon", "num_train_timesteps": 1000}


def kept(sampler: str, steps: int, spread: float, schedule: dict[str, Any] = COSINE) -> float:
    """Return the fraction of contrast kept: for images N(0, spread²), the exact solution maps noise 1 to `spread`."""
    solver = make_solver(sampler, schedule, steps)
    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for time in solver.timesteps:
        power = float(solver.alphas_cumprod[int(time)])
        signal, noise = math.sqrt(power), math.sqrt(1 - power)
        image = signal * spread**2 / (power * spread**2 + 1 - power) * x
        epsilon = (x - signal * image) / noise
        given = signal * epsilon - noise * image if schedule["prediction_type"] == "v_prediction" else epsilon
        x = solver.step(given, time, x).prev_sample
    return float(x) / spread


@pytest.mark.parametrize(("spread", "lost"), [(0.05, 0.45), (0.1, 0.2), (0.2, 0.05), (5.0, 0.08)])
def test_uniform_log_snr_keeps_contrast_uniform_time_loses(spread: float, lost: float) -> None:
    assert kept("dpm++", 20, spread) < 1 - lost
    assert abs(kept("dpm++-logsnr", 20, spread) - 1) < 0.02


@pytest.mark.parametrize(("sampler", "near"), [("dpm++", 0.001), ("dpm++-logsnr", 0.001), ("ddim", 0.015)])
@pytest.mark.parametrize("schedule", [COSINE, LINEAR])
def test_every_solver_converges_to_the_exact_solution(sampler: str, near: float, schedule: dict[str, Any]) -> None:
    errors = [abs(kept(sampler, steps, 0.5, schedule) - 1) for steps in (10, 50, 250)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < near


@pytest.mark.parametrize("schedule", [COSINE, LINEAR])
@pytest.mark.parametrize("steps", [1, 2, 20, 250, 900])
def test_uniform_log_snr_timesteps_are_strictly_decreasing(steps: int, schedule: dict[str, Any]) -> None:
    solver, usual = (make_solver(sampler, schedule, steps) for sampler in ("dpm++-logsnr", "dpm++"))
    times = solver.timesteps.numpy()
    assert len(times) == steps and times[0] == usual.timesteps[0] and (np.diff(times) < 0).all()
    assert steps == 1 or times[-1] == 0
    if steps == 20:
        gaps = np.diff(solver.lambda_t.numpy()[times])
        assert gaps.max() < 1.5 * gaps.min()


def test_page_kept_contrast_matches_computation() -> None:
    page = (ROOT / "results" / "sampling" / "README.md").read_text()
    (head,) = (line for line in page.splitlines() if line.startswith("| Contrast of the images |"))
    spreads = [float(cell) for cell in head.split("|")[2:-1]]
    for sampler, steps in (("dpm++", 20), ("dpm++-logsnr", 20), ("dpm++", 100)):
        cells = " | ".join(f"{100 * kept(sampler, steps, spread):.0f} %" for spread in spreads)
        assert f"| `{sampler}`, {steps} steps | {cells} |" in page


def test_page_solver_errors_match_record() -> None:
    page = " ".join((ROOT / "results" / "sampling" / "README.md").read_text().split())
    record = json.loads((ROOT / "results" / "sampling" / "cifar10-cpu.json").read_text())
    rows = {(row["sampler"], row["steps"]): row for row in record["rows"]}
    for name, form in (("rms_grey_levels", "{:.1f}"), ("contrast", "{:.2f}"), ("fine_power", "{:.2f}")):
        shown = [form.format(rows[at][name]) for at in (("dpm++", 20), ("dpm++-logsnr", 20), ("dpm++", 100))]
        assert ", ".join(shown[:2]) + f" and {shown[2]}" in page, shown
    half = rows["dpm++-logsnr", 10]["rms_grey_levels"]
    assert half < rows["dpm++", 20]["rms_grey_levels"]
    assert f"with 10 steps it has {half:.1f}." in page


def test_page_distances_by_step_spacing_match_records() -> None:
    page = " ".join((ROOT / "results" / "sampling" / "README.md").read_text().split())
    distances = []
    for place in ("cifar100/g1-n20{}/report", "cifar10/g1-n20{}/report", "digits/report{}"):
        ends = ("-logsnr", "") if "digits" in place else ("-dpm++-logsnr", "")
        texts = [(ROOT / "results" / f"quality-{place.format(end)}.json").read_text() for end in ends]
        reports = [json.loads(text) for text in texts]
        assert reports[0]["sampler"] == "dpm++-logsnr" and reports[0]["sampler-steps"] == 20
        assert reports[1].get("sampler", "dpm++") == "dpm++"
        assert reports[0]["samples"] == reports[1]["samples"]
        distances += [report["classifier_frechet_distance"] for report in reports]
    text = "have a distance of {:.1f}, 20 uniform timesteps {:.1f}; on CIFAR-10's {:.1f} and"
    assert f"{text} {{:.1f}}, on digits {{:.1f}} and {{:.1f}}.".format(*distances) in page
