"""A generator service that combines concurrent requests into full batches.

Under Ray, ray_service.py runs it in an actor that all clients share. Without Ray (inline, SuperNodes) it runs in the
client's process, and the threads of an inline grid share its batches (`InProcessService`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import Images
from fedeas_flwr.generators.cache import sample_checked
from fedeas_flwr.generators.interface import Generator, SampleId, batch_size, describe_generator, images_per_class
from fedeas_flwr.generators.opening import open_for_run

_GATHER_SECONDS = 0.02
_BATCHES_PER_PASS = 8


@dataclass
class _Request:
    samples: list[SampleId]
    reply: asyncio.Future[Images]
    taken: int = 0
    images: list[Images] = field(default_factory=list)


class GeneratorService:
    """Holds a generator and serves requests in order of arrival, in full batches.

    Its methods run on one event loop and the generator in one thread: requests queue up during a pass. The generator is
    opened at the first request: an unused service takes no memory.
    """

    def __init__(self, open_generator: Callable[[], Generator]) -> None:
        self._open = open_generator
        self._generator: Generator | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._waiting: deque[_Request] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._counts = {"requests": 0, "passes": 0, "images": 0}
        self._seconds = 0.0

    async def describe(self) -> tuple[str, int]:
        """Return the generator's fingerprint and batch size."""
        generator = await self._loaded()
        return generator.fingerprint, await self._in_thread(lambda: batch_size(generator))

    async def stats(self) -> dict[str, Any]:
        """Return the counters of this process; they start at zero after a restart."""
        return {"pid": os.getpid(), "loaded": self._generator is not None, **self._counts, "seconds": self._seconds}

    async def sample(self, samples: Sequence[tuple[int, ...]]) -> Images:
        """Generate images; a request waits a moment for others to share batches with."""
        request = _Request([SampleId(*sample) for sample in samples], asyncio.get_running_loop().create_future())
        self._counts["requests"] += 1
        self._waiting.append(request)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await request.reply

    async def _loaded(self) -> Generator:
        if self._generator is None:
            # Two requests may wait here, but there is one thread: the second finds the generator that the first opened.
            self._generator = await self._in_thread(lambda: self._generator or self._open())
        return self._generator

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _serve(self) -> None:
        while self._waiting:
            try:
                generator = await self._loaded()
                batch = await self._in_thread(partial(batch_size, generator))
            except Exception as error:
                while self._waiting:
                    _fail(self._waiting.popleft(), error)
                return
            if sum(len(request.samples) - request.taken for request in self._waiting) < batch:
                await asyncio.sleep(_GATHER_SECONDS)
            await self._pass(generator, self._take(_BATCHES_PER_PASS * batch))

    def _take(self, limit: int) -> list[tuple[_Request, list[SampleId]]]:
        """Take up to `limit` samples from the front of the queue; the last request may be taken in part."""
        parts = []
        while self._waiting and limit > 0:
            request = self._waiting[0]
            part = request.samples[request.taken : request.taken + limit]
            request.taken += len(part)
            limit -= len(part)
            parts.append((request, part))
            if request.taken == len(request.samples):
                self._waiting.popleft()
        return parts

    async def _pass(self, generator: Generator, parts: list[tuple[_Request, list[SampleId]]]) -> None:
        began = time.perf_counter()
        try:
            samples = [sample for _, part in parts for sample in part]
            images = await self._in_thread(lambda: sample_checked(generator, samples))
        except Exception as error:
            if len(parts) > 1:  # an invalid request must not fail the others
                for single in parts:
                    await self._pass(generator, [single])
                return
            request = parts[0][0]
            _fail(request, error)
            if request in self._waiting:
                self._waiting.remove(request)
            return
        self._seconds += time.perf_counter() - began
        self._counts["passes"] += 1
        self._counts["images"] += len(images)
        start = 0
        for request, part in parts:
            request.images.append(images[start : start + len(part)])
            start += len(part)
            if sum(map(len, request.images)) == len(request.samples) and not request.reply.done():
                request.reply.set_result(np.concatenate(request.images))


def _fail(request: _Request, error: Exception) -> None:
    if not request.reply.done():
        request.reply.set_exception(error)


class InProcessService:
    """The service without Ray: a generator whose batches the threads of this process share."""

    def __init__(self, generator: Generator) -> None:
        self.fingerprint, self.image_shape = generator.fingerprint, generator.image_shape
        self.num_classes, self.batch_size = generator.num_classes, batch_size(generator)
        self.images_of_class = images_per_class(generator)
        self._service = GeneratorService(lambda: generator)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="generator", daemon=True).start()

    def sample(self, samples: Sequence[SampleId]) -> Images:
        """Generate images, in batches shared with concurrent requests; see `Generator.sample`."""
        return asyncio.run_coroutine_threadsafe(self._service.sample(samples), self._loop).result()


_opening = threading.Lock()


def own_generator(config: RunConfig, device: str) -> Generator:
    """Return the run's generator in this process, shared by its threads."""
    with _opening:
        return _opened_generator(tuple(describe_generator(config).items()), device)


@lru_cache(maxsize=1)
def _opened_generator(keys: tuple[tuple[str, Any], ...], device: str) -> Generator:
    return InProcessService(open_for_run(parse_config(dict(keys)), device))
