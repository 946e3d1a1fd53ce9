"""Node configs: invalid values, the state folder, a node's data and generator, and what a node imports."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from runners import CHEAP, finish, small, weights

from fedeas_flwr import client_app
from fedeas_flwr.common.errors import ConfigError, RunFailedError
from fedeas_flwr.config import parse_config
from fedeas_flwr.data import datasets
from fedeas_flwr.data.federated import federated_data, local_data
from fedeas_flwr.data.node import read_node
from fedeas_flwr.federation import client_manager
from fedeas_flwr.federation.grids import InlineGrid
from fedeas_flwr.federation.messages import build_query
from fedeas_flwr.generators.cache import ImageCache
from fedeas_flwr.generators.client_images import _source
from fedeas_flwr.generators.interface import LazyGenerator, SampleId, batch_size
from fedeas_flwr.generators.opening import open_generator
from fedeas_flwr.runs.directory import RunDirectory

RUN = "ab" * 16
PLACE = {"partition-id": 0, "num-partitions": 2}


@pytest.mark.parametrize(
    ("node_config", "reason"),
    [
        ({}, "data-path is missing, or for a trial partition-id and num-partitions"),
        ({"client-id": 3}, "data-path is missing, or for a trial"),
        ({"partition-id": 0}, "num-partitions is missing: must be a whole number from 1"),
        ({"partition-id": 2, "num-partitions": 2}, "partition-id = 2: must be a whole number from 0 to 1"),
        ({"partition-id": "0", "num-partitions": 2}, "partition-id = '0': must be a whole number"),
        ({"partition-id": True, "num-partitions": 2}, "partition-id = True: must be a whole number"),
        ({"partition-id": 0, "num-partitions": 2, "client-id": 1}, "client-id = 1, but partition-id = 0"),
        ({"data-path": "/nowhere", "client-id": 1}, "data-path = '/nowhere' is not there"),
        ({"data-path": ".", "client-id": 1, "partition-id": 1}, "exclude each other"),
        ({"data-path": "."}, "client-id is missing"),
        ({"data-pat": "."}, "unknown key 'data-pat' = '.'; did you mean 'data-path'?"),
        ({"path": "."}, "unknown key 'path' = '.'; did you mean 'data-path'?"),
        ({"zzzzzz": 1}, "unknown key 'zzzzzz' = 1; there are client-id, data-path, partition-id, num-partitions, gen"),
        ({"partition-id": 0, "num-partitions": 2, "generator": 3}, "generator = 3: must be text"),
        ({**PLACE, "max-images": -3}, "max-images = -3: must be a whole number from 0"),
        ({**PLACE, "max-images": 1e3}, "max-images = 1000.0: must be a whole number from 0"),
        ({**PLACE, "max-images": "500"}, "max-images = '500': must be a whole number from 0"),
        ({**PLACE, "generate": "maybe"}, 'generate = \'maybe\': must be "yes" or "no"'),
        ({**PLACE, "generate": 0}, 'generate = 0: must be "yes" or "no"'),
    ],
)
def test_invalid_node_config_is_one_line(node_config: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^node-config: ") as caught:
        read_node(node_config)
    assert reason in str(caught.value)


def test_node_config_keys_override_the_run_config() -> None:
    place = {"partition-id": 0, "num-partitions": 2}
    config = parse_config({"generator": "/servers/generator", "data-dir": "/servers/data"})
    assert read_node(place).apply(config) is config
    node = read_node({**place, "generator": "/mine/generator", "device": "cpu"})
    assert node.apply(config) == config.with_changes(generator="/mine/generator", device="cpu")


@pytest.mark.parametrize(
    ("limit", "images"),
    [
        ({}, None),
        ({"max-images": 500}, 500),
        ({"generate": "yes"}, None),
        ({"generate": "no"}, 0),
        ({"generate": False}, 0),
        ({"generate": True, "max-images": 0}, 0),
        ({"generate": "no", "max-images": 500}, 0),
    ],
)
def test_node_states_its_limit_of_images(limit: dict[str, object], images: int | None) -> None:
    assert read_node({**PLACE, **limit}).max_images == images


def test_state_folder_of_simulated_client_and_of_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEAS_CACHE", str(tmp_path / "cache"))
    place = {"partition-id": 1, "num-partitions": 2}
    config = parse_config({"run-dir": "/run"})

    def folder(**more: object) -> Path:
        return read_node({**place, **more}).state_folder(config, 5, RUN)

    assert folder(simulated=True) == Path("/run/clients/1")
    simulated = read_node({**place, "simulated": True})
    assert simulated.state_folder(parse_config({}), 5, RUN) == tmp_path / "cache/runs/5/clients/1"
    assert folder() == tmp_path / "cache/clients" / RUN / "1"
    assert folder(**{"state-dir": "/var/lib/node"}) == Path("/var/lib/node") / RUN / "1"


def test_run_identity_survives_moving_its_folder(tmp_path: Path) -> None:
    run = RunDirectory.start(parse_config({"run-dir": str(tmp_path / "a")}), {})
    name = run.identity()
    (tmp_path / "a").rename(tmp_path / "b")
    assert RunDirectory(tmp_path / "b").identity() == name
    assert RunDirectory.start(parse_config({"run-dir": str(tmp_path / "a")}), {}).identity() != name


def test_node_trains_on_its_own_images(tmp_path: Path) -> None:
    """The images of partition 1, given as a file of the node, equal the data of partition 1."""
    config = parse_config({"clients": 3})
    partition = federated_data(config, 3)
    x, y = partition.train(1)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    node = read_node({"client-id": 9, "data-path": str(tmp_path / "mine.npz")})
    own = local_data(config, node)
    assert node.part == 0
    assert np.array_equal(own.train(node.part)[0], x)
    assert np.array_equal(own.train_labels(node.part), y)
    assert len(own.test(node.part)[1]) == 0
    split = local_data(config.with_changes(protocol="paper"), node)
    kept = np.bincount(split.test(0)[1], minlength=10)
    assert kept.tolist() == [round(0.25 * n) for n in np.bincount(y, minlength=10)]
    assert len(split.train(0)[1]) + kept.sum() == len(y)


def test_test_images_of_a_node_depend_on_the_partition_seed(tmp_path: Path) -> None:
    images = np.arange(40, dtype=np.uint8)[:, None, None, None] * np.ones((8, 8, 1), np.uint8)
    np.savez(tmp_path / "mine.npz", x=images, y=np.arange(40) % 2)
    node = read_node({"client-id": 9, "data-path": str(tmp_path / "mine.npz")})
    configs = [parse_config({"protocol": "paper", "partition-seed": seed}) for seed in (1, 2)]
    first, second = (set(local_data(config, node).test(0)[0][:, 0, 0, 0].tolist()) for config in configs)
    assert len(first) == len(second) == 10 and first != second


def test_node_whose_file_changed_reads_it_again(tmp_path: Path) -> None:
    config, images = parse_config({}), np.zeros((20, 8, 8, 1), np.uint8)
    np.savez(tmp_path / "mine.npz", x=images, y=np.arange(20) % 2)
    node = read_node({"client-id": 9, "data-path": str(tmp_path / "mine.npz")})
    assert local_data(config, node) is local_data(config, node)
    np.savez(tmp_path / "mine.npz", x=images, y=np.arange(20) % 4)
    assert local_data(config, node).label_counts(0).tolist() == [[5] * 4 + [0] * 6]


def test_node_with_other_classes_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One path may hold different data on two machines, and label 1 would mean different classes."""
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    np.savez(tmp_path / "examples.npz", x=x, y=np.arange(40) % 2, classes=np.array(["healthy", "ill"]))
    opened = datasets.dataset_info(f"own:{tmp_path}/examples.npz")
    on_server = replace(opened, classes=("healthy", "broken"))
    monkeypatch.setattr(client_manager, "dataset_info", lambda name: on_server)
    with pytest.raises(RunFailedError, match=r"examples.npz': its class names or their order differ"):
        finish(small(tmp_path / "r", dataset=f"own:{tmp_path}/examples.npz", policy="none", clients=2, alpha=10.0))


def test_lazy_generator_opens_only_to_generate(digits_generator: Path, fresh_images: object, tmp_path: Path) -> None:
    generator = open_generator(str(digits_generator), "digits")
    cache, wanted = ImageCache(tmp_path), [3, *[0] * 9]
    images, _, made = cache.ensure(generator, seed=1, client=0, wanted=wanted)
    opened: list[object] = []

    def open_it() -> object:
        opened.append(1)
        return generator

    remembered = LazyGenerator(generator.fingerprint, 10, (8, 8, 1), open_it)
    again, _, made_again = cache.ensure(remembered, seed=1, client=0, wanted=wanted)
    assert (made, made_again, opened) == (3, 0, [])
    assert np.array_equal(images, again)
    next(tmp_path.rglob("*.npy")).write_bytes(b"damaged")
    mended, _, made_again = cache.ensure(remembered, seed=1, client=0, wanted=wanted)
    assert (made_again, opened) == (3, [1])
    assert np.array_equal(images, mended)
    other = LazyGenerator("0" * 64, 10, (8, 8, 1), open_it)
    with pytest.raises(ValueError, match="not the one that made this client's images"):
        other.sample([SampleId(1, 0, 0, 0)])
    assert batch_size(LazyGenerator("wide", 10, (8, 8, 1), Wide)) == 512


class Wide:
    """A generator with batches of 512 images."""

    fingerprint, batch_size = "wide", 512


def test_client_keeps_its_generator_fingerprint_under_ray(tmp_path: Path) -> None:
    config, address = small(tmp_path), "service 64  NEW"
    assert _source(config, "cpu", address, "").fingerprint == "NEW"
    known = _source(config, "cpu", address, "OLD")
    assert known.fingerprint == "OLD"
    with pytest.raises(ValueError, match="not the one that made this client's images"):
        known.sample([SampleId(1, 0, 0, 0)])


def test_resumed_run_does_not_load_diffusers(tmp_path: Path, fresh_images) -> None:
    """Every message to a SuperNode starts such a process; only the one that generates may load diffusers."""
    fresh_images("a")
    finish(small(tmp_path / "run", participation=1.0, rounds=2, **CHEAP))
    whole = weights(finish(small(tmp_path / "whole", participation=1.0, **CHEAP)))
    code = (
        "import io, sys; from rich.console import Console; from fedeas_flwr.launch.run import launch; "
        "from fedeas_flwr.runs.directory import RunDirectory; from pathlib import Path; "
        f"config = RunDirectory(Path({str(tmp_path / 'run')!r})).config().with_changes(rounds=3, resume=True); "
        "launch(config, Console(file=io.StringIO())); print('diffusers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
    assert weights(RunDirectory(tmp_path / "run")) == whole


@pytest.mark.parametrize("simulated", [False, True])
def test_only_a_real_node_shows_the_packages_log(
    simulated: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower's process on a node shows only Flower's own log."""
    package, flower = logging.getLogger("fedeas_flwr"), logging.getLogger("flwr")
    monkeypatch.setattr(package, "handlers", [])
    monkeypatch.setattr(package, "level", logging.NOTSET)
    monkeypatch.setattr(flower, "handlers", [logging.StreamHandler(sys.stdout)])
    package.manager._clear_cache()
    place = {**PLACE, **({"simulated": True} if simulated else {})}
    for _ in range(2):  # one line for each, however many messages the process handles
        client_app._open(Context(run_id=1, node_id=1, node_config=place, state=RecordDict(), run_config={}))
    logging.getLogger("fedeas_flwr.generators").info("images generated: 1 of 2")
    assert capsys.readouterr().out == ("" if simulated else "images generated: 1 of 2\n")
    monkeypatch.undo()
    package.manager._clear_cache()


@pytest.mark.parametrize(
    ("node_config", "lines"),
    [
        ({"partition-id": 1, "num-partitions": 3}, 1),
        ({"partition-id": 1, "num-partitions": 3, "simulated": True}, 0),
        ({"client-id": 1, "data-path": "mine.npz"}, 0),
    ],
)
def test_node_without_own_images_says_once_per_run_what_it_trains_on(
    node_config: dict[str, int | str],
    lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client_app, "_show_log", lambda: None)
    np.savez("mine.npz", x=np.zeros((20, 8, 8, 1), np.uint8), y=np.arange(20) % 2)
    run_config = parse_config({"policy": "uniform", "clients": 3}).to_user_dict()
    InlineGrid(client_app.app, 1, run_config)  # Flower then creates messages
    context = Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config=run_config)
    for question in ("identity", "plan"):
        reply = client_app.query(build_query(1, question), context)
        assert not reply.has_error(), reply.error
    said = [line for line in caplog.messages if "partition 1 of 3 of the run's dataset digits" in line]
    assert (len(said), len(caplog.messages), all("data-path" in line for line in said)) == (lines, lines, True)
