"""The parts of a training step outside the network, as one kernel each: fetch the batch, loss, and SGD.

PyTorch needs about fifty kernels of one or two microseconds for them. Kernel launches limit a GPU that trains several
clients, so each of the fifty would delay the other clients too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fedeas_flwr.training.models import Normaliser

_BLOCK = 1024
"""Elements that one program processes."""


# ------------------------------------------------------------------------------------------------- fetch


@triton.jit  # type: ignore[untyped-decorator]
def _fetch_kernel(  # type: ignore[no-untyped-def]
    table, row, pixels, labels, views, mean, std, images, batch_labels, BATCH: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, HAS_VIEWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply `augment` (training/augmentation.py) and `Normaliser` (training/models.py) to a part of one image."""
    position = tl.load(row) * BATCH + tl.program_id(0)
    index = tl.load(table + position)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < H * W * PADDED
    channel = element % PADDED
    x = (element // PADDED) % W
    y = element // (PADDED * W)
    is_channel = inside & (channel < C)
    has_source = is_channel
    if HAS_VIEWS:
        mirrored = tl.load(views + 3 * position)
        y -= tl.load(views + 3 * position + 1).to(tl.int32)
        x -= tl.load(views + 3 * position + 2).to(tl.int32)
        has_source = is_channel & (y >= 0) & (y < H) & (x >= 0) & (x < W)
        x = tl.where(mirrored > 0, W - 1 - x, x)
    value = tl.load(pixels + index * (H * W * C) + (y * W + x) * C + channel, mask=has_source, other=0)
    value = value.to(tl.float32) / 255.0 - tl.load(mean + channel, mask=is_channel, other=0)
    value = tl.where(is_channel, value / tl.load(std + channel, mask=is_channel, other=1), 0.0)
    target = images + tl.program_id(0) * (H * W * PADDED) + element
    tl.store(target, value.to(images.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(batch_labels + tl.program_id(0), tl.load(labels + index))


def fetch(
    table: torch.Tensor,
    row: torch.Tensor,
    pixels: torch.Tensor,
    labels: torch.Tensor,
    views: torch.Tensor | None,
    normalise: Normaliser,
    dtype: torch.dtype,
    padded: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalised images (channels last) and labels of the batch whose indices are in a row of the table.

    ``row`` is a counter on the device. ``views`` is the whole table of views (training/augmentation.py), or None. In
    memory a pixel has ``padded`` channels (convolutions.py); those after the image's own are zero.
    """
    batch, (height, width, channels) = table.shape[1], pixels.shape[1:]
    images = torch.empty(batch, height, width, padded, dtype=dtype, device=pixels.device)
    batch_labels = torch.empty(batch, dtype=labels.dtype, device=labels.device)
    _fetch_kernel[(batch, triton.cdiv(height * width * padded, _BLOCK))](
        table, row, pixels, labels, views, normalise.mean, normalise.std, images, batch_labels,
        BATCH=batch, H=height, W=width, C=channels, PADDED=padded, HAS_VIEWS=views is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    return images.permute(0, 3, 1, 2)[:, :channels], batch_labels


# -------------------------------------------------------------------------------------------------- loss


@triton.jit  # type: ignore[untyped-decorator]
def _loss_kernel(logits, labels, losses, gradients, C: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    sample = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < C
    label = tl.load(labels + sample)
    value = tl.load(logits + sample * C + column, mask=inside, other=-float("inf")).to(tl.float32)
    value -= tl.max(value, 0)
    exponential = tl.exp(value)
    total = tl.sum(exponential, 0)
    is_label = column == label
    tl.store(losses + sample, tl.log(total) - tl.sum(tl.where(is_label, value, 0.0), 0))
    tl.store(gradients + sample * C + column, exponential / total - tl.where(is_label, 1.0, 0.0), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _loss_backward_kernel(gradients, dlosses, dlogits, C: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    sample = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < C
    gradient = tl.load(gradients + sample * C + column, mask=inside, other=0) * tl.load(dlosses + sample)
    tl.store(dlogits + sample * C + column, gradient.to(dlogits.dtype.element_ty), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any) -> Any:
        logits, (samples, classes) = logits.contiguous(), logits.shape
        losses = torch.empty(samples, device=logits.device)
        gradients = torch.empty(samples, classes, device=logits.device)
        width = triton.next_power_of_2(classes)
        _loss_kernel[(samples,)](logits, labels, losses, gradients, C=classes, WIDTH=width, num_warps=1)
        ctx.save_for_backward(gradients)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlosses: Any) -> Any:
        (gradients,) = ctx.saved_tensors
        samples, classes = gradients.shape
        dlogits = torch.empty_like(gradients, dtype=ctx.dtype)
        width = triton.next_power_of_2(classes)
        _loss_backward_kernel[(samples,)](gradients, dlosses.contiguous(), dlogits, C=classes, WIDTH=width, num_warps=1)
        return dlogits, None


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return −log softmax(z)_y of each sample, in float32."""
    losses: torch.Tensor = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    return losses


@triton.jit  # type: ignore[untyped-decorator]
def _mean_kernel(values, count, mean, B: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    sample, number = tl.arange(0, WIDTH), tl.load(count)
    included = (sample < B) & (sample < number)
    tl.store(mean, tl.sum(tl.load(values + sample, mask=included, other=0).to(tl.float32), 0) / number)


@triton.jit  # type: ignore[untyped-decorator]
def _mean_backward_kernel(dmean, count, dvalues, B: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    sample, number = tl.arange(0, WIDTH), tl.load(count)
    tl.store(dvalues + sample, tl.where(sample < number, tl.load(dmean) / number, 0.0), mask=sample < B)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Any, count: Any) -> Any:
        mean = torch.empty((), device=values.device)
        ctx.size = {"B": len(values), "WIDTH": triton.next_power_of_2(len(values))}
        _mean_kernel[(1,)](values.contiguous(), count, mean, **ctx.size)
        ctx.save_for_backward(count)
        ctx.dtype = values.dtype
        return mean

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dmean: Any) -> Any:
        (count,) = ctx.saved_tensors
        dvalues = torch.empty(ctx.size["B"], device=count.device)
        _mean_backward_kernel[(1,)](dmean, count, dvalues, **ctx.size)
        return dvalues.to(ctx.dtype), None


def mean_of_first(count: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mean of the first ``count`` of values ``[B]`` in float32; ``count`` is a tensor on the device."""
    mean: torch.Tensor = _Mean.apply(values, count)  # type: ignore[no-untyped-call]
    return mean


# --------------------------------------------------------------------------------------------------- SGD


@triton.jit  # type: ignore[untyped-decorator]
def _sgd_kernel(  # type: ignore[no-untyped-def]
    blocks, gradients, rate, loss, sum_of_losses, samples, row, RATE_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr
):
    if RATE_ON_DEVICE:
        rate = tl.load(rate)
    block = blocks + 5 * tl.program_id(0).to(tl.int64)
    start = tl.load(block + 1)
    master = tl.load(block + 2).to(tl.pointer_type(tl.float32))
    copy = tl.load(block + 3)
    element = tl.arange(0, BLOCK)
    inside = element < tl.load(block + 4)
    gradient = tl.load(gradients + tl.load(block))
    value = tl.load(master + element, mask=inside, other=0)
    if copy == 0:
        value -= rate * tl.load(gradient.to(tl.pointer_type(tl.float32)) + start + element, mask=inside, other=0)
    else:
        bf16_gradient = tl.load(gradient.to(tl.pointer_type(tl.bfloat16)) + start + element, mask=inside, other=0)
        value -= rate * bf16_gradient.to(tl.float32)
        tl.store(copy.to(tl.pointer_type(tl.bfloat16)) + element, value.to(tl.bfloat16), mask=inside)
    tl.store(master + element, value, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(sum_of_losses, tl.load(sum_of_losses) + tl.load(loss) * tl.load(samples))
        tl.store(row, tl.load(row) + 1)


class FusedSGD:
    """Sets w ← w − η g for all parameters in one kernel, and updates the model's bfloat16 copies.

    The loss is differentiated by ``parameters``: float32, or bfloat16 copies of ``masters``, which are float32 values
    at fixed addresses, contiguous or rows of a larger array.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        found = [_blocks(i, *pair) for i, pair in enumerate(zip(parameters, masters, strict=True))]
        device = parameters[0].device
        self._blocks = torch.tensor([block for part in found for block in part], dtype=torch.long, device=device)
        self._addresses: list[int] = []
        self.new_address_table()

    def new_address_table(self) -> torch.Tensor:
        """Return a new address table for the next captured step; it must live as long as the step's graph."""
        self._table = torch.zeros(len(self._parameters), dtype=torch.long, device=self._blocks.device)
        return self._table

    def write_addresses(self) -> None:
        """Write the gradients' addresses to the table; call it after a capture, which cannot contain the copy."""
        self._table.copy_(torch.tensor(self._addresses))

    def __call__(
        self,
        gradients: Sequence[torch.Tensor],
        rate: float | torch.Tensor,
        loss: torch.Tensor,
        sum_of_losses: torch.Tensor,
        samples: torch.Tensor,
        row: torch.Tensor,
    ) -> None:
        """Take the step, add ``loss`` × ``samples`` to the sum, and increment the row counter.

        A captured step contains a ``rate`` that is a number; it reads a float32 tensor at every replay.
        """
        ordered = [_in_memory_order(g, p) for g, p in zip(gradients, self._parameters, strict=True)]
        self._addresses = [gradient.data_ptr() for gradient in ordered]
        if not (self._table.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.write_addresses()
        _sgd_kernel[(len(self._blocks),)](
            self._blocks, self._table, rate, loss, sum_of_losses, samples, row,
            RATE_ON_DEVICE=isinstance(rate, torch.Tensor), BLOCK=_BLOCK,
        )  # fmt: skip


def _blocks(number: int, parameter: torch.Tensor, master: torch.Tensor) -> list[tuple[int, int, int, int, int]]:
    """Return contiguous blocks: gradient number, offset in it, addresses of master and copy (or 0), length."""
    rows, length, pitch = 1, master.numel(), 0
    if master.dim() == 2 and master.stride(0) > master.shape[1]:
        rows, length, pitch = master.shape[0], master.shape[1], master.stride(0)
    use_bf16 = parameter.dtype != master.dtype
    found = []
    for row in range(rows):
        for start in range(0, length, _BLOCK):
            offset = row * pitch + start
            copy = parameter.data_ptr() + 2 * offset if use_bf16 else 0
            address = master.data_ptr() + 4 * offset
            found.append((number, row * length + start, address, copy, min(_BLOCK, length - start)))
    return found


def _in_memory_order(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient in its parameter's memory order; if the parameter is strided, without the gaps."""
    wanted = torch.empty_like(parameter, device="meta").stride()
    same = all(a == b for a, b, n in zip(gradient.stride(), wanted, parameter.shape, strict=True) if n > 1)
    return gradient if same else torch.empty_like(parameter).copy_(gradient)
