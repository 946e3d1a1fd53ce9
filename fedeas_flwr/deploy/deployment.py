"""Write and read a deployment, a federation of real machines with one folder per machine.

    DIR/deployment.toml   hosts, ports and nodes, from which the rest was made
    DIR/ca/               the authority's key: keep it offline, it is needed to renew the SuperLink's certificate
    DIR/superlink/        for the server: certificate, key, start.sh (SuperLink), gateway.sh, resume.sh, systemd units
    DIR/node-0/ …         one per node: its key, the authority's certificate, node-config, start.sh, a systemd unit
    DIR/flwr/             for the operator, in place: FLWR_HOME=DIR/flwr flwr run DIR/app deployment
    DIR/app/              the Flower app, with a deployment's run-config as its defaults and the clients' keys

A machine's folder can be copied anywhere; machines share only ``ca.crt``.

Flower serves nodes and operators on one port and requires no login of operators. So the SuperLink listens on the
server's loopback interface, and nodes connect to a gateway that forwards only nodes' requests. Operators work on the
server or through an SSH tunnel to it.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import tomli_w

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_folder, atomic_write
from fedeas_flwr.common.project import read_project
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.deploy.certificates import write_authority, write_node_key, write_server_certificate
from fedeas_flwr.deploy.node_folders import write_client_keys
from fedeas_flwr.deploy.scripts import (
    gateway_config,
    gateway_script,
    node_script,
    resume_script,
    resume_unit,
    superlink_script,
    systemd_unit,
)
from fedeas_flwr.federation.node_keys import KEYS_FILE
from fedeas_flwr.launch.superlink import stage_app

CONNECTION = "deployment"
"""Name of the SuperLink in Flower's command line."""
REVOKED = "revoked"
"""Name of the file that marks the folder of a revoked node."""
VERSION = "version"
"""Name of the file in a machine's folder with the version of fedeas-flwr that wrote its scripts."""
FIRST_NODE_PORT = 9094
"""Loopback port of the first SuperNode's API; later nodes count up, so that several can share a machine."""


@dataclass(frozen=True)
class Deployment:
    """The machines of a federation."""

    hosts: tuple[str, ...]
    """Host names or addresses of the server; nodes use the first, the certificate is valid for all."""
    port: int
    """Port of the gateway, which nodes connect to."""
    superlink_port: int
    """Port of the SuperLink on the server's loopback, and of an operator's tunnel to it."""
    nodes: int
    """Number of node folders, revoked nodes included."""
    install_dir: str
    """Folder on each machine that holds its copy; systemd requires an absolute path."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 10_000:
            raise ConfigError(f"nodes = {self.nodes}: must be from 1 to 10000")
        for name, port in (("port", self.port), ("superlink-port", self.superlink_port)):
            if not 1 <= port <= 65_535:
                raise ConfigError(f"{name} = {port}: must be from 1 to 65535")
        if self.port == self.superlink_port:
            raise ConfigError(f"superlink-port = {self.superlink_port}: must differ from port, which is the gateway's")
        for host in self.hosts:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*|[0-9A-Fa-f:]+", host):
                raise ConfigError(f"host = '{host}': must be a name or an address, without a port")
            if ":" in host:
                _check_shortest(host)
        if not Path(self.install_dir).is_absolute() or not re.fullmatch(r"[\w./+-]+", self.install_dir):
            raise ConfigError(f"install-dir = '{self.install_dir}': must be an absolute path without spaces")

    @property
    def address(self) -> str:
        """Return the gateway's address, to which nodes connect."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def control_address(self) -> str:
        """Return the SuperLink's address on the server, and on an operator's machine with a tunnel."""
        return f"127.0.0.1:{self.superlink_port}"

    @property
    def tunnel(self) -> str:
        """Return the command that forwards the SuperLink's port to an operator's machine."""
        return f"ssh -N -L {self.superlink_port}:{self.control_address} {self.hosts[0]}"

    def node_folders(self, folder: Path) -> list[Path]:
        """Return the folder of each node that has not been revoked."""
        folders = (folder / f"node-{number}" for number in range(self.nodes))
        return [node for node in folders if not (node / REVOKED).exists()]

    def run_config(self) -> RunConfig:
        """Return the default run-config of a deployment, whose machines may be slow, late or offline."""
        return parse_config(
            {
                "clients": self.nodes,
                "participation": 1.0,
                "min-replies": 0.5,
                "node-wait": 120.0,
                "round-timeout": 1800.0,
            }
        )


def _check_shortest(host: str) -> None:
    """Raise `ConfigError` unless an IPv6 address is written as certificates have it."""
    try:
        shortest = str(ipaddress.ip_address(host))
    except ValueError:
        raise ConfigError(f"host = '{host}': must be a name or an address, without a port") from None
    if host != shortest:
        raise ConfigError(f"host = '{host}': must be written {shortest}")


def read_deployment(folder: Path) -> Deployment:
    """Return the deployment that `write_deployment` wrote to ``folder``."""
    path = folder / "deployment.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        hosts, ports = tuple(found["hosts"]), (int(found["port"]), int(found["superlink_port"]))
        return Deployment(hosts, *ports, int(found["nodes"]), str(found["install_dir"]))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder} is not a deployment: deployment.toml is missing; see fedeas deploy init") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def write_deployment(deployment: Deployment, folder: Path) -> None:
    """Write all folders of a new deployment; ``folder`` appears complete or not at all."""
    if folder.exists():
        raise ConfigError(f"{folder} already exists: give a new folder, because keys are never overwritten")
    with atomic_folder(folder) as root:
        root.chmod(0o700)
        write_settings(deployment, root)
        (root / "ca").mkdir()
        write_authority(root / "ca")
        (root / "superlink").mkdir()
        shutil.copy(root / "ca" / "ca.crt", root / "superlink")
        write_server_certificate(root / "ca", root / "superlink", deployment.hosts)
        write_superlink_scripts(deployment, root / "superlink")
        for number, node in enumerate(deployment.node_folders(root)):
            write_node(deployment, number, node, root / "ca" / "ca.crt")
            place = f"partition-id={number} num-partitions={deployment.nodes}\n"
            (node / "node-config").write_text(place, encoding="utf-8")
        _write_connection(deployment, root / "flwr", root / "ca", folder.absolute())
        write_app(deployment.run_config(), root / "app", deployment.node_folders(root))


def write_app(run: RunConfig, folder: Path, nodes: list[Path]) -> None:
    """Write the Flower app, with a run-config as its defaults and the clients' keys."""
    stage_app(run, folder, KEYS_FILE)
    write_client_keys(folder, nodes)


def write_settings(deployment: Deployment, folder: Path) -> None:
    """Write ``deployment.toml``."""
    atomic_write(folder / "deployment.toml", tomli_w.dumps(asdict(deployment)).encode())


def write_superlink_scripts(deployment: Deployment, folder: Path) -> None:
    """Write the files of the server's folder that hold no secret: scripts, ``Caddyfile`` and systemd units."""
    _write_script(folder / "start.sh", superlink_script(deployment.superlink_port))
    _write_script(folder / "gateway.sh", gateway_script(deployment.port))
    _write_script(folder / "resume.sh", resume_script(CONNECTION, deployment.superlink_port))
    installed, name = f"{deployment.install_dir}/superlink", "fedeas-superlink.service"
    for path, text in (
        ("Caddyfile", gateway_config(deployment.port, deployment.superlink_port)),
        (name, systemd_unit("Flower SuperLink", installed)),
        ("fedeas-gateway.service", systemd_unit("Gateway to the Flower SuperLink", installed, "gateway.sh")),
        ("fedeas-resume.service", resume_unit(installed, name)),
        (VERSION, read_project().version + "\n"),
    ):
        (folder / path).write_text(text, encoding="utf-8")


def write_node(deployment: Deployment, number: int, folder: Path, certificate: Path) -> None:
    """Write a new node's folder except its node-config; ``certificate`` is the authority's."""
    folder.mkdir(exist_ok=True)
    shutil.copy(certificate, folder)
    write_node_key(folder)
    (folder / "superlink-address").write_text(deployment.address + "\n", encoding="utf-8")
    write_node_scripts(deployment, number, folder)


def write_node_scripts(deployment: Deployment, number: int, folder: Path) -> None:
    """Write the files of a node's folder that hold no secret and no setting: script and systemd unit."""
    _write_script(folder / "start.sh", node_script(FIRST_NODE_PORT + number))
    unit = systemd_unit(f"Flower SuperNode {number}", f"{deployment.install_dir}/node-{number}")
    (folder / f"fedeas-node-{number}.service").write_text(unit, encoding="utf-8")
    (folder / VERSION).write_text(read_project().version + "\n", encoding="utf-8")


def _write_connection(deployment: Deployment, folder: Path, authority: Path, final: Path) -> None:
    folder.mkdir()
    shutil.copy(authority / "ca.crt", folder)
    certificate = str(final / "flwr" / "ca.crt")  # Flower accepts only absolute paths
    connection = {"address": deployment.control_address, "root-certificates": certificate}
    text = tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}})
    (folder / "config.toml").write_text(text, encoding="utf-8")


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
