"""What a step does around the network, in kernels of our own: the same as in PyTorch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from triton_here import DEVICE  # first: it skips where Triton is not there

from fedeas_flwr.data import dataset_info
from fedeas_flwr.training.images import Normaliser
from fedeas_flwr.training.step_kernels import Descent, cross_entropy, fetch
from fedeas_flwr.training.views import draw_views, viewed


@pytest.mark.parametrize("with_views", [False, True])
def test_a_batch_is_fetched_viewed_and_normalised(with_views: bool) -> None:
    rng, info = np.random.default_rng(0), dataset_info("cifar10")
    pixels = torch.from_numpy(rng.integers(0, 256, (9, *info.image_shape), dtype=np.uint8)).to(DEVICE)
    labels, table = torch.arange(9, device=DEVICE) * 7, torch.from_numpy(rng.integers(0, 9, (3, 4))).to(DEVICE)
    views = draw_views(info, 3, 4, rng).to(DEVICE) if with_views else None
    normalise, row = Normaliser(info.mean, info.std, DEVICE), torch.tensor([2], device=DEVICE)
    images, chosen = fetch(table, row, pixels, labels, views, normalise, torch.float32)
    wanted = pixels[table[2]] if views is None else viewed(pixels[table[2]], views[2])
    torch.testing.assert_close(images, normalise(wanted), rtol=1e-6, atol=1e-6)  # torch multiplies by 1/255 on a GPU
    assert torch.equal(chosen, labels[table[2]])
    assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("classes", [10, 100])
def test_cross_entropy_and_its_gradient(classes: int) -> None:
    torch.manual_seed(0)
    logits = (30 * torch.randn(7, classes, device=DEVICE)).requires_grad_()
    labels, weights = torch.randint(0, classes, (7,), device=DEVICE), torch.rand(7, device=DEVICE)
    ours, torchs = cross_entropy(logits, labels), F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(ours, torchs)
    (one,), (two,) = (torch.autograd.grad((losses * weights).sum(), logits) for losses in (ours, torchs))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_descent_moves_masters_copies_loss_and_row(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    kernel = torch.randn(64, 20, 3, 3, device=DEVICE).to(memory_format=torch.channels_last)
    wholes = [kernel, torch.randn(5000, device=DEVICE), torch.randn(40, 40, 3, 3, device=DEVICE)]
    wholes[2] = wholes[2].to(memory_format=torch.channels_last)
    copies = [whole.to(kind) for whole in wholes] if kind != torch.float32 else wholes
    tap = (slice(None), slice(None), 1, 1)
    masters, parameters = [*wholes[:2], wholes[2][tap]], [*copies[:2], copies[2][tap]]
    gradients = [torch.randn(p.shape, device=DEVICE).to(kind) for p in parameters]  # the kernel's is in another order
    wanted = [whole.clone() for whole in wholes]
    for target, gradient in zip([*wanted[:2], wanted[2][tap]], gradients, strict=True):
        target -= 0.1 * gradient.float()
    total, row = torch.tensor(3.0, device=DEVICE), torch.tensor([4], device=DEVICE)
    descent = Descent(parameters, masters)
    loss, samples = torch.tensor(0.5, device=DEVICE), torch.tensor(6.0, device=DEVICE)
    descent(gradients, 0.1, loss, total, samples, row)
    for whole, copy, value in zip(wholes, copies, wanted, strict=True):
        torch.testing.assert_close(whole, value)
        torch.testing.assert_close(copy.float(), whole, rtol=2**-7, atol=0)  # Triton's interpreter cuts, GPUs round
    assert (total.item(), row.item()) == (6.0, 5)
