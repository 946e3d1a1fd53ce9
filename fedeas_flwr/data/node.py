"""A node's settings: its client number, the paths of its data, generator and state, and its limit of images.

A simulated client is an index into a partition and keeps its state in the run directory. A SuperNode sets these things
in its `--node-config`; the server never names a path on it.

    client-id                      client number, the same after each restart; required with data-path
    data-path                      its own images: a folder with one subfolder per class, an .npz file, a folder saved
                                   by datasets (as `flwr-datasets create` writes it), or hf:PATH
    partition-id, num-partitions   or, for a trial, its part of the run's dataset
    generator, data-dir, device    override the run-config's keys of these names
    state-dir                      folder of its state between rounds; empty: clients/ in its cache
    max-images                     largest number of images that its plan in a run may have
    generate                       "no": none, which needs no generator; the same as max-images=0

The limit is applied when the client plans: `client_app` scales the policy's plan down, class by class.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import cache_root, expanded
from fedeas_flwr.common.hf_spec import HfSpec
from fedeas_flwr.config import RunConfig, parse_config, unknown_key

OVERRIDES = ("generator", "data-dir", "device")
NODE_KEYS = (
    "client-id",
    "data-path",
    "partition-id",
    "num-partitions",
    *OVERRIDES,
    "state-dir",
    "max-images",
    "generate",
)
OWN_IMAGES = "for its own images, replace partition-id and num-partitions in node-config by client-id and data-path"
"""What the owner of a node without own images can do."""
SIMULATED = "simulated"
"""Key that the inline grid sets. Ray cannot set it, so a client under Ray is recognised by Ray itself."""


@dataclass(frozen=True)
class Node:
    """One client's place in the federation, as read from its node-config."""

    client: int
    """Client number, which seeds batches and images."""
    partitions: int
    """Number of parts of the run's dataset; 0: this node has its own data."""
    data_path: str
    overrides: Mapping[str, str]
    """Run-config values that this machine sets itself."""
    state_dir: str
    """Folder of its state; empty: the default."""
    max_images: int | None
    """Largest number of images in its plan; None: no limit."""
    simulated: bool
    """Whether it is a client of a simulation, which shares a disk with the server."""

    @property
    def part(self) -> int:
        """Index of this node's part in the data it opens."""
        return self.client if self.partitions else 0

    @property
    def trains_on(self) -> str:
        """Return in words which images this node trains on; for a partition, the dataset's name may follow."""
        part = f"partition {self.client} of {self.partitions} of the run's dataset"
        return part if self.partitions else "its own data"

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the run-config with this node's overrides."""
        return parse_config({**config.to_user_dict(), **self.overrides}) if self.overrides else config

    def limited(self, images: int) -> int:
        """Return how many of a plan's images this node makes."""
        return images if self.max_images is None else min(images, self.max_images)

    def state_folder(self, config: RunConfig, run_id: int, run: str) -> Path:
        """Return the folder of this client's state in a run; a simulated client keeps it in the run's folder.

        ``run`` is the run's identity (`RunDirectory.identity`), since ``run_id`` changes when a run is resumed.
        """
        if self.simulated:
            return run_folder(config, run_id) / "clients" / str(self.client)
        root = expanded(self.state_dir, "node-config: state-dir") if self.state_dir else cache_root() / "clients"
        return root / run / str(self.client)


def is_simulated_node(node_config: Mapping[str, Any]) -> bool:
    """Return whether a node's config is that of a simulated client."""
    return node_config.get(SIMULATED) is True or running_ray() is not None


def read_node(node_config: Mapping[str, Any]) -> Node:
    """Check and read a node-config; raise `ConfigError` with the key, the value and what is allowed."""
    for key in node_config:
        if key not in (*NODE_KEYS, SIMULATED):
            listed = f"there are {', '.join(NODE_KEYS)}"
            raise ConfigError(f"node-config: {unknown_key(key, node_config[key], NODE_KEYS, listed)}")
    data_path = _text(node_config, "data-path")
    key = "node-config: data-path"
    if data_path and not expanded(HfSpec.parse(data_path, key).where, key).exists():
        raise ConfigError(
            f"node-config: data-path = '{data_path}' is not there: must be an image folder, an .npz file or hf:PATH"
        )
    if data_path and "partition-id" in node_config:
        raise ConfigError(
            "node-config: data-path and partition-id exclude each other: give own data or a part of the run's dataset"
        )
    if data_path:
        client, partitions = _whole(node_config, "client-id"), 0
    elif "num-partitions" not in node_config and "partition-id" not in node_config:
        raise ConfigError("node-config: data-path is missing, or for a trial partition-id and num-partitions")
    else:
        partitions = _whole(node_config, "num-partitions", least=1)
        client = _whole(node_config, "partition-id", below=partitions)
        if node_config.get("client-id", client) != client:
            raise ConfigError(
                f"node-config: client-id = {node_config['client-id']!r}, but partition-id = {client}: give one of them"
            )
    return Node(
        client=client,
        partitions=partitions,
        data_path=data_path,
        overrides={key: _text(node_config, key) for key in OVERRIDES if key in node_config},
        state_dir=_text(node_config, "state-dir"),
        max_images=_max_images(node_config),
        simulated=is_simulated_node(node_config),
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


def _max_images(node_config: Mapping[str, Any]) -> int | None:
    limit = _whole(node_config, "max-images") if "max-images" in node_config else None
    generate = node_config.get("generate", True)
    if not isinstance(generate, bool):
        if generate not in ("yes", "no"):
            raise ConfigError(f'node-config: generate = {generate!r}: must be "yes" or "no"')
        generate = generate == "yes"
    return limit if generate else 0


def running_ray() -> Any:
    """Return the module ray if Ray is running, else None; it is not imported, since a SuperNode does not need it."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def run_folder(config: RunConfig, run_id: int) -> Path:
    """Return the run's folder: `run-dir`, or a folder in the user's cache named by Flower's run id."""
    return Path(config.run_dir) if config.run_dir else cache_root() / "runs" / str(run_id)
