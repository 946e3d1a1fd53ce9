"""Run the same job with several frameworks on one GPU, one after another, and compare speed, memory and accuracy.

    python benchmarks/peers.py --out results/peers --data-dir data --weights data/resnet18-imagenet.safetensors \\
        --pfl-python pflenv/bin/python --job A --limit 560

Peers (--peers; the default is PEERS): `flower:N`, Flower's own simulation with N clients at a time; `pfl:N`,
pfl-research in N processes; `torch`, a plain PyTorch loop; `inline:P:N` and `ray:P:N`, this project's two backends in
precision P with N clients at a time. `:mps` after flower:N or pfl:N lets its processes share the GPU by MPS, as `ray`
always does. The programs of the first three are in peer_programs/ and keep PyTorch's default precision.

Jobs: A, the paper's FedAvg with 100 clients (conf/cifar10-k100.toml, protocol clean). B, pfl-research's CIFAR-10
benchmark: 1,000 clients of 50 images, 50 a round, its small CNN. C, 10,000 clients of 5 images, 100 a round, the same
CNN. B-plain and C-plain: without dropout. Partition, network, initial weights and hyperparameters are the same for all
peers; only Flower samples other clients. All evaluate after every round; ours also write a record then, and a
checkpoint every 20 rounds.

Round 1 is not timed. Speed is that of the next --timed rounds, accuracy the mean of the last 20 rounds. A peer whose
complete record is in --out is skipped, so a second command does the rest. --limit: seconds for the whole command; the
peer that runs then is stopped, and its record has the rounds until then. Without --peers' words only the table is made.

pfl needs an environment of its own, because of dp-accounting. Bring its wheels (PyTorch is taken from this Python):

    pip download --no-deps -d wheels --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 pfl==0.6.0 dp-accounting==0.5.1 \\
        prv-accountant==0.2.0 multiprocess==0.70.19 dill==0.4.1 absl-py==1.4.0 attrs==23.2.0 dm-tree==0.1.10 \\
        mpmath==1.3.0 scipy==1.17.1 wrapt==2.5.2 packaging==25.0
    python -m venv --without-pip pflenv
    uv pip install --python pflenv/bin/python --no-index --no-deps wheels/*.whl
    python -c "import sysconfig as s; print(s.get_path('purelib'))" > pflenv/lib/python3.12/site-packages/torch.pth

--small: digits and tiny models on a CPU, `--rounds 6 --peers torch pfl:1 flower:2 inline:tf32:1 ray:tf32:2`: minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import tomli_w
import torch
from run_records import HERE, let_children_import_models, markdown, round_ends, write_record

from fedeas_flwr.common.files import cache_root
from fedeas_flwr.common.project import code_digest
from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.config_files import read_config
from fedeas_flwr.data.datasets import dataset_info, open_dataset
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.launch.mps import shared_gpu
from fedeas_flwr.partition import Partition, make_partition
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.listing import portable_config
from fedeas_flwr.training.build import build_network

PEERS = ("flower:10", "pfl:1", "pfl:5", "torch", "inline:tf32:10", "inline:bf16:10", "ray:bf16:10")
PROGRAMS = {"flower": "flower_simulation", "pfl": "pfl_research", "torch": "plain_torch"}
OURS = ("inline", "ray")
PACKAGES = ("torch", "torchvision", "numpy", "flwr", "ray", "pfl")
ALWAYS: dict[str, Any] = {"policy": "none", "gamma-hat": "off", "protocol": "clean", "checkpoint-every": 20}
NETWORKS = "peer_programs.networks:"
SMALL_CNN: dict[str, Any] = {"local-epochs": 1, "learning-rate": 0.1, "alpha": 1e6}
"""As in pfl-research's benchmark; α only names the partitions of equal parts in this script's cache."""
EQUAL_PARTS: dict[str, dict[str, Any]] = {
    "B": {"clients": 1000, "participation": 0.05, "batch-size": 10},
    "C": {"clients": 10_000, "participation": 0.01, "batch-size": 5},
}
IMAGES_EACH = {"B": 50, "C": 5}
SMALL: dict[str, dict[str, Any]] = {
    "A": {"clients": 10, "participation": 0.5, "alpha": 0.5, "batch-size": 32, "learning-rate": 0.05},
    "B": {"clients": 20, "participation": 0.25},
    "C": {"clients": 200, "participation": 0.05},
}


# ------------------------------------------------------------------------------------------------ the job


def run_config(job: str, options: argparse.Namespace) -> RunConfig:
    """Return a job as this project's run-config, without what depends on the peer."""
    letter, _, variant = job.partition("-")
    dataset = {"dataset": "digits"} if options.small else {"dataset": "cifar10", "data-dir": options.data_dir}
    values = {**ALWAYS, **dataset, "device": options.device, "rounds": options.rounds}
    if letter == "A":
        config = read_config(HERE.parent / "conf" / "cifar10-k100.toml").to_user_dict()
        values = {**config, **values, "weights": options.weights}
        model = {"model": f"{NETWORKS}tiny_batchnorm", "weights": "none", "local-epochs": 3} if options.small else {}
    else:
        values |= {**SMALL_CNN, **EQUAL_PARTS[letter]}
        model = {"model": NETWORKS + ("without_dropout" if variant else "two_convolutions")}
    return parse_config({**values, **model, **(SMALL[letter] if options.small else {})})


def store_equal_parts(config: RunConfig, each: int) -> None:
    """Write a partition of random parts of `each` images to the cache, where a run finds it.

    The project's own partitions give no client fewer than ten images.
    """

    def parts(labels: np.ndarray[Any, Any], *_: Any, **__: Any) -> Partition:
        order = np.random.RandomState(config.partition_seed).permutation(len(labels))[: config.clients * each]
        held = list(order.reshape(config.clients, each))
        return Partition(held, [part[:0] for part in held])

    labels = open_dataset(config.dataset, config.data_dir).y_train
    with patch("fedeas_flwr.partition.dirichlet_partition", parts):
        make_partition(labels, config.protocol, config.clients, config.alpha, config.partition_seed, cache_root())


def sampled_clients(config: RunConfig) -> np.ndarray[Any, Any]:
    """Return the clients that `TrainingRounds.sample` chooses, [rounds, clients a round]."""
    count = config.num_sampled(config.clients)
    rounds = (stream(config.seed, "sample", number) for number in range(1, config.rounds + 1))
    return np.stack([np.sort(rng.choice(config.clients, count, replace=False)) for rng in rounds])


def write_job(config: RunConfig, words: Sequence[str], folder: Path) -> None:
    """Write the folder that `peer_programs.job.Job` opens."""
    data, info = federated_data(config, config.clients), dataset_info(config.dataset)
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.save(folder / f"{name}.npy", getattr(data.dataset, name))
    held = data.partition.train
    np.savez(folder / "partition.npz", indices=np.concatenate(held), sizes=[len(part) for part in held])
    np.save(folder / "sampled.npy", sampled_clients(config))
    torch.save(build_network(config).state_dict(), folder / "initial.pt")
    about = {"classes": len(info.classes), "image_shape": info.image_shape, "mean": info.mean, "std": info.std}
    settings = {**config.to_user_dict(), **about, "words": list(words)}
    (folder / "job.json").write_text(json.dumps(settings), encoding="utf-8")


# ------------------------------------------------------------------------------------------------ one peer


def memory_of(process: psutil.Process) -> tuple[int, int]:
    """Return the memory of a process and its descendants in bytes, each shared page counted once, and their number."""
    found = []
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            found.append(member.memory_full_info().pss)
    return sum(found), len(found)


def gpu_memory() -> int:
    """Return the bytes of the GPU's memory that are in use by any process."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return total - free


def command_of(name: str, words: Sequence[str], config: RunConfig, folder: Path, pfl_python: str) -> list[str]:
    """Prepare a peer's folder and return its command."""
    if name not in OURS:
        write_job(config, words, folder)
        python = pfl_python if name == "pfl" else sys.executable
        return [python, "-m", "peer_programs", PROGRAMS[name], str(folder)]
    ours = {"backend": name, "precision": words[0], "actors": int(words[1]), "run_dir": str(folder / "run")}
    (folder / "run.toml").write_text(tomli_w.dumps(config.with_changes(**ours).to_user_dict()))
    main = "from fedeas_flwr.commands.app import main; main()"
    return [sys.executable, "-c", main, "run", str(folder / "run.toml")]


@contextmanager
def environment_of(name: str, words: Sequence[str], folder: Path) -> Iterator[dict[str, str]]:
    """Yield a peer's environment variables; with the word mps, its processes share the GPU by MPS in the block."""
    with ExitStack() as stack:
        shared = stack.enter_context(shared_gpu(folder, os.environ, int(words[0]))) if "mps" in words else {}
        if "mps" in words and not shared:
            raise RuntimeError(f"{name}: MPS does not work here")
        yield {**os.environ, **shared, **({"PYTHONPATH": str(HERE)} if name == "pfl" else {})}


def watch(command: list[str], environment: dict[str, str], folder: Path, until: float) -> dict[str, Any]:
    """Run a command until it ends or the time is `until`; return how it ended, and its peak memory."""
    before, gpu, host, turn, launched = gpu_memory(), [0], [(0, 0)], 0, time.time()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and time.time() < until:
            gpu.append(gpu_memory() - before)
            if turn % 10 == 0:  # seldom, since it walks through the processes' pages
                with suppress(psutil.Error):
                    host.append(memory_of(psutil.Process(process.pid)))
            turn += 1
            time.sleep(0.2)
    finally:
        ended = process.poll()
        if ended is None:
            end_family(process)
    return {
        "launched": launched,
        "returned": ended,  # None: stopped
        "peak_gpu_mb": round(max(gpu) / 2**20) if torch.cuda.is_available() else None,
        "peak_host_mb": round(max(size for size, _ in host) / 2**20),
        "processes": max(count for _, count in host),
    }


def end_family(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started."""
    family = [*psutil.Process(process.pid).children(recursive=True), process]
    process.terminate()  # this project's launcher ends its own processes
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for member in family:
        with suppress(psutil.Error):
            member.kill()
    process.wait()


def rounds_of(name: str, folder: Path, config: RunConfig) -> list[dict[str, Any]]:
    """Return the end, images and accuracy of every round that a peer finished."""
    if name not in OURS:
        path = folder / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if not (folder / "run" / "flower.log").is_file():
        return []
    run, held = RunDirectory(folder / "run"), federated_data(config, config.clients).partition.train
    return [
        {
            "end": end,
            "images": config.local_epochs * sum(len(held[k]) for k in record["clients"]),
            "accuracy": record["accuracy"],
        }
        for end, record in zip(round_ends(run), run.rounds(), strict=False)
    ]


def summary(rounds: Sequence[dict[str, Any]], launched: float, timed: int) -> dict[str, Any]:
    """Return speed and accuracy; there are at least two rounds."""
    ends = [each["end"] for each in rounds]
    seconds = [end - begin for begin, end in pairwise(ends)][:timed]
    images = sum(each["images"] for each in rounds[1 : 1 + timed])
    accuracies = [each["accuracy"] for each in rounds if each["accuracy"] is not None]
    return {
        "rounds": len(rounds),
        "seconds_until_round_1": round(ends[0] - launched, 2),
        "round_seconds": [round(each, 4) for each in seconds],
        "rounds_per_second_median": round(1 / statistics.median(seconds), 4),
        "rounds_per_second_total": round(len(seconds) / sum(seconds), 4),
        "images_per_second": round(images / sum(seconds), 1),
        "accuracy_last_20": round(statistics.mean(accuracies[-20:]), 4),
        "accuracies": [round(each, 4) for each in accuracies],
    }


def versions_in(python: str) -> dict[str, str]:
    """Return the versions of the packages in a Python environment."""
    known = "known = {d.name for d in m.distributions()}"
    found = f"json.dumps({{name: m.version(name) for name in {PACKAGES} if name in known}})"
    code = f"import json, importlib.metadata as m; {known}; print({found})"
    versions: dict[str, str] = json.loads(subprocess.check_output([python, "-c", code], text=True))
    return versions


def measure(job: str, peer: str, options: argparse.Namespace, until: float) -> None:
    """Run a peer's job and write its record; raise RuntimeError if it fails, or is stopped in its first two rounds."""
    config, (name, *words) = run_config(job, options), peer.split(":")
    if job[0] in IMAGES_EACH:
        store_equal_parts(config, IMAGES_EACH[job[0]])
    with tempfile.TemporaryDirectory(prefix="fe-", ignore_cleanup_errors=True) as temporary:  # short: MPS's sockets
        folder = Path(temporary)
        command = command_of(name, words, config, folder, options.pfl_python)
        with environment_of(name, words, folder) as environment:
            found = watch(command, environment, folder, until)
        rounds = rounds_of(name, folder, config)
        if found["returned"] or len(rounds) < 2:
            output = (folder / "output.txt").read_text(errors="replace")
            raise RuntimeError(f"{job} {peer}: {len(rounds)} rounds, exit status {found['returned']}\n{output[-2500:]}")
    row = {"job": job, "peer": peer, "complete": len(rounds) == config.rounds}
    row |= summary(rounds, found.pop("launched"), options.timed) | found
    setting = {**portable_config(config), "timed": options.timed, "programs": code_digest(HERE / "peer_programs")}
    setting["packages_of_peer"] = versions_in(options.pfl_python if name == "pfl" else sys.executable)
    write_record(record_path(options, job, peer), "cuda" if torch.cuda.is_available() else "cpu", setting, [row])


# ------------------------------------------------------------------------------------------------ all peers


def record_path(options: argparse.Namespace, job: str, peer: str) -> Path:
    """Return where a peer's record is."""
    path: Path = options.out / f"{job}-{peer.replace(':', '-')}.json"
    return path


def table(out: Path) -> str:
    """Return the table of a folder's records; ratios are of images/s, to a job's fastest Flower and its fastest pfl."""
    head = ["job", "peer", "rounds", "rounds/s, median", "rounds/s", "images/s", "× Flower", "× pfl"]
    head += ["s to the end of round 1", "GPU MB", "host MB", "accuracy %"]
    rows = [json.loads(path.read_text(encoding="utf-8"))["rows"][0] for path in out.glob("*.json")]
    cells = []
    for row in sorted(rows, key=lambda row: (row["job"], row["images_per_second"])):
        line = [row["job"], row["peer"], f"{row['rounds']}" + ("" if row["complete"] else " (stopped)")]
        line += [f"{row[key]:.3f}" for key in ("rounds_per_second_median", "rounds_per_second_total")]
        line.append(f"{row['images_per_second']:,.0f}")
        for rival in ("flower", "pfl"):
            rates = [r["images_per_second"] for r in rows if r["job"] == row["job"] and r["peer"].startswith(rival)]
            line.append(f"{row['images_per_second'] / max(rates):.2f}" if rates else "–")
        gpu = "–" if row["peak_gpu_mb"] is None else f"{row['peak_gpu_mb']:,}"
        line += [f"{row['seconds_until_round_1']:.1f}", gpu, f"{row['peak_host_mb']:,}"]
        cells.append([*line, f"{100 * row['accuracy_last_20']:.1f}"])
    return markdown(head, cells)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--job", nargs="+", help="A, B, C, B-plain, C-plain; default: A B C")
    parser.add_argument("--peers", nargs="*", default=PEERS, help="none: only print the table of the records")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--timed", type=int, default=20, help="rounds whose time counts, from the second on")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for the whole command")
    parser.add_argument("--data-dir", default="", help="folder of CIFAR-10")
    parser.add_argument("--weights", default="imagenet", help="of ResNet-18: imagenet or a .safetensors file")
    parser.add_argument("--pfl-python", default="", help="interpreter of pfl's environment; without it pfl is skipped")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="for this project's backends")
    parser.add_argument("--small", action="store_true", help="digits and tiny models, to try the script")
    options = parser.parse_args()
    if options.data_dir:
        options.data_dir = str(Path(options.data_dir).absolute())
    if options.weights != "imagenet":
        options.weights = str(Path(options.weights).absolute())
    if not options.pfl_python:
        options.peers = [peer for peer in options.peers if not peer.startswith("pfl")]
    return options


def main() -> None:
    options, began, failed = parse_options(), time.time(), False
    let_children_import_models()
    if options.small:  # one client at a time is fastest with one thread if the model is tiny
        os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(HERE))  # for the networks, which a run-config names
    with tempfile.TemporaryDirectory(prefix="fe-peers-") as cache:
        os.environ["FEDEAS_CACHE"] = cache  # its partitions of equal parts are not the project's
        for job in options.job or "ABC":
            for peer in options.peers:
                path, until = record_path(options, job, peer), began + options.limit
                if time.time() > until or (path.is_file() and json.loads(path.read_text())["rows"][0]["complete"]):
                    continue
                print(f"{job} {peer}", flush=True)
                try:
                    measure(job, peer, options, until)
                except RuntimeError as error:  # the other peers still run
                    failed = True
                    print(error, flush=True)
    print(table(options.out))
    sys.exit(failed)


if __name__ == "__main__":
    main()
