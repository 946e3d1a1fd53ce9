"""The project's word on itself, from its source tree or from what is installed."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from fedeas_flwr.common.project import Project, read_project
from fedeas_flwr.config import parse_config
from fedeas_flwr.launch.superlink import stage_app

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_a_source_tree_speaks_for_itself_and_so_does_the_app_staged_from_it(tmp_path: Path) -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert read_project() == Project(project["version"], project["requires-python"], project["dependencies"])
    staged = tomllib.loads((stage_app(parse_config({}), tmp_path) / "pyproject.toml").read_text())["project"]
    assert (staged["name"], staged["version"], staged["license"]) == tuple(
        project[key] for key in ("name", "version", "license")
    )


def test_another_projects_folder_is_passed_over_for_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site" / "fedeas_flwr-7.8.9.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fedeas-flwr\nVersion: 7.8.9\nRequires-Python: >=3\nRequires-Dist: numpy\n"
    )
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "somebody-elses"\nversion = "1"\n')
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(installed))
    assert read_project(tmp_path / "fedeas_flwr") == Project("7.8.9", ">=3", ["numpy"])


def test_a_copy_that_nobody_installed_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", nothing)
    with pytest.raises(ValueError, match=r"/fedeas_flwr is not in a source tree, and fedeas-flwr is not installed"):
        read_project(tmp_path / "fedeas_flwr")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_clean_leaves_the_runs(tmp_path: Path) -> None:
    for name in (".venv", "build", "runs"):
        (tmp_path / name).mkdir()
    subprocess.run(["make", "-f", PYPROJECT.with_name("Makefile"), "clean"], cwd=tmp_path, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
