"""Training with replayed CUDA graphs: kernel launches, not arithmetic, limit a batch-64 step of a small network.

The engine captures one step (gather, normalise, forward, loss, backward, SGD) once and replays it for every batch of
every client and round. The step reads its sample indices from a table on the device with the permutations of all
epochs, one row per step, at a row counter that the graph itself increments. There are two step graphs: one for full
batches, and one for the shorter last batch of an epoch, of any size. The second pads the batch, and loss and BatchNorm
average over the real rows only, so the result equals that of the short batch up to rounding. On a GPU, BatchNorm and
adjacent operations are fused kernels (batchnorm_kernels.py). An objective with `precompute` has a third graph, which
the engine replays for all samples in chunks before the first step.

Weights, data and tables are buffers that are refilled in place; nothing is allocated or captured between clients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedeas_flwr.common.cuda import LAST, CaptureError, capture, capturing, own_stream
from fedeas_flwr.common.errors import is_out_of_memory
from fedeas_flwr.common.launcher import launch, on_stream
from fedeas_flwr.common.text import one_line
from fedeas_flwr.training.augmentation import VIEWS, augment
from fedeas_flwr.training.engine import (
    LEARNING_RATE,
    LocalTrainingConfig,
    State,
    TrainResult,
    batch_table,
    clone_state,
    copy_state,
    stream_seed,
)
from fedeas_flwr.training.gpu.batchnorm import double_backward_batchnorm, masked_batchnorm
from fedeas_flwr.training.gpu.convolutions import first_convolution, one_pixel_convolutions, padded_channels
from fedeas_flwr.training.gpu.precomputed_rows import PrecomputedRows
from fedeas_flwr.training.gpu.weights import Weights
from fedeas_flwr.training.losses import cross_entropy
from fedeas_flwr.training.models import Normaliser, drawing, trained_names, uses_rng
from fedeas_flwr.training.objective import (
    CROSS_ENTROPY,
    NO_INPUTS,
    Batch,
    Inputs,
    Objective,
    Tensors,
    mean_of_first,
    named,
)

logger = logging.getLogger(__name__)


class Graphs(NamedTuple):
    """Functions that replay the captured graphs; without a GPU, the captured functions themselves."""

    chunk: Callable[[], None] | None
    """Precomputes one chunk of samples; None if the objective does not need it."""
    full: Callable[[], None]
    short: Callable[[], None]


class GraphedEngine:
    """One model, its graphs and its buffers, on its own CUDA stream.

    The captured step contains ``recipe`` and ``objective``, so they are fixed for an engine. ``precision`` is ``fp32``,
    ``tf32`` (tensor cores on float32 storage) or ``bf16`` (autocast; weights stay float32). On ``cpu`` the same steps
    run without graphs, for tests. The GPU serves engines of lower ``rank`` first, as far as it has stream priorities.
    Without ``fused``, all layers are PyTorch's. The first capture makes room for ``most_samples`` samples; a client
    with more needs another one.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: LocalTrainingConfig,
        normalise: Normaliser,
        precision: str,
        device: str = "cuda",
        objective: Objective = CROSS_ENTROPY,
        rank: int = LAST,
        fused: bool = True,
        most_samples: int = 0,
    ) -> None:
        self.recipe, self._normalise, self._precision, self._device = recipe, normalise, precision, device
        self._objective, self._use_fused = objective, fused and device == "cuda" and not objective.needs_double_backward
        self._most_samples = most_samples
        self._stream = own_stream(rank) if device == "cuda" else None
        self._model = model.to(device).train()
        if device == "cuda":
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._batch = torch.full((), float(recipe.batch_size), device=device)
        self._one = torch.ones((), device=device)
        self._row = torch.zeros(1, dtype=torch.long, device=device)
        self._count = torch.zeros((), device=device)
        self._loss = torch.zeros((), device=device)
        self._pixels = torch.zeros(0, dtype=torch.uint8, device=device)
        self._labels = torch.zeros(0, dtype=torch.long, device=device)
        self._table = torch.zeros(0, recipe.batch_size, dtype=torch.long, device=device)
        self._constants: dict[str, torch.Tensor] = {}
        self._tables: dict[str, torch.Tensor] = {}
        self._precomputed: PrecomputedRows | None = None
        self._graphs: Graphs | None = None
        self._state: dict[str, torch.Tensor] = {}

    def _build_for_shape(self, image: Sequence[int]) -> None:
        """Prepare the model for images of this shape [H, W, C], which is the same for all clients."""
        two = self._normalise(torch.zeros((2, *image), dtype=torch.uint8, device=self._device))
        self._uses_rng = uses_rng(self._model, two)
        changes_gradients = type(self._objective).correct_gradients is not Objective.correct_gradients
        self._fast = fast_layers(self._model) if self._use_fused else None
        self._weights, self._padded_channels = self._lay_out_weights(two, changes_gradients)
        self._state, self._trained = self._weights.state(self._model), trained_names(self._model)
        self._momentum = [torch.zeros_like(p) for p in self._weights.masters] if self.recipe.momentum else []
        self._fused_sgd: Any = None
        self._cross_entropy, self._mean_of_first = cross_entropy, mean_of_first
        if self._fast is not None:
            from fedeas_flwr.training.gpu import step_kernels

            self._cross_entropy, self._mean_of_first = step_kernels.cross_entropy, step_kernels.mean_of_first
            if not (self.recipe.momentum or self.recipe.weight_decay or changes_gradients):
                self._fused_sgd = step_kernels.FusedSGD(self._weights.parameters, self._weights.masters)

    def _lay_out_weights(self, two: torch.Tensor, changes_gradients: bool) -> tuple[Weights, int]:
        """Return the weights for the steps, and the number of image channels, padding included (convolutions.py).

        ``two`` are two normalised images. An algorithm that changes gradients has arrays in the model's own shapes, so
        its weights are not rearranged.
        """
        use_bf16, channels = self._precision == "bf16" and self._device == "cuda", two.shape[1]
        if changes_gradients or self._objective.needs_double_backward:
            return Weights(self._model, use_bf16), channels
        taps: list[nn.Conv2d] = []
        if not self.recipe.weight_decay:
            taps = one_pixel_convolutions(self._model, two)
        first = first_convolution(self._model) if self._fast is not None else None
        if first is None:
            return Weights(self._model, use_bf16, taps), channels
        padded = padded_channels(channels, torch.bfloat16 if use_bf16 else torch.float32)
        return Weights(self._model, use_bf16, taps, first, padded), padded

    def train(
        self,
        trainable: State,
        buffers: State,
        images: torch.Tensor,
        labels: torch.Tensor,
        batches: np.random.Generator,
        inputs: Inputs = NO_INPUTS,
    ) -> tuple[TrainResult, State, State]:
        """Train from the given state on uint8 images [N, H, W, C]; return the result and the state after it."""
        table, full, rest = batch_table(len(labels), self.recipe, batches)
        with on_stream(self._stream):
            try:
                graphs = self._reserve(images, len(table), inputs)
            except Exception as error:  # a network's layers, and a compiler of kernels, may raise anything
                if is_out_of_memory(error) or isinstance(error, CaptureError):
                    raise
                raise CaptureError(one_line(error)) from error
            copy_state(self._state, trainable, buffers)
            self._weights.refresh()
            for name, value in inputs.constants.items():
                self._constants[name].copy_(value)
            for name, value in inputs.tables.items():
                self._tables[name][: len(table)].copy_(value)
            self._pixels[: len(images)].copy_(images)
            self._labels[: len(labels)].copy_(labels)
            self._table[: len(table)].copy_(torch.from_numpy(table))
            self._row.zero_()
            self._count.fill_(float(rest))
            for buffer in self._momentum:
                buffer.zero_()
            epoch = [self._loss.zero_, *[graphs.full] * full, *[graphs.short] * (rest > 0)]
            with self._own_random_numbers(batches):
                launch(self._stream, [*self._precompute_launches(graphs, len(labels)), *epoch * self.recipe.epochs])
                if self._fast is not None:
                    self._fast.count_batches(len(table))
                state = clone_state(self._state, self._trained)
                loss = float(self._loss)  # waits for the stream
        return TrainResult(loss / max(self.recipe.samples(len(labels)), 1), len(table)), *state

    @contextmanager
    def _own_random_numbers(self, batches: np.random.Generator) -> Iterator[None]:
        """Seed the generator for a model that draws random numbers, and keep other threads from it in the block.

        All graphs of a process read the seed from the same memory, and a graph that draws cannot be replayed while
        another thread captures. So clients whose models draw train one after the other, as in the eager engine.
        """
        if not self._uses_rng:
            yield
            return
        with capturing, drawing:
            torch.default_generator.manual_seed(stream_seed(batches))
            if self._device != "cpu":
                torch.cuda.manual_seed(stream_seed(batches))
            yield

    def _reserve(self, images: torch.Tensor, rows: int, inputs: Inputs) -> Graphs:
        """Make the buffers large enough; return the graphs.

        Growth needs a new capture, which stops all streams. So the first buffers are for the largest client, and later
        growth is by at least half.
        """
        samples, device = len(images), self._device
        if self._graphs and samples <= len(self._pixels) and rows <= len(self._table):
            return self._graphs
        self._graphs = None  # so that an error below leaves no graph of freed buffers
        if not self._state:
            with capturing:  # compiles and loads kernels: once, and not during another thread's capture
                self._build_for_shape(images.shape[1:])
        # At least one: a capture runs the step, even for a client whose only sample is skipped.
        samples = max(samples, len(self._pixels) * 3 // 2, self._most_samples, 1)
        rows = max(rows, len(self._table) * 3 // 2, self.recipe.steps(self._most_samples), 1)
        self._pixels = torch.zeros((samples, *images.shape[1:]), dtype=torch.uint8, device=device)
        self._labels = torch.zeros(samples, dtype=torch.long, device=device)
        self._table = torch.zeros(rows, self.recipe.batch_size, dtype=torch.long, device=device)
        self._constants = {name: value.to(device, copy=True) for name, value in inputs.constants.items()}
        self._tables = {
            name: torch.zeros((rows, *value.shape[1:]), dtype=value.dtype, device=device)
            for name, value in inputs.tables.items()
        }
        needed = self._objective.precomputes(inputs)
        self._precomputed = PrecomputedRows(samples, self.recipe.batch_size, device) if needed else None
        # Capture this first: it allocates the buffers that the steps read.
        chunk = self._captured(self._precompute_chunk) if needed else None
        self._graphs = Graphs(chunk, self._captured_step(self._full_step), self._captured_step(self._short_step))
        return self._graphs

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        return work if self._stream is None else capture(work, self._stream, before_each=self._row.zero_)

    def _captured_step(self, step: Callable[[], None]) -> Callable[[], None]:
        self._count.fill_(2.0)
        addresses = self._fused_sgd.new_address_table() if self._fused_sgd else None
        replay = self._captured(step)
        if self._fused_sgd:
            self._fused_sgd.write_addresses()
        return lambda addresses=addresses: replay()  # type: ignore[misc]

    def _precompute_launches(self, graphs: Graphs, samples: int) -> list[Callable[[], object]]:
        """Return the launches before the first step: all chunks of samples, if the objective needs `precompute`."""
        if graphs.chunk is None or self._precomputed is None:
            return []
        return [*[graphs.chunk] * self._precomputed.chunks(samples), self._row.zero_]

    @torch.no_grad()
    def _precompute_chunk(self) -> None:
        """Store `Objective.precompute` of one chunk of samples; the row counter is the chunk's number."""
        assert self._precomputed is not None
        images, labels = self._fetch(self._precomputed.table, None)
        batch = Batch(images, labels, self._constants, partial(self._mean_of_first, self._batch), self._cross_entropy)
        with self._autocast():
            found = self._objective.precompute(self._model, batch)
        self._precomputed.put(self._row, found)
        self._row.add_(1)

    def _full_step(self) -> None:
        if self._fast is not None:
            self._fast.count = self._batch
        with double_backward_batchnorm(self._model) if self._objective.needs_double_backward else nullcontext():
            self._step(self._batch)

    def _short_step(self) -> None:
        if self._fast is not None:
            self._fast.count = self._count
            self._step(self._count)
            return
        mask = (torch.arange(self.recipe.batch_size, device=self._device) < self._count).float()
        with masked_batchnorm(self._model, mask):
            self._step(self._count)

    def _step(self, samples: torch.Tensor) -> None:
        rows = {name: table.index_select(0, self._row)[0] for name, table in self._tables.items() if name != VIEWS}
        images, labels = self._fetch(self._table, self._tables.get(VIEWS))
        precomputed = (
            self._precomputed.of(self._table.index_select(0, self._row).view(-1))
            if self._precomputed is not None
            else {}
        )
        mean = partial(self._mean_of_first, samples)
        batch = Batch(images, labels, {**self._constants, **rows}, mean, self._cross_entropy, precomputed)
        with self._autocast():
            loss = self._objective.loss(self._model, batch)
        gradients = torch.autograd.grad(loss, self._weights.parameters, self._one)
        rate = batch.given.get(LEARNING_RATE, self.recipe.learning_rate)
        if self._fused_sgd:
            self._fused_sgd(gradients, rate, loss.detach(), self._loss, samples, self._row)
        else:
            self._descend(gradients, rate, batch.given)
            self._loss.add_(loss.detach() * samples)
            self._row.add_(1)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device, torch.bfloat16, enabled=self._precision == "bf16", cache_enabled=False)

    def _fetch(self, table: torch.Tensor, views: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and labels of the current row of a table; stored images are channels-last already."""
        if self._fast is not None:
            from fedeas_flwr.training.gpu.step_kernels import fetch

            dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
            return fetch(
                table, self._row, self._pixels, self._labels, views, self._normalise, dtype, self._padded_channels
            )
        chosen = table.index_select(0, self._row).view(-1)
        pixels = self._pixels.index_select(0, chosen)
        if views is not None:
            pixels = augment(pixels, views.index_select(0, self._row)[0])
        return self._normalise(pixels), self._labels.index_select(0, chosen)

    @torch.no_grad()
    def _descend(self, gradients: Sequence[torch.Tensor], rate: float | torch.Tensor, given: Tensors) -> None:
        """Take an SGD step, as torch.optim.SGD, on all parameters at once."""
        recipe, names, weights = self.recipe, self._weights.names, self._weights.masters
        grads = self._weights.whole_gradients(gradients)
        self._objective.correct_gradients(named(names, weights), named(names, grads), given)
        if recipe.weight_decay:
            torch._foreach_add_(grads, weights, alpha=recipe.weight_decay)
        if recipe.momentum:
            torch._foreach_mul_(self._momentum, recipe.momentum)
            torch._foreach_add_(self._momentum, grads)
            grads = self._momentum
        self._weights.descend(grads, rate)


def fast_layers(model: nn.Module) -> Any:
    """Install the fused layers; return None, with a warning, if Triton or its C compiler is missing."""
    try:
        from fedeas_flwr.training.gpu.fast_layers import FusedLayers

        return FusedLayers(model)
    except Exception as error:  # a compiler may raise anything
        logger.warning("BatchNorm is not fused, so training is slower: %s", one_line(error))
        return None
