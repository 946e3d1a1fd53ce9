"""Imports point one way, and light modules stay light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedeas_flwr"

LAYERS = [
    {"allocation"},
    {"waterfill"},
    {"policies"},
    {
        "cores",
        "noise",
        "npy",
        "paths",
        "sizes",
        "streams",
        "metrics",
        "processes",
        "keeper",
        "one_line",
        "errors",
        "image_sheet",
        "project",
        "round_records",
        "run_files",
        "environment",
        "terminal",
    },
    {"partition", "budget_path", "own_data"},
    {"config", "config_files", "keys", "planning", "choosing", "curves", "dataset_sources", "data"},
    {
        "checkpoints",
        "gpu",
        "devices",
        "runs",
        "exporting",
        "node",
        "client_state",
        "local_data",
        "run_plan",
        "models",
        "normaliser",
        "generators",
        "cache",
        "upkeep",
        "augment",
        "superlink",
    },
    {
        "flower_internals",
        "array_records",
        "messages",
        "training",
        "progress",
        "report",
        "sweep",
        "listing",
        "event_log",
    },
    {"grids", "strategies"},
    {"client_app", "server_app"},
    {"resources", "mps", "launch", "prepare", "sweep_jobs"},
    {"doctor", "reproduce"},
    {"deploy"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
"""A module imports from its own layer or a lower one (nearer the top of this list), never from a higher one."""

FLOWER = {
    "flower_internals",
    "array_records",
    "messages",
    "grids",
    "strategies",
    "client_app",
    "server_app",
    "launch",
}
TORCH = {
    "array_records",
    "gpu",
    "devices",
    "event_log",
    "training",
    "models",
    "normaliser",
    "generators",
    "strategies",
    "client_app",
    "server_app",
    "resources",
    "doctor",
}


def modules() -> dict[str, list[Path]]:
    """Module or subpackage → its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name != "__init__":
            found.setdefault(name, []).append(path)
    return found


def imported(path: Path) -> set[str]:
    """Every module a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_module_has_a_layer() -> None:
    assert sorted(name for layer in LAYERS for name in layer) == sorted(modules())


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name: str) -> None:
    rank = {module: number for number, layer in enumerate(LAYERS) for module in layer}
    for path in modules()[name]:
        for target in imported(path):
            parts = target.split(".")
            if parts[0] == "fedeas_flwr" and len(parts) > 1 and parts[1] in rank:
                assert rank[parts[1]] <= rank[name], f"{path.name} imports {target}"


@pytest.mark.parametrize(
    ("library", "allowed"), [("flwr", FLOWER), ("torch", TORCH), ("ray", {"generators", "doctor"})]
)
def test_heavy_libraries_stay_where_they_belong(library: str, allowed: set[str]) -> None:
    users = {n for n, paths in modules().items() if any(t.split(".")[0] == library for p in paths for t in imported(p))}
    assert users <= allowed


PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.serverapp", "flwr.serverapp.strategy"}


def test_flowers_private_names_stay_in_one_module() -> None:
    for path in (path for name, paths in modules().items() if name != "flower_internals" for path in paths):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flwr":
                assert node.module in PUBLIC, path.name


@pytest.mark.parametrize(
    "module",
    [
        "fedeas_flwr",
        "fedeas_flwr.allocation",
        "fedeas_flwr.augment",
        "fedeas_flwr.cache",
        "fedeas_flwr.generators",
        "fedeas_flwr.generators.interface",
        "fedeas_flwr.generators.opening",
        "fedeas_flwr.partition",
        "fedeas_flwr.planning",
        "fedeas_flwr.run_plan",
        "fedeas_flwr.report.plan_figures",
        "fedeas_flwr.report.writing",
        "fedeas_flwr.cli",
    ],
)
def test_light_modules_pull_in_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch','flwr','ray','diffusers','sklearn'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


UNNEEDED = {"diffusers", "matplotlib", "pandas", "ray", "sqlalchemy", "sympy", "torchvision", "transformers", "triton"}
"""Slow to import, and no part of an inline run of the small network that generates nothing; sympy comes with torch's
compiler, which torch.optim imports."""


def test_a_plain_inline_run_imports_only_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "conf.toml").write_text(
        'policy = "none"\nclients = 2\nrounds = 1\nlocal-epochs = 1\nbackend = "inline"\ndevice = "cpu"\n'
    )
    code = (
        "import atexit, sys; from fedeas_flwr import cli\n"
        f"atexit.register(lambda: print('imported:', *sorted({UNNEEDED!r} & set(sys.modules))))\n"
        "sys.argv = ['fedeas', 'run', 'conf.toml']; cli.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "last-1 accuracy" in done.stdout and done.stdout.splitlines()[-1] == "imported:"
