"""Where Triton's kernels can be tried: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1); elsewhere skipped."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which comes with torch's CUDA builds")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
