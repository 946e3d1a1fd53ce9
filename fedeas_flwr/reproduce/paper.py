"""The numbers that the paper printed. Accuracies are in %."""

from __future__ import annotations

COLUMNS = (
    "c10-k20-a0.05",
    "c10-k20-a0.1",
    "c10-k20-a0.3",
    "c100-k20-a0.1",
    "c10-k100-a0.05",
    "c10-k100-a0.1",
    "c10-k100-a0.3",
    "c100-k100-a0.1",
)
"""Columns of the paper's two large tables, in its order: dataset, clients K, Dirichlet α."""

Row = tuple[float | None, ...]

# Table 1 (main text): mean of rounds 181–200; None where the paper has a dash
LAST_20: dict[str, Row] = {
    "fedavg": (39.16, 55.52, 67.47, 42.83, 43.41, 50.18, 65.11, 41.11),
    "fedprox": (39.16, 56.40, 67.53, 42.46, 43.44, 50.63, 64.65, 41.04),
    "scaffold": (38.39, 60.16, 75.28, 45.92, 30.16, 51.04, 67.32, 43.48),
    "moon": (37.08, 58.05, 69.24, 41.79, 36.75, 43.08, 60.09, 38.83),
    "fedgen": (32.53, 52.07, 67.84, 37.87, 39.06, 47.49, 65.00, 38.38),
    "fedmix": (35.81, 52.42, 67.59, 40.95, 36.05, 50.16, 48.00, 40.28),
    "uniform": (54.97, 64.43, 71.27, 45.97, 51.59, 58.81, 67.56, 43.72),
    "missing-only": (66.58, 70.16, 73.50, 51.69, 65.37, 70.18, 71.87, 51.71),
    "full-balance": (None, 79.91, None, 59.12, None, 79.33, None, 57.47),
    "fedeas": (68.25, 71.65, 73.08, 51.13, 70.41, 72.55, 72.83, 52.04),
}

# Supplement, E: best of 200 rounds
PEAK: dict[str, Row] = {
    "fedavg": (44.92, 61.11, 68.93, 43.44, 50.81, 56.08, 67.51, 41.76),
    "fedprox": (44.99, 60.67, 68.80, 42.91, 50.73, 56.35, 66.82, 41.58),
    "scaffold": (41.25, 64.04, 75.76, 46.32, 36.13, 54.19, 68.02, 44.02),
    "moon": (45.51, 61.84, 71.09, 42.31, 44.35, 50.36, 63.10, 39.44),
    "fedgen": (39.54, 60.24, 70.55, 38.69, 47.69, 53.99, 68.47, 38.94),
    "fedmix": (40.71, 59.38, 68.97, 41.55, 41.73, 55.67, 61.21, 40.88),
    "uniform": (59.67, 66.40, 73.06, 46.47, 62.21, 62.91, 68.86, 44.21),
    "missing-only": (69.00, 72.00, 74.43, 52.61, 70.11, 71.46, 72.70, 52.14),
    "full-balance": (None, 80.28, None, 59.39, None, 79.79, None, 57.75),
    "fedeas": (70.25, 72.74, 73.66, 51.44, 73.25, 73.71, 73.33, 52.56),
}

# Generated images
_IMAGES: dict[str, tuple[int | None, ...]] = {
    **dict.fromkeys(LAST_20, (0,) * len(COLUMNS)),
    **dict.fromkeys(
        ("fedeas", "uniform", "missing-only"), (18_080, 13_437, 5_675, 29_639, 36_697, 33_650, 15_666, 74_005)
    ),
    "full-balance": (None, 226_783, None, 612_492, None, 246_394, None, 826_762),
}

# Supplement, F, on c10-k20-a0.1: method → last-20, images, gain over FedAvg, η
BETA_SWEEP: dict[str, tuple[float, int, float | None, float | None]] = {
    "fedavg": (55.52, 0, None, None),
    "fedeas-b4": (66.11, 4_113, 10.59, 2.575),
    "fedeas-b8": (70.86, 8_673, 15.34, 1.769),
    "fedeas": (71.65, 13_437, 16.13, 1.200),
    "fedeas-b16": (72.59, 18_435, 17.07, 0.926),
    "fedeas-b20": (74.05, 23_514, 18.53, 0.788),
    "uniform-b4": (60.81, 4_113, 5.29, 1.286),
    "uniform-b8": (63.42, 8_673, 7.90, 0.911),
    "uniform": (64.43, 13_437, 8.91, 0.663),
    "uniform-b16": (65.61, 18_435, 10.09, 0.547),
    "uniform-b20": (66.46, 23_514, 10.94, 0.465),
    "full-balance": (79.91, 226_783, 24.39, 0.108),
}

# Table 2 (main text), on c10-k20-a0.1: method → images, last-20
ABLATION: dict[str, tuple[int, float]] = {
    "fedeas-b8": (8_673, 70.86),
    "without-entropy": (10_337, 70.34),
    "linear": (10_198, 70.33),
}

# Supplement, A, on c10-k20-a0.1: median Γ̂ of 200 rounds, and how much less than FedAvg's in %
GAMMA_HAT: dict[str, tuple[float, float | None]] = {
    "fedavg": (1.42e-4, None),
    "uniform": (2.15e-5, 84.9),
    "fedeas": (1.95e-5, 86.3),
    "full-balance": (1.14e-6, 99.2),
}

# Fig. 4: the first round that reaches 70 %
ROUNDS_TO_70: dict[str, dict[str, int]] = {
    "c10-k20-a0.1": {"fedeas": 30, "missing-only": 60},
    "c10-k100-a0.1": {"fedeas": 59, "missing-only": 100},
}

# Supplement, D, on CIFAR-10 with α = 0.3. The paper gives it next to two peaks of the K = 20 column, so
# it is a peak too.
FEDEAS_AND_SCAFFOLD = "c10-k20-a0.3/fedeas+scaffold"
FEDEAS_AND_SCAFFOLD_PEAK = 78.18

# Section 4.2, on c10-k20-a0.1: FedEAS's lead over Uniform in peak accuracy, in points, by generator
PEAK_LEAD = {"ddpm": 6.34, "sd-turbo": 2.46}

# Section 2.2, on c10-k20-a0.1: Uniform's samples at pairs where the gain is negative
NEGATIVE_GAIN = 1_679

# Section 4.3, on c10-k20-a0.1, one RTX 4090: seconds from start to end
RUN_SECONDS = {"fedeas": 3 * 3600 + 7 * 60, "full-balance": 11 * 3600 + 36 * 60}


def at(rows: dict[str, Row], method: str, column: str) -> float | None:
    """Return one number of a large table, None where the paper has none."""
    return rows[method][COLUMNS.index(column)] if method in rows and column in COLUMNS else None


def images(method: str, column: str) -> int | None:
    """Return the total of images that the paper's run of a method generated, None where the paper does not say."""
    if column == "c10-k20-a0.1":
        known = {name: row[1] for name, row in BETA_SWEEP.items()} | {name: row[0] for name, row in ABLATION.items()}
        if method in known:
            return known[method]
    return _IMAGES[method][COLUMNS.index(column)] if method in _IMAGES else None
