"""FedEAS: budget-aware synthetic augmentation for label-skewed federated learning, on Flower.

As a library, from label counts to a filled dataset, without the app:

    counts → `budget` → `allocate` → `fill` (with any `Generator`)

Importing this package pulls in NumPy alone: neither torch nor flwr nor ray.
"""

from fedeas_flwr.allocation import allocate, budget, fedeas, imbalance, normalised_entropy, removed
from fedeas_flwr.augment import fill
from fedeas_flwr.cache import ImageCache
from fedeas_flwr.generators import Generator, SampleId, open_generator
from fedeas_flwr.partition import dirichlet_partition, make_partition

__all__ = [
    "Generator",
    "ImageCache",
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
