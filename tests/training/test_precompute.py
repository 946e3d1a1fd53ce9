"""Precomputed rows of an objective: computed once per round, and each step gets the rows of its samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from requires_gpu import DEVICES
from torch import nn
from torch.nn import functional as F
from users_models import WithFeatures

from fedeas_flwr.common.randomness import stream
from fedeas_flwr.config import parse_config
from fedeas_flwr.strategies.moon import PREVIOUS, RECEIVED, ContrastiveObjective
from fedeas_flwr.training.augmentation import VIEWS
from fedeas_flwr.training.build import build_engine
from fedeas_flwr.training.eager import EagerEngine
from fedeas_flwr.training.engine import Engine, LocalTrainingConfig, read_state
from fedeas_flwr.training.gpu.graphed import GraphedEngine
from fedeas_flwr.training.models import Normaliser
from fedeas_flwr.training.objective import CROSS_ENTROPY, Batch, Inputs, Objective
from fedeas_flwr.training.oom_fallback import accumulate_gradients, full_batch_gradient

BATCH, MU, TAU, RATE = 32, 5.0, 0.5, 0.05
MOON = ContrastiveObjective(MU, TAU)


class Counting(WithFeatures):
    """Records the number of images of each forward pass in evaluation mode."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(10, (8, 8, 1))
        self.seen: list[int] = []
        self(3 * torch.randn(50, 1, 8, 8) + seed)  # BatchNorm's statistics are not the initial ones

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.seen.append(len(images))
        return super().forward(images)


def references(received: nn.Module, previous: nn.Module) -> Inputs:
    """Return MOON's inputs: the parameters and buffers of two models."""
    states = {RECEIVED: received.state_dict(), PREVIOUS: previous.state_dict()}
    return Inputs({prefix + key: value.clone() for prefix, state in states.items() for key, value in state.items()})


def data(samples: int, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng((samples, seed))
    images = torch.from_numpy(rng.integers(0, 256, (samples, 8, 8, 1), dtype=np.uint8))
    return images.to(device), torch.from_numpy(rng.integers(0, 10, samples)).to(device)


def engine(
    kind: str,
    model: nn.Module,
    recipe: LocalTrainingConfig,
    objective: Objective = MOON,
    device: str = "cpu",
    precision: str = "fp32",
) -> Engine:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    normalise = Normaliser((0.3,), (0.4,), device)
    if kind == "eager":
        return EagerEngine(copy.deepcopy(model), recipe, normalise, device, objective, precision=precision)
    return GraphedEngine(copy.deepcopy(model), recipe, normalise, precision, device, objective)


def identity_views(steps: int, device: str = "cpu") -> Inputs:
    """Return views that change no image, so that an engine computes references in every step."""
    return Inputs(tables={VIEWS: torch.zeros((steps, BATCH, 3), dtype=torch.int8, device=device)})


def assert_near(ours: Any, theirs: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    assert list(ours) == list(theirs)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


# ----------------------------------------------------------------------------------------------- how often


@pytest.mark.parametrize(
    ("kind", "a_pass"), [("eager", [32, 32, 32, 32, 6, 6]), ("graphed", [32] * 6)]
)  # two references each; the graphed engine pads the last chunk
def test_references_are_precomputed_once_unless_augmented(kind: str, a_pass: list[int]) -> None:
    recipe, model = LocalTrainingConfig(10, BATCH, RATE), Counting(0)
    inputs = references(model, Counting(1))
    for more, times in ((Inputs(), 1), (identity_views(recipe.steps(70)), 10)):
        trainer: Any = engine(kind, model, recipe)
        seen = trainer._model.seen
        for _ in range(2):  # also for the second client, which reuses the buffers
            seen.clear()
            trainer.train(*read_state(model), *data(70), np.random.default_rng(0), inputs | more)
        assert seen == a_pass * times


@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_other_objectives_precompute_nothing(kind: str) -> None:
    model = Counting(0)
    trainer: Any = engine(kind, model, LocalTrainingConfig(2, BATCH, RATE), CROSS_ENTROPY)
    for _ in range(2):
        trainer._model.seen.clear()
        trainer.train(*read_state(model), *data(70), np.random.default_rng(0))
    assert trainer._model.seen == []


# ---------------------------------------------------------------------------------------------- same steps


def by_hand(
    model: nn.Module, received: nn.Module, previous: nn.Module, images: torch.Tensor, labels: torch.Tensor, kept: int
) -> dict[str, torch.Tensor]:
    """Train three epochs of MOON as in the paper, with both references computed in every step."""
    model, draws = copy.deepcopy(model).train(), np.random.default_rng(7)
    references = [copy.deepcopy(each).eval() for each in (received, previous)]
    pixels = (images.permute(0, 3, 1, 2).float() / 255 - 0.3) / 0.4
    for _ in range(3):
        order = draws.permutation(len(labels))[:kept]
        for chosen in np.split(order, range(BATCH, kept, BATCH)):
            z = model.body(pixels[chosen])  # type: ignore[operator]
            with torch.no_grad():
                to_global, to_previous = (each.body(pixels[chosen]) for each in references)  # type: ignore[operator]
            alike, unlike = (torch.exp(F.cosine_similarity(z, other) / TAU) for other in (to_global, to_previous))
            contrast = -torch.log(alike / (alike + unlike))
            loss = F.cross_entropy(model.fc(z), labels[chosen]) + MU * contrast.mean()  # type: ignore[operator]
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= RATE * weight.grad
                    weight.grad = None
    return dict(model.state_dict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("samples", "kept"), [(70, 70), (64, 64), (69, 64), (20, 20)]
)  # a short last batch; none; five skipped, others each epoch; less than a batch
def test_engines_match_steps_with_recomputed_references(samples: int, kept: int, device: str) -> None:
    model, received, previous = (Counting(seed).to(device) for seed in range(3))
    recipe, client = LocalTrainingConfig(3, BATCH, RATE, min_batch=6), data(samples, device=device)
    engines = [engine(kind, model, recipe, device=device) for kind in ("eager", "graphed")]
    wanted = by_hand(model, received, previous, *client, kept)
    for trainer in engines:
        result, *ends = trainer.train(
            *read_state(model), *client, np.random.default_rng(7), references(received, previous)
        )
        assert result.steps == recipe.steps(samples)
        ended = {**ends[0], **ends[1]}
        assert_near({key: ended[key] for key in wanted}, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_precomputed_rows_equal_those_computed_in_the_step(kind: str, precision: str, device: str) -> None:
    """This holds also for samples that an epoch skips, and in bf16, whose features are stored unrounded."""
    model, received, previous = (Counting(seed).to(device) for seed in range(3))
    recipe, inputs, ends = LocalTrainingConfig(3, BATCH, RATE, min_batch=6), references(received, previous), []
    for more in (Inputs(), identity_views(recipe.steps(69), device)):
        trainer = engine(kind, model, recipe, device=device, precision=precision)
        client = data(69, device=device)
        _, end, _ = trainer.train(*read_state(model), *client, np.random.default_rng(7), inputs | more)
        ends.append(end)
    # In bf16 a feature may round differently where the library sums another chunk in another order.
    assert_near(*ends, **({} if precision == "fp32" else {"rtol": 0.02, "atol": 0.002}))


@pytest.mark.parametrize("device", DEVICES)
def test_reused_buffers_hold_no_data_of_other_clients(device: str) -> None:
    model, recipe = Counting(0).to(device), LocalTrainingConfig(3, BATCH, RATE)
    used = engine("graphed", model, recipe, device=device)
    for number, samples in enumerate((40, 200, 33, 1, 70, 200)):  # the second reallocates the buffers
        inputs = references(Counting(number + 1).to(device), Counting(number + 2).to(device))
        client, fresh = data(samples, number, device), engine("graphed", model, recipe, device=device)
        ends = []
        for trainer in (used, fresh):
            result, *end = trainer.train(*read_state(model), *client, np.random.default_rng(number), inputs)
            ends.append({**end[0], **end[1], "loss": torch.tensor(result.loss)})
        if device == "cuda":  # its summation order may vary
            assert_near(*ends)
        else:
            assert all(torch.equal(ends[0][key], value) for key, value in ends[1].items()), f"client {number}"


@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_client_without_samples_takes_no_step(kind: str) -> None:
    model = Counting(0)
    trainer = engine(kind, model, LocalTrainingConfig(3, BATCH, RATE))
    result, end, _ = trainer.train(
        *read_state(model), *data(0), np.random.default_rng(0), references(Counting(1), Counting(2))
    )
    assert (result.steps, result.loss) == (0, 0.0)
    assert all(torch.equal(value, read_state(model)[0][key]) for key, value in end.items())


# ------------------------------------------------------------------------------------------- little memory


class WithoutNorm(nn.Module):
    """A network without BatchNorm, with memory for ``most`` images at a time in either mode."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.body, self.most = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten()), most
        self.fc = nn.Linear(144, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to take {len(images)} images")
        logits: torch.Tensor = self.fc(self.body(images))
        return logits


def test_micro_batches_get_their_own_precomputed_rows() -> None:
    torch.manual_seed(0)
    model, (images, labels) = WithoutNorm(30), data(30)
    kept = {RECEIVED: torch.randn(30, 144), PREVIOUS: torch.randn(30, 144)}
    batch = Batch(images.permute(0, 3, 1, 2).float(), labels, {}, torch.mean, precomputed=kept)
    weights = list(model.parameters())
    whole_loss, whole = full_batch_gradient(MOON, model, batch, weights)
    for parts in (2, 4, 7):  # of 15, of 8 and 6, of 5
        loss, gradients = accumulate_gradients(parts, MOON, model, batch, weights)
        torch.testing.assert_close(loss, whole_loss)
        for ours, theirs in zip(gradients, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_precompute_chunks_shrink_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a client that can train four images at a time would fail before its first step."""
    config = parse_config({"policy": "none", "batch-size": 32, "local-epochs": 2, "strategy": "moon"})
    torch.manual_seed(0)
    first, *others = (WithoutNorm(4) for _ in range(3))
    ends = []
    for most in (32, 4):

        def network(_: object, most: int = most) -> nn.Module:
            model = copy.deepcopy(first)
            model.most = most
            return model

        monkeypatch.setattr("fedeas_flwr.training.build.build_network", network)
        trainer = build_engine(config, "cpu", MOON)
        _, end, _ = trainer.train(*read_state(first), *data(75), stream(1, "batches", 1, 0), references(*others))
        ends.append(end)
    assert_near(*ends, rtol=1e-4, atol=1e-5)
