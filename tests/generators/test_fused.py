"""The fused kernels compute the same as PyTorch's (run on a GPU, or by Triton's interpreter)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from requires_triton import DEVICE  # first: it skips where Triton is not there
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.generators.diffusion import fused, unet_kernels

pytestmark = pytest.mark.gpu
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def strict_float32() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).requires_grad_()


def compare(ours: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Assert that two results agree, and so do their gradients with respect to the inputs."""
    torch.testing.assert_close(ours, wanted, **CLOSE)
    incoming = torch.randn_like(wanted)
    for one, other in zip(*(torch.autograd.grad(y, inputs, incoming) for y in (ours, wanted)), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize(("channels", "groups", "side"), [((96,), 32, 5), ((64, 128), 32, 4), ((32,), 8, 17)])
@pytest.mark.parametrize("kind", ["plain", "scale_shift", "before"])
def test_normalise_matches_groupnorm(channels: tuple[int, ...], groups: int, side: int, kind: str) -> None:
    total = sum(channels)
    norm = nn.GroupNorm(groups, total).to(DEVICE)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    maps = [(2 * torch.randn(3, number, side, side, device=DEVICE) + 1).requires_grad_() for number in channels]
    summed = [unet_kernels.with_sums(x) for x in maps]
    bias, time, inputs = leaf(total), leaf(3, 2 * total), [*maps, norm.weight, norm.bias]
    whole, (scale, shift) = torch.cat(maps, 1), time[:, :, None, None].chunk(2, dim=1)
    if kind == "plain":
        compare(unet_kernels.normalise(norm, *summed), norm(whole), inputs)
    elif kind == "scale_shift":
        ours = unet_kernels.normalise(norm, *summed, before=bias, scale_shift=time, silu=True)
        compare(ours, F.silu(norm(whole + bias.view(1, -1, 1, 1)) * (1 + scale) + shift), [*inputs, bias, time])
    else:
        before = time[:, :total].contiguous()
        ours = unet_kernels.normalise(norm, *summed, before=before, silu=True)
        compare(ours, F.silu(norm(whole + before[:, :, None, None])), [*inputs, time])


def test_add_matches_sum_and_upsampling() -> None:
    x, y, bias = leaf(2, 6, 3, 4), leaf(2, 6, 3, 4), leaf(6)
    wanted = x + y + bias.view(1, -1, 1, 1)
    compare(unet_kernels.add(x, y, bias).values, wanted, [x, y, bias])
    torch.testing.assert_close(unet_kernels.add(x, y, bias).sums, unet_kernels.with_sums(wanted).sums, **CLOSE)
    compare(unet_kernels.add(x, None, bias).values, wanted - y, [x, bias])
    compare(unet_kernels.add(x, y, bias, doubled=True).values, F.interpolate(wanted, scale_factor=2.0), [x, y, bias])


def make_unet(**settings: Any) -> Any:
    from diffusers import UNet2DModel

    unet_class: Any = UNet2DModel
    unet = unet_class(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        num_class_embeds=11,
        norm_num_groups=8,
        attention_head_dim=16,
        **{"layers_per_block": 1, **settings},
    ).to(DEVICE)
    for parameter in unet.parameters():
        nn.init.normal_(parameter, std=0.1)
    return unet


@pytest.mark.parametrize("time_kind", ["default", "scale_shift"])
def test_fused_unet_predicts_and_differentiates_the_same(time_kind: str) -> None:
    unet = make_unet(resnet_time_scale_shift=time_kind).eval()
    x, moment = torch.randn(2, 3, 8, 8, device=DEVICE), torch.tensor([5], device=DEVICE)
    labels = torch.tensor([1, 3], device=DEVICE)
    weights = list(unet.parameters())
    before = unet(x, moment, class_labels=labels, return_dict=False)[0]
    wanted = torch.autograd.grad(before, weights, torch.ones_like(before))
    fused.fuse(unet)
    after = unet(x, moment, class_labels=labels, return_dict=False)[0]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(after, weights, torch.ones_like(after))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6 + 1e-3 * float(other.abs().max()))


@pytest.mark.parametrize(
    "settings",
    [{"act_fn": "relu"}, {"downsample_padding": 0}, {"add_attention": False}],
)
def test_only_a_unet_with_known_layers_is_fused(settings: dict[str, Any]) -> None:
    unet = make_unet(**settings)
    if "add_attention" in settings:
        fused.fuse(unet)
    else:
        with pytest.raises(ValueError, match="this UNet has"):
            fused.fuse(unet)
    assert ("forward" in vars(unet)) == ("add_attention" in settings)
