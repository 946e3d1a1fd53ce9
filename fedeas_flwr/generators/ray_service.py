"""Run one generator for all clients of a simulation in a named Ray actor. A cluster has one actor per GPU node.

    ServerApp   start_service ──────────► GeneratorService (the actor: loads the model at its first request)
    clients     ServiceGenerator.sample ─► the actor serves the requests of all clients in full batches
    ServerApp   release_gpu, when every client has its images: restarts the actor's process, which frees the GPU
    ServerApp   end, when the run is over: stops the actor

If the actor crashes, Ray restarts it and the clients repeat their requests. Each client loses at most the chunk that it
was waiting for. Earlier images are in the image cache.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedeas_flwr.common.errors import ConfigError
from fedeas_flwr.common.processes import MARK
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.data.datasets import Images, dataset_info
from fedeas_flwr.data.node import running_ray
from fedeas_flwr.generators.interface import Generator, SampleId
from fedeas_flwr.generators.opening import open_for_run
from fedeas_flwr.generators.service import GeneratorService

GENERATOR_GPU_FRACTION = 0.004
"""Fraction of a GPU that an actor requests from Ray. With 0, Ray would hide the GPU from the actor; a larger fraction
would leave room for fewer clients."""
_ATTEMPTS = 5
_RESTART_SECONDS = 1.0
_ANSWER_SECONDS = 5.0


# ----------------------------------------------------------------------------------------- the ServerApp


class RunningService:
    """Lets the ServerApp control the actors; `start_service` creates it. A single machine has one actor."""

    def __init__(self, ray: Any, config: RunConfig, device: str) -> None:
        self._ray, self._name = ray, f"fedeas-generator-{uuid.uuid4().hex[:12]}"
        self._done: dict[str, Any] | None = None
        # The actor's process imports the class by name and must find the same package as this process.
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._nodes = gpu_nodes(ray)
        options = {
            "num_cpus": 0,  # the clients use all CPUs
            "num_gpus": gpu_share(ray, config, max(1, len(self._nodes))) if device == "cuda" else 0,
            "max_restarts": -1,
            "max_concurrency": 10_000,  # every client may wait at once
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
        }
        make = ray.remote(GeneratorService).options
        opened = partial(_open, config.to_user_dict(), device)
        places = [{"name": f"{self._name}-{node}", **_only_on(ray, node)} for node in self._nodes]
        self._actors = [make(**options, **place).remote(opened) for place in places or [{"name": self._name}]]
        self._descriptions = [actor.describe.remote() for actor in self._actors]

    def address(self) -> str:
        """Wait until the model is loaded; return the address with which clients reach the service."""
        found = [self._get(description) for description in self._descriptions]
        fingerprints = {fingerprint for fingerprint, _ in found}
        if len(fingerprints) > 1:
            raise ValueError(
                "generator: the cluster's nodes have different generators; copy one folder to the same path on all"
            )
        batch, nodes = min(batch for _, batch in found), ",".join(self._nodes)
        return f"{self._name} {batch} {nodes} {found[0][0]}"  # a fingerprint may contain spaces

    def stats(self) -> dict[str, Any]:
        """Return the sums of the actors' counters; after `release_gpu`, their last values before it."""
        if self._done is not None:
            return self._done
        try:
            waiting = [actor.stats.remote() for actor in self._actors]
            found = [dict(self._get(one, timeout=_ANSWER_SECONDS)) for one in waiting]
        except self._ray.exceptions.RayError:
            return {}  # an actor is being restarted, or Ray is shutting down
        counted = ("requests", "passes", "images", "seconds")
        return {**found[0], **{key: sum(one[key] for one in found) for key in counted}, "nodes": self._nodes}

    def release_gpu(self) -> dict[str, Any] | None:
        """Free the GPUs and return the counters so far, or return None if the GPUs were freed before.

        A later request, for example after a cached shard was damaged, loads the model again.
        """
        if self._done is not None:
            return None
        self._done = self.stats()
        for actor in self._actors:
            self._ray.kill(actor, no_restart=False)
        return self._done

    def end(self) -> None:
        """Stop the actors."""
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):  # Ray may have stopped already
                self._ray.kill(actor, no_restart=True)

    def _get(self, reference: Any, timeout: float | None = None) -> Any:
        try:
            return self._ray.get(reference, timeout=timeout)
        except self._ray.exceptions.RayTaskError as error:  # its message is a traceback; the cause's is one line
            raise error.cause from None


def gpu_nodes(ray: Any) -> list[str]:
    """Return the ids of a cluster's nodes with GPUs, sorted; empty if Ray runs on one machine."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return sorted(node["NodeID"] for node in alive if node["Resources"].get("GPU", 0)) if len(alive) > 1 else []


def _only_on(ray: Any, node: str) -> dict[str, Any]:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return {"scheduling_strategy": strategy(node, soft=False)}


def start_service(config: RunConfig, device: str) -> RunningService | None:
    """Start the run's service if this is a simulation under Ray, else return None.

    Ray is called only if it is running: in a deployment, a call would start a cluster.
    """
    ray = running_ray()
    return RunningService(ray, config, device) if ray is not None and config.generates else None


def _open(values: dict[str, Any], device: str) -> Generator:
    return open_for_run(parse_config(values), device)


def gpu_share(ray: Any, config: RunConfig, actors: int) -> float:
    """Return the fraction of a GPU that each of the actors requests; raise ConfigError if the clients leave less."""
    if ray.cluster_resources().get("GPU", 0) == 0:  # Ray manages no GPU, so the clients request none either
        return 0
    left = ray.available_resources().get("GPU", 0)
    if left < GENERATOR_GPU_FRACTION * actors:
        needs = f"the clients leave {left:g} of the GPU free, but the generator needs {GENERATOR_GPU_FRACTION}"
        if MARK in os.environ:
            most = reserve_generator_gpu(config.gpu_share or 0.1)
            raise ConfigError(f"gpu-share = {config.gpu_share:g}: {needs}; must be at most {most:g}")
        examples = "0.099 for ten clients at a time, 0.249 for four, 0.996 for one"
        raise ConfigError(f"client-resources-num-gpus: {needs}; set it slightly lower: {examples}")
    return GENERATOR_GPU_FRACTION


def clients_share_gpu() -> bool | None:
    """Return whether Ray's clients hold a share of its GPUs; None if this is no simulation under Ray.

    Call this after the clients have replied and before the service starts. Ray hides the GPU from a client without one.
    """
    ray = running_ray()
    if ray is None:
        return None
    return bool(ray.available_resources().get("GPU", 0) < ray.cluster_resources().get("GPU", 0))


def reserve_generator_gpu(share: float) -> float:
    """Return a client's GPU share, lowered if necessary so that the generator also fits on the GPU.

    As many clients as before can train in parallel on a GPU. A lowered share is rounded down to thousandths.
    """
    clients = max(1, int(1 / share + 1e-6))
    max_share = (1 - GENERATOR_GPU_FRACTION) / clients
    if 1000 * max_share + 1e-9 < 1:
        fits = int(1000 * (1 - GENERATOR_GPU_FRACTION) + 1e-9)
        raise ValueError(
            f"gpu-share = {share:g}: {clients:,} clients and the generator do not fit on one GPU, because a share is "
            f"at least a thousandth; give gpu-share={-(-1000 // fits) / 1000:g} or more, or actors={fits} or fewer"
        )
    return min(share, int(1000 * max_share + 1e-9) / 1000)


# ------------------------------------------------------------------------------------------- the clients


class ServiceGenerator:
    """A client's generator, which gets its images from the service at an address of `RunningService.address`."""

    def __init__(self, address: str, dataset_name: str) -> None:
        self._name, batch, nodes, self.fingerprint = address.split(" ", 3)
        self.batch_size, self._nodes = int(batch), nodes.split(",") if nodes else []
        info = dataset_info(dataset_name)
        self.image_shape, self.num_classes = info.image_shape, len(info.classes)

    def sample(self, samples: Sequence[SampleId]) -> Images:
        """Return images from the service; repeat the request if the service dies. See `Generator.sample`."""
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
                    raise RuntimeError(f"generator: the service died {deaths} times during one request") from error
                time.sleep(_RESTART_SECONDS)

    def _nearest(self, ray: Any) -> str:
        """Return the name of the actor on this client's machine, or of the first actor if this machine has none.

        An actor on the same machine saves network traffic.
        """
        if not self._nodes:
            return self._name
        here = ray.get_runtime_context().get_node_id()
        return f"{self._name}-{here if here in self._nodes else self._nodes[0]}"
