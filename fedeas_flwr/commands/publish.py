"""The command `fedeas publish`."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import tomli_w
import typer

from fedeas_flwr.commands.output import check_folder, console, print_line
from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.files import atomic_folder

ROOT = Path(__file__).resolve().parents[2]
_PROJECT_FILE = "pyproject.toml"
_DOCUMENTS = ("*.md", "docs/*.md", "examples/**", "results/**/*.md", "LICENSE", ".gitignore")
"""Files to publish besides those that Flower ships to nodes (`fab-include`), if the Hub accepts their format."""


def publish(
    folder: Annotated[
        Path,
        typer.Argument(
            help="folder to write, new or empty; its name has only letters, digits and hyphens", callback=check_folder
        ),
    ],
) -> None:
    """Write the files of this checkout that Flower's Hub accepts to a folder, ready for `flwr app publish`.

    It uploads nothing. Only files that git tracks are written.
    """
    write_app(ROOT, folder.absolute())
    print_line(console, f"next: flwr login supergrid && flwr app publish {folder}")


def write_app(root: Path, folder: Path) -> None:
    """Write the app of a checkout to a new folder; raise `ConfigError` if Flower's Hub would reject it."""
    from fedeas_flwr.federation.flower_internals import check_app, published_files

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"folder '{folder}': is not empty; give a new folder")
    _tracked(root, _PROJECT_FILE)
    project = _published_project(tomllib.loads((root / _PROJECT_FILE).read_text(encoding="utf-8")))
    names = _tracked(root, *project["tool"]["flwr"]["app"]["fab-include"], *_DOCUMENTS)
    with atomic_folder(folder) as staged:
        for name in published_files(names):
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, staged / name)
        (staged / _PROJECT_FILE).write_text(tomli_w.dumps(project), encoding="utf-8")
        for page in staged.rglob("*.md"):
            text = page.read_text(encoding="utf-8", errors="surrogateescape")  # `check_app` names other encodings
            text = _without_dead_links(text, page.parent)
            page.write_text(text, encoding="utf-8", errors="surrogateescape")
        try:
            check_app(staged, folder.name)
        except ValueError as error:
            raise ConfigError(str(error).replace(str(staged.resolve()), str(folder))) from None


def _tracked(root: Path, *patterns: str) -> list[str]:
    """Return the files that git tracks below a folder; raise `ConfigError` if there are none."""
    words = ["git", "-C", str(root), "ls-files", "-z", "--", *(f":(glob){pattern}" for pattern in patterns)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.stdout:
        why = done.stderr.strip() or f"git tracks no {patterns[0]} there"
        raise ConfigError(f"publish: {root} must be a git checkout of the app: {why}")
    return done.stdout.split("\0")[:-1]


def _published_project(found: dict[str, Any]) -> dict[str, Any]:
    """Return the content of pyproject.toml with what Flower's app format 1 needs, without the developers' tools."""
    project, app = found["project"], found["tool"]["flwr"]["app"]
    project.pop("license-files", None)
    project["license"] = {"file": "LICENSE"}
    app["fab-format-version"] = 1
    app["flwr-version-target"] = metadata.version("flwr")
    # The README too, since an unpacked app cannot be installed without the file that [project] names.
    app["fab-include"] = list(dict.fromkeys([*app["fab-include"], "LICENSE", "README.md"]))
    wheel = found["tool"]["hatch"]["build"]["targets"]["wheel"]
    tools = {"hatch": {"build": {"targets": {"wheel": wheel}}}, "flwr": found["tool"]["flwr"]}
    return {**found, "tool": tools}


def _without_dead_links(text: str, folder: Path) -> str:
    """Return a page with its links to files that are not published replaced by their text."""

    def replace(link: re.Match[str]) -> str:
        if (folder / link["target"]).exists():
            return link[0]
        return f"*(figure in the repository: {link['text']})*" if link["image"] else link["text"]

    return re.sub(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?P<target>[^)#:\s]+)(#[^)]*)?\)", replace, text)
