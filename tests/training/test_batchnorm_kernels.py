"""The fused layers compute the same as PyTorch's (run on a GPU, or by Triton's interpreter)."""

from __future__ import annotations

import copy

import pytest
import torch
from requires_triton import DEVICE  # first: it skips where Triton is not there
from torch import nn
from torch.nn import functional as F
from torchvision import models
from torchvision.ops import StochasticDepth

from fedeas_flwr.training.gpu.batchnorm_kernels import batchnorm
from fedeas_flwr.training.gpu.fast_layers import FusedLayers
from fedeas_flwr.training.models import build_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def strict_float32() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def compare(plain: nn.Module, x: torch.Tensor, counted: int, tolerance: float) -> None:
    """Compare the plain model on the real samples with the fused one on all samples, padding included."""
    fast = copy.deepcopy(plain)
    layers = FusedLayers(fast)
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
    """Compare by norm, because rounding can flip a ReLU and change a few elements."""
    off = (got.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-6)
    assert off <= tolerance, f"{name} is off by {off:.1e} of its length"


@pytest.mark.parametrize("counted", [6, 5, 3])
def test_batchnorm_kernel_matches_torch_far_from_zero(counted: int) -> None:
    norm = nn.BatchNorm2d(20).to(DEVICE)
    nn.init.normal_(norm.weight)
    compare(norm, 0.1 * torch.randn(6, 20, 3, 3, device=DEVICE) + 30, counted, 1e-3)
    compare(nn.BatchNorm1d(20).to(DEVICE), torch.randn(6, 20, 7, device=DEVICE), counted, 1e-4)
    flat = nn.BatchNorm1d(20).to(DEVICE)
    compare(flat, torch.randn(6, 20, device=DEVICE), counted, 1e-4)


@pytest.mark.parametrize("counted", [5, 4])
def test_batchnorm_kernel_matches_torch_on_large_maps(counted: int) -> None:
    norm = nn.BatchNorm2d(20).to(DEVICE)
    nn.init.normal_(norm.weight)
    compare(norm, 0.1 * torch.randn(5, 20, 19, 29, device=DEVICE) + 30, counted, 1e-3)
    compare(nn.BatchNorm2d(20).to(DEVICE), torch.randn(5, 20, 29, 19, device=DEVICE), counted, 1e-5)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("uses", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("side", [2, 40])  # rows of the larger map are split over several programs
def test_fused_norm_add_relu_matches_torch(side: int, uses: tuple[bool, bool], with_norm: bool) -> None:
    """Compare relu(norm(x) + other(added)) and all its gradients, for two real samples and one of padding."""
    norm, other = (nn.BatchNorm2d(20).to(DEVICE) for _ in range(2))
    for layer in (norm, other):
        nn.init.normal_(layer.weight)
    second = other if with_norm else None
    plain = copy.deepcopy((norm, second))
    x, added, *directions = torch.randn(4, 3, 20, side, side, device=DEVICE).unbind()
    one, two = ([t.clone().requires_grad_() for t in (x, added)] for _ in range(2))
    shortcut = plain[1](one[1][:2]) if plain[1] is not None else one[1][:2]
    wanted = F.relu(plain[0](one[0][:2]) + shortcut)
    outputs = batchnorm(norm, torch.tensor(2.0, device=DEVICE), two[0], two[1], relu=True, other=second)
    used = [(y[:2] * d[:2]).sum() for y, d, use in zip(outputs, directions, uses, strict=True) if use]
    torch.stack(used).sum().backward()
    sum((wanted * d[:2]).sum() for d, use in zip(directions, uses, strict=True) if use).backward()  # type: ignore[union-attr]
    for y in outputs:
        close("the map", y[:2], wanted, 1e-5)
    for ours, theirs, name in zip(two, one, ("x", "added"), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        close(name, ours.grad[:2], theirs.grad[:2], 1e-4)
        assert not ours.grad[2].any()
    for ours, theirs in zip((norm, second), plain, strict=True):
        for value, right in zip(*([*m.parameters(), *m.buffers()] if m else [] for m in (ours, theirs)), strict=True):
            if value.is_floating_point():
                close("a weight or statistic", value, right, 1e-5)
            if value.grad is not None:
                close("a weight's gradient", value.grad, right.grad, 1e-4)


def test_unsupported_batchnorm_is_rejected_before_any_change() -> None:
    for norm in (nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None)):
        model = nn.Sequential(nn.BatchNorm2d(4), norm).to(DEVICE)
        with pytest.raises(ValueError, match="is not supported"):
            FusedLayers(model)
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("counted", [8, 5])
def test_fused_resnet18_matches_torch_with_one_pixel_maps(counted: int) -> None:
    """For some draws rounding flips a ReLU, which changes a gradient by a hundredth."""
    side = 32 if DEVICE == "cuda" else 24  # the last maps are 1×1 with either
    for last in (False, False, True):
        model = build_model("resnet18", 10, (side, side, 3), seed=0).to(DEVICE)
        try:
            compare(model, torch.randn(8, 3, side, side, device=DEVICE), counted, 1e-3)
            break
        except AssertionError:
            if last:
                raise


class InPlace(nn.Module):
    """A residual block that changes the outputs of its BatchNorm layers in place, as torchvision's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 20, 3, bias=False), nn.BatchNorm2d(20), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(20, 20, 3, padding=1, bias=False), nn.BatchNorm2d(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out = self.second(x)
        out += x
        return F.relu(out, inplace=True).mean((2, 3))


@pytest.mark.parametrize("counted", [6, 5])
def test_layers_that_change_a_fused_batchnorm_in_place(counted: int) -> None:
    compare(InPlace().to(DEVICE), torch.randn(6, 3, 8, 8, device=DEVICE), counted, 1e-4)


TORCHVISION = (
    "resnet50", "mobilenet_v2", "mobilenet_v3_small", "vgg11_bn", "shufflenet_v2_x0_5", "densenet121",
    "efficientnet_b0", "regnet_y_400mf",
)  # fmt: skip
"""Networks with BatchNorm; most change its output in place."""


@pytest.mark.parametrize("name", TORCHVISION)
def test_fused_batchnorm_in_torchvision_networks_matches_torch(name: str) -> None:
    plain = getattr(models, name)(num_classes=10).to(DEVICE)
    for module in plain.modules():
        if isinstance(module, (nn.Dropout, StochasticDepth)):
            module.p = 0.0
    fast = copy.deepcopy(plain)
    FusedLayers(fast).count = torch.tensor(6.0, device=DEVICE)
    images = [torch.randn(6, 3, 64, 64, device=DEVICE).requires_grad_()]
    images.append(images[0].detach().clone().requires_grad_())
    outputs = [model(x) for model, x in zip((plain, fast), images, strict=True)]
    close("the output", outputs[1], outputs[0], 1e-2)
    for output in outputs:
        output.square().sum().backward()
    # In float32 the gradient of PyTorch's own ResNet-50 is off by 0.05 of its length: roundings flip ReLUs.
    close("the images' gradient", images[1].grad, images[0].grad, 0.2)  # type: ignore[arg-type]
