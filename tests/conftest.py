"""One cache folder and one trained digits generator for the whole session."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
# Helpers, and tests that others build on, are imported by their bare names.
sys.path[:0] = [str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir()]
if os.environ.get("FEDEAS_TEST_GPU") != "1":  # `make test-gpu`: all other tests are the same with and without a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
pytest_plugins = ["leftovers"]
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@cache
def _starts_flower(path: str) -> bool:
    """Return whether the tests of a file start processes of Flower or Ray, that is, have `pytest.mark.flower`."""
    return "pytest.mark.flower" in (ROOT / path).read_text(encoding="utf-8")


class FileByFile(LoadScopeScheduling):
    """Runs the tests of a file in one process, and all that start Flower in one: they look for leftover processes.

    The scheduler sees only the tests' ids, so the marker is read from the file. xdist's own groups
    (`--dist loadgroup`) do not work with pytest 9.2, whose test ids differ from those xdist expects.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "flower" if _starts_flower(path) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileByFile:
    return FileByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Use a cache folder for tests only; ``FEDEAS_TEST_CACHE`` names one to keep between sessions."""
    kept = os.environ.get("FEDEAS_TEST_CACHE", "")
    # Each xdist worker has its own folder in one that they share.
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else None
    folder = Path(kept) if kept else shared / "cache" if shared else tmp_path_factory.mktemp("cache")
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDEAS_CACHE", str(folder))
        # Processes started in other folders import this source tree and the helpers, so the path must be absolute.
        path = [str(ROOT), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path).rstrip(os.pathsep))
        yield folder


@pytest.fixture(scope="module", autouse=True)
def freeze_loaded_objects() -> None:
    """Exclude loaded modules from garbage collection: some Flower strategies collect at each reply, for 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_images(
    session_cache: Path, digits_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Return a function that switches to a named, empty cache with the session's generator."""

    def switch(name: str) -> None:
        folder = tmp_path / "caches" / name
        folder.mkdir(parents=True)
        (folder / "generators").symlink_to(session_cache / "generators")
        monkeypatch.setenv("FEDEAS_CACHE", str(folder))

    return switch


@pytest.fixture(scope="session")
def digits_generator(session_cache: Path) -> Path:
    """Return the folder of the built-in generator, which trains once, for about a minute."""
    from fedeas_flwr.generators.learn.builtin import ensure_builtin

    return ensure_builtin()
