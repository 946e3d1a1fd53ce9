"""The library without the app: the README's example runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import fedeas_flwr

ROOT = Path(__file__).parents[1]


def test_readme_library_example_runs(digits_generator: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (example,) = [block for block in blocks if "fill(" in block]
    assert len(example.strip().splitlines()) <= 22
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    images, labels, plan = (np.asarray(scope[name]) for name in ("images", "labels", "plan"))
    assert images.dtype == np.uint8
    assert len(images) == len(labels) == 40 + plan.sum()
    assert plan.sum() > 0


def test_every_name_in_all_can_be_imported() -> None:
    assert all(getattr(fedeas_flwr, name).__name__ == name for name in fedeas_flwr.__all__)
    assert dir(fedeas_flwr) == fedeas_flwr.__all__ and not hasattr(fedeas_flwr, "nothing")
    assert fedeas_flwr.__getattr__("policies").allocate is fedeas_flwr.allocate


def test_return_types_are_exported() -> None:
    made = fedeas_flwr.dirichlet_partition([0, 1] * 30, 2, 100.0, 1, test_fraction=0.25)
    assert isinstance(made, fedeas_flwr.Partition) and "Partition" in fedeas_flwr.__all__
