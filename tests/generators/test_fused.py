"""The fused kernels compute the same as PyTorch's (run on a GPU, or by Triton's interpreter)."""

from __future__ import annotations

import pytest
import torch
from requires_triton import DEVICE  # first: it skips where Triton is not there
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.generators.diffusion import fused

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def strict_float32() -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize(("channels", "groups", "side"), [(96, 32, 5), (192, 32, 4), (32, 8, 3)])
@torch.no_grad()
def test_fused_normalise_matches_groupnorm_scale_shift_silu(channels: int, groups: int, side: int) -> None:
    norm = nn.GroupNorm(groups, channels).to(DEVICE)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = 2 * torch.randn(3, channels, side, side, device=DEVICE) + 1
    bias, time = torch.randn(channels, device=DEVICE), torch.randn(3, 2 * channels, device=DEVICE)
    scale, shift = time[:, :, None, None].chunk(2, dim=1)
    close = {"rtol": 1e-5, "atol": 1e-5}

    torch.testing.assert_close(fused.normalise(norm, x), norm(x), **close)
    wanted = F.silu(norm(x + bias.view(1, -1, 1, 1)) * (1 + scale) + shift)
    torch.testing.assert_close(fused.normalise(norm, x, before=bias, scale_shift=time, silu=True), wanted, **close)
    wanted = F.silu(norm(x + scale))
    torch.testing.assert_close(
        fused.normalise(norm, x, before=time[:, :channels].contiguous(), silu=True), wanted, **close
    )
    tokens = x.flatten(2)
    torch.testing.assert_close(fused.normalise(norm, tokens), norm(tokens), **close)
    other = torch.randn_like(x)
    torch.testing.assert_close(fused.add(x, other, bias), x + other + bias.view(1, -1, 1, 1), **close)


@pytest.mark.parametrize("time_kind", ["default", "scale_shift"])
@torch.no_grad()
def test_fused_unet_predicts_the_same(time_kind: str) -> None:
    from diffusers import UNet2DModel

    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        num_class_embeds=11,
        resnet_time_scale_shift=time_kind,
        norm_num_groups=8,
        attention_head_dim=16,
        layers_per_block=1,
    )
    unet = unet.to(DEVICE).eval()
    for parameter in unet.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, moment = torch.randn(2, 3, 8, 8, device=DEVICE), torch.tensor([5], device=DEVICE)
    labels = torch.tensor([1, 3], device=DEVICE)
    before = unet(x, moment, class_labels=labels).sample
    fused.fuse(unet)
    after = unet(x, moment, class_labels=labels).sample
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    replaced = [module for module in unet.modules() if "forward" in vars(module)]
    assert len(replaced) > 20, "the blocks were not fused"
