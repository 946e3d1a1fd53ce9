"""Generators by import path: the images of `fill`, and one line for a wrong one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from runners import finish, quick, run_in_process
from users_generators import Stripes

from fedeas_flwr.common.generator_spec import GeneratorSpec
from fedeas_flwr.doctor.inputs import check_generator
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.opening import open_generator
from fedeas_flwr.planning.run_plan import planned_allocation, planned_counts

QUICKSTART = str(Path(__file__).parents[2] / "conf" / "quickstart.toml")
WRONG = {
    "no_such_module:open": "cannot be imported (ModuleNotFoundError",
    "users_generators:not_callable": "is of type int: must be a function or class",
    "users_generators:nothing": "without fingerprint, image_shape, num_classes, sample",
    "users_generators:NeedsFolder": "needs folder, which no key sets",
    "users_generators:raising": "raised OSError: the model is gone",
    "users_generators:Small": "makes 2 classes of images [4, 4, 1], but the dataset has 10 classes of images [8, 8, 1]",
    "users_generators:unnamed": "has fingerprint '': must be a text",
    "users_generators:TooFew": "sample() returned uint8 [1, 8, 8, 1]; it must return uint8 [2, 8, 8, 1]",
    "users_generators:Unseeded": "returned other images when asked for the same again",
    "users_generators:Broken": "raised RuntimeError: no memory",
    "users_generators:Floats": "sample() returned float64 [2, 8, 8, 1]; it must return uint8 [2, 8, 8, 1]",
}


@pytest.mark.parametrize(
    ("text", "kind", "where"),
    [
        ("builtin", "builtin", ""),
        ("sd-turbo", "sd-turbo", ""),
        ("sd-turbo:/m", "sd-turbo", "/m"),
        ("bank:b", "bank", "b"),
        ("bank", "folder", "bank"),
        ("models/cifar10", "folder", "models/cifar10"),
        ("/models/a:b", "folder", "/models/a:b"),
        ("mypackage.gen:open", "import path", "mypackage.gen:open"),
    ],
)
def test_spec_is_taken_apart(text: str, kind: str, where: str) -> None:
    spec = GeneratorSpec.parse(text)
    assert (spec.kind, spec.where) == (kind, where)
    assert GeneratorSpec.parse(spec.absolute(Path())).kind == kind


def test_own_generators_images_are_trained_on_and_cached(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(3), "big")  # a cache kept between sessions has no images of it
    keys = {"generator": "users_generators:Stripes", "participation": 1.0, "rounds": 2, "seed": seed}
    run = finish(config := quick(tmp_path / "r", **keys))
    planned = int(planned_allocation(config, planned_counts(config)).sum())
    assert [record["made"] for record in run.rounds()] == [planned, 0] and planned > 0
    again = finish(quick(tmp_path / "again", **keys))
    assert [record["made"] for record in again.rounds()] == [0, 0]
    (same,) = open_generator("users_generators:Stripes", "digits").sample([SampleId(1, 2, 3, 4)])
    assert np.array_equal(same, Stripes(range(10), (8, 8, 1)).sample([SampleId(1, 2, 3, 4)])[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("path", WRONG)
def test_wrong_generator_is_one_line_and_nothing_starts(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "r"
    words = [QUICKSTART, f"generator={path}", "clients=3", "backend=inline", f"run-dir={folder}"]
    found = run_in_process("run", *words)
    assert (found.returncode, found.stdout, folder.exists()) == (2, "", False)
    (line,) = found.stderr.splitlines()
    assert f"generator: '{path}'" in line and WRONG[path] in line
    (finding,) = check_generator(quick(folder, generator=path))
    assert finding.state == "problem" and WRONG[path] in finding.text


def test_rounding_differences_between_calls_are_allowed(tmp_path: Path) -> None:
    (finding,) = check_generator(quick(tmp_path / "r", generator="users_generators:Rounded"))
    assert finding.state == "ok"


def test_images_of_the_wrong_type_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"sample\(\) returned float64 .*it must return uint8"):
        finish(quick(tmp_path / "r", generator="users_generators:Floats", seed=78))
