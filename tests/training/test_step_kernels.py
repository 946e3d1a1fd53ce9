"""The kernels of a training step around the network match PyTorch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from requires_triton import DEVICE  # first: it skips where Triton is not there
from torch.nn import functional as F

from fedeas_flwr.data.datasets import dataset_info
from fedeas_flwr.training.augmentation import augment, draw_views
from fedeas_flwr.training.gpu.step_kernels import FusedSGD, cross_entropy, fetch, mean_of_first
from fedeas_flwr.training.models import Normaliser

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dataset", "room"), [("cifar10", 3), ("cifar10", 8), ("fashion-mnist", 8)])
@pytest.mark.parametrize("with_views", [False, True])
def test_fetch_augments_and_normalises_a_batch(with_views: bool, dataset: str, room: int) -> None:
    rng, info = np.random.default_rng(0), dataset_info(dataset)
    pixels = torch.from_numpy(rng.integers(0, 256, (9, *info.image_shape), dtype=np.uint8)).to(DEVICE)
    labels, table = torch.arange(9, device=DEVICE) * 7, torch.from_numpy(rng.integers(0, 9, (3, 4))).to(DEVICE)
    views = draw_views(info, 3, 4, rng).to(DEVICE) if with_views else None
    normalise, row = Normaliser(info.mean, info.std, DEVICE), torch.tensor([2], device=DEVICE)
    images, chosen = fetch(table, row, pixels, labels, views, normalise, torch.float32, room)
    wanted = pixels[table[2]] if views is None else augment(pixels[table[2]], views[2])
    torch.testing.assert_close(images, normalise(wanted), rtol=1e-6, atol=1e-6)  # torch multiplies by 1/255 on a GPU
    assert torch.equal(chosen, labels[table[2]])
    whole = images.as_strided((4, room, *images.shape[2:]), images.stride())
    assert whole.is_contiguous(memory_format=torch.channels_last)
    assert not whole[:, info.image_shape[2] :].any()


@pytest.mark.parametrize("classes", [10, 100])
def test_cross_entropy_kernel_and_gradient_match_torch(classes: int) -> None:
    torch.manual_seed(0)
    logits = (30 * torch.randn(7, classes, device=DEVICE)).requires_grad_()
    labels, weights = torch.randint(0, classes, (7,), device=DEVICE), torch.rand(7, device=DEVICE)
    ours, torchs = cross_entropy(logits, labels), F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(ours, torchs)
    (one,), (two,) = (torch.autograd.grad((losses * weights).sum(), logits) for losses in (ours, torchs))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("counted", [7, 3])
def test_mean_of_first_and_its_gradient_match_torch(counted: int) -> None:
    values = torch.rand(7, device=DEVICE).requires_grad_()
    mean = mean_of_first(torch.tensor(float(counted), device=DEVICE), values)
    torch.testing.assert_close(mean, values[:counted].mean())
    (slopes,) = torch.autograd.grad(mean, values, torch.tensor(2.0, device=DEVICE))
    wanted = [2 / counted] * counted + [0.0] * (7 - counted)
    torch.testing.assert_close(slopes, torch.tensor(wanted, device=DEVICE))


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, device=DEVICE)], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_fused_sgd_updates_weights_copies_loss_and_row(kind: torch.dtype, rate: float | torch.Tensor) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(64, 20, 3, 3, device=DEVICE).to(memory_format=torch.channels_last)
    wholes = [kernel, torch.randn(5000, device=DEVICE), torch.randn(40, 40, 3, 3, device=DEVICE)]
    wholes[2] = wholes[2].to(memory_format=torch.channels_last)
    copies = [whole.to(kind) for whole in wholes] if kind != torch.float32 else wholes
    tap = (slice(None), slice(None), 1, 1)
    masters, parameters = [*wholes[:2], wholes[2][tap]], [*copies[:2], copies[2][tap]]
    gradients = [
        torch.randn(p.shape, device=DEVICE).to(kind) for p in parameters
    ]  # the kernel's has another memory layout
    wanted = [whole.clone() for whole in wholes]
    for target, gradient in zip([*wanted[:2], wanted[2][tap]], gradients, strict=True):
        target -= 0.1 * gradient.float()
    total, row = torch.tensor(3.0, device=DEVICE), torch.tensor([4], device=DEVICE)
    descent = FusedSGD(parameters, masters)
    loss, samples = torch.tensor(0.5, device=DEVICE), torch.tensor(6.0, device=DEVICE)
    descent(gradients, rate, loss, total, samples, row)
    for whole, copy, value in zip(wholes, copies, wanted, strict=True):
        torch.testing.assert_close(whole, value)
        torch.testing.assert_close(
            copy.float(), whole, rtol=2**-7, atol=0
        )  # Triton's interpreter truncates, GPUs round
    assert (total.item(), row.item()) == (6.0, 5)
