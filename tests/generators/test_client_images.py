"""Images stay on the GPU for the clients of one run, as long as a quarter of its memory is free."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedeas_flwr.config import parse_config
from fedeas_flwr.data.federated import FederatedData, federated_data
from fedeas_flwr.data.node import read_node
from fedeas_flwr.generators import client_images
from fedeas_flwr.generators.client_images import ImagesOnGpu, LocalImages

CONFIG = parse_config({"clients": 4})


def some_images() -> LocalImages:
    return LocalImages(torch.zeros(2, 8, 8, 1, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))


@pytest.fixture
def data() -> FederatedData:
    return federated_data(CONFIG, 4)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose item is the free GPU memory in percent."""
    now = [100]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (now[0], 100))
    return now


def test_find_returns_only_the_images_of_that_client_and_plan(data: FederatedData, free: list[int]) -> None:
    kept, images = ImagesOnGpu(), some_images()
    kept.keep(CONFIG, data, 3, (0, 5), images)
    assert kept.find(CONFIG, data, 3, (0, 5)) is images
    assert kept.find(CONFIG, data, 2, (0, 5)) is None
    assert kept.find(CONFIG, data, 3, (0, 6)) is None, "its plan has changed"


def test_images_of_a_new_plan_replace_those_of_the_old_one(data: FederatedData, free: list[int]) -> None:
    """Under an adaptive policy, plans change during a run."""
    kept, images = ImagesOnGpu(), some_images()
    kept.keep(CONFIG, data, 3, (0, 5), images)
    alive = weakref.ref(images)
    del images
    kept.keep(CONFIG, data, 3, (0, 6), more := some_images())
    assert alive() is None and kept.find(CONFIG, data, 3, (0, 6)) is more


def test_images_of_an_old_plan_leave_a_full_gpu(data: FederatedData, free: list[int]) -> None:
    kept, images = ImagesOnGpu(), some_images()
    kept.keep(CONFIG, data, 3, (0, 5), images)
    alive = weakref.ref(images)
    del images
    free[0] = 25
    kept.keep(CONFIG, data, 3, (0, 6), some_images())
    assert alive() is None and kept.find(CONFIG, data, 3, (0, 6)) is None


def test_find_returns_nothing_for_reloaded_data(data: FederatedData, free: list[int]) -> None:
    kept = ImagesOnGpu()
    kept.keep(CONFIG, data, 3, (0, 5), some_images())
    assert kept.find(CONFIG, dataclasses.replace(data), 3, (0, 5)) is None


def test_full_gpu_keeps_its_images_and_adds_none(data: FederatedData, free: list[int]) -> None:
    kept, first, second = ImagesOnGpu(), some_images(), some_images()
    kept.keep(CONFIG, data, 1, (), first)
    free[0] = 25
    kept.keep(CONFIG, data, 2, (), second)
    assert kept.find(CONFIG, data, 1, ()) is first and kept.find(CONFIG, data, 2, ()) is None
    free[0] = 26
    kept.keep(CONFIG, data, 2, (), second)
    assert kept.find(CONFIG, data, 2, ()) is second


def test_next_run_frees_the_images_of_the_previous_run(data: FederatedData, free: list[int]) -> None:
    kept, images = ImagesOnGpu(), some_images()
    kept.keep(CONFIG, data, 1, (), images)
    alive = weakref.ref(images)
    del images
    assert alive() is not None
    second = CONFIG.with_changes(seed=2)
    assert kept.find(second, data, 1, ()) is None, "found images of the first run"
    kept.keep(second, data, 2, (), some_images())
    assert alive() is None and kept.find(second, data, 1, ()) is None and kept.find(second, data, 2, ()) is not None


def test_rejected_images_count_in_every_round(
    data: FederatedData, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newly generated images count once. The device stands in for a GPU: images stay on any device except cpu."""
    made = np.zeros((5, 8, 8, 1), np.uint8), np.zeros(5, np.int64), 12, 7
    monkeypatch.setattr(client_images, "_on_gpu", ImagesOnGpu())
    monkeypatch.setattr(client_images, "_source", lambda *_: SimpleNamespace(fingerprint="stand-in"))
    monkeypatch.setattr(client_images, "_synthetic", lambda *_: made)
    node, planned = read_node({"partition-id": 1, "num-partitions": 4}), (5, *[0] * 9)
    first, second = (client_images.local_images(CONFIG, data, node, planned, (), "", "", "meta") for _ in range(2))
    assert second.images is first.images
    assert [(found.made, found.rejected, found.generator) for found in (first, second)] == [
        *((12, 7, "stand-in"), (0, 7, "stand-in"))
    ]
