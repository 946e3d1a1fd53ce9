"""The site builds without a warning and needs no network; the notebook runs. Both need the extra docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if not find_spec(module)]
    return pytest.mark.skipif(bool(missing), reason=f"needs the extra docs: {', '.join(missing)} not installed")


@needs("mkdocs", "material", "mkdocstrings")
def test_site_builds_in_strict_mode_and_loads_nothing_from_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {str(page.relative_to(tmp_path / "site")): page.read_text() for page in tmp_path.rglob("*.html")}
    assert {"index.html", "docs/index.html", "docs/parameters.html", "results/reproduction.html"} < set(pages)
    assert "fedeas_flwr.policies.registry.allocate" in pages["docs/api.html"]
    assert "fedeas plan" in pages["docs/commands.html"]
    loaded = re.compile(r'<(?:script|img|iframe)[^>]* src="?https?:|<link[^>]*stylesheet[^>]* href="?https?:')
    assert [name for name, text in pages.items() if loaded.search(text)] == []


@needs("nbclient", "nbformat", "ipykernel")
def test_notebook_runs(digits_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(ROOT / "examples" / "digits.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "runs" / "notebook" / "fedeas" / "summary.json").exists()
