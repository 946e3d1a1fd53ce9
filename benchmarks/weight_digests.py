"""Record or check the final weights of small runs, bit for bit: refactoring must not change them.

    python benchmarks/weight_digests.py --check tests/weight_digests.json

Each case is an inline run on digits with one torch thread: every strategy with and without FedEAS, every policy, and
each value of the keys that decide what a client trains on. Its record is the SHA-256 of the final model and the
accuracy of each round. The images come from a generator trained for ten steps; the case builtin trains the built-in
generator, which takes over a minute on two slow cores. The generators' weights are cases too, and so are the names in
the cache, which are hashes. The script uses only the command line, as a user does.

The bits are valid for one architecture and one set of wheels, which the file names; elsewhere --check exits with code
3. Then record them again, from the commit that the file names:

    git worktree add ../before COMMIT
    python ../before/benchmarks/weight_digests.py --record digests.json
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
"""Exit code of --check in an environment other than the recorded one."""
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
    "dp-noise-multiplier": 0.2,  # the maximum for adaptive clipping with this number of clients
}
_ATTACKED = {"participation": 1.0, "strategy-args": "num_malicious_nodes=1"}
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
"""Every strategy with the keys that it needs."""
POLICIES = ("uniform", "missing-only", "full-balance", "waterfill", "without-entropy", "linear", "oversample")
"""Every policy of runs except none and fedeas, which are combined with each strategy."""
PLAIN: dict[str, tuple[str, ...]] = {
    "loss": ("class-weighted", "logit-adjusted"),
    "views": ("flip-crop",),
    "dp": ("server-fixed", "server-adaptive", "client-fixed", "client-adaptive"),
}
"""Values of keys tested with FedAvg without images; the case fedavg-none has their defaults."""
GENERATED: dict[str, tuple[Any, ...]] = {
    "shared-images": ("by-class", "one-seed"),
    "sampler": ("dpm++-logsnr", "ddim"),
    "guidance": (2.0,),
}
"""Values of keys tested with FedAvg and FedEAS; the case fedavg-fedeas has their defaults."""


def cases(bank: Path) -> dict[str, dict[str, Any]]:
    """Return the run-config of each case by name, without ``BASE``."""
    found: dict[str, dict[str, Any]] = {}
    for name, keys in STRATEGIES.items():
        found |= {f"{name}-{policy}": {"strategy": name, "policy": policy, **keys} for policy in ("none", "fedeas")}
    found |= {f"policy-{name}": {"policy": name} for name in POLICIES}
    found["policy-full-balance"]["alpha"] = 10.0  # with the default of 0.1 it generates 6,122 images
    for policy, choices in (("none", PLAIN), ("fedeas", GENERATED)):
        for key, values in choices.items():
            found |= {f"{key}-{value}": {"policy": policy, key: value} for value in values}
    for name in ("moon", "scaffold"):  # clients that take part again have a state
        found[f"{name}-3-rounds"] = {"strategy": name, "policy": "fedeas", "rounds": 3, "participation": 0.5}
    found["evaluation-federated"] = {"policy": "none", "protocol": "paper", "evaluation": "federated"}
    found["bank"] = {"policy": "fedeas", "generator": f"bank:{bank}"}
    found["builtin"] = {"policy": "fedeas", "generator": "builtin"}
    return found


def run_case(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one case; return its digest and accuracies, or its error."""
    folder.mkdir(parents=True)
    if "dp" in keys:
        (folder / "noise-key").write_text("0f" * 32)  # otherwise each run creates its own secret
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
    """Run the command line in this process, so that torch is loaded only once."""
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
    """Run the cases whose names match, with an empty cache; return their results."""
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
    """Return the environment that the bits depend on."""
    import torch

    return {
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: version(name) for name in ("torch", "numpy", "flwr", "diffusers")},
    }


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return a line for each case that differs from its record."""
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
    what.add_argument("--record", type=Path, metavar="FILE", help="run all cases and write FILE")
    what.add_argument("--check", type=Path, metavar="FILE", help="list each case that differs from FILE")
    parser.add_argument("--repo", type=Path, default=Path(__file__).parents[1], help="checkout to run (default: this)")
    parser.add_argument("--only", default="", metavar="REGEX", help="with --check: only cases whose names match")
    options = parser.parse_args()
    # Must be set before NumPy and torch are loaded.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", CUDA_VISIBLE_DEVICES="", FEDEAS_OFFLINE="1")
    sys.path.insert(0, str(options.repo.resolve()))
    if options.record:
        record(options.record, options.repo)
    else:
        check(options.check, options.only)


def record(file: Path, repo: Path) -> None:
    """Run all cases and write the file, unless a case fails."""
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
            f"{file.name} was recorded with {'; '.join(other)}: record again here, from a worktree of commit "
            f"{recorded['commit']} (python WORKTREE/benchmarks/weight_digests.py --record FILE)",
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
