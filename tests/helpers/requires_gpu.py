"""Tests on a GPU: marked `gpu`, and skipped unless there is one and `make test-gpu` asked for it (conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

_SKIPPED = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU and `make test-gpu`")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _SKIPPED])]


def on_a_gpu(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that needs a GPU."""
    marked: Callable[..., Any] = pytest.mark.gpu(_SKIPPED(test))
    return marked
