"""A diffusion model that a federation trains through the app: identities, resume, refused replies, the folder."""

from __future__ import annotations

import dataclasses
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from requires_gpu import on_a_gpu
from rich.console import Console
from runners import finish, run_in_process, small, weights

from fedeas_flwr.commands.sweep import print_results
from fedeas_flwr.common.errors import ConfigError, RunError
from fedeas_flwr.common.randomness import torch_seed
from fedeas_flwr.config import SAMPLER_STEPS, RunConfig, parse_config
from fedeas_flwr.config_files import read_config
from fedeas_flwr.data.datasets import open_dataset
from fedeas_flwr.data.federated import federated_data, local_data
from fedeas_flwr.data.node import read_node
from fedeas_flwr.federation.learners import ClassifierLearner, find_learner
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.learn import trainer as trainer_module
from fedeas_flwr.generators.learn.denoiser import BETAS, MOMENTS, rate_factor
from fedeas_flwr.generators.learn.federated import (
    WEIGHTS,
    DenoiserPool,
    LocalDenoiser,
    federated_preset,
    initial_state,
    split_held_out,
)
from fedeas_flwr.generators.learn.trainer import Trainer
from fedeas_flwr.generators.opening import open_for_run
from fedeas_flwr.launch.prepare import evaluate_run
from fedeas_flwr.launch.sweep import make_sweep
from fedeas_flwr.runs.directory import RunDirectory
from fedeas_flwr.runs.files import files_of_run
from fedeas_flwr.runs.metrics import summarise
from fedeas_flwr.strategies.registry import build_strategy


@pytest.fixture(autouse=True)
def quick_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLER_STEPS, "dpm++", 2)  # of samples.png


def tiny(folder: Path, recipe: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """Return the config of a federated training of a few steps."""
    table = {"local-steps": 2, "batch-size": 4, "held-out": 0.1, **(recipe or {})}
    keys = {"task": "generator", "policy": "none", "evaluation": "federated", "generator_training": table}
    return small(folder, **{**keys, **changes})


def test_one_client_with_all_images_takes_the_central_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {"held-out": 0.0, "warm-up": 2}
    config = tiny(tmp_path / "r", recipe, clients=1, participation=1.0, evaluation="central", dataset="digits")
    run = finish(config)
    data = federated_data(config, 1)
    images, labels = data.train(0)
    dataset = dataclasses.replace(open_dataset("digits"), x_train=images, y_train=labels)

    def seed_of_round(seed: int, number: int) -> int:
        return torch_seed(seed, (number - 1) // 2 + 1, 0, (number - 1) % 2) if number else torch_seed(seed, 0)

    monkeypatch.setattr(trainer_module, "torch_seed", seed_of_round)
    central = Trainer(dataclasses.replace(federated_preset(config), cpu_threads=1), dataset, seed=config.seed)
    central.run(steps=6)
    found, expected = run.load_checkpoint(), central.tensors()
    assert found is not None and len(run.rounds()) == 3
    for arrays, prefix in ((found.trainable[WEIGHTS], "unet"), *((found.buffers[m], f"adam-{m}") for m in MOMENTS)):
        parts = [expected[f"{prefix}/{name}"].reshape(-1) for name, _ in central.unet.named_parameters()]
        assert np.array_equal(arrays, torch.cat(parts).numpy()), prefix


def test_resumed_training_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, train_round = finish(tiny(tmp_path / "whole")), TrainingRounds.train_round

    def stop_in_round_3(self: TrainingRounds, state: Any) -> Any:
        if state.round == 2:
            raise KeyboardInterrupt
        return train_round(self, state)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TrainingRounds, "train_round", stop_in_round_3)
        finish(tiny(tmp_path / "parts"))
    resumed = finish(tiny(tmp_path / "parts", resume=True))
    assert weights(whole) == weights(resumed)
    assert [r["loss"] for r in whole.rounds()] == [r["loss"] for r in resumed.rounds()]
    with pytest.raises(Exception, match=r"rounds = 5: must be 3, .* its learning rate depends on it"):
        finish(tiny(tmp_path / "parts", resume=True, rounds=5))


@pytest.mark.flower
@pytest.mark.slow
def test_ray_and_inline_give_the_same_weights(tmp_path: Path) -> None:
    inline, ray = (finish(tiny(tmp_path / backend, backend=backend)) for backend in ("inline", "ray"))
    assert weights(inline) == weights(ray)


def test_reply_with_nan_or_wrong_shape_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = LocalDenoiser.train

    def broken(self: LocalDenoiser, *given: Any) -> Any:
        result, trainable, buffers = train(self, *given)
        client, moments = given[-1], dict(buffers)
        first = next(iter(moments))
        if client == 1:
            moments[first] = moments[first] * torch.nan
        if client == 2:
            moments[first] = moments[first][:1]
        return result, trainable, moments

    monkeypatch.setattr(LocalDenoiser, "train", broken)
    run = finish(tiny(tmp_path / "r", participation=1.0, rounds=1, min_replies=0.5))
    one, two = run.rounds()[0]["failures"]
    assert (one["client"], two["client"]) == (1, 2)
    assert "exp_avg holds NaN" in one["reason"]
    assert "exp_avg is float32[1], wanted float32[635681]" in two["reason"]


def test_run_writes_a_generator_that_another_run_takes(tmp_path: Path) -> None:
    run = finish(tiny(tmp_path / "r"))
    folder = run.path / "generator"
    generator = open_for_run(parse_config({"generator": str(folder), "sampler-steps": 2}), "cpu")
    assert generator.sample([SampleId(0, 0, 3, 0)]).shape == (1, 8, 8, 1)
    card = (folder / "README.md").read_text()
    assert "4 clients, 3 rounds" in card and "its weights and Adam's two moments" in card
    assert "license: cc-by-4.0" in card and "7.6 MB in\n  all" in card and "Handwritten Digits" in card
    written = {str(path.relative_to(folder)) for path in files_of_run(run.path) if folder in path.parents}
    assert {"README.md", "loss.png", "samples.png", "unet/config.json"} < written
    with Image.open(folder / "samples.png") as sheet:
        assert sheet.width == sheet.height  # ten images of ten classes
    assert "accuracy" not in run.rounds()[0] and run.summary()["final_loss"] == run.rounds()[-1]["loss"]
    assert evaluate_run(run).keys() == {"loss"}
    for command in (["runs", "ls", str(tmp_path)], ["runs", "show", str(run.path)], ["runs", "csv", str(run.path)]):
        assert run_in_process(*command).returncode == 0, command
    refused = run_in_process("report", str(run.path))
    assert refused.returncode == 2 and "trained a generator: it has a loss and no accuracy" in refused.stderr


def test_without_averaged_moments_only_weights_are_sent(tmp_path: Path) -> None:
    run = finish(tiny(tmp_path / "r", {"average-moments": "neither"}, rounds=1))
    checkpoint = run.load_checkpoint()
    assert checkpoint is not None and checkpoint.buffers == {}
    assert "sent its weights, 2.5 MB" in (run.path / "generator" / "README.md").read_text()


@pytest.mark.parametrize("sent", ["both", "second", "neither"])
def test_a_local_step_is_adams_with_the_moments_that_were_sent(tmp_path: Path, sent: str) -> None:
    """A moment that starts at 0 in every round is corrected for the steps of the round, an averaged one for all."""
    config = tiny(
        tmp_path, {"average-moments": sent, "local-steps": 1, "held-out": 0.0}, rounds=9, evaluation="central"
    )
    (start, buffers), preset, number = initial_state(config), federated_preset(config), 5
    rng = np.random.default_rng(0)
    given = {moment: rng.uniform(1e-6, 1e-4, start[WEIGHTS].shape).astype(np.float32) for moment in buffers}
    images, labels = torch.from_numpy(rng.integers(0, 256, (6, 8, 8, 1), dtype=np.uint8)), torch.arange(6)
    denoiser = LocalDenoiser(config, "cpu")
    _, trained, kept = denoiser.train(start, given, images, labels, number, 0)
    gradient = torch.cat([weight.grad.reshape(-1) for weight in denoiser._weights]).double().numpy()
    moments = []
    for moment, beta, new in zip(MOMENTS, BETAS, (gradient, gradient**2), strict=True):
        average = beta * np.asarray(given.get(moment, 0.0), dtype=np.float64) + (1 - beta) * new
        moments.append(average / (1 - beta ** (number if moment in given else 1)))
        assert moment not in given or np.allclose(kept[moment], average, rtol=1e-4, atol=1e-8)
    rate = preset.learning_rate * rate_factor(preset, number - 1, (number - 1) / config.rounds)
    step = rate * moments[0] / (np.sqrt(moments[1]) + 1e-8)
    assert np.allclose(start[WEIGHTS] - np.asarray(trained[WEIGHTS]), step, rtol=0, atol=5e-7)  # steps are up to 1e-3


def test_evaluation_every_few_rounds_leaves_the_weights_unchanged(tmp_path: Path) -> None:
    seldom, always = (finish(tiny(tmp_path / str(n), {"evaluate-every": n})) for n in (2, 1))
    assert weights(seldom) == weights(always)
    losses = [record["loss"] for record in always.rounds()]
    assert [record["loss"] for record in seldom.rounds()] == [None, *losses[1:]]
    assert seldom.summary()["final_loss"] == losses[2] and seldom.summary()["best_loss"] == min(losses[1:])
    assert summarise(seldom.rounds()[:1], 0.5)["final_loss"] is None  # stopped by a callback, for example


def test_small_clients_draw_with_replacement_or_skip(tmp_path: Path) -> None:
    images, labels = torch.zeros((3, 8, 8, 1), dtype=torch.uint8), torch.tensor([1, 2, 3])
    for small_clients, steps in (("replace", 2), ("skip", 0)):
        config = tiny(tmp_path / "r", {"small-clients": small_clients, "held-out": 0.0}, evaluation="central")
        start, _ = initial_state(config)
        result, trainable, _ = LocalDenoiser(config, "cpu").train(start, {}, images, labels, 1, 0)
        assert result.steps == steps
        assert np.array_equal(trainable[WEIGHTS], start[WEIGHTS]) == (steps == 0)


def test_client_that_skips_does_not_count_in_the_average(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"clients": 20, "participation": 1.0, "rounds": 1, "evaluation": "central"}
    data = federated_data(tiny(tmp_path), 20)
    sizes = [len(data.train(client)[1]) for client in range(20)]
    largest = int(np.argmax(sizes))
    recipe = {"small-clients": "skip", "batch-size": max(sizes), "local-steps": 1, "held-out": 0.0}
    config = tiny(tmp_path / "r", recipe, **keys)
    run = finish(config)
    (record,), found = run.rounds(), run.load_checkpoint()
    assert found is not None and record["clients"] == [largest] and record["failures"] == []
    images, labels = (torch.from_numpy(array) for array in data.train(largest))
    result, trainable, _ = LocalDenoiser(config, "cpu").train(*initial_state(config), images, labels, 1, largest)
    assert np.array_equal(found.trainable[WEIGHTS], trainable[WEIGHTS])
    assert record["train_loss"] == pytest.approx(result.loss)
    with pytest.raises(RunError, match="round 1: none of 20 clients has enough images to train on"):
        finish(tiny(tmp_path / "all", {**recipe, "batch-size": max(sizes) + 1}, failed_rounds=1, **keys))


def test_sweep_of_generators_shows_the_loss(tmp_path: Path) -> None:
    sweep = make_sweep(tiny(tmp_path).with_changes(run_dir="", rounds=1).to_user_dict(), ["seed=1"], tmp_path)
    (cell,), shown = sweep.cells, io.StringIO()
    loss = finish(cell.config).summary()["final_loss"]
    print_results(sweep, Console(file=shown))
    assert [line.split() for line in shown.getvalue().splitlines() if "." in line] == [["1", f"{loss:.5f}"]]
    assert cell.finished and cell.result()["final_loss"] == loss
    with pytest.raises(ConfigError, match="the runs of a sweep have one task"):
        make_sweep({}, ["task=classifier,generator"], tmp_path)


def test_warm_up_is_in_rounds_and_no_images_have_no_loss(tmp_path: Path) -> None:
    config = tiny(tmp_path, {"warm-up": 5, "local-steps": 3})
    assert federated_preset(config).warm_up == 15
    images, labels = torch.zeros((0, 8, 8, 1), dtype=torch.uint8), torch.zeros(0, dtype=torch.long)
    assert LocalDenoiser(config, "cpu").loss(initial_state(config)[0], images, labels, 1) == 0


def test_held_out_images_are_a_fixed_fraction(tmp_path: Path) -> None:
    config = tiny(tmp_path / "r")
    kept, held_out = split_held_out(config, 3, 50)
    assert sorted([*kept, *held_out]) == list(range(50)) and len(held_out) == 5
    assert np.array_equal(held_out, split_held_out(config, 3, 50)[1])


def test_held_out_loss_is_of_the_images_and_noise_of_the_client(tmp_path: Path) -> None:
    config, images = tiny(tmp_path), np.random.default_rng(0).integers(256, size=(50, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x=images, y=np.arange(50) % 10)
    node = read_node({"client-id": 9, "data-path": str(tmp_path / "mine.npz")})
    start, moments = initial_state(config)
    report = find_learner(config).evaluate(config, local_data(config, node), node, "cpu", start, moments)
    _, chosen = split_held_out(config, 9, 50)
    held_out, classes = torch.from_numpy(images[chosen]), torch.from_numpy(chosen % 10)
    expected = LocalDenoiser(config, "cpu").loss(start, held_out, classes, torch_seed(config.seed, 9))
    assert (report.client, report.examples, report.loss) == (9, 5, expected)


def test_evaluation_network_is_that_of_the_config() -> None:
    learner, config = ClassifierLearner(), parse_config({"model": "small-cnn"})
    network = learner._network(config, "cpu")
    assert learner._network(config, "cpu") is network
    assert learner._network(config.with_changes(seed=2), "cpu") is not network


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"policy": "fedeas"}, "policy = 'fedeas': must be none with task = 'generator'"),
        ({"evaluation": "federated"}, "evaluation = 'federated' needs generator-training.held-out above 0"),
        ({"callbacks": "early-stop(patience=3)"}, "early-stop needs an accuracy"),
        ({"dp": "server-fixed"}, "dp = 'server-fixed' needs generator-training.average-moments = neither"),
        ({"generator-training": {"local-steps": 0}}, "generator-training.local-steps = 0: must be greater than"),
        ({"generator-training.lokal-steps": 1}, "did you mean 'generator-training.local-steps'?"),
        ({"generator-training": 3}, "unknown key 'generator-training' = 3"),
    ],
)
def test_wrong_settings_are_one_line(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"task": "generator", "policy": "none", **keys})
    assert text in str(error.value) and "\n" not in str(error.value)


def test_strategy_with_a_client_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="strategy = 'moon': must be one whose clients train as FedAvg's do"):
        build_strategy(parse_config({"task": "generator", "policy": "none", "strategy": "moon", "clients": 4}))


def test_train_generator_command_runs_a_federation(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        'clients = 3\nrounds = 1\nbackend = "inline"\n[generator-training]\nlocal-steps = 1\nbatch-size = 4\n'
    )
    given = ("train-generator", "--federated", "c.toml")
    done = run_in_process(*given, "--out", "g", "generator-training.batch-size=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"generator: {tmp_path / 'g' / 'generator'}" in done.stdout
    assert RunDirectory(tmp_path / "g").config().generator_training.batch_size == 2
    refused = run_in_process(*given, "--steps", "3", cwd=tmp_path)
    assert refused.returncode == 2 and "--steps" in refused.stderr


def test_training_starts_from_a_trained_generator(tmp_path: Path) -> None:
    run = finish(tiny(tmp_path / "first", rounds=1))
    folder = run.path / "generator"
    (tmp_path / "c.toml").write_text(
        'task = "generator"\npolicy = "none"\n[generator-training]\nstart = "first/generator"\n'
    )
    config = read_config(tmp_path / "c.toml")
    assert config.generator_training.start == str(folder)
    trainable, moments = initial_state(config)
    saved = run.load_model()
    assert np.array_equal(trainable[WEIGHTS], saved[WEIGHTS])
    assert moments.keys() == set(MOMENTS) and not any(map(np.any, moments.values()))
    with pytest.raises(FileNotFoundError, match=r"^generator-training\.start: there is no "):
        initial_state(config.with_changes(**{"generator_training.start": str(tmp_path / "none")}))


@on_a_gpu
def test_graphs_of_several_clients_at_once_take_the_eager_steps(tmp_path: Path) -> None:
    eager, graphed = (
        tiny(tmp_path / "r", {"local-steps": 6, "batch-size": 64, "held-out": 0.0}, evaluation="central", engine=engine)
        for engine in ("eager", "auto")
    )
    trainable, moments = initial_state(eager)
    data = federated_data(eager, 4)
    clients = [[torch.tensor(array, device="cuda") for array in data.train(part)] for part in range(4)]
    expected = [LocalDenoiser(eager, "cuda").train(trainable, moments, *own, 2, c) for c, own in enumerate(clients)]
    pool = DenoiserPool()

    def train(client: int) -> Any:
        with pool.borrow(graphed, "cuda") as denoiser:
            return denoiser.train(trainable, moments, *clients[client], 2, client)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(train, range(4)))
    again = train(2)
    for (loss, states, adam), (other, other_states, other_adam) in zip(found, expected, strict=True):
        assert loss.loss == pytest.approx(other.loss, rel=0.02)
        for name, state in states.items():
            moved = (other_states[name].cpu() - torch.from_numpy(trainable[name])).norm()
            assert (state - other_states[name]).norm() <= 0.1 * moved + 1e-6, name
        assert adam.keys() == other_adam.keys() == moments.keys()
    assert all(torch.allclose(again[1][name], state, rtol=0.01, atol=1e-4) for name, state in found[2][1].items())
