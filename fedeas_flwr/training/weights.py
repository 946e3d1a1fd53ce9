"""The parameters that an engine trains, always float32; in bf16 the model itself computes with copies.

Autocast would make those copies anew in every step, a kernel a layer. Here they lie in one piece and are made by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Weights:
    """A model's trained parameters by name.

    Parameters
    ----------
    model
        On its device and in its memory format. With ``halved``, its matrices and kernels become bfloat16.
    halved
        Whether the model is to compute in bfloat16.

    Attributes
    ----------
    names, masters
        Of all trained parameters: float32, and what is copied in, stepped and read out.
    """

    def __init__(self, model: nn.Module, halved: bool) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.parameters: list[torch.Tensor] = [p for _, p in trained]
        self.masters: list[torch.Tensor] = list(self.parameters)
        large = [i for i, p in enumerate(self.parameters) if halved and p.dim() > 1 and p.dtype == torch.float32]
        size = sum(self.parameters[i].numel() for i in large)
        device = self.parameters[0].device
        self._whole, self._half = torch.empty(size, device=device), torch.empty(0, dtype=torch.bfloat16)
        if halved:
            self._half = torch.empty(size, dtype=torch.bfloat16, device=device)
        start = 0
        for i in large:
            parameter = self.parameters[i]
            shape, strides = parameter.shape, parameter.stride()  # channels last, where the model is
            self.masters[i] = self._whole[start : start + parameter.numel()].as_strided(shape, strides, start)
            self.masters[i].copy_(parameter.detach())
            parameter.data = self._half[start : start + parameter.numel()].as_strided(shape, strides, start)
            start += parameter.numel()
        self._large = large
        self._gradients = [torch.zeros_like(self.masters[i]) for i in large]
        self.refresh()

    def whole_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of `parameters` as float32."""
        whole = list(gradients)
        if self._large:
            torch._foreach_copy_(self._gradients, [gradients[i] for i in self._large])
            for i, gradient in zip(self._large, self._gradients, strict=True):
                whole[i] = gradient
        return whole

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the model compute with what the masters are now."""
        if self._large:
            self._half.copy_(self._whole)

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's state dict with the masters in it."""
        masters = dict(zip(self.names, self.masters, strict=True))
        return {key: masters.get(key, tensor).detach() for key, tensor in model.state_dict().items()}
