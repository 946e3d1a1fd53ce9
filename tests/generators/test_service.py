"""The shared generator without Ray: requests share batches, and an invalid request fails alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from numpy.typing import NDArray
from runners import small
from test_cache import Fake, ids
from waiting import LONG

from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.ray_service import RunningService, ServiceGenerator, reserve_generator_gpu, start_service
from fedeas_flwr.generators.service import GeneratorService, InProcessService
from fedeas_flwr.launch.superlink import QUIET

pytestmark = pytest.mark.flower


class Batched(Fake):
    batch_size = 4

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        if any(sample.client == 99 for sample in samples):
            self.calls.append(list(samples))
            raise ValueError("not for 99")
        return super().sample(samples)


def test_service_requests_of_clients_share_full_batches() -> None:
    fake, opened = Batched(), []

    def open_generator() -> Fake:
        opened.append(1)
        return fake

    async def run() -> list[NDArray[np.uint8]]:
        service = GeneratorService(open_generator)
        assert not (await service.stats())["loaded"] and not opened
        answers = await asyncio.gather(*(service.sample(ids(0, client, [1, 0, 2])) for client in range(20)))
        late = await service.sample(ids(0, 3, [2, 0, 0]))
        assert await service.describe() == ("fake", 4)
        stats = await service.stats()
        assert (stats["requests"], stats["images"], stats["loaded"]) == (21, 62, True)
        return [*answers, late]

    *answers, late = asyncio.run(run())
    assert opened == [1]
    assert [len(call) for call in fake.calls] == [32, 28, 2]  # eight batches per pass
    for client, images in enumerate(answers):
        assert np.array_equal(images, Fake().sample(ids(0, client, [1, 0, 2])))
    assert np.array_equal(late, Fake().sample(ids(0, 3, [2, 0, 0])))


def test_in_process_threads_share_batches_and_get_own_images(monkeypatch: pytest.MonkeyPatch) -> None:
    class WaitingGenerator(Batched):
        """Generates nothing before all clients have sent a request."""

        def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
            assert all_have_asked.wait(LONG)
            return super().sample(samples)

    fake, asked, all_have_asked = WaitingGenerator(), list[int](), threading.Event()
    sample = GeneratorService.sample

    async def counted(self: GeneratorService, samples: Sequence[tuple[int, ...]]) -> NDArray[np.uint8]:
        asked.append(1)
        if len(asked) == 10:
            all_have_asked.set()
        return await sample(self, samples)

    monkeypatch.setattr(GeneratorService, "sample", counted)
    service = InProcessService(fake)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda client: service.sample(ids(0, client, [1, 0, 2])), range(10)))
    for client, images in enumerate(answers):
        assert np.array_equal(images, Fake().sample(ids(0, client, [1, 0, 2])))
    assert len(fake.calls) <= 2, "requests made during the first pass took more than one other"
    with pytest.raises(ValueError, match="not for 99"):
        service.sample(ids(0, 99, [1]))
    assert (service.fingerprint, service.batch_size) == ("fake", 4)


def test_invalid_request_fails_only_its_own_client() -> None:
    async def run() -> list[object]:
        service = GeneratorService(Batched)
        requests = [service.sample(ids(0, client, [20, 0, 0])) for client in (12, 99, 14)]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return [*answers, await service.sample(ids(0, 1, [1, 0, 0]))]

    first, wrong, third, after = asyncio.run(run())
    assert isinstance(wrong, ValueError) and str(wrong) == "not for 99"
    for client, images in ((12, first), (14, third)):
        assert np.array_equal(images, Fake().sample(ids(0, client, [20, 0, 0])))  # type: ignore[arg-type]
    assert len(after) == 1  # type: ignore[arg-type]


def test_generator_that_cannot_open_fails_all_requests() -> None:
    def broken() -> Fake:
        raise FileNotFoundError("generator: there is no /nowhere")

    async def run() -> list[object]:
        service = GeneratorService(broken)
        return await asyncio.gather(*(service.sample(ids(0, 0, [1, 0, 0])) for _ in range(3)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["generator: there is no /nowhere"] * 3


def test_service_batch_size_error_fails_all_requests() -> None:
    """As on a full GPU; no request may wait for ever."""

    class Full(Fake):
        def find_batch_size(self) -> int:
            raise MemoryError("no room")

    async def run() -> list[object]:
        service = GeneratorService(Full)
        asked = (service.sample(ids(0, 0, [1, 0, 0])) for _ in range(3))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LONG)

    assert [str(error) for error in asyncio.run(run())] == ["no room"] * 3


def test_start_service_without_ray_returns_none(tmp_path: Path) -> None:
    assert start_service(small(tmp_path), "cpu") is None


@pytest.mark.parametrize(
    ("share", "left"),
    [(0.1, 0.099), (0.099, 0.099), (0.2, 0.199), (0.25, 0.249), (0.5, 0.498), (1.0, 0.996), (0.3, 0.3)],
)
def test_reserve_generator_gpu_by_hand(share: float, left: float) -> None:
    assert reserve_generator_gpu(share) == left
    assert int(1 / share + 1e-6) * left + 0.004 <= 1


def test_gpu_share_too_small_to_reduce_is_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"gpu-share = 0\.001: 1,000 clients .* gpu-share=0\.002 or more, or actors=996"
    ):
        reserve_generator_gpu(0.001)


class SilentRay:
    """A stand-in for Ray with one actor, which never replies."""

    class exceptions:
        class RayError(Exception): ...

        class RayTaskError(RayError): ...

    def __init__(self) -> None:
        self.kills: list[bool] = []

    def nodes(self) -> list[dict[str, object]]:
        return []

    def remote(self, kind: type) -> MagicMock:
        return MagicMock()

    def get(self, reference: object, timeout: float | None = None) -> object:
        raise self.exceptions.RayError("it is being restarted")

    def kill(self, actor: object, *, no_restart: bool) -> None:
        self.kills.append(no_restart)


def test_release_gpu_without_stats_runs_once(tmp_path: Path) -> None:
    ray = SilentRay()
    service = RunningService(ray, small(tmp_path), "cpu")
    assert [service.release_gpu(), service.release_gpu(), service.release_gpu()] == [{}, None, None]
    assert ray.kills == [False] and service.stats() == {}


@pytest.mark.parametrize("fingerprint", ["abc", "a custom model 2"])
@pytest.mark.parametrize("nodes", [[], ["a1", "b2"]])
def test_service_address_holds_fingerprint_batch_size_and_nodes(
    tmp_path: Path, fingerprint: str, nodes: list[str]
) -> None:
    class AnsweringRay(SilentRay):
        util = MagicMock()

        def nodes(self) -> list[dict[str, object]]:
            return [{"Alive": True, "NodeID": node, "Resources": {"GPU": 1}} for node in nodes]

        def get(self, reference: object, timeout: float | None = None) -> object:
            return fingerprint, 512

    generator = ServiceGenerator(RunningService(AnsweringRay(), small(tmp_path), "cpu").address(), "cifar10")
    assert (generator.fingerprint, generator.batch_size, generator._nodes) == (fingerprint, 512, nodes)
    assert (generator.image_shape, generator.num_classes) == ((32, 32, 3), 10)


RELEASING = """
import json, psutil, ray, sys, time
from pathlib import Path
from fedeas_flwr.generators.interface import SampleId
from fedeas_flwr.generators.ray_service import ServiceGenerator, start_service
sys.path.insert(0, sys.argv[1])
from runners import small
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
service = start_service(small(Path("/nowhere")), "cpu")
generator = ServiceGenerator(service.address(), "digits")
samples = [SampleId(1, 2, 3, index) for index in range(5)]
first = generator.sample(samples)
done = service.release_gpu()
assert done["images"] == 5 and service.release_gpu() is None
deadline = time.monotonic() + 120
while psutil.pid_exists(done["pid"]) and psutil.Process(done["pid"]).status() != "zombie":
    assert time.monotonic() < deadline, "the generator's process is still alive"
    time.sleep(0.1)
again = generator.sample(samples)
try:
    generator.sample([SampleId(0, 0, 99, 0)])
    refused = ""
except ValueError as error:
    refused = str(error)
service.end()
try:
    ray.get_actor(generator._name)
    gone = False
except ValueError:
    gone = True
print(json.dumps([bool((first == again).all()), refused, gone, "diffusers" in sys.modules]))
ray.shutdown()
"""


@pytest.mark.slow
def test_service_works_in_a_new_process_after_release_gpu(digits_generator: Path) -> None:
    command = [sys.executable, "-c", RELEASING, str(Path(__file__).parents[1] / "helpers")]
    with tempfile.TemporaryDirectory(prefix="rt-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **QUIET, "RAY_TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    same, refused, gone, loaded_here = json.loads(done.stdout.splitlines()[-1])
    assert same and gone and not loaded_here
    assert "label below 10" in refused and "\n" not in refused
