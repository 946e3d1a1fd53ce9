"""Record what a change of structure must not change: the final weights of small runs, bit for bit.

    python benchmarks/weight_digests.py --check tests/weight_digests.json

Each case is an inline run on digits in one torch thread: every strategy with and without FedEAS, every policy, and each
value of the keys that decide what a client trains on. Its record is the SHA-256 of the final model and the accuracy of
each round. Their images come from a generator that is trained for ten steps; the case builtin trains the built-in one,
a minute and more on two slow cores. The generators' weights are cases too, and so are the names of what is in the
cache, which are hashes. All goes through the command line alone, so that any commit can be checked.

Bits hold for one architecture and one set of wheels, which the file names; elsewhere --check exits with code 3. Record
anew there, from the commit that the file names:

    git worktree add ../before COMMIT
    python benchmarks/weight_digests.py --repo ../before --record digests.json
    python benchmarks/weight_digests.py --check digests.json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

RECORDED_ELSEWHERE = 3
"""The exit code of --check where the file's bits do not hold."""
BASE: dict[str, Any] = {
    "backend": "inline",
    "device": "cpu",
    "clients": 8,
    "participation": 0.75,
    "rounds": 2,
    "local-epochs": 1,
    "beta": 4.0,
    "sampler-steps": 2,
    "generation-batch": 16,
    "dp-noise-multiplier": 0.2,  # adaptive clipping allows no more with so few clients
}
_ATTACKED = {"participation": 1.0, "malicious-clients": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {},
    "scaffold": {},
    "moon": {},
    "fedavgm": {},
    "fedadam": {},
    "fedadagrad": {},
    "fedyogi": {},
    "fedmedian": {},
    "fedtrimmedavg": {},
    "krum": _ATTACKED,
    "multikrum": _ATTACKED,
    "bulyan": _ATTACKED,
    "qfedavg": {},
    "fedmix": {"disclose-mean-images": "true"},
    "fedgen": {"disclose-label-counts": "true"},
}
"""Every strategy, and the keys that it needs."""
POLICIES = ("uniform", "missing-only", "full-balance", "waterfill", "without-entropy", "linear", "oversample")
"""Every policy of runs but none and fedeas, which go with each strategy."""
PLAIN: dict[str, tuple[str, ...]] = {
    "loss": ("class-weighted", "logit-adjusted"),
    "views": ("flip-crop",),
    "dp": ("server-fixed", "server-adaptive", "client-fixed", "client-adaptive"),
}
"""Values of keys that go with FedAvg and no images; their defaults are the case fedavg-none."""
GENERATED: dict[str, tuple[Any, ...]] = {
    "shared-images": ("by-class", "one-seed"),
    "sampler": ("dpm++-logsnr", "ddim"),
    "guidance": (2.0,),
}
"""Values of keys that go with FedAvg and FedEAS; their defaults are the case fedavg-fedeas."""


def cases(bank: Path) -> dict[str, dict[str, Any]]:
    """Return the run-config of each case by its name, ``BASE`` left out."""
    found: dict[str, dict[str, Any]] = {}
    for name, keys in STRATEGIES.items():
        found |= {f"{name}-{policy}": {"strategy": name, "policy": policy, **keys} for policy in ("none", "fedeas")}
    found |= {f"policy-{name}": {"policy": name} for name in POLICIES}
    found["policy-full-balance"]["alpha"] = 10.0  # with the default of 0.1 it generates 6,122 images
    for policy, choices in (("none", PLAIN), ("fedeas", GENERATED)):
        for key, values in choices.items():
            found |= {f"{key}-{value}": {"policy": policy, key: value} for value in values}
    for name in ("moon", "scaffold"):  # clients that come back have states of their own
        found[f"{name}-3-rounds"] = {"strategy": name, "policy": "fedeas", "rounds": 3, "participation": 0.5}
    found["evaluation-federated"] = {"policy": "none", "protocol": "paper", "evaluation": "federated"}
    found["bank"] = {"policy": "fedeas", "generator": f"bank:{bank}"}
    found["builtin"] = {"policy": "fedeas", "generator": "builtin"}
    return found


def run_case(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one case; return its digest and accuracies, or how it failed."""
    folder.mkdir(parents=True)
    if "dp" in keys:
        (folder / "noise-key").write_text("0f" * 32)  # else a secret of each run's own
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            fedeas("run", os.devnull, *(f"{key}={value}" for key, value in {**keys, "run-dir": folder}.items()))
        rounds = (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        accuracy = [json.loads(line)["accuracy"] for line in rounds]
        return {"weights": digest(folder / "model.safetensors"), "accuracy": accuracy}
    except (Exception, SystemExit) as error:  # the other cases are still worth comparing
        return {"failed": f"{type(error).__name__}: {error}", "output": output.getvalue()}


def fedeas(*words: str) -> None:
    """Run the command line in this process: torch is loaded once."""
    from fedeas_flwr.__main__ import main as command

    with patch("sys.argv", ["fedeas", *words]):
        command()
    gc.freeze()  # some of Flower's strategies collect garbage at each reply


def digest(path: Path) -> str:
    """Return the SHA-256 of the names, types, shapes and bytes of a file's arrays, in the order of their names."""
    from safetensors.numpy import load_file

    found = hashlib.sha256()
    for name, array in sorted(load_file(path).items()):
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def run_cases(only: str) -> dict[str, dict[str, Any]]:
    """Run the cases whose names match, with an empty cache; return what each gave."""
    import numpy as np

    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        here, cache, generator = (Path(folder) / name for name in ("", "cache", "generator"))
        os.environ["FEDEAS_CACHE"] = str(cache)
        images = np.random.default_rng(0).integers(0, 256, (500, 8, 8, 1), np.uint8)
        np.savez(here / "bank.npz", x=images, y=np.repeat(np.arange(10), 50))
        fedeas("train-generator", "--dataset", "digits", "--device", "cpu", "--steps", "10", "--out", str(generator))
        for name, keys in cases(here / "bank.npz").items():
            if re.search(only, name):
                began = time.monotonic()
                results[name] = run_case({**BASE, "generator": generator, **keys}, here / "runs" / name)
                print(f"{name}  {time.monotonic() - began:.1f} s", flush=True)
        for root in (generator, *cache.glob("generators/*/")):
            results[f"weights of {root.name}"] = {"weights": digest(next(root.glob("unet/*.safetensors")))}
        if not only:
            kept = sorted(str(path.relative_to(cache)) for path in cache.glob("*/*") if path.suffix != ".lock")
            results["cache"] = {"names": kept}
    return results


def environment() -> dict[str, str]:
    """Return what the bits depend on."""
    import torch

    return {
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: version(name) for name in ("torch", "numpy", "flwr", "diffusers")},
    }


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return a line for each case that is not as recorded."""
    lines = []
    for name in sorted({*recorded, *found}):
        old, new = recorded.get(name, {}), found.get(name, {})
        if "failed" in new:
            lines.append(f"{name}: {new['failed']}\n{new['output']}")
        elif old != new:
            lines.append(f"{name}: {', '.join(key for key in {**old, **new} if new.get(key) != old.get(key))}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="FILE", help="write the file")
    what.add_argument("--check", type=Path, metavar="FILE", help="name each case that differs from the file")
    parser.add_argument("--repo", type=Path, default=Path(__file__).parents[1], help="the checkout to run; else this")
    parser.add_argument("--only", default="", metavar="REGEX", help="of --check: the cases whose names match")
    options = parser.parse_args()
    # Before NumPy and torch are loaded.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", CUDA_VISIBLE_DEVICES="", FEDEAS_OFFLINE="1")
    sys.path.insert(0, str(options.repo.resolve()))
    if options.record:
        record(options.record, options.repo)
    else:
        check(options.check, options.only)


def record(file: Path, repo: Path) -> None:
    """Run all cases and write the file; with a case that fails, write nothing."""
    found = run_cases("")
    if failed := differences(found, found):
        sys.exit("\n".join(failed))
    command = ["git", "-C", str(repo), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    text = json.dumps({"commit": commit, "environment": environment(), "cases": found}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


def check(file: Path, only: str) -> None:
    """Run the cases and exit with code 1 if one differs from the file."""
    recorded, here = json.loads(file.read_text(encoding="utf-8")), environment()
    there = recorded["environment"]
    other = [f"{key} {there[key]}, here {value}" for key, value in here.items() if there[key] != value]
    if other:
        print(
            f"{file.name} was recorded with {'; '.join(other)}: record anew here, from a worktree of commit "
            f"{recorded['commit']} (python benchmarks/weight_digests.py --repo WORKTREE --record FILE)",
            file=sys.stderr,
        )
        sys.exit(RECORDED_ELSEWHERE)
    found = run_cases(only)
    wanted = {name: case for name, case in recorded["cases"].items() if name in found or not only}
    if lines := differences(wanted, found):
        sys.exit("\n".join(["not as recorded:", *lines]))
    print("as recorded")


if __name__ == "__main__":
    main()
