"""Weights padded with extra channels train like those without."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedeas_flwr.training.gpu.convolutions import first_convolution, padded_channels
from fedeas_flwr.training.gpu.weights import Weights
from fedeas_flwr.training.models import build_model

ROOM = 4


def padded_images(images: torch.Tensor) -> torch.Tensor:
    """Return the same images in the memory layout of `fetch`."""
    memory = F.pad(images.movedim(1, -1), (0, ROOM - images.shape[1])).contiguous()
    return memory.movedim(-1, 1)[:, : images.shape[1]]


def test_padded_channels_fill_sixteen_bytes() -> None:
    assert [padded_channels(n, torch.bfloat16) for n in (1, 3, 8, 9)] == [8, 8, 8, 16]
    assert [padded_channels(n, torch.float32) for n in (1, 3, 4, 5)] == [4, 4, 4, 8]


@pytest.mark.parametrize(("channels", "laid_out"), [(3, True), (3, False), (1, True)])
def test_step_with_padded_weights_matches_plain_step(channels: int, laid_out: bool) -> None:
    plain, wide = (build_model("resnet18", 10, (16, 16, channels), seed=0).double() for _ in range(2))
    torch.manual_seed(0)
    images, labels = torch.randn(4, channels, 16, 16, dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    layer = first_convolution(wide)
    assert layer is not None
    one, two = Weights(plain, use_bf16=False), Weights(wide, use_bf16=False, padded_layer=layer, padded=ROOM)
    place = two.names.index("conv1.weight")
    assert two.masters[place].shape == two.parameters[place].shape == (64, ROOM, 7, 7)
    for model, weights, given in ((plain, one, images), (wide, two, padded_images(images) if laid_out else images)):
        for _ in range(2):
            gradients = torch.autograd.grad(F.cross_entropy(model.train()(given), labels), weights.parameters)
            weights.descend(weights.whole_gradients(gradients), 0.1)
    assert not two.masters[place][:, channels:].any(), "the padding was trained"
    first, second = one.state(plain), two.state(wide)
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-6, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}")
    start = build_model("resnet18", 10, (16, 16, channels), seed=0)
    moved = second["conv1.weight"] - start.state_dict()["conv1.weight"]
    assert moved.abs().max() > 1e-4, "nothing was trained"


def test_padding_is_reset_after_a_client_with_nan_gradients() -> None:
    """0 · NaN is NaN, so a NaN gradient reaches the padding, which no client's state overwrites."""
    model = build_model("resnet18", 10, (16, 16, 3), seed=0)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    layer = first_convolution(model)
    assert layer is not None
    weights = Weights(model, use_bf16=False, padded_layer=layer, padded=ROOM)
    state = weights.state(model)
    images = padded_images(torch.rand(2, 3, 16, 16))
    wanted = model.train()(images)
    broken = torch.autograd.grad(model(images).sum() * torch.nan, weights.parameters)
    weights.descend(weights.whole_gradients(broken), 0.1)
    assert weights.masters[weights.names.index("conv1.weight")].isnan().all()
    torch._foreach_copy_(list(state.values()), [start[key] for key in state])
    weights.refresh()
    torch.testing.assert_close(model(images), wanted)


def test_padded_layer_is_plain_in_eval_and_functional_calls() -> None:
    model = build_model("resnet18", 10, (16, 16, 3), seed=0)
    layer = first_convolution(model)
    assert layer is not None
    other = {"weight": torch.randn(64, 3, 7, 7)}
    images = torch.randn(2, 3, 16, 16)
    wanted = F.conv2d(images, other["weight"], None, 2, 3), layer(images)
    Weights(model, use_bf16=False, padded_layer=layer, padded=ROOM)
    torch.testing.assert_close(torch.func.functional_call(layer.train(), other, (images,)), wanted[0])
    torch.testing.assert_close(layer.eval()(padded_images(images)), wanted[1], rtol=1e-4, atol=1e-5)


def test_unknown_models_get_no_padded_weights() -> None:
    assert first_convolution(build_model("small-cnn", 10, (16, 16, 3), seed=0)) is None
