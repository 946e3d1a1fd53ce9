"""The library without the app: the README's example is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import fedeas_flwr

ROOT = Path(__file__).parents[1]


def test_the_readmes_library_example_runs(digits_generator: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (example,) = [block for block in blocks if "fill(" in block]
    assert len(example.strip().splitlines()) <= 22
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    images, labels, plan = (np.asarray(scope[name]) for name in ("images", "labels", "plan"))
    assert images.dtype == np.uint8
    assert len(images) == len(labels) == 40 + plan.sum()
    assert plan.sum() > 0


def test_all_that_the_package_offers_is_there() -> None:
    assert {name for names in fedeas_flwr._HOMES.values() for name in names} == set(fedeas_flwr.__all__)
    assert all(getattr(fedeas_flwr, name).__name__ == name for name in fedeas_flwr.__all__)
    assert not hasattr(fedeas_flwr, "nothing")
