"""Ray's head process: the sizes that it gets, and that the SuperLink becomes its parent."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from fedeas_flwr.config import parse_config
from fedeas_flwr.launch import ray_head
from fedeas_flwr.launch.resources import ray_resources


@pytest.mark.parametrize(("on_gpu", "sizes"), [(False, (3, None)), (True, (3, 1))])
def test_ray_head_gets_the_sizes_of_the_run(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, sizes: tuple[int, int | None]
) -> None:
    resources = ray_resources(parse_config({"clients": 8, "actors": 3}), on_gpu)
    shell, option, script = ray_head.with_head(["flower-superlink", "--port", "1"], resources)
    head, superlink = script.removeprefix("(").split("; kill $$) & ")
    assert (shell, option, superlink) == ("sh", "-c", "exec flower-superlink --port 1")
    started: list[Any] = []

    def init(address: str, **options: Any) -> None:
        started.append((address, options["num_cpus"], options["num_gpus"]))
        raise SystemExit

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(sys, "argv", shlex.split(head)[1:])
    with pytest.raises(SystemExit):
        ray_head.main()
    assert started == [("local", *sizes)]


def test_superlink_ends_if_ray_head_ends(tmp_path: Path) -> None:
    """Otherwise Flower would try for minutes to connect, and the run would fail for another reason."""
    (tmp_path / "ray.py").write_text("raise SystemExit('no space left')")
    command = ray_head.with_head([sys.executable, "-c", "import time; time.sleep(60)"], {"init-args-num-cpus": 1})
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    superlink = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert superlink.wait(30) == -signal.SIGTERM
    finally:
        superlink.kill()
