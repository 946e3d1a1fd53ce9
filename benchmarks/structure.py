"""Count modules, layers, imports between packages and import cycles, and how much code a round executes.

    python benchmarks/structure.py                   this checkout
    python benchmarks/structure.py --tree ../other   another checkout, with any layout

An import between packages is a top-level module or package that imports another one, also inside functions; each pair
counts once. Layers are the longest chain of such imports, where a cycle counts as one. Upward imports are those to the
same or a higher layer of `LAYERS` in tests/test_imports.py. A round is measured from the end of round 1's last client
to the end of round 2's, in an inline run of conf/quickstart.toml: the functions of the package (including lambdas and
comprehensions, if Python calls them) that any thread enters. A client's turn is what the ClientApp enters for one
message. The first run on a machine also generates images: use the numbers of a second run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

NAME = "fedeas_flwr"
Graph = dict[str, set[str]]


def module_name(path: Path, package: Path) -> str:
    """Return a file's module, such as `data.node`; a package's `__init__` is the package, the top-level one ""."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(package: Path) -> Graph:
    """Return which module imports which, inside functions too; the top-level `__init__` is left out."""
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    graph: Graph = {name: set() for name in paths if name}
    for name in graph:
        for node in ast.walk(ast.parse(paths[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                below = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [target if target.partition(".")[2] in graph else str(node.module) for target in below]
            else:
                continue
            found = {target.partition(".")[2] for target in targets if target.partition(".")[0] == NAME}
            graph[name] |= (found & graph.keys()) - {name}
    return graph


def package_graph(graph: Graph) -> Graph:
    """Return the graph of top-level modules and packages."""
    packages: Graph = defaultdict(set)
    for name, targets in graph.items():
        package = name.partition(".")[0]
        packages[package] |= {target.partition(".")[0] for target in targets} - {package}
    return packages


def cycles(graph: Graph) -> list[set[str]]:
    """Return the sets of two or more modules that import each other, directly or through others."""
    reached: Graph = {}
    for start in graph:
        seen, waiting = set[str](), [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[start] = seen
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


def count_layers(graph: Graph) -> int:
    """Return the length of the longest chain of imports, with each cycle counted as one."""
    cycle_of = {name: min(group) for group in cycles(graph) for name in group}
    merged: Graph = defaultdict(set)
    for name, targets in graph.items():
        own = cycle_of.get(name, name)
        merged[own] |= {cycle_of.get(target, target) for target in targets} - {own}
    height: dict[str, int] = {}

    def climb(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((climb(target) for target in merged[name]), default=0)
        return height[name]

    return max(climb(name) for name in list(merged))


def count_upward_imports(tree: Path, packages: Graph) -> int | None:
    """Return the number of imports to the same or a higher layer of `LAYERS`, or None in a tree without it."""
    for node in ast.parse((tree / "tests" / "test_imports.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            layers = ast.literal_eval(node.value)
            layer_of = {name: number for number, layer in enumerate(layers) for name in layer}
            return sum(layer_of[target] >= layer_of[name] for name, targets in packages.items() for target in targets)
    return None


def describe(tree: Path) -> dict[str, Any]:
    """Return the counts that need only the source files."""
    package = tree / NAME
    graph = import_graph(package)
    packages = package_graph(graph)
    sources = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [n for text in sources.values() for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    tests = [path.read_text(encoding="utf-8") for path in (tree / "tests").rglob("*.py")]
    return {
        "modules at the top": len(list(package.glob("*.py"))),
        "packages": sum((folder / "__init__.py").exists() for folder in package.iterdir()),
        "modules in total": len(sources),
        "layers": count_layers(packages),
        "imports between packages": sum(len(targets) for targets in packages.values()),
        "upward imports": count_upward_imports(tree, packages),
        "cycles of packages": sorted(len(group) for group in cycles(packages)),
        "cycles of modules": sorted(len(group) for group in cycles(graph)),
        "lines of code": sum(len(text.splitlines()) for text in sources.values()),
        "lines of tests": sum(len(text.splitlines()) for text in tests),
        "median lines per function": statistics.median((n.end_lineno or 0) - n.lineno + 1 for n in functions),
    }


class Round:
    """Record which functions of the package round 2 of a run enters, and which of them a client's turn enters."""

    def __init__(self, package: Path, clients: int) -> None:
        self._package, self._clients = f"{package}{os.sep}", clients
        self._trained, self._here = 0, threading.local()
        self.entered: set[tuple[str, str]] = set()
        self.turn: set[tuple[str, str]] = set()

    def watch(self) -> None:
        """Start to record calls, in this thread and in new ones."""
        from flwr.clientapp import ClientApp

        call = ClientApp.__call__

        def recorded(app: ClientApp, message: Any, context: Any) -> Any:
            self._here.turn = trains = message.metadata.message_type == "train"
            try:
                return call(app, message, context)
            finally:
                self._here.turn = False
                self._trained += trains

        ClientApp.__call__ = recorded  # type: ignore[assignment, method-assign]
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._package):
            return
        if self._clients <= self._trained < 2 * self._clients:
            function = (code.co_filename.removeprefix(self._package), code.co_qualname)
            self.entered.add(function)
            if getattr(self._here, "turn", False):
                self.turn.add(function)


def follow(tree: Path, policy: str) -> dict[str, Any]:
    """Run three rounds of the quickstart in this process; return the files and functions that round 2 entered."""
    from fedeas_flwr.__main__ import main
    from fedeas_flwr.config import KEYS

    watched = Round(tree / NAME, clients=5)  # half of ten per round
    with tempfile.TemporaryDirectory() as folder:
        words = [f"policy={policy}", "backend=inline", "device=cpu", "rounds=3", f"run-dir={folder}/run"]
        sys.argv = ["fedeas", "run", str(tree / "conf" / "quickstart.toml"), *words]
        watched.watch()
        main()
        sys.setprofile(None)
    counted = {"a round": watched.entered, "a client's turn": watched.turn}
    found = {what: {"files": len({f for f, _ in all_}), "functions": len(all_)} for what, all_ in counted.items()}
    listed = {what: sorted({f for f, _ in all_}) for what, all_ in counted.items()}
    return {"keys": len(KEYS), **found, "listed": listed}


def main() -> None:
    """Print all numbers, or write them as JSON."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="checkout to measure")
    words.add_argument("--files", action="store_true", help="also list the files")
    words.add_argument("--follow", help=argparse.SUPPRESS)
    given = words.parse_args()
    tree = given.tree.resolve()
    if given.follow:
        found = follow(tree, given.follow)
        print("\n" + json.dumps(found))
        return
    for name, value in describe(tree).items():
        print(f"{name:28} {value}")
    for policy in ("none", "fedeas"):
        command = [sys.executable, str(Path(__file__).resolve()), "--tree", str(tree), "--follow", policy]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        if policy == "none":
            print(f"{'run-config keys':28} {found['keys']}")
        for what in ("a round", "a client's turn"):
            print(f"{what + ', ' + policy:28} {found[what]['files']} files, {found[what]['functions']} functions")
            if given.files:
                print("".join(f"    {name}\n" for name in found["listed"][what]), end="")


if __name__ == "__main__":
    main()
