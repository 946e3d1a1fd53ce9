"""Choosing a device changes nothing; configuring torch sets its threads and CUDA's queues."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fedeas_flwr.common.devices import configure_torch, pick_device

QUEUES, PROFILE = "CUDA_DEVICE_MAX_CONNECTIONS", "ONEDNN_JIT_PROFILE"


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv(QUEUES, raising=False)
    monkeypatch.delenv(PROFILE, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_pick_device_leaves_the_process_as_it_is(two_threads: None) -> None:
    assert pick_device("cpu") == "cpu"
    assert torch.get_num_threads() == 2 and QUEUES not in os.environ


def test_configure_torch_sets_one_thread_and_the_queues(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert configure_torch("cpu") == "cpu"
    assert torch.get_num_threads() == 1 and os.environ[QUEUES] == "32"
    assert os.environ[PROFILE] == "0", "oneDNN writes perf-PID.map into the temporary folder"
