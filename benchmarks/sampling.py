"""Measure how close a sampler's images are to those of many more steps from the same noise.

    python benchmarks/sampling.py --generator generators/cifar10 --out results/sampling/cifar10-cpu.json

For given noise the exact solution is unique; 150 steps with uniform log-SNR spacing stand for it. Needs only the
generator. Takes a quarter of an hour on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from run_records import markdown, write_record

from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.opening import open_generator

EXACT = ("dpm++-logsnr", 150)
TRIED = (("dpm++", 20), ("dpm++-logsnr", 20), ("dpm++-logsnr", 10), ("dpm++", 100))


def fine_power(images: NDArray[np.float64]) -> float:
    """Return the mean power of the grey images above half of the highest frequency."""
    grey = images.mean(axis=-1)
    frequency = np.fft.fftfreq(grey.shape[1])
    power = np.abs(np.fft.fft2(grey - grey.mean(axis=(1, 2), keepdims=True))) ** 2
    return float(power[:, np.hypot(frequency[:, None], frequency) > 0.25].mean())


def main() -> None:
    """Sample the same noise with each sampler, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", required=True)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    def solved(sampler: str, steps: int) -> NDArray[np.float64]:
        generator = open_generator(
            options.generator,
            options.dataset,
            sampler=sampler,
            steps=steps,
            batch_size=min(options.images, 64),
            device=options.device,
        )
        samples = [SampleId(0, 0, i % generator.num_classes, i // generator.num_classes) for i in range(options.images)]
        return generator.sample(samples).astype(np.float64)

    exact = solved(*EXACT)
    rows: list[dict[str, Any]] = []
    for sampler, steps in TRIED:
        found = solved(sampler, steps)
        rows.append(
            {
                "sampler": sampler,
                "steps": steps,
                "rms_grey_levels": float(np.sqrt(((found - exact) ** 2).mean())),
                "contrast": float(found.std() / exact.std()),
                "fine_power": fine_power(found) / fine_power(exact),
            }
        )
        print(rows[-1], flush=True)
    write_record(options.out, options.device, {"images": options.images, "exact": EXACT}, rows)
    shown = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    print(markdown(list(rows[0]), shown))


if __name__ == "__main__":
    main()
