"""Label counts to test allocation rules: the paper's and random ones."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedeas_flwr.allocation import IntArray
from fedeas_flwr.partition import make_partition, plan_labels


@cache
def paper_counts(dataset: str, clients: int, alpha: float) -> IntArray:
    """Return the counts of one of the paper's settings."""
    classes = {"cifar10": 10, "cifar100": 100}[dataset]
    return make_partition(dataset, "paper", clients, alpha, 42).counts(plan_labels(dataset, "paper"), classes)


def tables(most: int = 60, clients: int = 5, classes: int = 6, least_classes: int = 1) -> st.SearchStrategy[IntArray]:
    """Return a strategy for count tables with many absent and equal classes and some empty clients."""
    shape = st.tuples(st.integers(1, clients), st.integers(least_classes, classes))
    return shape.flatmap(lambda s: arrays(np.int64, s, elements=st.just(0) | st.integers(0, most)))


betas = st.floats(0, 40, allow_nan=False)
totals = st.integers(0, 200)
