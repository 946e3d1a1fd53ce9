"""What a node says of itself: who it is, where its data, its generator and its memory lie.

A simulated client is a number in a partition, and the run directory is its memory. A SuperNode is a machine of
somebody's own, so it chooses these things itself, in its `--node-config`; the server names no path on it.

    client-id                      who it is, however often it restarts; needed with data-path
    data-path                      images of its own: a folder with one subfolder a class, or an .npz file
    partition-id, num-partitions   or, for a trial, its part of the run's dataset
    generator, data-dir, device    in place of the run-config's keys of these names
    state-dir                      where it keeps what it must know in the next round; empty: clients/ in its cache
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import cache_root, expanded
from fedeas_flwr.config import RunConfig, parse_config, unknown_key

OVERRIDES = ("generator", "data-dir", "device")
NODE_KEYS = ("client-id", "data-path", "partition-id", "num-partitions", *OVERRIDES, "state-dir")
SIMULATED = "simulated"
"""Set by the inline grid; under Ray, which cannot set it, Ray itself is the sign."""


@dataclass(frozen=True)
class Node:
    """One client's place in the federation.

    Attributes
    ----------
    client
        Its number, which seeds its batches and images.
    partitions
        Into how many parts the run's dataset is split; 0: this node has data of its own.
    data_path
        Where that is.
    overrides
        Run-config keys that are this machine's business.
    state_dir
        Where it wants its memory kept.
    simulated
        Whether it shares a disk with the server, as a client of a simulation.
    """

    client: int
    partitions: int
    data_path: str
    overrides: Mapping[str, str]
    state_dir: str
    simulated: bool

    @property
    def part(self) -> int:
        """Which part of the data it opens is its own."""
        return self.client if self.partitions else 0

    def apply(self, config: RunConfig) -> RunConfig:
        """The run-config as it holds on this machine."""
        return parse_config({**config.to_user_dict(), **self.overrides}) if self.overrides else config

    def state_folder(self, config: RunConfig, run_id: int, run: str) -> Path:
        """Where this client's state of a run lies.

        Parameters
        ----------
        config, run_id
            Of the run: its folder, which a simulated client shares.
        run
            The run's own name for itself (`RunDirectory.identity`): a resumed run has another ``run_id``.
        """
        if self.simulated:
            return run_folder(config, run_id) / "clients" / str(self.client)
        root = expanded(self.state_dir, "node-config: state-dir") if self.state_dir else cache_root() / "clients"
        return root / run / str(self.client)


def read_node(node_config: Mapping[str, Any]) -> Node:
    """Check and read a node-config.

    Raises
    ------
    ConfigError
        One line that names the key, the value and what is allowed.
    """
    for key in node_config:
        if key not in (*NODE_KEYS, SIMULATED):
            listed = f"there are {', '.join(NODE_KEYS)}"
            raise ConfigError(f"node-config: {unknown_key(key, node_config[key], NODE_KEYS, listed)}")
    data_path = _text(node_config, "data-path")
    if data_path and not expanded(data_path, "node-config: data-path").exists():
        raise ConfigError(f"node-config: data-path = '{data_path}' is not there: an image folder or an .npz file")
    if data_path and "partition-id" in node_config:
        raise ConfigError("node-config: data-path and partition-id exclude each other: own data, or part of a dataset")
    if data_path:
        client, partitions = _whole(node_config, "client-id"), 0
    elif "num-partitions" not in node_config and "partition-id" not in node_config:
        raise ConfigError("node-config: data-path is missing, or for a trial partition-id and num-partitions")
    else:
        partitions = _whole(node_config, "num-partitions", least=1)
        client = _whole(node_config, "partition-id", below=partitions)
        if node_config.get("client-id", client) != client:
            raise ConfigError(
                f"node-config: client-id = {node_config['client-id']!r}, but partition-id = {client}: leave one out"
            )
    return Node(
        client=client,
        partitions=partitions,
        data_path=data_path,
        overrides={key: _text(node_config, key) for key in OVERRIDES if key in node_config},
        state_dir=_text(node_config, "state-dir"),
        simulated=node_config.get(SIMULATED) is True or _under_ray(),
    )


def _whole(node_config: Mapping[str, Any], key: str, least: int = 0, below: int = 2**53) -> int:
    value = node_config.get(key)
    if type(value) is not int or not least <= value < below:
        found = "is missing" if value is None else f"= {value!r}"
        raise ConfigError(f"node-config: {key} {found}: must be a whole number from {least} to {below - 1}")
    return value


def _text(node_config: Mapping[str, Any], key: str) -> str:
    value = node_config.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"node-config: {key} = {value!r}: must be text, in quotes")
    return value


def _under_ray() -> bool:
    ray = sys.modules.get("ray")  # never imported for this: a SuperNode has no use for it
    return ray is not None and bool(ray.is_initialized())


def run_folder(config: RunConfig, run_id: int) -> Path:
    """Where a run is recorded: as its config says, or by Flower's number in the user's cache."""
    return Path(config.run_dir) if config.run_dir else cache_root() / "runs" / str(run_id)
