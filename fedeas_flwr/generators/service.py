"""One generator for a whole simulated federation: a named Ray actor that the clients ask; on a cluster, one a GPU node.

    ServerApp   start_service ──────────► GeneratorService (the actor: loads the model at its first request)
    clients     ServiceGenerator.sample ─► waits with everybody else's requests, is served in full batches
    ServerApp   rest, when every client has its images: the process is replaced by a fresh one, so that the GPU is
                free; end, when the run is over

A crash loses at most the chunk each client is waiting for: Ray starts the actor anew, the clients ask again, and what
they had before is in the image cache. Without Ray (inline, SuperNodes) the same class runs in the client's own process,
and the threads of an inline grid share its batches (`InProcessService`).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data import dataset_info
from fedeas_flwr.generators import Generator, SampleId, batch_size, open_for_run

Images = NDArray[np.uint8]

GPU_SLIVER = 0.004
"""Fraction of a GPU the actor asks Ray for: 0 would hide the GPU from it, more would not fit beside the clients."""
_GATHER_SECONDS = 0.02
_BATCHES_A_PASS = 8
_ATTEMPTS = 5
_RESTART_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


@dataclass
class _Request:
    samples: list[SampleId]
    reply: asyncio.Future[Images]
    taken: int = 0
    images: list[Images] = field(default_factory=list)


class GeneratorService:
    """Holds a generator and serves whoever waits, first come first served, in full batches.

    Its methods run on one event loop, the generator in one thread beside it: requests queue up during a pass.

    Parameters
    ----------
    open_generator
        Called once, at the first request: a service that nobody asks costs no memory.
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
        """Return what this process has done so far; a restart begins at zero."""
        return {"pid": os.getpid(), "loaded": self._generator is not None, **self._counts, "seconds": self._seconds}

    async def sample(self, samples: Sequence[tuple[int, ...]]) -> Images:
        """Make images; the request waits a moment for others, to share batches with them."""
        request = _Request([SampleId(*sample) for sample in samples], asyncio.get_running_loop().create_future())
        self._counts["requests"] += 1
        self._waiting.append(request)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await request.reply

    async def _loaded(self) -> Generator:
        if self._generator is None:
            # Two may be here at once, but the thread is one: the second finds the first one's generator.
            self._generator = await self._in_thread(lambda: self._generator or self._open())
        return self._generator

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _serve(self) -> None:
        while self._waiting:
            try:
                generator = await self._loaded()
            except Exception as error:
                while self._waiting:
                    _fail(self._waiting.popleft(), error)
                return
            batch = await self._in_thread(partial(batch_size, generator))
            if sum(len(request.samples) - request.taken for request in self._waiting) < batch:
                await asyncio.sleep(_GATHER_SECONDS)
            await self._pass(generator, self._take(_BATCHES_A_PASS * batch))

    def _take(self, most: int) -> list[tuple[_Request, list[SampleId]]]:
        """Take up to `most` samples from the front of the queue, the last request's perhaps in part."""
        parts = []
        while self._waiting and most > 0:
            request = self._waiting[0]
            part = request.samples[request.taken : request.taken + most]
            request.taken += len(part)
            most -= len(part)
            parts.append((request, part))
            if request.taken == len(request.samples):
                self._waiting.popleft()
        return parts

    async def _pass(self, generator: Generator, parts: list[tuple[_Request, list[SampleId]]]) -> None:
        began = time.perf_counter()
        try:
            images = await self._in_thread(lambda: generator.sample([sample for _, part in parts for sample in part]))
        except Exception as error:
            if len(parts) > 1:  # one request's mistake must not be its neighbours' failure
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
    """The service without Ray: a generator whose batches all threads of this process share.

    Parameters
    ----------
    generator
        Used by this service alone from now on.
    """

    def __init__(self, generator: Generator) -> None:
        self.fingerprint, self.image_shape = generator.fingerprint, generator.image_shape
        self.num_classes, self.batch_size = generator.num_classes, batch_size(generator)
        self._service = GeneratorService(lambda: generator)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="generator", daemon=True).start()

    def sample(self, samples: Sequence[SampleId]) -> Images:
        """Make images together with whoever else is asking; see `Generator.sample`."""
        return asyncio.run_coroutine_threadsafe(self._service.sample(samples), self._loop).result()


# ----------------------------------------------------------------------------------------- the ServerApp


class RunningService:
    """The ServerApp's hold on the actors; `start_service` makes it. A single machine has one of them."""

    def __init__(self, ray: Any, config: RunConfig, device: str) -> None:
        self._ray, self._name = ray, f"fedeas-generator-{uuid.uuid4().hex[:12]}"
        self._done: dict[str, Any] = {}
        # The class is imported by name in the actor's process, which must find the very package that runs here.
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._nodes = gpu_nodes(ray)
        options = {
            **actor_demand(ray, config, device, max(1, len(self._nodes))),
            "max_restarts": -1,
            "max_concurrency": 10_000,  # every client may wait at once
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
        }
        make = ray.remote(GeneratorService).options
        opened = partial(_open, config.outside(), device)
        places = [{"name": f"{self._name}-{node}", **_only_on(ray, node)} for node in self._nodes]
        self._actors = [make(**options, **place).remote(opened) for place in places or [{"name": self._name}]]
        self._descriptions = [actor.describe.remote() for actor in self._actors]

    def address(self) -> str:
        """Return what a client needs to ask the service; waits until the model is loaded."""
        found = [self._get(description) for description in self._descriptions]
        fingerprints = {fingerprint for fingerprint, _ in found}
        if len(fingerprints) > 1:
            raise ValueError(
                "generator: the cluster's nodes hold different ones; copy one folder to the same path on all"
            )
        return " ".join([self._name, found[0][0], str(min(batch for _, batch in found)), *self._nodes])

    def stats(self) -> dict[str, Any]:
        """Return what the actors' present processes have done, or those before them if they were put to rest."""
        if self._done:
            return self._done
        try:
            waiting = [actor.stats.remote() for actor in self._actors]
            found = [dict(self._get(one, timeout=_ANSWER_SECONDS)) for one in waiting]
        except self._ray.exceptions.RayError:
            return {}  # one is being restarted, or Ray is going down
        counted = ("requests", "passes", "images", "seconds")
        return {**found[0], **{key: sum(one[key] for one in found) for key in counted}, "nodes": self._nodes}

    def rest(self) -> dict[str, Any] | None:
        """Free the GPUs, once; return what had been done. A late request (a damaged shard) loads the model again."""
        if self._done:
            return None
        self._done = self.stats()
        for actor in self._actors:
            self._ray.kill(actor, no_restart=False)
        return self._done

    def end(self) -> None:
        """End the actors for good."""
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):  # Ray may be gone before it
                self._ray.kill(actor, no_restart=True)

    def _get(self, reference: Any, timeout: float | None = None) -> Any:
        try:
            return self._ray.get(reference, timeout=timeout)
        except self._ray.exceptions.RayTaskError as error:  # its text is a traceback, the cause's is one line
            raise error.cause from None


def gpu_nodes(ray: Any) -> list[str]:
    """The nodes of a cluster that have GPUs, in a fixed order; none if Ray runs on one machine."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(node["NodeID"] for node in alive if node["Resources"].get("GPU", 0)) if len(alive) > 1 else []


def _only_on(ray: Any, node: str) -> dict[str, Any]:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return {"scheduling_strategy": strategy(node, soft=False)}


def start_service(config: RunConfig, device: str) -> RunningService | None:
    """Start the run's service if this is a simulation under Ray, else return None.

    Nothing of Ray is called unless it is already running here: in deployment any call would start a cluster.
    """
    ray = sys.modules.get("ray")
    if ray is None or not config.generates or not ray.is_initialized():
        return None
    return RunningService(ray, config, device)


def _open(values: dict[str, Any], device: str) -> Generator:
    return open_for_run(parse_config(values), device)


def actor_demand(ray: Any, config: RunConfig, device: str, actors: int = 1) -> dict[str, float]:
    """Return what an actor asks Ray for: no CPU, since the clients hold all of them, and a sliver of the GPU."""
    return {"num_cpus": 0, "num_gpus": _gpu_share(ray, config, actors) if device == "cuda" else 0}


def _gpu_share(ray: Any, config: RunConfig, actors: int) -> float:
    if ray.cluster_resources().get("GPU", 0) == 0:  # the clients have none either
        return 0
    left = ray.available_resources().get("GPU", 0)
    if left < GPU_SLIVER * actors:
        raise ValueError(
            f"gpu-share = {config.gpu_share:g}: the clients' shares leave {left:g} of the GPU and the generator needs "
            f"{GPU_SLIVER}; write {leave_sliver(config.gpu_share or 0.1):g}"
        )
    return GPU_SLIVER


def leave_sliver(share: float) -> float:
    """Return the largest share, in thousandths, that lets as many clients run at once and the generator beside them."""
    clients = max(1, int(1 / share + 1e-6))
    most = (1 - GPU_SLIVER) / clients
    if 1000 * most + 1e-9 < 1:
        fits = int(1000 * (1 - GPU_SLIVER) + 1e-9)
        raise ValueError(
            f"gpu-share = {share:g}: {clients:,} clients and the generator do not fit on one GPU, which is shared in "
            f"thousandths; write gpu-share={-(-1000 // fits) / 1000:g} or more, or actors={fits} or fewer"
        )
    return min(share, int(1000 * most + 1e-9) / 1000)


# ------------------------------------------------------------------------------------------- the clients


class ServiceGenerator:
    """A generator that asks the service; everything but the pixels it knows from its address.

    Parameters
    ----------
    address
        As `RunningService.address` gives it.
    dataset_name
        Whose classes and image shape are meant.
    """

    def __init__(self, address: str, dataset_name: str) -> None:
        self._name, self.fingerprint, batch, *self._nodes = address.split(" ")
        self.batch_size = int(batch)
        info = dataset_info(dataset_name)
        self.image_shape, self.num_classes = info.image_shape, len(info.classes)

    def sample(self, samples: Sequence[SampleId]) -> Images:
        """Ask for images, again if the service dies over it.

        Parameters
        ----------
        samples
            Identities, in any order.

        Returns
        -------
        array
            uint8 ``[len(samples), H, W, C]``.
        """
        import ray

        deaths = 0
        while True:
            try:
                actor = ray.get_actor(self._nearest(ray))
                return np.array(ray.get(actor.sample.remote([tuple(sample) for sample in samples])))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except ray.exceptions.RayActorError as error:
                deaths += 1
                if deaths == _ATTEMPTS:
                    raise RuntimeError(f"generator: the service died {deaths} times over one request") from error
                time.sleep(_RESTART_SECONDS)

    def _nearest(self, ray: Any) -> str:
        """The actor on this client's own machine, so that images need not travel; else the first."""
        if not self._nodes:
            return self._name
        here = ray.get_runtime_context().get_node_id()
        return f"{self._name}-{here if here in self._nodes else self._nodes[0]}"
