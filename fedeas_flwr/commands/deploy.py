"""The commands of `fedeas deploy`."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from fedeas_flwr.commands.doctor import show
from fedeas_flwr.commands.help import OrderedGroup
from fedeas_flwr.config import parse_config
from fedeas_flwr.config_files import parse_overrides

deploy_app = typer.Typer(
    cls=OrderedGroup,
    help="Set up a federation of real machines: keys, certificates, start scripts.",
    rich_markup_mode=None,
)
Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="folder of the deployment, or of one of its machines", callback=Path.absolute),
]


@deploy_app.command(short_help="Write certificates, keys and start scripts")
def init(
    folder: Folder,
    nodes: Annotated[int, typer.Option(help="number of SuperNodes")],
    host: Annotated[list[str], typer.Option(help="host name or address of the server; repeat for other names")],
    port: Annotated[int, typer.Option(help="port of the gateway, which nodes connect to")] = 9092,
    superlink_port: Annotated[
        int, typer.Option(help="port of the SuperLink on the server's loopback interface")
    ] = 9093,
    install_dir: Annotated[str, typer.Option(help="folder on each machine that will hold its copy")] = "/opt/fedeas",
) -> None:
    """Write certificates, keys and start scripts, one folder per machine, and the Flower app to run."""
    from fedeas_flwr.deploy.deployment import CONNECTION, Deployment, write_deployment

    deployment = Deployment(tuple(host), port, superlink_port, nodes, install_dir)
    write_deployment(deployment, folder)
    places = "node-0/" if nodes == 1 else f"node-0/ … node-{nodes - 1}/"
    for line in (
        f"superlink/ → {host[0]}; {places} → one per node; ca/ stays here",
        "1. start superlink/start.sh and superlink/gateway.sh on the server",
        f"2. unless you are on the server, open a tunnel to it: {deployment.tunnel}",
        f"3. fedeas deploy register {quote(str(folder))}",
        "4. start node-N/start.sh on every node",
        f"5. fedeas deploy check {quote(str(folder))}",
        f"6. FLWR_HOME={quote(f'{folder}/flwr')} flwr run {quote(f'{folder}/app')} {CONNECTION} --stream",
    ):
        print(line)


@deploy_app.command(short_help="Register the nodes' public keys with the SuperLink")
def register(folder: Folder) -> None:
    """Register the nodes' public keys with the running SuperLink; repeating it is harmless."""
    from fedeas_flwr.deploy.deployment import read_deployment
    from fedeas_flwr.deploy.registry import register_nodes

    for line in register_nodes(read_deployment(folder), folder):
        print(line)


@deploy_app.command(short_help="Check a deployment, or one of its machines")
def check(
    folder: Folder,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="run-config to check a node's images and generator against"),
    ] = None,
) -> None:
    """Check a deployment, or on one of its machines that machine's folder; exit code 1 if there is a problem."""
    run = parse_config(parse_overrides(words or []))
    from fedeas_flwr.doctor.deployment import examine

    os.environ.setdefault("FEDEAS_CACHE", str(folder / "cache"))  # as start.sh does
    findings = list(examine(folder, run))
    show(findings, Console(markup=False))
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


@deploy_app.command("add-node", short_help="Write the folder of another node and register it")
def add_node(folder: Folder) -> None:
    """Write the folder of another node, register its key, and raise the default of `clients` in the app."""
    from fedeas_flwr.deploy import maintenance
    from fedeas_flwr.deploy.deployment import read_deployment

    node, lines = maintenance.add_node(read_deployment(folder), folder)
    print(lines[-1])
    print(f"1. describe its images in {node}/node-config; keep its client-id, or register again")
    print(f"2. copy {node.name}/ to its machine and start it there")


@deploy_app.command("revoke-node", short_help="Unregister a node for good")
def revoke_node(
    folder: Folder, node: Annotated[str, typer.Argument(metavar="NODE", help="name of its folder, such as node-1")]
) -> None:
    """Unregister a node for good: its key is rejected from now on, and its folder is marked as revoked."""
    from fedeas_flwr.deploy import maintenance
    from fedeas_flwr.deploy.deployment import read_deployment

    number = maintenance.revoke_node(read_deployment(folder), folder, node)
    print(f"{node}: revoked; " + ("it was not registered" if number is None else f"it was node {number}"))
    print(f"on its machine: systemctl disable --now fedeas-{node}")


@deploy_app.command(short_help="Write a new certificate of the SuperLink")
def renew(folder: Folder) -> None:
    """Write a new key and certificate of the SuperLink, signed by the same authority: nodes need no new file."""
    from fedeas_flwr.deploy import maintenance
    from fedeas_flwr.deploy.deployment import read_deployment

    until = maintenance.renew_certificate(read_deployment(folder), folder)
    print(f"superlink/server.crt is valid until {until:%Y-%m-%d}")
    print("1. copy superlink/server.crt and superlink/server.key to the server")
    print("2. systemctl restart fedeas-gateway; nodes reconnect by themselves")
    print("3. when no run is in progress: systemctl restart fedeas-superlink")


@deploy_app.command(short_help="Write the app and the scripts of the installed version")
def upgrade(folder: Folder) -> None:
    """Write the app, scripts and units of the installed version, and name the machines of another version."""
    from fedeas_flwr.common.project import read_project
    from fedeas_flwr.deploy import maintenance
    from fedeas_flwr.deploy.deployment import read_deployment

    lines, version = maintenance.upgrade(read_deployment(folder), folder), read_project().version
    print(f"app/ is fedeas-flwr {version}")
    for line in lines:
        print(line)
    if lines:
        print(f"on each of these machines: install {version}, copy its scripts and units, restart its services")
