"""`fedeas publish`: its folder passes the checks of Flower's Hub; `tests/launch/test_run_ray.py` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from flwr.cli.auth_plugin.oidc_cli_plugin import OidcCliPlugin
from flwr.cli.build import build, build_fab_from_files
from flwr.cli.utils import collect_files
from runners import run_in_process

from fedeas_flwr.commands import publish
from fedeas_flwr.common.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROJECT = """
[project]
name = "fedeas-flwr"
version = "1.2.3"
description = "A fork"
readme = "README.md"
license = "Apache-2.0"
dependencies = ["flwr>=1.40"]
[tool.hatch.build.targets.wheel]
packages = ["mine"]
[tool.flwr.app]
publisher = "me"
fab-include = ["mine/**/*.py"]
[tool.flwr.app.components]
serverapp = "mine.apps:server"
clientapp = "mine.apps:client"
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the command writes of this checkout."""
    folder = tmp_path_factory.mktemp("published") / "fedeas-flwr"
    done = run_in_process("publish", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"next: flwr login supergrid && flwr app publish {folder}\n")
    return folder


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """Return a small checkout of somebody else's app."""
    folder = tmp_path / "fork"
    (folder / "mine" / "deep").mkdir(parents=True)
    for name, text in {
        "pyproject.toml": PROJECT,
        "LICENSE": "free",
        "README.md": "---\ntags: [mine]\n---\n\n# Mine\n[code](mine/apps.py) [make](Makefile) ![plot](plot.png)\n",
        "Makefile": "",
        "plot.png": "",
        "mine/apps.py": "server = client = None\n",
        "mine/deep/er.py": "",
    }.items():
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    return folder


def test_flower_uploads_every_published_file(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flwr app publish` itself, up to its request: it rejects what is over the Hub's limits."""
    flower, plugin, sent = sys.modules["flwr.cli.app_cmd.publish"], OidcCliPlugin("supergrid"), []
    monkeypatch.setattr(plugin, "load_tokens", lambda: setattr(plugin, "access_token", "token"))
    monkeypatch.setattr(flower, "load_cli_auth_plugin_from_connection", lambda address: plugin)
    monkeypatch.setattr(flower, "_post_files", lambda files, token: sent.extend(files) or Mock(ok=True))
    flower.publish(published)
    assert sorted(name for _, (name, _, _) in sent) == sorted(collect_files(published))
    for name in ("README.md", "LICENSE", "conf/quickstart.toml", "fedeas_flwr/training/gpu/graphed.py"):
        assert (published / name).is_file(), name


def test_published_app_builds_in_format_1(published: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    build(published)
    (bundle,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(bundle) as archive:
        names = set(archive.namelist())
        project = tomllib.loads(archive.read("pyproject.toml").decode())
    assert {"LICENSE", "README.md", "fedeas_flwr/server_app.py"} <= names
    _, format_read = build_fab_from_files(collect_files(published))
    assert (format_read.fab_format_version, format_read.flwr_version_target) == (1, metadata.version("flwr"))
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["flwr"]["app"]["config"] == own["tool"]["flwr"]["app"]["config"]
    changed = {"license", "license-files"}
    assert {k: v for k, v in project["project"].items() if k not in changed} == {
        k: v for k, v in own["project"].items() if k not in changed
    }


def test_published_readme_has_front_matter_for_hub_and_baseline(published: Path) -> None:
    _, front, body = (published / "README.md").read_text().split("---\n", 2)
    found = yaml.safe_load(front)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert (found["title"], found["url"]) == (cited["title"], cited["url"])
    assert 4 <= len(found["labels"]) <= 10  # as Flower's template for baselines asks
    assert found["tags"] and found["framework"] and {"CIFAR-10", "CIFAR-100"} <= {*found["dataset"]}
    assert body.startswith("\n# FedEAS on Flower\n")


def test_links_of_published_pages_exist(published: Path) -> None:
    pages = list(published.rglob("*.md"))
    assert len(pages) > 20
    for page in pages:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_fork_publishes_only_tracked_text_and_keeps_its_tags(fork: Path, tmp_path: Path) -> None:
    (fork / "mine" / "secret.py").write_text("password = 1\n")
    publish.write_app(fork, tmp_path / "mine")
    expected = {"LICENSE", "README.md", "pyproject.toml", "mine/apps.py", "mine/deep/er.py"}
    assert set(collect_files(tmp_path / "mine")) == expected
    _, front, body = (tmp_path / "mine" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"tags", "title", "url", "labels", "dataset", "framework"}
    assert front.startswith("tags: [mine]\n")
    assert body == "\n# Mine\n[code](mine/apps.py) make *(figure in the repository: plot)*\n"


def test_publish_rejects_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.md").write_text("years")
    for name, line in (
        ("used", f"folder '{tmp_path}/used': is not empty; give a new folder"),
        ("used/thesis.md", f"folder '{tmp_path}/used/thesis.md': is a file, must be a folder"),
        ("my_app", 'The folder\'s name "my_app" is invalid, a valid app name must start with a letter'),
    ):
        done = run_in_process("publish", str(tmp_path / name))
        assert done.returncode == 2 and done.stderr.startswith(f"error: {line}"), done.stderr
        assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_publish_rejects_a_folder_that_is_no_checkout(fork: Path, tmp_path: Path) -> None:
    line = f"publish: {tmp_path} must be a git checkout of the app: fatal: not a git repository"
    with pytest.raises(ConfigError, match=re.escape(line)):
        publish.write_app(tmp_path, tmp_path / "mine")
    installed = fork / ".venv" / "site-packages"  # below a checkout, but not of it
    installed.mkdir(parents=True)
    (installed / "pyproject.toml").write_text(PROJECT)
    with pytest.raises(ConfigError, match=r"site-packages must be a git .*: git tracks no pyproject.toml there$"):
        publish.write_app(installed, tmp_path / "mine")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("mine/apps.py", b"#" * (1024**2 + 1), "File too large: '{}' is 1,048,577 bytes, exceeding the per-file limit"),
        ("README.md", b"\xff", "Encoding error: '{}' is not UTF-8 encoded."),
    ],
)
def test_publish_rejects_a_file_that_the_hub_rejects(
    fork: Path, tmp_path: Path, name: str, content: bytes, line: str
) -> None:
    (fork / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(line.format(tmp_path / "mine" / name))):
        publish.write_app(fork, tmp_path / "mine")
    assert os.listdir(tmp_path) == ["fork"]
