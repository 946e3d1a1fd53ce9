"""Judge a trained generator: by its loss, the roughness of its images, and a classifier that should recognise them.

A run trains on images of noise without an error, so a training ends with a verdict. The verdict is stored with the
model, and runs warn of a generator that has a fault. The limits are from trainings with preset ``digits``:

                   digits, 8×8, 10 classes              photos, 16×16, 4 classes
    steps          1    10    20    38    75   125   250    10    38
    loss        1.00  0.65  0.55  0.45  0.35  0.31  0.27  0.69  0.43   fraction of the first step's
    roughness   1.57  1.09  1.03  0.96  0.92  0.95        4.66  2.01   fraction of real images'
    agreement   0.15  0.20  0.33  0.64  0.85  0.92  0.95  0.70  0.65   of held-out images: 0.99 and 0.81

Digits can be read from about 75 steps on. The photos are noise up to 38 steps, but of the mean colour of their class,
so a classifier recognises them: hence the roughness. A good generator of CIFAR-100 is 0.71 of the way from chance to
the agreement of held-out images (results/quality-cifar100), and its loss is 0.08 of that of initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedeas_flwr.common.text import counted
from fedeas_flwr.data.datasets import Dataset, Images, Labels
from fedeas_flwr.generators.classifier import agreement, small_classifier
from fedeas_flwr.generators.learn.trainer import Trainer, TrainingState

_MAX_LOSS, _MAX_ROUGHNESS = 0.4, 1.5
_MIN_HELD_OUT, _MIN_LEAD = 20, 0.3
_MAX_COMPARED = 500


@dataclass(frozen=True)
class Verdict:
    """Quality of a trained generator; fractions are from 0 to 1."""

    steps: int
    loss: float | None
    """Loss at the end, divided by the loss at the start; None: unknown, or the initial weights were pretrained."""
    roughness: float
    """Roughness of the generated images, divided by that of real ones."""
    agreement: float | None
    """Fraction of the generated images that a classifier recognises; None: there is no classifier to trust."""
    real_agreement: float | None
    """Fraction of held-out real images that it recognises, mean over classes; None: too few held-out images."""
    text: str
    """The result and the measurements in one line."""
    warns: bool
    """Whether a fault was found."""


def judge(trainer: Trainer, dataset: Dataset, images: Images, labels: Labels) -> Verdict:
    """Return the verdict on a trained model; ``images`` are samples of it, the same number of each class."""
    chance, recognised, real = 1 / len(dataset.classes), None, None
    if len(dataset.y_test) >= _MIN_HELD_OUT:
        classifier = small_classifier(dataset, trainer.device.type)
        by_class = agreement(classifier, np.asarray(dataset.x_test), np.asarray(dataset.y_test))[1]
        real = fmean(found for found in by_class if found is not None)
        if real >= chance + _MIN_LEAD:
            recognised = agreement(classifier, images, labels)[0]
    loss = loss_fraction(trainer.state)
    rough = roughness(images) / max(1.0, roughness(dataset.x_train[:: len(dataset.x_train) // _MAX_COMPARED + 1]))
    fault = ""
    if recognised is not None and real is not None and recognised < (chance + real) / 2:
        fault = "unrecognisable images"
    elif rough > _MAX_ROUGHNESS:
        fault = "noisy images"
    elif loss is not None and loss > _MAX_LOSS:
        fault = "undertrained"
    parts = [_describe_agreement(recognised, real, chance, len(dataset.y_test))]
    parts += [f"they are {rough:.1f} times as rough as real ones"]
    parts += [] if loss is None else [f"the loss is {_percent(loss)} of its start"]
    text = f"{fault or 'no fault found'} after {counted(trainer.state.step, 'step')}: {'; '.join(parts)}"
    return Verdict(trainer.state.step, loss, rough, recognised, real, text, bool(fault))


def loss_fraction(state: TrainingState) -> float | None:
    """Return the mean loss of the last tenth of the steps as a fraction of the first one; None: see `Verdict`."""
    if state.start or not state.curve:
        return None
    last = [loss for step, loss in state.curve if step > 0.9 * state.curve[-1][0]]
    return fmean(last) / state.curve[0][1]


def roughness(images: Images) -> float:
    """Return the mean absolute difference of neighbouring pixels, in grey levels."""
    pixels = np.asarray(images, dtype=np.float32)
    return fmean(float(np.abs(np.diff(pixels, axis=axis)).mean()) for axis in (1, 2))


def _describe_agreement(recognised: float | None, real: float | None, chance: float, held_out: int) -> str:
    if real is None:
        return f"no classifier checked its images, for lack of real ones ({held_out} held out)"
    known = f"{_percent(real)} of real ones, {_percent(chance)} by chance"
    if recognised is None:
        return f"no classifier could check its images (it recognises {known})"
    return f"a classifier recognises {_percent(recognised)} of its images ({known})"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"
