"""The texts that start a deployment's processes. They run where they lie, so that a folder can be copied anywhere."""

from __future__ import annotations

import shlex

from fedeas_flwr.superlink import QUIET

_HEAD = """\
#!/bin/sh
set -eu
cd "$(dirname "$0")"
# Where fedeas-flwr is installed, if not on the PATH: FEDEAS_BIN=/opt/fedeas/venv/bin
PATH="${{FEDEAS_BIN:-/opt/fedeas/venv/bin}}:$PATH"
# Everything this machine keeps is below this folder, unless it is told otherwise.
export PATH FEDEAS_CACHE="${{FEDEAS_CACHE:-$PWD/cache}}" FLWR_HOME="${{FLWR_HOME:-$PWD/flwr}}"
export {quiet}
"""


def superlink_script(port: int) -> str:
    """Start the SuperLink: TLS, registered nodes alone, registrations and runs kept in ``state.db``."""
    return f"""{_head()}\
exec flower-superlink --host "${{SUPERLINK_HOST:-0.0.0.0}}" --port {port} \\
    --ssl-certfile server.crt --ssl-keyfile server.key --ssl-ca-certfile "$PWD/ca.crt" \\
    --enable-supernode-auth --database state.db --disable-runtime-dependency-installation "$@"
"""


def node_script(port: int) -> str:
    """Start a SuperNode with its key, its node-config and the SuperLink's address, all files beside it."""
    return f"""{_head()}\
# node-config is one line; with data of this machine's own: client-id=0 data-path="/data/images"
exec flower-supernode --superlink "$(cat superlink-address)" --root-certificates ca.crt \\
    --auth-supernode-private-key node.key --port "${{NODE_PORT:-{port}}}" --node-config "$(cat node-config)" "$@"
"""


def systemd_unit(what: str, folder: str) -> str:
    """Start it with the machine and whenever it ends."""
    return f"""\
[Unit]
Description={what} (FedEAS)
After=network-online.target
Wants=network-online.target

[Service]
User=fedeas
WorkingDirectory={folder}
ExecStart={folder}/start.sh
Restart=always
RestartSec=10
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths={folder}
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""


def _head() -> str:
    return _HEAD.format(quiet=" ".join(f"{name}={shlex.quote(value)}" for name, value in QUIET.items()))
