"""Both apps on a SuperLink and SuperNodes with TLS and registered keys: the simulation's weights, no strangers."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import psutil
import pytest
from deployments import Lab
from runners import finish, small, weights
from waiting import wait_until

from fedeas_flwr import client_app
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.federated import federated_data
from fedeas_flwr.deploy.certificates import write_authority, write_node_key
from fedeas_flwr.deploy.deployment import CONNECTION
from fedeas_flwr.doctor.deployment import check_gateway, examine
from fedeas_flwr.launch.superlink import free_port, run_flwr_json

pytestmark = pytest.mark.flower

KEYS: dict[str, Any] = {"clients": 3, "rounds": 5, "participation": 1.0, "local_epochs": 1, "beta": 4.0, "alpha": 0.1}
GENERATOR_KEYS: dict[str, Any] = {
    "task": "generator",
    "policy": "none",
    "clients": 3,
    "rounds": 2,
    "participation": 1.0,
    "alpha": 0.1,
    "evaluation": "federated",
    "generator-training.local-steps": 2,
    "generator-training.batch-size": 4,
    "generator-training.held-out": 0.1,
}


def test_unregistered_node_and_false_superlink_are_rejected(tmp_path: Path) -> None:
    """Real Flower processes: an unregistered key, and a certificate of another authority."""
    with Lab(tmp_path, 2, tmp_path) as lab:
        honest, other = lab.deployment.node_folders(lab.folder)
        assert [re.sub(r"\d{6,}", "N", line) for line in lab.register()] == [
            "node-0: registered as node N",
            "node-1: registered as node N",
        ]
        (other / "node.key").unlink()
        write_node_key(other)  # a key of its own making
        deceived = lab.folder / "deceived"
        shutil.copytree(honest, deceived)
        (tmp_path / "elsewhere").mkdir()
        write_authority(tmp_path / "elsewhere")
        shutil.copy(tmp_path / "elsewhere" / "ca.crt", deceived)
        lab.start_node(0)
        refused = [lab.start_node(1), lab.start(deceived, NODE_PORT=str(free_port()))]
        wait_until(lambda: all(process.poll() is not None for process in refused), "both nodes have exited")
        assert [process.cmdline() for process in processes_of(other)] == [], "flower-superexec outlived its SuperNode"
        wait_until(lambda: "SuperNode ID" in lab.said("node-0"), "the honest node is registered")
        assert lab.online() == 1
        desk, deployment = lab.folder / "flwr", lab.deployment
        assert [found.state for found in check_gateway(deployment.address, desk)] == ["ok"]
        (open_door,) = check_gateway(
            deployment.control_address, desk
        )  # as if nodes connected to the SuperLink directly
        assert (open_door.state, "answers 200 to POST /v1/control/list-runs" in open_door.text) == ("problem", True)
        found = [one for one in examine(lab.folder, RunConfig()) if one.name == "registered nodes"]
        assert [(one.state, re.sub(r"\d{6,}", "N", one.text)) for one in found] == [
            ("problem", "node N (registered) has a key that no node of this deployment has"),
            ("problem", "not registered: node-1"),
        ]
    said = [plain(lab.said(folder)) for folder in ("node-1", "deceived")]
    assert [("Failed to initialize the connection" in text, "SuperNode ID" in text) for text in said] == [
        (True, False)
    ] * 2


def processes_of(node: Path) -> list[psutil.Process]:
    """Return the processes that use a node's cache."""
    found = []
    for process in psutil.process_iter(["environ", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        if (process.info["environ"] or {}).get("FEDEAS_CACHE") == str(node / "cache"):
            found.append(process)
    return found


def own_file(folder: Path, client: int) -> Path:
    """Write the images of one partition to a file, as custom data of a node."""
    x, y = federated_data(parse_config({"alpha": KEYS["alpha"]}), KEYS["clients"]).train(client)
    np.savez(folder / "mine.npz", x=x, y=y)
    return folder / "mine.npz"


@pytest.mark.slow
def test_three_supernodes_give_the_weights_of_the_simulation(
    tmp_path: Path, digits_generator: Path, fresh_images: Any
) -> None:
    fresh_images("simulated")
    simulated = finish(small(tmp_path / "simulated", **KEYS))
    generator = finish(small(tmp_path / "generator", **GENERATOR_KEYS))
    with Lab(tmp_path, 3, digits_generator) as lab:
        lab.register()
        third = lab.deployment.node_folders(lab.folder)[2]
        own = f'client-id=2 data-path="{own_file(third, 2)}" state-dir="{third}/kept"'
        lab.set_node_config(third, f'{own} generator="{digits_generator}"')
        for number in range(3):
            lab.start_node(number)
        run = lab.follow(lab.submit(**KEYS, min_replies=1.0))
        importing, replies = lab.notes("diffusers"), lab.notes("replies")
        kept = [int(path.stem.removeprefix("state-")) for path in sorted((third / "kept").rglob("2/*"))]
        assert weights(lab.follow(lab.submit(**GENERATOR_KEYS, min_replies=1.0))) == weights(generator)
    assert weights(run) == weights(simulated)
    assert [r["clients"] for r in run.rounds()] == [[0, 1, 2]] * 5
    assert [r["made"] > 0 for r in run.rounds()] == [True, *[False] * 4]
    # Six messages per node, each in its own process: one of them loaded diffusers.
    nodes = lab.deployment.node_folders(lab.folder)
    assert sorted(importing) == [str(node / "cache") for node in nodes]
    # The last round's, the accepted one's, and those of two checkpoints, older ones if round 4 was still being tested.
    assert kept in ([3, 4, 5], [2, 3, 4, 5])
    assert not (run.path / "clients").exists()
    assert_only_model_and_numbers_were_sent(replies, run.load_model())


def assert_only_model_and_numbers_were_sent(replies: list[Any], model: dict[str, Any]) -> None:
    """The server received only arrays with the model's names and shapes, and single numbers under known names."""
    assert Counter(reply["type"] for reply in replies) == {"query": 3, "train": 15}
    for reply in replies:
        assert reply["configs"] == {}
        assert list(reply["metrics"]) == ["metrics"]
        assert all(type(value) in (int, float) for value in reply["metrics"]["metrics"].values())
        names = set(reply["metrics"]["metrics"])
        if reply["type"] == "query":
            assert (names, reply["arrays"]) == ({"client-id", "partitions", "examples", "classes"}, {})
            continue
        assert names == {
            *("num-examples", "client-id", "loss", "steps", "generated", "made", "rejected", "not-made"),
            *("seconds-generating", "seconds-training"),
        }
        assert set(reply["arrays"]) == {"arrays", "buffers"}
        sent = {key: shape for record in reply["arrays"].values() for key, shape in record.items()}
        assert sent == {key: list(array.shape) for key, array in model.items()}


@pytest.mark.slow
def test_late_and_killed_nodes_do_not_stop_the_run(tmp_path: Path, digits_generator: Path) -> None:
    with Lab(tmp_path, 3, digits_generator) as lab:
        lab.register()
        lab.start_node(0)
        victim = lab.start_node(1)
        wait_until(lambda: lab.online() == 2, "two nodes are online")
        run = lab.submit(**KEYS, min_replies=0.5, node_wait=1.0)
        wait_until(lambda: len(run.rounds()) >= 1, "round 1 is recorded")
        lab.start_node(2)
        # One query and the tasks of two rounds: Flower never gives it the second one again.
        wait_until(lambda: lab.said("node-1").count("Received successfully") == 3, "node 1 has its second task")
        for process in [*psutil.Process(victim.pid).children(recursive=True), psutil.Process(victim.pid)]:
            process.kill()
        # As systemd does: until a dead node's last heartbeat is a minute old, Flower refuses its key to a new process.
        back = [lab.start_node(1)]

        def done() -> bool:
            if back[-1].poll() is not None:
                back.append(lab.start_node(1))
            return run.status()[0] in ("finished", "failed")

        wait_until(done, "the run ends")
    assert run.status() == ("finished", "")
    rounds = run.rounds()
    assert rounds[0]["clients"] == [0, 1]
    reasons = [failure["reason"] for failure in rounds[1]["failures"] if failure["client"] == 1]
    assert len(reasons) == 1 and re.search(
        "Node Unavailable|its node went offline after the message was sent", reasons[0]
    )
    assert rounds[1]["seconds"]["clients"] < 120  # a minute without heartbeat, and no round-timeout of 1,800 s
    assert rounds[-1]["clients"] == [0, 1, 2]
    made = Counter()
    for client, folder in enumerate(lab.deployment.node_folders(lab.folder)):
        shards = list((folder / "cache" / "images").rglob("*.npy"))
        made[client] = sum(int(p.stem.split("-")[1]) - int(p.stem.split("-")[0]) for p in shards)
    assert sum(r["made"] for r in rounds) == sum(made.values()) == rounds[-1]["generated"]
    assert sorted(lab.notes("diffusers")) == [str(node / "cache") for node in lab.deployment.node_folders(lab.folder)]


@pytest.mark.slow
def test_impostors_with_registered_keys_are_rejected(tmp_path: Path, digits_generator: Path) -> None:
    """Two nodes of another's making, with keys that were registered by hand, claim to be client 0: early and late."""
    keys: dict[str, Any] = {**KEYS, "clients": 2, "rounds": 3, "policy": "none"}
    with Lab(tmp_path, 2, digits_generator) as lab:
        lab.register()
        impostors = []
        for name in ("early", "late"):
            folder = lab.folder / name
            shutil.copytree(lab.folder / "node-0", folder)
            (folder / "node.key").unlink()
            write_node_key(folder)
            lab.set_node_config(folder, f'client-id=0 data-path="{own_file(folder, 1)}"')
            words = ["supernode", "register", str(folder / "node.pub"), CONNECTION]
            answer = run_flwr_json(words, lab.environment(FLWR_HOME=str(lab.folder / "flwr")), lab.folder)
            impostors.append(answer["node-id"])
        lab.start(lab.folder / "early", NODE_PORT=str(free_port()))
        wait_until(lambda: lab.online() == 1, "the early impostor is online")
        for number in range(2):
            lab.start_node(number)
        run = lab.submit(**keys, min_replies=1.0)
        wait_until(lambda: len(run.rounds()) >= 1, "round 1 is recorded")
        lab.start(lab.folder / "late", NODE_PORT=str(free_port()))
        wait_until(lambda: lab.online() == 4, "the late impostor is online")
        lab.follow(run)
        found = [one.text for one in examine(lab.folder, RunConfig()) if one.name == "registered nodes"]
    assert [one.split(" has a key")[0] for one in found] == [
        *(f"node {number} (online)" for number in impostors),
        "all 2 are online",
    ]
    logged = (run.path / "flower.log").read_text()
    named = [f"Node {number} is rejected: its key is none of this deployment's" for number in impostors]
    assert [logged.count(text) for text in named] == [1, 1]
    assert [lab.said(name).count("Received successfully") for name in ("early", "late")] == [0, 0]
    assert [r["clients"] for r in run.rounds()] == [[0, 1]] * 3
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **keys)))


@pytest.mark.slow
def test_restarted_server_continues_its_round(tmp_path: Path, digits_generator: Path) -> None:
    keys: dict[str, Any] = {**KEYS, "clients": 1, "policy": "none", "checkpoint_every": 50}
    with Lab(tmp_path, 1, digits_generator) as lab:
        lab.register()
        lab.start_node(0)
        run = lab.submit(**keys)
        wait_until(lambda: len(run.rounds()) >= 2, "two rounds are recorded")
        lab.restart_superlink()
        checkpoint, done = run.load_checkpoint(), len(run.rounds())
        assert (run.status(), checkpoint is not None and checkpoint.round == done) == (("interrupted", ""), True)
        lab.submit(**keys, run_dir=str(run.path), resume=True)
        lab.follow(run)
    assert [r["round"] for r in run.rounds()] == [1, 2, 3, 4, 5] and 2 <= done < 5
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **keys)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hostile_supernode_changes_nothing_for_the_others(
    tmp_path: Path, digits_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three nodes sends another bad reply in every round: the weights are those of a run in which it fails."""
    with Lab(tmp_path, 3, digits_generator) as lab:
        project = lab.folder / "app" / "pyproject.toml"
        project.write_text(project.read_text().replace("fedeas_flwr.client_app:app", "hostile:app"))
        lab.register()
        for number in range(3):
            lab.start_node(number)
        run = lab.follow(lab.submit(**hostile.RUN, round_timeout=60.0), 900)
    reasons = [failure["reason"] for record in run.rounds() for failure in record["failures"]]
    expected = [reason for _, reason in hostile.KINDS.values()]
    assert [part in reason for part, reason in zip(expected, reasons, strict=True)] == [True] * len(expected), reasons
    monkeypatch.setattr(client_app, "app", hostile.app)
    monkeypatch.setattr(hostile, "KINDS", dict.fromkeys(hostile.KINDS, (hostile.fail, "")))
    assert weights(run) == weights(finish(small(tmp_path / "simulated", **hostile.RUN)))


def plain(log: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", log)
