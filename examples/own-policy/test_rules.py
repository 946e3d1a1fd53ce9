"""Tests of the example's policy; run them with `pytest examples/own-policy`."""

import numpy as np
import rules

from fedeas_flwr import allocate
from fedeas_flwr.policies.own import FunctionPolicy

COUNTS = np.array([[40, 0, 8, 2], [0, 90, 0, 0], [5, 5, 5, 5]])


def test_classes_are_filled_up_to_the_median_of_those_held() -> None:
    assert rules.by_median(COUNTS[0]).tolist() == [0, 8, 0, 6]
    assert allocate(COUNTS, FunctionPolicy(rules.by_median)).tolist() == [[0, 8, 0, 6], [90, 0, 90, 90], [0, 0, 0, 0]]


def test_the_budget_is_that_of_fedeas() -> None:
    assert allocate(COUNTS, rules.same_budget, beta=6).sum() == allocate(COUNTS, "fedeas", beta=6).sum() > 0
