"""Packaging: the wheel installs and works, the citation is correct, and the help is complete."""

from __future__ import annotations

import json
import os
import re
import shlex
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
import typer
import yaml
from click.testing import CliRunner
from waiting import LONG

from fedeas_flwr.commands.app import app

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.slow
def test_wheel_builds_installs_and_works_without_the_source(tmp_path: Path) -> None:
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed (it comes with the extra dev)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"fedeas_flwr", f"fedeas_flwr-{PROJECT['version']}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)

    venv.create(tmp_path / "fresh", with_pip=False, symlinks=True)
    python = tmp_path / "fresh" / "bin" / "python"
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    # The dependencies are those of this interpreter: a path in a .pth file does not bring its own .pth files along, so
    # that an editable install of the source stays out.
    (packages / "dependencies.pth").write_text("\n".join([*site.getsitepackages()]))
    install = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=300)

    def fresh(*words: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = fresh(str(python), "-c", "import fedeas_flwr; print(fedeas_flwr.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    fedeas = str(python.with_name("fedeas"))
    assert "Typical workflow" in fresh(fedeas, "--help")
    assert json.loads(fresh(fedeas, "plan", "--format", "json"))["total"] == 893  # the quickstart's


PLANNING = (ROOT / "docs" / "choosing-beta.md").read_text().partition("## Planning without torch and Flower")[2]
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if not allowed(name.partition(".")[0]):
            raise ModuleNotFoundError(f"not installed: {name}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_without(allowed: str, code: str, *words: str) -> str:
    """Run code in a process that can import only modules for which ``allowed``, an expression of ``name``, is true."""
    script = f"{BLOCK}\nallowed = lambda name: {allowed}\n{code}"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_library_plans_with_numpy_alone() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PLANNING, re.S)
    only = "name in sys.stdlib_module_names | {'numpy', 'fedeas_flwr'} or name.startswith('_')"
    assert run_without(only, example) == "13437 images\nβ = 12.0\n"


def test_plan_command_needs_only_the_listed_packages() -> None:
    (line,) = re.findall(r"^pip install ('typer.*?) +#", PLANNING, re.M)
    typer_range, *others = shlex.split(line)
    assert typer_range in PROJECT["dependencies"]
    assert typer_range.endswith("<0.21"), "newer ones need not install click, and raise errors of their own"
    listed = {"typer", *others, "numpy", "click"}  # typer installs click
    needed = {re.split(r"[^a-z0-9-]", word)[0] for word in PROJECT["dependencies"]} | {"ray"}
    assert listed <= needed
    absent = {module for module, names in packages_distributions().items() if {*names} & (needed - listed)}
    assert {"torch", "flwr", "ray", "sklearn", "PIL", "matplotlib"} <= absent
    code = "from fedeas_flwr.commands.app import main\nmain()"
    for words in ([], ["conf/cifar10-k20.toml"], ["--counts", "tests/helpers/three_clients.csv"]):
        assert "To generate:" in run_without(f"name not in {absent!r}", code, "plan", *words)
    for words in (["plan", "--figures", "figures"], ["run", "conf/quickstart.toml"]):
        script = f"{BLOCK}\nallowed = lambda name: name not in {absent!r}\n{code}"
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=ROOT)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and "Traceback" not in done.stderr and re.search("needs the package '[a-z]+'", last)


def test_deployment_guide_installs_this_version() -> None:
    guide = (ROOT / "docs" / "deployment.md").read_text()
    assert set(re.findall(r"fedeas_flwr-([0-9.]+)-py3", guide)) == {PROJECT["version"]}


def test_workflows_run_what_ci_runs() -> None:
    found = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    commands = {name: [step.get("run") for step in found[name]["jobs"]["test"]["steps"]] for name in found}
    assert ".ci/run" in commands["ci"]
    assert any(command and "--pre" in command and "flwr" in command for command in commands["next-flower"])


def test_changelog_begins_with_this_version() -> None:
    assert re.findall(r"^## ([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == PROJECT["version"]


def test_citation_names_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0" and found["message"] and found["authors"]
    assert (str(found["version"]), found["license"]) == (PROJECT["version"], PROJECT["license"])
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert found["preferred-citation"]["title"] in readme
    assert [a["family-names"] for a in found["preferred-citation"]["authors"]] == ["Lee", "Park", "Lee"]


# ------------------------------------------------------------------------------------------------------------- help


def check_words(words: list[str]) -> None:
    """Check that a command line is valid: its command, options and values exist."""
    command: click.Command = typer.main.get_command(app)
    name = "fedeas"
    while isinstance(command, click.Group):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


def help_of(*words: str) -> str:
    return CliRunner().invoke(typer.main.get_command(app), [*words, "--help"], terminal_width=80).output


def test_help_shows_how_to_plan_run_compare_and_plot() -> None:
    text = help_of()
    shown = [shlex.split(line.partition("fedeas ")[2]) for line in text.splitlines() if "  fedeas " in line]
    assert [words[0] for words in shown] == ["quickstart", "doctor", "plan", "plan", "run", "resume", "sweep", "report"]
    for words in shown:
        check_words(words)
    with pytest.raises(click.UsageError):
        check_words(["plan", "--no-such-option"])


def test_command_summaries_fit_a_narrow_terminal() -> None:
    commands = help_of().partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    assert [line.split()[0] for line in commands] == group.list_commands(click.Context(group))
    assert all(len(line) <= 80 and not line.endswith("...") and len(line.split()) > 1 for line in commands)


def test_every_option_and_argument_is_explained() -> None:
    def walk(command: click.Command, path: tuple[str, ...]) -> None:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                inner = command.get_command(click.Context(command), name)
                assert inner is not None
                walk(inner, (*path, name))
            return
        assert command.help, path
        context = click.Context(command)
        for parameter in command.params:
            record = parameter.get_help_record(context)
            assert record and "\\" not in record[1], (*path, parameter.name)
            assert record[1].removesuffix("[required]").strip(), (*path, parameter.name)

    walk(typer.main.get_command(app), ())
    assert help_of("report").count("run directories, or folders that contain runs") == 1
