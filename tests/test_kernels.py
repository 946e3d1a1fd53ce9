"""The fast layers compute what PyTorch's do (run on a GPU, or by Triton's interpreter)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from triton_here import DEVICE  # first: it skips where Triton is not there

from fedeas_flwr.models import build_model
from fedeas_flwr.training.kernels import FastLayers


@pytest.fixture(autouse=True)
def strict_float32() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def compare(plain: nn.Module, x: torch.Tensor, counted: int, tolerance: float) -> None:
    """The plain model on the samples that count, and the fast one on all of them, padding and all."""
    fast = copy.deepcopy(plain)
    layers = FastLayers(fast)
    layers.count = torch.tensor(float(counted), device=x.device)
    direction = torch.randn_like(plain(x))
    plain.load_state_dict(fast.state_dict())
    one, two = x[:counted].clone().requires_grad_(), x.clone().requires_grad_()
    (plain(one) * direction[:counted]).sum().backward()
    outputs = fast(two)
    layers.count_batches(1)
    (outputs[:counted] * direction[:counted]).sum().backward()
    assert one.grad is not None and two.grad is not None
    close("the images' gradient", two.grad[:counted], one.grad, tolerance)
    assert not two.grad[counted:].any(), "padding has a gradient"
    for (name, first), second in zip(plain.named_parameters(), fast.parameters(), strict=True):
        close(name, second.grad, first.grad, tolerance)
    for key, value in plain.state_dict().items():
        close(key, fast.state_dict()[key], value, tolerance)
    plain.eval()
    fast.eval()
    close("in eval mode", fast(x), plain(x), tolerance)


def close(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Near by length: where rounding turns a ReLU the other way, a few elements are not."""
    off = (got.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-6)
    assert off <= tolerance, f"{name} is off by {off:.1e} of its length"


@pytest.mark.parametrize("counted", [6, 5, 3])
def test_batchnorm_alone_also_far_from_zero(counted: int) -> None:
    norm = nn.BatchNorm2d(20).to(DEVICE)
    nn.init.normal_(norm.weight)
    compare(norm, 0.1 * torch.randn(6, 20, 3, 3, device=DEVICE) + 30, counted, 1e-3)
    compare(nn.BatchNorm1d(20).to(DEVICE), torch.randn(6, 20, 7, device=DEVICE), counted, 1e-4)
    flat = nn.BatchNorm1d(20).to(DEVICE)
    compare(flat, torch.randn(6, 20, device=DEVICE), counted, 1e-4)


@pytest.mark.parametrize("counted", [5, 4])
def test_a_map_so_large_that_its_rows_are_spread_over_programs(counted: int) -> None:
    norm = nn.BatchNorm2d(20).to(DEVICE)
    nn.init.normal_(norm.weight)
    compare(norm, 0.1 * torch.randn(5, 20, 19, 29, device=DEVICE) + 30, counted, 1e-3)
    compare(nn.BatchNorm2d(20).to(DEVICE), torch.randn(5, 20, 29, 19, device=DEVICE), counted, 1e-5)


def test_a_norm_that_would_count_padding_is_refused_before_anything_is_changed() -> None:
    for norm in (nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None)):
        model = nn.Sequential(nn.BatchNorm2d(4), norm).to(DEVICE)
        with pytest.raises(ValueError, match="not known here"):
            FastLayers(model)
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("counted", [8, 5])
def test_a_resnet18_with_maps_of_one_pixel(counted: int) -> None:
    """Rounding may turn one of its ReLUs the other way, which moves a gradient by a hundredth; not for every draw."""
    side = 32 if DEVICE == "cuda" else 24  # the last maps are 1×1 with either
    for last in (False, False, True):
        model = build_model("resnet18", 10, (side, side, 3), seed=0).to(DEVICE)
        try:
            compare(model, torch.randn(8, 3, side, side, device=DEVICE), counted, 1e-3)
            break
        except AssertionError:
            if last:
                raise
