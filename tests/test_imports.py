"""Imports point to lower layers, private names stay in their package, and light modules stay light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fedeas_flwr"

LAYERS = [
    {"common", "allocation"},
    {"waterfill", "partition"},
    {"policies"},
    {"config"},
    {"config_keys", "config_files", "data"},
    {"planning", "training", "runs"},
    {"strategies", "generators", "callbacks"},
    {"federation", "report"},
    {"client_app", "server_app"},
    {"launch"},
    {"deploy"},
    {"doctor", "reproduce"},
    {"commands"},
    {"__main__"},
]
"""A file imports from its own package or from a lower layer, never from another package in its own layer."""

INNER_LAYERS = {
    "training": [
        {"losses", "augmentation"},
        {"objective", "models"},
        {"engine"},
        {"oom_fallback"},
        {"eager", "gpu"},
        {"build"},
        {"evaluation"},
    ],
    "generators": [
        {"interface"},
        {"cache", "bank", "diffusion"},
        {"fill", "cache_maintenance", "sd_turbo", "classifier", "own"},
        {"learn"},
        {"federated"},
        {"opening"},
        {"quality", "service"},
        {"audit", "ray_service"},
        {"client_images"},
    ],
}
"""The same within the two packages that are large enough to need it."""

FLWR = {"strategies", "federation", "client_app", "server_app", "launch", "doctor"}
TORCH = {
    *(
        "common/devices",
        "common/cuda",
        "common/launcher",
        "callbacks/tensorboard",
        "training",
        "generators",
        "strategies",
    ),
    *(
        "federation/dissimilarity",
        "federation/augmenter",
        "federation/learners",
        "client_app",
        "server_app",
        "launch/resources",
        "doctor",
    ),
}
RAY = {"federation/delivery", "launch/ray_head", "generators/ray_service"}
"""Packages and files that may import a heavy library."""

LIGHT = [
    *("allocation", "policies.own", "partition", "generators", "generators.interface", "generators.opening"),
    *("generators.cache", "generators.fill", "callbacks.registry", "planning.plan", "planning.run_plan"),
    "report.plan_figures",
    *("report.writing", "commands.app"),
]


def modules() -> list[str]:
    """Return every module as a path below `fedeas_flwr`: `data/node`; a package's `__init__` is the package."""
    paths = (path.relative_to(PACKAGE).with_suffix("").as_posix() for path in sorted(PACKAGE.rglob("*.py")))
    return [path.removesuffix("/__init__") for path in paths if path != "__init__"]


def source(module: str) -> Path:
    """Return a module's file."""
    path = PACKAGE / f"{module}.py"
    return path if path.exists() else PACKAGE / module / "__init__.py"


def imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield every (module, name) that a file imports, also inside functions; the name is "" for a plain import."""
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def own_imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield (module of this package, imported name), the module as a path below the package."""
    for target, name in imports(module):
        if target.split(".")[0] == PACKAGE.name:
            path = "/".join(target.split(".")[1:])
            below = f"{path}/{name}".strip("/")
            yield (below, "") if name and source(below).exists() else (path, name)


def layer_numbers(layers: list[set[str]]) -> dict[str, int]:
    """Return the layer of each package or module."""
    return {name: number for number, layer in enumerate(layers) for name in layer}


def test_every_package_has_a_layer() -> None:
    assert sorted(layer_numbers(LAYERS)) == sorted({module.split("/")[0] for module in modules()})
    for package, layers in INNER_LAYERS.items():
        inside = {module.split("/")[1] for module in modules() if module.startswith(f"{package}/")}
        assert sorted(layer_numbers(layers)) == sorted(inside), package


def test_the_top_stays_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 12


def test_imports_point_to_lower_layers() -> None:
    layer = layer_numbers(LAYERS)
    wrong = []
    for module in modules():
        package = module.split("/")[0]
        for target, _ in own_imports(module):
            other = target.split("/")[0]
            if other != package and layer.get(other, -1) >= layer[package]:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


@pytest.mark.parametrize("package", sorted(INNER_LAYERS))
def test_imports_within_a_package_point_to_lower_layers(package: str) -> None:
    layer = layer_numbers(INNER_LAYERS[package])
    wrong = []
    for module in (module for module in modules() if module.startswith(f"{package}/")):
        own = module.split("/")[1]
        for target, _ in own_imports(module):
            parts = target.split("/")
            if parts[0] == package and len(parts) > 1 and parts[1] != own and layer[parts[1]] >= layer[own]:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_only_training_imports_its_gpu_package() -> None:
    users = {m for m in modules() for target, _ in own_imports(m) if target.startswith("training/gpu")}
    assert {module for module in users if not module.startswith("training/gpu")} <= {"training/build"}


def test_private_names_stay_in_their_package() -> None:
    wrong = []
    for module in modules():
        package, aliases = module.split("/")[0], set()
        for target, name in own_imports(module):
            if target.split("/")[0] == package:
                continue
            if name.startswith("_") or "/_" in target:
                wrong.append(f"{module} imports {target}.{name}")
            if not name:
                aliases.add(target.split("/")[-1])
        for node in ast.walk(ast.parse(source(module).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                wrong += [f"{module} uses {node.value.id}.{node.attr}"] if private else []
    assert wrong == []


@pytest.mark.parametrize(("library", "allowed"), [("flwr", FLWR), ("torch", TORCH), ("ray", RAY)])
def test_heavy_libraries_stay_where_they_belong(library: str, allowed: set[str]) -> None:
    users = [module for module in modules() if any(target.split(".")[0] == library for target, _ in imports(module))]
    assert [user for user in users if not {user, user.split("/")[0]} & allowed] == []


@pytest.mark.parametrize("module", ["fedeas_flwr", *(f"fedeas_flwr.{name}" for name in LIGHT)])
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
        "import atexit, sys; from fedeas_flwr.commands.app import main\n"
        f"atexit.register(lambda: print('imported:', *sorted({UNNEEDED!r} & set(sys.modules))))\n"
        "sys.argv = ['fedeas', 'run', 'conf.toml']; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "accuracy: " in done.stdout and done.stdout.splitlines()[-1] == "imported:"
