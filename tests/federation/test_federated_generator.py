"""A run whose federation trains its generator first: once, kept in the cache, resumed, sent to nodes elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from deployments import Lab
from runners import CHEAP, SMALL, finish, quick, run_in_process, small, weights
from waiting import LONG

from fedeas_flwr import client_app
from fedeas_flwr.commands.train_generator import federated_config
from fedeas_flwr.common.errors import ConfigError, MessageError, RunError
from fedeas_flwr.common.files import is_whole
from fedeas_flwr.config import RunConfig, generator_config, parse_config
from fedeas_flwr.data.node import Node
from fedeas_flwr.federation import messages
from fedeas_flwr.federation.training_round import TrainingRounds
from fedeas_flwr.generators.federated import federated_training, received_folder, with_folder
from fedeas_flwr.generators.opening import check_for_run, open_for_run
from fedeas_flwr.runs.directory import RunDirectory

RECIPE = {"rounds": 2, "participation": 1.0, "local-steps": 1, "batch-size": 4, "held-out": 0.1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache without generators."""
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunDirectory]:
    """Return a finished run, and the training of its generator."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDEAS_CACHE", str(folder / "cache"))
        config = tiny(folder / "run")
        return finish(config), training_of(config)


def tiny(folder: Path, recipe: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """Return the config of a run of two rounds whose generator is trained in two rounds of one step per client."""
    table = {**RECIPE, **(recipe or {})}
    keys = {**CHEAP, "clients": 2, "rounds": 2, "participation": 1.0, "generator": "federated"}
    keys |= {"generator_training": table, **changes}
    return quick(folder, **keys)


def training_of(config: RunConfig) -> RunDirectory:
    return RunDirectory(Path(federated_training(config).run_dir))


def log_of(run: RunDirectory) -> str:
    return (run.path / "flower.log").read_text(encoding="utf-8")


def stop_before(monkeypatch: pytest.MonkeyPatch, task: str, number: int) -> None:
    """Interrupt the server before a round of a phase."""
    train_round = TrainingRounds.train_round

    def stop(self: TrainingRounds, state: Any) -> Any:
        if (self.config.task, state.round + 1) == (task, number):
            raise KeyboardInterrupt
        return train_round(self, state)

    monkeypatch.setattr(TrainingRounds, "train_round", stop)


def test_generator_is_trained_once_and_the_run_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[RunDirectory, RunDirectory]
) -> None:
    one, training = whole
    monkeypatch.setenv("FEDEAS_CACHE", str(training.path.parents[1]))
    assert training.status() == ("finished", "") and len(training.rounds()) == 2
    assert training.rounds()[0]["clients"] == [0, 1] and "loss" in training.rounds()[0]
    assert is_whole(training.path / "generator") and one.config().generator == "federated"
    assert one.summary()["total_generated"] > 0 and set(one.files()) == {"generator", "model"}
    assert "Training the generator first, 2 rounds" in log_of(one)
    assert all(list(run.path.glob("clients/*/state-*")) for run in whole)  # each phase has its own

    before = (training.path / "rounds.jsonl").stat().st_mtime_ns
    two = finish(tiny(tmp_path / "two"))
    assert "which the federation has trained before" in log_of(two)
    assert weights(one) == weights(two) and (training.path / "rounds.jsonl").stat().st_mtime_ns == before
    for words in (["runs", "ls", str(tmp_path)], ["runs", "show", str(two.path)], ["export", str(two.path), "record"]):
        assert run_in_process(*words, cwd=tmp_path).returncode == 0, words

    (training.path / "generator" / "unet" / "config.json").write_text("{}")  # damaged: written again
    assert weights(finish(tiny(tmp_path / "three"))) == weights(one)


def test_training_alone_gives_the_generator_of_the_run(
    tmp_path: Path, whole: tuple[RunDirectory, RunDirectory]
) -> None:
    run, training = whole
    values = {**run.config().to_user_dict(), "run-dir": ""}
    (tmp_path / "c.toml").write_text(tomli_w.dumps(values))
    done = run_in_process("train-generator", "--federated", "c.toml", "--out", "alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone = RunDirectory(tmp_path / "alone")
    assert alone.config().task == "generator" and len(alone.rounds()) == RECIPE["rounds"]
    assert weights(alone) == weights(training)


def test_overrides_of_the_training_alone_have_an_effect(tmp_path: Path) -> None:
    """`rounds` and `strategy` of a run that trains its generator first are the classifier's, but overrides are not."""
    conf = tmp_path / "c.toml"
    recipe = {"rounds": 5, "local-steps": 2, "batch-size": 4}
    conf.write_text(tomli_w.dumps({"generator": "federated", "rounds": 9, "beta": 3.0, "generator-training": recipe}))
    assert federated_config(conf, []).rounds == 5
    changed = federated_config(conf, ["rounds=7", "strategy=fedavgm", "generator-training.local-steps=3", "seed=4"])
    assert (changed.task, changed.rounds, changed.strategy, changed.seed) == ("generator", 7, "fedavgm", 4)
    assert (changed.generator_training.local_steps, changed.generator_training.batch_size) == (3, 4)
    assert federated_config(conf, ["generator-training.rounds=6"]).rounds == 6
    with pytest.raises(ConfigError, match="policy = 'fedeas'"):
        federated_config(conf, ["policy=fedeas"])


@pytest.mark.parametrize("task", ["generator", pytest.param("classifier", marks=pytest.mark.slow)])
def test_run_killed_in_either_phase_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[RunDirectory, RunDirectory], task: str
) -> None:
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_before(patched, task, 2)
        finish(tiny(tmp_path / "parts"))
    assert RunDirectory(tmp_path / "parts").state() == "interrupted"
    resumed = finish(tiny(tmp_path / "parts", resume=True))
    assert weights(resumed) == weights(whole[0])
    assert weights(training_of(resumed.config())) == weights(whole[1])


def test_run_whose_generator_has_its_rounds_keeps_them(tmp_path: Path) -> None:
    config = tiny(tmp_path / "r", {"rounds": 0})
    RunDirectory.start(config, {})
    with pytest.raises(RunError, match=r"rounds = 3: must be 2, .*; its generator's training .* depends on it"):
        RunDirectory(tmp_path / "r").check_ready(config.with_changes(resume=True, rounds=3))


def test_failure_of_the_training_names_the_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise ValueError("no memory left")

    monkeypatch.setattr("fedeas_flwr.generators.learn.federated.LocalDenoiser.train", broken)
    with pytest.raises(Exception, match=r"^generator = 'federated': round 1: 2 of 2 clients failed .* no memory left"):
        finish(tiny(tmp_path / "r"))


def test_nodes_elsewhere_receive_the_generator_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[RunDirectory, RunDirectory]
) -> None:
    """Treat inline clients as SuperNodes: the server's folder is in its run directory, and they keep a copy of it."""
    monkeypatch.setattr("fedeas_flwr.server_app.is_simulated", lambda grid: False)
    read_node, add_task = client_app.read_node, messages.add_task
    sent: list[tuple[str, int, bool]] = []

    def deployed(node_config: Any) -> Node:
        return replace(read_node(node_config), simulated=False)

    def listen(message: Any, task: Any, buffers: Any, extra: Any, generator: Any = None) -> None:
        sent.append((task.task, task.round, generator is not None))
        add_task(message, task, buffers, extra, generator)

    monkeypatch.setattr(client_app, "read_node", deployed)
    monkeypatch.setattr(messages, "add_task", listen)
    run = finish(tiny(tmp_path / "deployed"))
    assert weights(RunDirectory(run.path / "generator-training")) == weights(whole[1])
    assert is_whole(received_folder(run.identity())) and not training_of(run.config()).path.exists()
    assert [one for one in sent if one[2]] == [("classifier", 1, True)] * 2 and len(sent) == 8
    assert weights(run) == weights(whole[0])
    done = run_in_process("runs", "rm", str(run.path), "--yes")
    assert done.returncode == 0 and not run.path.exists(), done.stdout + done.stderr


def test_received_weights_are_checked() -> None:
    from flwr.app import ConfigRecord, Message, RecordDict

    from fedeas_flwr.strategies.records import ARRAYS, CONFIG, to_record

    content = RecordDict({ARRAYS: to_record({}), CONFIG: ConfigRecord({"server-round": 1})})
    message = Message(content, dst_node_id=6, message_type="train")
    task = messages.TrainTask(1, 1.0, 0, 0, 0, "0" * 32, messages.EMPTY_SHARE)
    messages.add_task(message, task, to_record({}), to_record({}), to_record({"w": np.array([np.nan], np.float32)}))
    assert messages.has_generator(message)
    with pytest.raises(MessageError, match="array w holds NaN"):
        messages.read_generator(message, {"w": np.zeros(1, np.float32)})


def test_phase_has_the_runs_data_and_its_own_recipe(tmp_path: Path) -> None:
    config = tiny(tmp_path / "r", rounds=7, participation=0.25, strategy="moon", model="small-cnn", backend="ray")
    phase = generator_config(config)
    assert (phase.task, phase.policy, phase.generator, phase.strategy) == ("generator", "none", "builtin", "fedavg")
    assert (phase.rounds, phase.participation, phase.evaluation, phase.backend) == (2, 1.0, "federated", "ray")
    without = config.with_changes(generator_training={**RECIPE, "rounds": 0, "participation": 0.0, "held-out": 0.0})
    defaults = generator_config(without)
    assert (defaults.rounds, defaults.participation, defaults.evaluation) == (7, 0.25, "central")
    same = config.with_changes(strategy="fedavg", rounds=9, model="resnet18", actors=2, run_dir=str(tmp_path / "s"))
    assert federated_training(config).run_dir == federated_training(same).run_dir
    for change in ({"seed": 2}, {"alpha": 0.5}, {"clients": 3}, {"generator_training": {**RECIPE, "local-steps": 2}}):
        assert federated_training(tiny(tmp_path / "r", **change)).run_dir != federated_training(config).run_dir
    assert with_folder(config).generator == str(training_of(config).path / "generator")


@pytest.mark.flower
@pytest.mark.slow
def test_ray_and_inline_train_the_same_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline = finish(tiny(tmp_path / "inline", model="small-cnn"))
    generator = weights(training_of(inline.config()))
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "ray-cache"))
    ray = finish(tiny(tmp_path / "ray", model="small-cnn", backend="ray"))
    assert weights(training_of(ray.config())) == generator and weights(ray) == weights(inline)
    assert ray.read_json("service.json")["images"] > 0


@pytest.mark.flower
@pytest.mark.slow
def test_supernodes_train_and_receive_the_generator(tmp_path: Path) -> None:
    keys = {**SMALL, **CHEAP, "clients": 2, "rounds": 1, "participation": 1.0, "generator": "federated"}
    recipe = {**RECIPE, "rounds": 1}
    keys |= {f"generator-training.{key}": value for key, value in recipe.items()}
    simulated = finish(small(tmp_path / "simulated", **keys))
    with Lab(tmp_path, 2, tmp_path) as lab:
        lab.register()
        nodes = lab.deployment.node_folders(lab.folder)
        for number, node in enumerate(nodes):
            lab.set_node_config(node, f"partition-id={number} num-partitions=2")
            lab.start_node(number)
        run = lab.follow(lab.submit(**keys), 2 * LONG)
    assert weights(RunDirectory(run.path / "generator-training")) == weights(training_of(simulated.config()))
    assert weights(run) == weights(simulated)
    assert all(list((node / "cache" / "generators").glob("received-*/unet/*.safetensors")) for node in nodes)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"dp": "client-fixed"}, "dp = 'client-fixed': must be none with generator = 'federated'"),
        ({"evaluation": "federated", "protocol": "paper"}, "needs generator-training.held-out above 0"),
        ({"generator-training.rounds": -1}, "generator-training.rounds = -1: must be greater than or equal to 0"),
        ({"task": "generator", "policy": "none", "generator-training.rounds": 3}, "rounds = 3: must be 0 with task"),
    ],
)
def test_wrong_settings_are_one_line(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"generator": "federated", **keys})
    assert text in str(error.value) and "\n" not in str(error.value)


def test_commands_before_the_training_check_what_they_can(tmp_path: Path) -> None:
    config = parse_config({"generator": "federated", "clients": 4})
    check_for_run(config, "cpu")
    with pytest.raises(ValueError, match="sampler-steps"):
        check_for_run(config.with_changes(sampler="ddim", sampler_steps=333), "cpu")
    with pytest.raises(ValueError, match="preset: paper needs images with sides of multiples of 8"):
        odd = np.zeros((20, 12, 12, 1), np.uint8)
        labels = np.arange(20) % 2
        np.savez(tmp_path / "own.npz", x_train=odd, y_train=labels, x_test=odd, y_test=labels)
        own = {"dataset": f"own:{tmp_path / 'own.npz'}", "generator-training.preset": "paper"}
        check_for_run(parse_config({"generator": "federated", "clients": 2, **own}), "cpu")
    with pytest.raises(OSError, match=r"there is no /nowhere/unet/config\.json"):
        check_for_run(parse_config({"generator": "federated", "generator-training.start": "/nowhere"}), "cpu")
    with pytest.raises(ValueError, match="'federated' is not trained yet"):
        open_for_run(config, "cpu")
    (tmp_path / "c.toml").write_text('clients = 4\ngenerator = "federated"\nbackend = "inline"\n')
    doctor = run_in_process("doctor", "c.toml", cwd=tmp_path)
    assert "federated: the first run with this config trains it" in doctor.stdout, doctor.stdout
    assert run_in_process("plan", "c.toml", cwd=tmp_path).returncode == 0
    refused = run_in_process("plan", "c.toml", "--estimate", cwd=tmp_path)
    assert refused.returncode == 2 and "is not trained yet" in refused.stderr
    refused = run_in_process("generate", "--generator", "federated", "--out", "images", cwd=tmp_path)
    assert refused.returncode == 2 and "is not trained yet" in refused.stderr
