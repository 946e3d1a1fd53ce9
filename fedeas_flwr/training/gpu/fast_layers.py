"""Run a model's BatchNorm layers, and a ResNet's ReLUs and sums, with fused kernels (batchnorm_kernels.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fedeas_flwr.training.gpu.batchnorm_kernels import batchnorm, plain_batchnorm

Pair = tuple[torch.Tensor, torch.Tensor]
"""The same feature map twice: for a block's main branch and for its shortcut. Each has its own gradient."""


class FusedLayers:
    """Replaces the forward passes of a model's layers, in place, by fused ones. Evaluation mode is unchanged.

    BatchNorm is fused in any network. In torchvision's ResNets with basic blocks, ReLU and sums are fused too. The
    caller sets ``count``, the number of samples in the batch without padding, as a float tensor on the device, before a
    step is captured or run.
    """

    def __init__(self, model: nn.Module) -> None:
        from torchvision.models.resnet import ResNet

        device = next(model.parameters()).device
        self.count = torch.full((), 2.0, device=device)
        self._counters: list[torch.Tensor] = []
        for module in model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            if is_norm and not (module.affine and module.momentum is not None):
                # The kernels cannot replace this layer, and PyTorch's own would treat padding as samples.
                raise ValueError("a BatchNorm without weights, or with a cumulative average, is not supported")
        trial = nn.BatchNorm1d(1, device=device)
        self._batchnorm(trial, torch.zeros(2, 1, device=device))  # raises where Triton cannot compile
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.forward = partial(self._batchnorm, module)  # type: ignore[method-assign]
                if module.num_batches_tracked is not None:
                    self._counters.append(module.num_batches_tracked)
            elif isinstance(module, ResNet):
                module._forward_impl = partial(self._resnet, module)

    def count_batches(self, number: int) -> None:
        """Add ``number`` steps to the batch counters of all BatchNorm layers.

        One call per round replaces one kernel per layer and step.
        """
        if self._counters:
            torch._foreach_add_(self._counters, number)

    def _batchnorm(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if layer.training:
            return plain_batchnorm(layer, self.count, x)
        y: torch.Tensor = type(layer).forward(layer, x)
        return y

    def _normalised(
        self, layer: Any, x: torch.Tensor, added: torch.Tensor | None = None, relu: bool = False, other: Any = None
    ) -> Pair:
        """Return ``relu(layer(x) + other(added))``; the ReLU and the sum are optional."""
        if layer.training:
            return batchnorm(layer, self.count, x, added, relu, other)
        y = type(layer).forward(layer, x)
        if added is not None:
            y = y + (added if other is None else type(other).forward(other, added))
        y = F.relu(y) if relu else y
        return y, y

    def _basic_block(self, block: Any, x: torch.Tensor, shortcut: torch.Tensor) -> Pair:
        """Run torchvision's `BasicBlock.forward` with ReLUs, sum and shortcut BatchNorm fused into bn1 and bn2."""
        hidden, _ = self._normalised(block.bn1, block.conv1(x), relu=True)
        norm = None
        if block.downsample is not None:
            convolution, norm = block.downsample
            shortcut = convolution(shortcut)
        return self._normalised(block.bn2, block.conv2(hidden), shortcut, relu=True, other=norm)

    def _resnet(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        """Run torchvision's `ResNet.forward` with fused layers."""
        from torchvision.models.resnet import BasicBlock

        x = shortcut = model.maxpool(self._normalised(model.bn1, model.conv1(x), relu=True)[0])
        for layer in (model.layer1, model.layer2, model.layer3, model.layer4):
            for block in layer:
                if isinstance(block, BasicBlock):
                    x, shortcut = self._basic_block(block, x, shortcut)
                else:
                    x = shortcut = block(x)
        if x.shape[2:] != (1, 1) or model.avgpool.output_size not in (1, (1, 1)):
            x = model.avgpool(x)
        logits: torch.Tensor = model.fc(torch.flatten(x, 1))
        return logits
