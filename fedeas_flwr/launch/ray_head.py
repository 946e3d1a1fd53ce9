"""Start Ray while Flower's SuperLink starts, so that the simulation finds it running.

    python ray_head.py CPUS GPUS      in an environment from `head_environment`; runs until it is killed

This file is also a script that imports only the standard library and Ray.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping


def head_environment(port: int) -> dict[str, str]:
    """Return the variables of Ray's head process and of those that join it."""
    return {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_GCS_SERVER_PORT": str(port),
        "RAY_prestart_worker_first_driver": "0",  # a client process needs an environment that these would not have
    }


def with_head(command: list[str], resources: Mapping[str, float]) -> list[str]:
    """Return a command that starts Ray's head process and then becomes the given one.

    If the head ends, so does the command, and the launcher starts both again: without a head Flower would try for
    minutes to connect.
    """
    sizes = [f"{resources.get(f'init-args-num-{kind}', -1):g}" for kind in ("cpus", "gpus")]
    head = shlex.join([sys.executable, __file__, *sizes])
    return ["sh", "-c", f"({head}; kill $$) & exec {shlex.join(command)}"]


def main() -> None:
    """Start Ray as `ray.init` of Flower's simulation would, and wait."""
    import ray

    cpus, gpus = (int(word) if int(word) >= 0 else None for word in sys.argv[1:])
    ray.init("local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
