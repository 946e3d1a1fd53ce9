"""The library: README's code blocks run unchanged, and every public name can be imported."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runners import run_in_process

import fedeas_flwr
from fedeas_flwr.config import parse_config
from fedeas_flwr.federation.flower_internals import parse_config_args

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.S | re.M)
LIBRARY, POLICY = (text for language, text in BLOCKS if language == "python")
COMMANDS = [line.partition(" #")[0] for language, text in BLOCKS if language == "sh" for line in text.splitlines()]


def test_readme_library_example_makes_the_worked_client(digits_generator: Path) -> None:
    scope: dict[str, object] = {}
    exec(compile(LIBRARY, "README.md", "exec"), scope)
    images, labels, plan, counts = (np.asarray(scope[name]) for name in ("images", "labels", "plan", "counts"))
    assert images.dtype == np.uint8 and len(images) == len(labels) == 40 + plan.sum()
    assert sorted(set(plan)) == [0, 9] and plan.sum() == 72 and "generates 9 images of each" in README
    assert f"H̃ = {fedeas_flwr.normalised_entropy(counts)[0]:.2f}" in README


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the configs of a clone and README's policy."""
    monkeypatch.setitem(sys.modules, "rules", None)  # remembers the module of another test, to restore it
    monkeypatch.delitem(sys.modules, "rules")
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    (tmp_path / "rules.py").write_text(POLICY)
    return tmp_path


@pytest.mark.flower
def test_readme_commands_run(clone: Path, digits_generator: Path) -> None:
    ran = []
    for line in COMMANDS:
        first, *words = shlex.split(line)
        ran.append(first)
        if first == "make":
            subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, capture_output=True)
        elif first == "flwr":
            parse_config(parse_config_args([words[words.index("--run-config") + 1]]))
        elif first == "printf":
            subprocess.run(["bash", "-c", line], cwd=clone, check=True)
        else:
            done = run_in_process(*words, cwd=clone)
            assert first == "fedeas" and done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert set(ran) == {"make", "flwr", "printf", "fedeas"}


def test_every_name_in_all_can_be_imported() -> None:
    assert all(getattr(fedeas_flwr, name).__name__ == name for name in fedeas_flwr.__all__)
    assert dir(fedeas_flwr) == fedeas_flwr.__all__ and not hasattr(fedeas_flwr, "nothing")
    assert fedeas_flwr.__getattr__("allocation").budget is fedeas_flwr.budget


def test_return_types_are_exported() -> None:
    made = fedeas_flwr.dirichlet_partition([0, 1] * 30, 2, 100.0, 1, test_fraction=0.25)
    assert isinstance(made, fedeas_flwr.Partition) and "Partition" in fedeas_flwr.__all__
