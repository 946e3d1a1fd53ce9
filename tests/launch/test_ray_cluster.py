"""Simulation on an existing Ray cluster: two Ray nodes on this machine, started with `ray start`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from runners import finish, run_in_process, small, weights
from waiting import wait_until

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.processes import MARK, ProcessTree
from fedeas_flwr.config import parse_config
from fedeas_flwr.launch.resources import ray_resources
from fedeas_flwr.launch.superlink import QUIET, free_port, is_listening, own_environment

pytestmark = pytest.mark.flower


def test_cluster_is_joined_only_with_ray_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for name in "ab":
        (tmp_path / name).mkdir()
    assert "RAY_ADDRESS" not in own_environment(tmp_path / "a")
    environment = own_environment(tmp_path / "b", "10.0.0.2:6379")
    assert (environment["RAY_ADDRESS"], "RAY_TMPDIR" in environment) == ("10.0.0.2:6379", False)
    config = parse_config({"clients": 8, "ray-address": "10.0.0.2:6379", "gpu-share": 0.25})
    assert ray_resources(config, on_gpu=True) == {
        "client-resources-num-cpus": 1,
        "client-resources-num-gpus": 0.249,
    }
    with pytest.raises(ConfigError, match="needs backend = 'ray'"):
        parse_config({"ray-address": "10.0.0.2:6379", "backend": "inline"})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("auto", "must be HOST:PORT, such as 10.0.0.1:6379"),
        ("127.0.0.1:1", "cannot connect (Connection refused)"),
        ("127.0.0.1:70000", "must be HOST:PORT"),
        ("..:5", "cannot connect"),
    ],
)
def test_unreachable_ray_address_is_one_line_at_once(tmp_path: Path, address: str, words: str) -> None:
    conf = str(Path(__file__).parents[2] / "conf" / "quickstart.toml")
    refused = run_in_process("run", conf, "backend=ray", f"ray-address={address}", cwd=tmp_path)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert refused.stderr.startswith(f"error: ray-address = '{address}': {words}")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def two_nodes(fresh_images: Any) -> Iterator[str]:
    """Start a head and a worker with one core and one declared GPU each; yield the address, and end both afterwards."""
    fresh_images("cluster")
    address, mark = f"127.0.0.1:{free_port()}", uuid.uuid4().hex
    shown = {"CUDA_VISIBLE_DEVICES": "0"}  # other tests hide it; Ray trusts this variable
    environment = {**os.environ, **QUIET, MARK: mark, "PYTHONUNBUFFERED": "1", **shown}
    ray = str(Path(sys.executable).parent / "ray")
    size = ["--num-cpus=1", "--num-gpus=1", "--object-store-memory=100000000", "--block"]
    with ExitStack() as stack:
        # Short, because Ray puts Unix sockets below it.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fe-", ignore_cleanup_errors=True))
        head = ["--head", f"--port={address.rpartition(':')[2]}", f"--temp-dir={folder}", "--include-dashboard=false"]
        for number, words in enumerate((head, [f"--address={address}"]), start=1):
            log = stack.enter_context((Path(folder) / "start.log").open("ab"))
            command = [ray, "start", "--node-ip-address=127.0.0.1", *words, *size]
            node = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            stack.callback(ProcessTree(node, mark).end)
            wait_until(lambda: is_listening(int(address.rpartition(":")[2])), "the head listens")
            # A worker that joins while the head is starting gives up.
            wait_until(lambda n=number: len(nodes_of(address, environment)) == n, f"{number} of 2 nodes are alive")
        yield address


def nodes_of(address: str, environment: dict[str, str]) -> list[str]:
    code = (
        "import json, ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); "
        "print(json.dumps([n['NodeID'] for n in ray.nodes() if n['Alive']]))"
    )
    done = subprocess.run([sys.executable, "-c", code, address], env=environment, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []


@pytest.mark.slow
def test_two_ray_nodes_give_the_weights_of_one(tmp_path: Path, two_nodes: str, fresh_images: Any) -> None:
    keys: dict[str, Any] = {"participation": 1.0, "device": "cpu"}
    run = finish(small(tmp_path / "two", backend="ray", ray_address=two_nodes, **keys))
    made = sum(record["made"] for record in run.rounds())
    assert run.read_json("service.json")["images"] == made > 0
    assert len(run.read_json("service.json")["nodes"]) == 2
    fresh_images("one")
    assert weights(run) == weights(finish(small(tmp_path / "one", **keys)))
