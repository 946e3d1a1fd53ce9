"""FedEAS: budget-aware synthetic augmentation for label-skewed federated learning, on Flower.

As a library, from label counts to a filled dataset, without the app:

    counts → `budget` → `allocate` → `fill` (with any `Generator`)

In another Flower app: `Augmenter` in its ClientApp, `with_fedeas` in its ServerApp (docs/in-your-flower-app.md).

Importing this package imports nothing else. These two import torch and flwr; all other functions import only NumPy. The
command `fedeas` is in `__main__.py`, which must run before anything else is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedeas_flwr.allocation import budget, fedeas, imbalance, normalised_entropy, removed
    from fedeas_flwr.federation.augmenter import Augmenter
    from fedeas_flwr.federation.with_fedeas import with_fedeas
    from fedeas_flwr.generators.cache import ImageCache
    from fedeas_flwr.generators.fill import fill
    from fedeas_flwr.generators.interface import Generator, SampleId
    from fedeas_flwr.generators.opening import open_generator
    from fedeas_flwr.partition import Partition, dirichlet_partition, make_partition
    from fedeas_flwr.policies.registry import allocate


__all__ = [
    "Augmenter",
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
    "with_fedeas",
]

_MODULES = (
    "allocation",
    "policies.registry",
    "partition",
    "generators.interface",
    "generators.cache",
    "generators.fill",
    "generators.opening",
    "federation.with_fedeas",
    "federation.augmenter",
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
