"""Public keys of a deployment's clients, which `fedeas deploy` writes into the app: a node is the client of its key.

Apps of simulations, and of federations set up by other means, have no such file.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedeas_flwr.common.errors import ConfigError

KEYS_FILE = "fedeas_flwr/node-keys.json"
"""Path in the app's folder."""


def read_node_keys(app: Path = Path(__file__).parents[2]) -> dict[str, int] | None:
    """Return public key → client id, or ``None`` if the app has no keys."""
    path = app / KEYS_FILE
    try:
        return {str(key): int(client) for key, client in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; write it again with fedeas deploy register") from None
