"""A run's division of one GPU, played through Ray with actors that do nothing.

    python -m fedeas_flwr.doctor.rehearsal '[run-config, what resources.ray_resources says]'

It prints one JSON object: how many clients there were, the seconds until the generator was there too, and an error or
an empty string.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import numpy as np

from fedeas_flwr.common.text import counted
from fedeas_flwr.config import RunConfig, parse_config
from fedeas_flwr.generators.ray_service import actor_demand

_CLIENT_SECONDS = 40.0
_GENERATOR_SECONDS = 10.0


class Placeholder:
    """Holds its part of the machine and answers."""

    def ready(self) -> bool:
        """Answer, which it can only once Ray has given it its part."""
        return True


def rehearse(config: RunConfig, resources: dict[str, float]) -> dict[str, float | str]:
    """Fill Ray with clients as Flower would, then ask for the generator's actor as the ServerApp would."""
    import ray

    from fedeas_flwr.federation.flower_internals import clients_that_fit

    ray.init(
        address="local",  # whatever RAY_ADDRESS says
        num_cpus=int(resources["init-args-num-cpus"]),
        num_gpus=int(resources["init-args-num-gpus"]),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    began = time.monotonic()
    # As a 32-bit float, which is how Flower's message carries it.
    share = float(np.float32(resources["client-resources-num-gpus"]))
    client: dict[str, int | float] = {"num_cpus": int(resources["client-resources-num-cpus"]), "num_gpus": share}
    clients = clients_that_fit(client)
    answer: dict[str, float | str] = {"clients": clients, "seconds": 0.0, "error": ""}
    if not clients:
        return answer | {"error": "no client fits"}
    try:
        _wait(ray, [client] * clients, _CLIENT_SECONDS + clients)
    except ray.exceptions.GetTimeoutError:
        return answer | {"error": f"{counted(clients, 'client')} could not be scheduled"}
    try:
        _wait(ray, [actor_demand(ray, config, "cuda")], _GENERATOR_SECONDS)
    except ray.exceptions.GetTimeoutError:
        return answer | {"error": f"the generator has no part of the GPU beside {counted(clients, 'client')}"}
    except ValueError as error:  # the service's own words, where it sees the same before it asks
        return answer | {"error": str(error)}
    return answer | {"seconds": time.monotonic() - began}


_held: list[Any] = []
"""Ray ends an actor that nobody refers to."""


def _wait(ray: Any, demands: list[dict[str, int | float]] | list[dict[str, float]], seconds: float) -> None:
    actors = [ray.remote(Placeholder).options(**demand).remote() for demand in demands]
    _held.extend(actors)
    ray.get([actor.ready.remote() for actor in actors], timeout=seconds)


if __name__ == "__main__":
    values, given = json.loads(sys.argv[1])
    print(json.dumps(rehearse(parse_config(values), given)), flush=True)
