"""The parameters that an engine trains, always float32; with bf16 the model computes with bfloat16 copies.

Autocast would copy them in every step, with one kernel per layer. Here they are contiguous, and one kernel copies all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from fedeas_flwr.training.gpu.convolutions import use_centre_tap, use_padded_weights


class Weights:
    """A model's trained parameters: names, tensors that the loss is differentiated by, and their float32 masters.

    The model is on its device and in its memory format. With ``use_bf16``, its matrices, kernels and biases become
    bfloat16. Only the centre taps of ``one_pixel`` are trained, and the weights of ``padded_layer`` are padded with
    zeros in memory to ``padded`` input channels (convolutions.py).
    """

    def __init__(
        self,
        model: nn.Module,
        use_bf16: bool,
        one_pixel: Sequence[nn.Conv2d] = (),
        padded_layer: nn.Conv2d | None = None,
        padded: int = 0,
    ) -> None:
        if padded_layer is not None:
            _pad_channels(padded_layer, padded)
        layers = {id(layer.weight): layer for layer in one_pixel}
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        trained.sort(key=lambda pair: id(pair[1]) in layers)  # those last, so that the others are contiguous
        self.names = [name for name, _ in trained]
        self.parameters: list[torch.Tensor] = [p for _, p in trained]
        self._dense = len(trained) - len(layers)
        biases = _biases(model)
        self._halved = [
            i
            for i, p in enumerate(self.parameters)
            if use_bf16 and p.dtype == torch.float32 and (p.dim() > 1 or id(p) in biases)  # the rest is BatchNorm's
        ]
        self._wholes = self._flatten_storage()
        self.masters = list(self._wholes)
        self._padding: list[torch.Tensor] = []
        for i in range(self._dense, len(trained)):
            self.parameters[i] = use_centre_tap(layers[id(trained[i][1])])
            self.masters[i] = self._wholes[i][:, :, 1, 1]
        if padded_layer is not None:
            i = next(i for i, (_, p) in enumerate(trained) if p is padded_layer.weight)
            self.parameters[i] = use_padded_weights(padded_layer, _with_padding(padded_layer.weight, padded))
            self.masters[i] = _with_padding(self._wholes[i], padded)
            self._padding.append(self.masters[i][:, padded_layer.in_channels :])
        self._gradients = [torch.zeros_like(self.masters[i]) for i in self._halved]
        self.refresh()

    def _flatten_storage(self) -> list[torch.Tensor]:
        """Move parameters with bfloat16 copies to two flat buffers, float32 and bfloat16; return all float32 values."""
        sizes = [-_extent(self.parameters[i]) // 64 * -64 for i in self._halved]  # each starts at a 64-element boundary
        starts = list(accumulate(sizes, initial=0))
        self._moving = starts[sum(i < self._dense for i in self._halved)]
        self._whole = torch.zeros(starts[-1], device=self.parameters[0].device)
        self._half = torch.zeros_like(self._whole, dtype=torch.bfloat16)
        wholes = [p.detach() for p in self.parameters]
        for i, start in zip(self._halved, starts[:-1], strict=True):
            place = wholes[i].shape, wholes[i].stride(), start  # channels last, where the model is
            moved = self._whole.as_strided(*place)
            moved.copy_(wholes[i])
            wholes[i], self.parameters[i].data = moved, self._half.as_strided(*place)
        return wholes

    def whole_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of `parameters` in float32."""
        whole = list(gradients)
        if self._halved:
            torch._foreach_copy_(self._gradients, [gradients[i] for i in self._halved])
            for i, gradient in zip(self._halved, self._gradients, strict=True):
                whole[i] = gradient
        return whole

    @torch.no_grad()
    def descend(self, directions: Sequence[torch.Tensor], rate: float | torch.Tensor) -> None:
        """Add ``-rate`` times the directions to the masters, and update the model's copies.

        A captured step contains a number as it is; it reads a tensor at every replay.
        """
        if isinstance(rate, torch.Tensor):
            directions, rate = torch._foreach_mul(list(directions), rate), 1.0
        dense = self._dense
        torch._foreach_add_(self.masters[:dense], list(directions[:dense]), alpha=-rate)
        self._half[: self._moving].copy_(self._whole[: self._moving])
        for i in range(dense, len(self.masters)):  # strided, so not in one launch with the others
            self.masters[i].add_(directions[i], alpha=-rate)
            if self.parameters[i].dtype != self.masters[i].dtype:
                self.parameters[i].copy_(self.masters[i])

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all masters to the model's copies and reset the padding channels to zero.

        Padding is not part of a state. It stays zero except after NaN, since 0 · NaN is NaN: a client whose training
        diverged must not affect the next clients.
        """
        for padding in self._padding:
            padding.zero_()
        self._half.copy_(self._whole)

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's state dict in float32; its tensors share memory with the masters."""
        wholes = dict(zip(self.names, self._wholes, strict=True))
        return {key: wholes.get(key, tensor).detach() for key, tensor in model.state_dict().items()}


def _pad_channels(layer: nn.Conv2d, padded: int) -> None:
    """Move a layer's weights to memory padded with zero input channels."""
    outputs, channels, *size = layer.weight.shape
    memory = torch.zeros(outputs, *size, padded, dtype=layer.weight.dtype, device=layer.weight.device).movedim(-1, 1)
    memory[:, :channels] = layer.weight.detach()
    layer.weight.data = memory[:, :channels]


def _with_padding(weight: torch.Tensor, padded: int) -> torch.Tensor:
    """Return weights with their padding channels."""
    return weight.detach().as_strided((weight.shape[0], padded, *weight.shape[2:]), weight.stride())


def _extent(weight: torch.Tensor) -> int:
    """Return the number of elements that weights occupy, padding included."""
    return max(weight.numel(), weight.shape[0] * weight.stride(0))


def _biases(model: nn.Module) -> set[int]:
    """Return the ids of the biases of layers that compute in bfloat16; autocast would convert them in every step."""
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
    return {id(layer.bias) for layer in layers if layer.bias is not None}
