"""The shared generator without Ray: requests share batches, mistakes stay with whoever made them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from runners import small
from test_cache import Fake, ids

from fedeas_flwr.generators import SampleId
from fedeas_flwr.generators.service import GeneratorService, ServiceGenerator, leave_sliver, start_service


class Batched(Fake):
    batch_size = 4

    def sample(self, samples: Sequence[SampleId]) -> NDArray[np.uint8]:
        if any(sample.client == 99 for sample in samples):
            self.calls.append(list(samples))
            raise ValueError("not for 99")
        return super().sample(samples)


def test_requests_of_many_clients_share_full_batches_and_come_back_apart() -> None:
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
    assert [len(call) for call in fake.calls] == [32, 28, 2]  # eight batches a pass
    for client, images in enumerate(answers):
        assert np.array_equal(images, Fake().sample(ids(0, client, [1, 0, 2])))
    assert np.array_equal(late, Fake().sample(ids(0, 3, [2, 0, 0])))


def test_one_clients_mistake_is_not_its_neighbours_failure() -> None:
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


def test_a_generator_that_cannot_be_opened_is_everybodys_error() -> None:
    def broken() -> Fake:
        raise FileNotFoundError("generator: there is no /nowhere")

    async def run() -> list[object]:
        service = GeneratorService(broken)
        return await asyncio.gather(*(service.sample(ids(0, 0, [1, 0, 0])) for _ in range(3)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["generator: there is no /nowhere"] * 3


def test_without_ray_there_is_no_service(tmp_path: Path) -> None:
    assert start_service(small(tmp_path), "cpu") is None


def test_an_address_says_all_but_the_pixels() -> None:
    generator = ServiceGenerator("fedeas-generator-1 abc 512", "cifar10")
    assert (generator.fingerprint, generator.batch_size) == ("abc", 512)
    assert (generator.image_shape, generator.num_classes) == ((32, 32, 3), 10)


@pytest.mark.parametrize(
    ("share", "left"),
    [(0.1, 0.099), (0.099, 0.099), (0.2, 0.199), (0.25, 0.249), (0.5, 0.498), (1.0, 0.996), (0.3, 0.3)],
)
def test_clients_leave_the_generator_a_sliver(share: float, left: float) -> None:
    assert leave_sliver(share) == left
    assert int(1 / share + 1e-6) * left + 0.004 <= 1
