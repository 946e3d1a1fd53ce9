"""FedEAS: budget-aware synthetic augmentation for label-skewed federated learning, on Flower.

As a library, from label counts to a filled dataset, without the app:

    counts → `budget` → `allocate` → `fill` (with any `Generator`)

Importing this package imports nothing else, and its functions import only NumPy: neither torch nor flwr nor ray. The
command `fedeas` is in `__main__.py`, which must run before anything else is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedeas_flwr.allocation import budget, fedeas, imbalance, normalised_entropy, removed
    from fedeas_flwr.generators.cache import ImageCache
    from fedeas_flwr.generators.fill import fill
    from fedeas_flwr.generators.interface import Generator, SampleId
    from fedeas_flwr.generators.opening import open_generator
    from fedeas_flwr.partition import Partition, dirichlet_partition, make_partition
    from fedeas_flwr.policies import allocate


__all__ = [
    "Generator",
    "ImageCache",
    "Partition",
    "SampleId",
    "allocate",
    "budget",
    "dirichlet_partition",
    "fedeas",
    "fill",
    "imbalance",
    "make_partition",
    "normalised_entropy",
    "open_generator",
    "removed",
]

_MODULES = (
    "allocation",
    "policies",
    "partition",
    "generators.interface",
    "generators.cache",
    "generators.fill",
    "generators.opening",
)


def __getattr__(name: str) -> Any:
    """Import a name of `__all__`, or a module of `_MODULES`, on first use."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    for path in _MODULES if name in __all__ else ():
        if hasattr(module := import_module(f"{__name__}.{path}"), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
