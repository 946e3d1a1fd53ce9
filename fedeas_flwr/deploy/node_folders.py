"""Read the nodes' folders: each one's public key and node-config, and so which key belongs to which client.

`fedeas deploy register` writes the clients' keys into the app, with which they reach the ServerApp.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from cryptography.hazmat.primitives import serialization

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_write
from fedeas_flwr.data.node import Node, read_node
from fedeas_flwr.federation.flower_internals import parse_config_args
from fedeas_flwr.federation.node_keys import KEYS_FILE

_WORD = re.compile(r"""\S+?=(?:'[^']*'|"[^"]*"|\S+)""")
"""Pattern of a key and its value as Flower reads them."""


def client_keys(folders: Sequence[Path]) -> dict[str, int]:
    """Return the public key of each node → the client id in its node-config.

    Raise `ConfigError` if a key or a node-config cannot be read, or two nodes have the same client id.
    """
    keys: dict[str, int] = {}
    for folder in folders:
        try:
            key, client = public_key(folder), read_node_config(folder, here=False).client
        except (ValueError, OSError) as error:
            raise ConfigError(f"{folder.name}: {error}") from None
        if client in keys.values():
            raise ConfigError(f"{folder.name}: another node has the client id {client}, too: give each node its own")
        keys[key] = client
    return keys


def write_client_keys(app: Path, folders: Sequence[Path]) -> None:
    """Write the clients' keys into the app, whose runs then reject all other nodes."""
    atomic_write(app / KEYS_FILE, json.dumps(client_keys(folders), indent=1).encode())


def public_key(folder: Path) -> str:
    """Return a node's public key as Flower stores it."""
    key = serialization.load_ssh_public_key((folder / "node.pub").read_bytes())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


def read_node_config(folder: Path, here: bool) -> Node:
    """Return the node that a folder's node-config describes; its data-path is checked only if it is on this machine."""
    found = _parsed((folder / "node-config").read_text(encoding="utf-8").strip())
    if not here and found.get("data-path"):
        found = {**found, "data-path": "/"}
    return read_node(found)


def _parsed(text: str) -> dict[str, Any]:
    """Return a node-config as Flower reads it, or raise `ConfigError`.

    The error names the wrong part of the node-config; Flower's own error does not.
    """
    for word in _WORD.findall(text):
        try:
            parse_config_args([word])
        except (ValueError, click.ClickException):
            quoted = 'put text in quotes, as in data-path="/data/images"'
            raise ConfigError(f"node-config: {word} cannot be read; {quoted}") from None
    if left := _WORD.sub("", text).strip():
        raise ConfigError(f"node-config: {left!r} is not key=value; Flower would ignore it")
    try:
        return parse_config_args([text])
    except (ValueError, click.ClickException):
        raise ConfigError("node-config: a key is given twice") from None
