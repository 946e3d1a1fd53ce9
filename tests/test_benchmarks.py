"""The benchmarks of whole runs: they run, and their numbers are correct."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import parse_config
from fedeas_flwr.config_files import read_config
from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.data.sources import check_npz
from fedeas_flwr.generators.learn.denoiser import build_unet
from fedeas_flwr.generators.opening import open_generator
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.strategies.privacy import gaussian_epsilon
from fedeas_flwr.training.build import build_network
from fedeas_flwr.training.engine import LocalTrainingConfig
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a benchmark by name, with its folder on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def run_small(script: str, out: Path, cwd: Path) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--small", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["command"].startswith(f"python benchmarks/{script} --small")
    assert record["environment"]["packages"]["torch"] == torch.__version__.split("+")[0]
    return record, done.stdout


@pytest.mark.slow
def test_framework_benchmark_times_a_bare_loop_and_flower(tmp_path: Path) -> None:
    """The script itself fails if the weights are not bitwise equal."""
    record, printed = run_small("framework.py", tmp_path / "out.json", tmp_path)
    bare, inline = record["rows"]
    assert (bare["way"], inline["way"]) == ("bare", "inline")
    assert bare["rounds"] == inline["rounds"] == 2
    assert 0 <= inline["tax_by_phases"] < 1
    assert 0.5 < inline["cpu_over_bare"] < 10
    assert inline["tax_by_difference"] == pytest.approx(1 - 1 / inline["over_bare"], abs=2e-3)
    assert "| small-cnn | inline |" in printed


@pytest.mark.slow
def test_growth_benchmark_runs_each_row_in_its_own_process(tmp_path: Path) -> None:
    record, printed = run_small("growth.py", tmp_path / "out.json", tmp_path)
    few, many = record["rows"]
    assert (few["growth_of"], many["growth_of"]) == ("clients", "parameters")
    assert few["clients_a_round"] == many["clients_a_round"] == 10
    # Float32 arrays to ten clients and back, and a little for the names and shapes.
    assert many["bytes_a_round"] == pytest.approx(20 * 4 * many["parameters"], rel=1e-3)
    assert many["own_peak_mb"] > few["own_peak_mb"] + 20, "a million parameters of ten clients must take memory"
    assert few["own_peak_mb"] < few["resident_peak_mb"]
    assert len(few["own_mb_by_round"]) <= few["rounds"]
    assert "| clients | 20 |" in printed


def test_check_same_rejects_different_weights(benchmark: Any) -> None:
    weights = {"w": np.ones(3, np.float32)}
    near = {"w": np.nextafter(weights["w"], np.float32(2))}
    check_same = benchmark("framework").check_same
    check_same(weights, {"w": weights["w"].copy()}, "alike")
    with pytest.raises(SystemExit, match=r"one bit off: .*different weights"):
        check_same(weights, near, "one bit off")


def test_framework_overhead_by_hand(benchmark: Any) -> None:
    """Rounds of 4 s vs 3 s without the framework, then a repetition twice as slow; phases are of the median round."""
    turns = benchmark("framework").Turns
    bare = turns("bare", [[3.0, 3.0, 7.0], [6.0, 6.0, 6.0], [3.0, 2.0, 3.0]])
    row = turns("inline", [[4.0, 4.0, 9.0], [8.0, 8.0, 1.0]], [0.125, 0.1, 0.9, 0.1, 0.125]).line(bare)
    assert row["tax_by_difference"] == 0.25
    assert row["tax_by_phases"] == 0.125
    assert row["over_bare"] == 1.333
    assert row["over_bare_by_turn"] == [1.333, 1.333]
    assert row["cpu_over_bare"] is None
    assert bare.line(bare)["tax_by_phases"] is None


def test_framework_overhead_by_phase_by_hand(benchmark: Any) -> None:
    """4 s until the last reply (3 s training, ½ s generating), ¼ s aggregation, ¾ s waiting for evaluation."""
    seconds = {"clients": 4.0, "aggregate": 0.25, "end_wait": 0.75, "training": 3.0, "generating": 0.5}
    background = {"gamma_hat": 9.0, "evaluate": 9.0}  # run in the background and do not count
    assert benchmark("framework").tax_by_phases(seconds | background) == pytest.approx(0.15)


def test_rounds_are_timed_from_the_log_without_the_first(benchmark: Any, tmp_path: Path) -> None:
    (tmp_path / "flower.log").write_text(
        "2026-01-01 23:59:50,000 INFO Run directory: x\n"
        "2026-01-01 23:59:52,500 INFO Federation of 3 clients\n"
        "2026-01-01 23:59:58,000 INFO [round 1/3] accuracy 0.1\n"
        "2026-01-01 23:59:59,500 INFO something else\nof two lines\n"
        "2026-01-02 00:00:00,250 INFO [round 2/3] accuracy 0.1\n"
        "2026-01-02 00:00:01,000 INFO [round 3/3] accuracy 0.1\n"
    )
    records, run = benchmark("run_records"), RunDirectory(tmp_path)
    assert records.round_seconds(run) == [2.25, 0.75]
    assert records.seconds_to_discover(run) == 2.5


def test_memory_includes_child_processes(benchmark: Any) -> None:
    """A grandchild takes 200 MB; growth is the slope of the second half only."""
    grandchild = "x = bytearray(200 << 20); x[::4096] = b'1' * len(x[::4096]); print('there', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        memory = benchmark("growth").Memory(psutil.Process(child.pid))
        memory.note(0)  # finds the child
        memory.note(0)  # and looks at it
    finally:
        child.communicate("\n")
    assert memory.processes == 2
    assert 200 << 20 < memory.own[0] < 260 << 20
    assert memory.resident > memory.own[0]
    memory.own = {0: 500, 1: 300, 2: 0, 3: 10, 4: 20, 5: 30, 6: 40}
    assert memory.growth() == pytest.approx(10)


@pytest.mark.parametrize(
    ("name", "parameters"), [("fifty_thousand", 5e4), ("one_million", 1e6), ("eleven_million", 11e6)]
)
def test_wide_models_have_the_stated_number_of_parameters(benchmark: Any, name: str, parameters: float) -> None:
    for shape in ((8, 8, 1), (32, 32, 3)):
        model = getattr(benchmark("wide_models"), name)(num_classes=10, image_shape=shape)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.03)
        images = torch.randn(4, shape[2], *shape[:2])
        assert model(images).shape == (4, 10)
        # Linear in the image: the mean of the matrices and nothing else.
        with torch.no_grad():
            assert torch.allclose(model(2 * images) - model(images), model(images) - model(0 * images), atol=1e-5)


def test_random_images_are_accepted_as_the_dataset(benchmark: Any, tmp_path: Path) -> None:
    benchmark("growth").write_random_images(tmp_path)
    check_npz("cifar10", tmp_path / "cifar10.npz")
    with np.load(tmp_path / "cifar10.npz") as arrays:
        assert np.bincount(arrays["y_train"]).tolist() == [5000] * 10


def test_parity_finds_an_engine_that_takes_other_steps(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parity = benchmark("parity")
    asked = parse_config({"clients": 20, "local-epochs": 2})
    exact, eager, graphed = parity.compare(asked, "cpu")
    assert exact["from_float64"] == 0 and exact["steps"] == eager["steps"] == graphed["steps"] > 2
    assert 0 < eager["from_float64"] < 1e-5 and graphed["from_float64"] < 2 * eager["from_float64"]
    assert graphed["from_eager_fp32"] < 1e-5 and graphed["loss"] == pytest.approx(exact["loss"], rel=1e-5)
    given = parity.local_training_config
    monkeypatch.setattr(parity, "GraphedEngine", lambda *words: GraphedEngine(*other(words, given(asked))))
    _, _, hasty = parity.compare(asked, "cpu")
    assert hasty["from_float64"] > 100 * graphed["from_float64"]


def test_parity_table_shows_a_distance_of_zero(benchmark: Any) -> None:
    zero = {"epochs": 1, "steps": 7, "loss": 2.0, "from_float64": 0.0, "from_eager_fp32": 0.0}
    names = ("eager, float64", "eager, fp32", "graphed, fp32")
    rows = [{"engine": name, **zero, "largest_from_eager_fp32": 0.0} for name in names]
    assert [line.split(" | ")[-3:] for line in benchmark("parity").table(rows).splitlines()[2:]] == [
        ["–", "–", "– |"],
        ["0", "–", "– |"],
        ["0", "0", "0 |"],
    ]


def other(words: tuple[Any, ...], steps: LocalTrainingConfig) -> tuple[Any, ...]:
    """Return the same arguments with a learning rate that is off by a thousandth."""
    return (words[0], replace(steps, learning_rate=1.001 * steps.learning_rate), *words[2:])


def test_small_batches_have_larger_gradients(benchmark: Any) -> None:
    short = benchmark("short_batches")
    rows = short.measure(parse_config({"clients": 5}), "cpu", [2, 32], 9)
    assert [(row["size"], row["draws"]) for row in rows] == [(2, 9), (32, 9)]
    assert rows[0]["median"] > 1.5 * rows[1]["median"] and rows[0]["largest"] > rows[0]["median"]
    by_hand = [{"size": 2, "median": 30.0, "largest": 90.0}, {"size": 64, "median": 3.0, "largest": 6.0}]
    assert "| 2 | 30.0 | 10.0 | 90.0 | 30.0 |" in short.table(by_hand)


def test_first_control_variate_is_the_mean_gradient(benchmark: Any) -> None:
    """Train one epoch with a tiny learning rate, so that all gradients are at the start, without the last batch."""
    first, config = benchmark("first_controls"), parse_config({"clients": 5, "local-epochs": 1, "learning-rate": 1e-4})
    data, client = federated_data(config, 5), 0
    held = len(data.partition.train[client])
    size = next(size for size in range(16, held) if 2 <= held % size < 8)
    config = config.with_changes(batch_size=size)
    with_last, without = first.measure(config, "cpu", [client])
    assert (with_last["last"], without["last"]) == (with_last["samples"] % size, 0)
    assert with_last["steps"] == without["steps"] + 1 == with_last["samples"] // size + 1
    images, labels = (torch.from_numpy(array) for array in data.train(client))
    info, model = dataset_info("digits"), build_network(config).train()
    total = [torch.zeros_like(p) for p in model.parameters()]
    order = torch.from_numpy(stream(config.seed, "batches", 1, client).permutation(len(labels)))
    for chosen in order[: without["steps"] * size].split(size):
        loss = F.cross_entropy(model(Normaliser(info.mean, info.std, "cpu")(images[chosen])), labels[chosen])
        torch._foreach_add_(total, torch.autograd.grad(loss, list(model.parameters())))
    length = float(torch.stack([one.norm() for one in total]).norm()) / without["steps"]
    assert without["length"] == pytest.approx(length, rel=0.01)


@pytest.mark.parametrize(("name", "rows"), [("parity", 3), ("short_batches", 6), ("first_controls", 1)])
def test_benchmarks_default_to_digits(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, rows: int
) -> None:
    script = benchmark(name)
    more = ["--draws", "1"] if name == "short_batches" else []
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "record.json"), "--device", "cpu", *more])
    script.main()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["setting"]["dataset"] == "digits" and len(record["rows"]) == rows


def test_every_switch_replaces_something_and_puts_it_back(benchmark: Any) -> None:
    pytest.importorskip("triton", reason="the kernels need it")
    switches = benchmark("switches")
    for name, (_, patches) in switches.SWITCHES.items():
        before = [getattr(target, attribute) for target, attribute, _ in patches()]
        with switches.without([name]):
            inside = [getattr(target, attribute) for target, attribute, _ in patches()]
        assert all(one is not two for one, two in zip(before, inside, strict=True)), name
        assert before == [getattr(target, attribute) for target, attribute, _ in patches()]


def test_loss_of_a_whole_run_by_hand(benchmark: Any) -> None:
    """Start 10 s and rounds of ½ s: 109.5 s. Slower by ¼ s in rounds 3 and 4, which count: 159.25 s."""
    kernels = benchmark("kernels")
    base = kernels.Variant("every kernel", starts=[30.0, 10.0], seconds=[[2.0, 0.5, 0.5], [1.0, 0.5, 0.5]])
    slow = kernels.Variant("sgd", ["sgd"], starts=[10.0], seconds=[[0.5, 0.75, 0.75]])
    assert kernels.losses(slow, base, first=3) == pytest.approx([159.25 / 109.5 - 1])


@pytest.mark.parametrize(
    ("name", "parameters", "mean", "std"),
    [
        ("niid_bench", 62_006, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        ("moon", 92_626, (0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616)),
    ],
)
def test_baseline_network_gets_the_baselines_pixels(
    monkeypatch: pytest.MonkeyPatch, name: str, parameters: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    config = read_config(ROOT / "results" / "flower-baselines" / f"{name}.toml", [])
    model, info = build_network(config), dataset_info("cifar10")
    assert (
        sum(p.numel() for p in model.parameters()) == sum(t.numel() for t in model.state_dict().values()) == parameters
    )
    pixels = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    converted = model.convert(Normaliser(info.mean, info.std, "cpu")(pixels))
    torch.testing.assert_close(converted, Normaliser(mean, std, "cpu")(pixels))


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "published"),
    [
        (4.0, 0.01, 10_000, 1.26),  # Abadi et al. (2016)
        (1.3, 256 / 60_000, 3515, 1.19),  # TensorFlow Privacy's tutorial
        (1.1, 256 / 60_000, 14_062, 3.01),
        (0.7, 256 / 60_000, 10_546, 7.10),
    ],
)
def test_epsilon_of_dp_sgd_matches_published_values(
    benchmark: Any, sigma: float, rate: float, steps: int, published: float
) -> None:
    dp = benchmark("dp_generator")
    assert dp.epsilon(sigma, rate, steps, 1e-5) == pytest.approx(published, abs=0.005)
    assert dp.find_sigma(published, rate, steps, 1e-5) == pytest.approx(sigma, rel=0.005)


def test_epsilon_of_dp_sgd_without_sampling_is_that_of_the_gaussian_mechanism(benchmark: Any) -> None:
    assert benchmark("dp_generator").epsilon(2.0, 1.0, 10, 1e-5) == pytest.approx(
        gaussian_epsilon(2.0, 10, 1e-5), 0.002
    )


def test_image_gradients_equal_those_of_torch_func(benchmark: Any) -> None:
    dp, images, copies = benchmark("dp_generator"), 3, 2
    unet = build_unet(dp.PRESET, dataset_info("digits").classes, (8, 8, 1))
    noisy, target = torch.randn(2, images * copies, 1, 8, 8)
    times, labels = torch.randint(1000, (images * copies,)), torch.randint(11, (images * copies,))

    def loss(weights: Any, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        inputs = {"class_labels": y, "return_dict": False}
        return (functional_call(unet, weights, (x, t), inputs)[0] - goal).square().sum() / copies

    by_image = [each.unflatten(0, (images, copies)) for each in (noisy, times, labels, target)]
    weights = {name: parameter.detach() for name, parameter in unet.named_parameters()}
    expected = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0))(weights, *by_image)
    gradients = dp.ImageGradients(unet, copies)
    loss(dict(unet.named_parameters()), noisy.requires_grad_(), times, labels, target).backward()
    assert len(gradients.of) == len(expected)
    for name, parameter in unet.named_parameters():
        assert torch.allclose(gradients.of[parameter], expected[name], rtol=1e-3, atol=1e-4), name
    norms = sum(each.flatten(1).square().sum(1) for each in expected.values()).sqrt()
    clipped = gradients.clipped_sum(float(norms[0]) / 2)[unet.conv_in.weight]
    factors = (norms[0] / 2 / norms).clamp(max=1).view(-1, 1, 1, 1, 1)
    assert torch.allclose(clipped, (factors * expected["conv_in.weight"]).sum(0), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_dp_generator_benchmark_writes_record_sheet_and_models(benchmark: Any, tmp_path: Path) -> None:
    out, options = tmp_path / "digits.json", "--dataset digits --device cpu --images 200 --epsilons inf,10 --batch 8"
    options += f" --copies 2 --steps 2 --samples 10 --out {out} --folders {tmp_path / 'dp'}"
    benchmark("dp_generator").main(options.split())
    without, private = json.loads(out.read_text())["rows"]
    assert without["epsilon"] is None and without["sigma"] == 0
    assert 9.9 < private["epsilon"] <= 10 and private["delta"] == 0.0005
    assert private["noise_to_clip"] == pytest.approx(private["sigma"] * 620_401**0.5 / 8)
    assert out.with_suffix(".png").exists()
    assert open_generator(str(tmp_path / "dp/200-10"), "digits").image_shape == (8, 8, 1)
