"""What an objective knows of a sample before the first step: computed once a round, and every step has its own rows."""

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
    """Notes how many images each pass in evaluation mode sees."""

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
    """MOON's inputs: the two models' parameters and buffers."""
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


def unmoved(steps: int, device: str = "cpu") -> Inputs:
    """Views that leave every image as it is: an engine cannot know that, and computes references in every step."""
    return Inputs(tables={VIEWS: torch.zeros((steps, BATCH, 3), dtype=torch.int8, device=device)})


def assert_near(ours: Any, theirs: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    assert list(ours) == list(theirs)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=rtol, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


# ----------------------------------------------------------------------------------------------- how often


@pytest.mark.parametrize(
    ("kind", "a_pass"), [("eager", [32, 32, 32, 32, 6, 6]), ("graphed", [32] * 6)]
)  # two references each; the graphed engine pads the last chunk
def test_ten_epochs_compute_a_samples_references_once_and_with_views_in_every_step(
    kind: str, a_pass: list[int]
) -> None:
    recipe, model = LocalTrainingConfig(10, BATCH, RATE), Counting(0)
    inputs = references(model, Counting(1))
    for more, times in ((Inputs(), 1), (unmoved(recipe.steps(70)), 10)):
        trainer: Any = engine(kind, model, recipe)
        seen = trainer._model.seen
        for _ in range(2):  # also of the second client, for which nothing is made ready any more
            seen.clear()
            trainer.train(*read_state(model), *data(70), np.random.default_rng(0), inputs | more)
        assert seen == a_pass * times


@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_other_objectives_pay_nothing(kind: str) -> None:
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
    """Three epochs of MOON as the paper writes it, both references computed anew in every step."""
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
)  # a short last batch; none; five left out, others each epoch; less than a batch
def test_both_engines_take_the_steps_that_compute_references_anew(samples: int, kept: int, device: str) -> None:
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
def test_rows_kept_are_what_the_step_itself_would_compute(kind: str, precision: str, device: str) -> None:
    """Also of samples that an epoch leaves out, and in bf16, whose features are kept as they come."""
    model, received, previous = (Counting(seed).to(device) for seed in range(3))
    recipe, inputs, ends = LocalTrainingConfig(3, BATCH, RATE, min_batch=6), references(received, previous), []
    for more in (Inputs(), unmoved(recipe.steps(69), device)):
        trainer = engine(kind, model, recipe, device=device, precision=precision)
        client = data(69, device=device)
        _, end, _ = trainer.train(*read_state(model), *client, np.random.default_rng(7), inputs | more)
        ends.append(end)
    # In bf16 a feature may be rounded the other way where the library sums the other chunk in another order.
    assert_near(*ends, **({} if precision == "fp32" else {"rtol": 0.02, "atol": 0.002}))


@pytest.mark.parametrize("device", DEVICES)
def test_clients_of_other_sizes_through_the_same_buffers_leave_nothing_behind(device: str) -> None:
    model, recipe = Counting(0).to(device), LocalTrainingConfig(3, BATCH, RATE)
    used = engine("graphed", model, recipe, device=device)
    for number, samples in enumerate((40, 200, 33, 1, 70, 200)):  # the second makes the buffers anew
        inputs = references(Counting(number + 1).to(device), Counting(number + 2).to(device))
        client, fresh = data(samples, number, device), engine("graphed", model, recipe, device=device)
        ends = []
        for trainer in (used, fresh):
            result, *end = trainer.train(*read_state(model), *client, np.random.default_rng(number), inputs)
            ends.append({**end[0], **end[1], "loss": torch.tensor(result.loss)})
        if device == "cuda":  # whose sums may come in another order each time
            assert_near(*ends)
        else:
            assert all(torch.equal(ends[0][key], value) for key, value in ends[1].items()), f"client {number}"


@pytest.mark.parametrize("kind", ["eager", "graphed"])
def test_a_client_without_samples_takes_no_step(kind: str) -> None:
    model = Counting(0)
    trainer = engine(kind, model, LocalTrainingConfig(3, BATCH, RATE))
    result, end, _ = trainer.train(
        *read_state(model), *data(0), np.random.default_rng(0), references(Counting(1), Counting(2))
    )
    assert (result.steps, result.loss) == (0, 0.0)
    assert all(torch.equal(value, read_state(model)[0][key]) for key, value in end.items())


# ------------------------------------------------------------------------------------------- little memory


class WithoutNorm(nn.Module):
    """Batches of it can be split; it has memory for ``most`` images at a time, in either mode."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.body, self.most = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten()), most
        self.fc = nn.Linear(144, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to take {len(images)} images")
        logits: torch.Tensor = self.fc(self.body(images))
        return logits


def test_parts_of_a_batch_have_their_own_rows() -> None:
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


def test_short_of_memory_no_more_images_are_looked_at_beforehand_than_a_step_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a client that can train, four images at a time, would fail before its first step."""
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
