"""Runs through Flower's Ray simulation: inline's weights, the correct status, no processes left."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab
from leftovers import flower_processes
from runners import CHEAP, finish, small, start_interruptible, weights, with_fixed_noise_key
from waiting import LONG, PausedRun, wait_until

from fedeas_flwr.commands.publish import write_app
from fedeas_flwr.common.errors import RunError
from fedeas_flwr.common.processes import with_variable
from fedeas_flwr.common.project import code_digest
from fedeas_flwr.launch.superlink import QUIET, free_port
from fedeas_flwr.runs.directory import RunDirectory

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.flower, pytest.mark.usefixtures("no_leftovers")]


def images_of(cache: str, folder: Path) -> dict[str, str]:
    """Return the content of a cache's shards by name."""
    root = folder / "caches" / cache / "images"
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*.npy"))}


@pytest.mark.parametrize("actors", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ray_and_inline_give_the_same_weights(tmp_path: Path, fresh_images: Callable[[str], None], actors: int) -> None:
    """Four clients per round in two processes: some train in parallel, some one after another."""
    keys = {**CHEAP, "participation": 1.0}
    fresh_images("inline")
    inline = finish(small(tmp_path / "inline", **keys))
    fresh_images("ray")
    ray = finish(small(tmp_path / "ray", backend="ray", actors=actors, **keys))
    # Every image came from the one shared generator: no client loaded a model.
    assert images_of("inline", tmp_path) == images_of("ray", tmp_path)
    assert ray.read_json("service.json")["state"] == "ended"
    assert ray.read_json("service.json")["images"] == sum(record["made"] for record in ray.rounds()) > 0
    assert weights(inline) == weights(ray)
    assert inline.summary()["total_generated"] == ray.summary()["total_generated"] > 0
    assert [r["accuracy"] for r in inline.rounds()] == [r["accuracy"] for r in ray.rounds()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fedadam"},
        {"strategy": "fedavgm", "dp": "client-adaptive", "dp_noise_multiplier": 0.1},
        {"strategy": "scaffold", "policy": "fedeas"},
    ],
)
def test_strategies_and_clipping_under_ray_equal_inline(
    tmp_path: Path, digits_generator: Path, keys: dict[str, object]
) -> None:
    keys = {"policy": "none", "rounds": 3, **keys}
    inline = finish(small(with_fixed_noise_key(tmp_path / "inline"), **keys))
    ray = finish(small(with_fixed_noise_key(tmp_path / "ray"), backend="ray", **keys))
    assert weights(inline) == weights(ray)
    assert [r["gamma_hat"] for r in inline.rounds()] == pytest.approx([r["gamma_hat"] for r in ray.rounds()])


@pytest.mark.slow
def test_killed_generator_does_not_change_the_result(tmp_path: Path, fresh_images: Callable[[str], None]) -> None:
    # Chunks of 4 × 8 images: the service dies with some of a client's images on disk and some not.
    changes = {"beta": 12.0, "generation_batch": 8, "participation": 1.0, "rounds": 2}
    fresh_images("inline")
    whole = finish(small(tmp_path / "whole", **changes))
    fresh_images("killed")
    config, killed = small(tmp_path / "r", backend="ray", actors=2, **changes), []

    def kill() -> None:
        wait_until(
            lambda: any((tmp_path / "caches" / "killed" / "images").rglob("*.npy")), "some images are in the cache"
        )
        killed.append(RunDirectory(tmp_path / "r").read_json("service.json")["pid"])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    run = finish(config)
    killer.join()
    done = run.read_json("service.json")
    assert done["pid"] != killed[0]
    assert 0 < done["images"] < run.rounds()[0]["made"] == run.summary()["total_generated"]
    assert images_of("inline", tmp_path) == images_of("killed", tmp_path)
    assert weights(whole) == weights(run)


@pytest.mark.slow
def test_client_that_raises_under_ray_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"))
    with pytest.raises(RunError, match="ArithmeticError: out of luck"):
        finish(small(tmp_path / "r", backend="ray", policy="none", model="users_models:that_raises"))
    assert RunDirectory(tmp_path / "r").status()[0] == "failed"


@pytest.mark.slow
def test_ctrl_c_under_ray_ends_all_processes_and_run_resumes(tmp_path: Path, digits_generator: Path) -> None:
    whole = finish(small(tmp_path / "whole", rounds=30))
    folder, conf = tmp_path / "stopped", tmp_path / "conf.toml"
    conf.write_text("clients = 4\nalpha = 0.1\nbeta = 4.0\nrounds = 30\nlocal-epochs = 1\n")
    command = [sys.executable, "-m", "fedeas_flwr", "run", str(conf), f"run-dir={folder}"]
    before = flower_processes()
    child = start_interruptible(command, env=PausedRun(tmp_path, 20).environment)
    wait_until(lambda: len(RunDirectory(folder).rounds()) >= 3, "three rounds are done")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=LONG)
    assert flower_processes() <= before, "it returned before its processes had ended"
    assert child.returncode == 130
    assert "fedeas resume" in errors
    assert "Traceback" not in errors
    assert 3 <= len(RunDirectory(folder).rounds()) < 30
    assert RunDirectory(folder).status()[0] == "interrupted"
    resumed = finish(small(folder, rounds=30, resume=True))
    assert weights(whole) == weights(resumed)


@pytest.mark.slow
def test_launcher_killed_under_ray_leaves_no_process(tmp_path: Path, digits_generator: Path) -> None:
    folder, conf = tmp_path / "killed", tmp_path / "conf.toml"
    conf.write_text("clients = 4\nalpha = 0.1\nbeta = 4.0\nrounds = 30\nlocal-epochs = 1\n")
    before, folders = flower_processes(), set(Path(tempfile.gettempdir()).glob("fe-*"))
    command = [sys.executable, "-m", "fedeas_flwr", "run", str(conf), f"run-dir={folder}"]
    with start_interruptible(command, env=PausedRun(tmp_path, 20).environment) as child:
        wait_until(lambda: len(RunDirectory(folder).rounds()) >= 3, "three rounds are done")
        child.kill()
    wait_until(lambda: flower_processes() <= before, "all its processes have ended")
    wait_until(lambda: set(Path(tempfile.gettempdir()).glob("fe-*")) <= folders, "its folder is gone")
    whole, resumed = finish(small(tmp_path / "whole", rounds=30)), finish(small(folder, rounds=30, resume=True))
    assert weights(whole) == weights(resumed)


def kill_all_with_home(home: str) -> None:
    """Kill the SuperLink of this FLWR_HOME and what it started; other runs on this machine go on."""
    own = set(with_variable("FLWR_HOME", home))
    for process in list(own):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            own.update(process.children(recursive=True))
    for process in own:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def own_superlink(home: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Yield a function that calls plain `flwr run` on the test's own SuperLink."""
    environment = {
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="rt-"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    before = flower_processes()

    def flwr_run(app: Path, keys: str, *more: str) -> subprocess.CompletedProcess[str]:
        words = ["flwr", "run", str(app), "--stream", "--run-config", keys, *more]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)

    try:
        yield flwr_run
    finally:
        kill_all_with_home(environment["FLWR_HOME"])
        wait_until(lambda: flower_processes() <= before, "all processes have ended")
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)


@pytest.mark.slow
def test_plain_flwr_run_works(tmp_path: Path, digits_generator: Path) -> None:
    """Run plain `flwr run .` with Flower's default of two nodes."""
    with own_superlink(tmp_path / "flwr") as flwr_run:
        done = flwr_run(ROOT, f'rounds=2 local-epochs=1 actors=1 run-dir="{tmp_path / "run"}"')
        run = RunDirectory(tmp_path / "run")
        assert run.status()[0] == "finished", done.stdout + done.stderr
        assert run.config().clients == 2
        assert run.summary()["rounds"] == 2
        said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)  # without colours
        superlink = rf"SuperLink: process \d+ of user .*, home {tmp_path}/flwr, Python {sys.executable}\n"
        assert re.search(superlink, said) and "This SuperLink's environment" not in said
        assert "WARNING :   actors = 1: no effect with `flwr run`" in said
        planned = f"{run.summary()['total_generated']} synthetic images for 2 clients"
        assert f"Plan: policy fedeas, β = 6: {planned}\n" in said
        assert re.search(rf"Result: accuracy .* images generated; see {tmp_path}/run\n", said)
        recipe = "generator-training.local-steps=2 generator-training.batch-size=4"
        keys = f'task="generator" policy="none" rounds=2 {recipe} run-dir="{tmp_path / "g"}"'
        done = flwr_run(ROOT, keys)
        assert re.search(r"Result: held-out loss .* after 2 rounds", done.stdout), done.stdout + done.stderr
        assert RunDirectory(tmp_path / "g").config().generator_training.batch_size == 4
        assert (tmp_path / "g" / "generator" / "README.md").exists()
        wrong = flwr_run(ROOT, "policy='nonsense'")
        said = wrong.stdout + wrong.stderr
        assert "policy = 'nonsense': must be" in said and "Traceback" not in said


@pytest.mark.slow
def test_flwr_run_of_the_example_with_fedeas(tmp_path: Path, digits_generator: Path) -> None:
    results = tmp_path / "results.jsonl"
    with own_superlink(tmp_path / "flwr") as flwr_run:
        example, nodes = ROOT / "examples" / "in-your-flower-app", ("--federation-config", "num-supernodes=3")
        done = flwr_run(example, f'num-server-rounds=2 results="{results}"', *nodes)
        assert results.exists(), done.stdout + done.stderr
        assert len(results.read_text().splitlines()) == 3
        assert "images planned by policy fedeas" in done.stdout and "Received 3 results and 0 failures" in done.stdout


@pytest.mark.slow
def test_published_app_runs_where_it_is_unpacked(tmp_path: Path, digits_generator: Path) -> None:
    published = tmp_path / "published" / "fedeas-flwr"
    write_app(ROOT, published)
    with (published / "fedeas_flwr" / "__init__.py").open("a") as code:
        code.write("# not the code of the checkout\n")
    unpacked = install_from_fab(build_fab_from_disk(published), tmp_path / "elsewhere")
    shutil.rmtree(published)
    with own_superlink(tmp_path / "flwr") as flwr_run:
        done = flwr_run(unpacked, f'rounds=2 local-epochs=1 run-dir="{tmp_path / "run"}"')
    run = RunDirectory(tmp_path / "run")
    assert run.status()[0] == "finished", done.stdout + done.stderr
    assert run.summary()["rounds"] == 2 and run.summary()["total_generated"] > 0
    assert run.environment()["code"] == code_digest(unpacked / "fedeas_flwr") != code_digest()
