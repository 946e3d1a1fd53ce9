"""Nearest members and non-members of generated images, by Euclidean distance of pixels within a class.

A model that memorised nothing is no nearer to its training images than to as many other images of the same class, so
the nearest image is a member for half of its samples. Distances of a classifier's features would not do: the
classifier was trained on the members too, so that their features differ from those of non-members.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedeas_flwr.data.datasets import Images, Labels
from fedeas_flwr.generators.audit.statistics import CONFIDENCE, Estimate, wilson
from fedeas_flwr.generators.quality import nearest_images


class LabelledImages(NamedTuple):
    """Images and their labels."""

    images: Images
    labels: Labels

    def at(self, rows: Labels) -> LabelledImages:
        """Return the images at some positions."""
        return LabelledImages(self.images[rows], self.labels[rows])


class Neighbours(NamedTuple):
    """Positions of the nearest member and non-member of each sample, ``[2, N]``, and their distances, ``[2, N]``."""

    positions: NDArray[np.int64]
    distances: NDArray[np.float64]


def match_classes(members: Labels, non_members: Labels, random: np.random.Generator) -> tuple[Labels, Labels]:
    """Return positions of as many members as non-members of each class, drawn at random; a class may have none."""
    chosen: tuple[list[Labels], list[Labels]] = ([], [])
    for label in np.union1d(members, non_members):
        places = [np.flatnonzero(labels == label) for labels in (members, non_members)]
        for side, place in zip(chosen, places, strict=True):
            side.append(random.permutation(place)[: min(map(len, places))])
    return np.concatenate(chosen[0]), np.concatenate(chosen[1])


def find_neighbours(
    samples: LabelledImages, members: LabelledImages, non_members: LabelledImages, mirrored: bool = False
) -> Neighbours:
    """Return the neighbours of samples among members and among non-members of the same class.

    With ``mirrored``, an image and its mirror image count as one. Each side must have images of each sample's class.
    """
    shape = (2, len(samples.labels))
    found = Neighbours(np.zeros(shape, dtype=np.int64), np.full(shape, np.inf))
    for label in np.unique(samples.labels):
        rows = np.flatnonzero(samples.labels == label)
        for side, (images, labels) in enumerate((members, non_members)):
            places = np.flatnonzero(labels == label)
            for part in (samples.images[rows], samples.images[rows][:, :, ::-1])[: 1 + mirrored]:
                nearest, distances = nearest_images(part, images[places])
                nearer = distances < found.distances[side, rows]
                found.positions[side, rows[nearer]] = places[nearest[nearer]]
                found.distances[side, rows[nearer]] = distances[nearer]
    return found


def member_preference(found: Neighbours, samples: Labels, members: Labels, confidence: float = CONFIDENCE) -> Estimate:
    """Return the fraction of samples whose nearest image is a member, ties counted half, with its interval.

    ``samples`` and ``members`` are labels. The interval is Wilson's for the effective number of samples. Samples with
    the same nearest image are not independent: whether that image is a member is decided once. The effective number
    is the one whose binomial variance is that of the fraction if members and non-members of a class changed places at
    random.
    """
    member, non_member = found.distances
    value = float(np.where(member == non_member, 0.5, member < non_member).mean())
    nearest = np.where(member <= non_member, found.positions[0], -1 - found.positions[1])
    variance = 0.0
    for label in np.unique(samples):
        counts, number = np.unique(nearest[samples == label], return_counts=True)[1], 2 * (members == label).sum()
        variance += float(number / (number - 1) * ((counts**2).sum() - counts.sum() ** 2 / number))
    return wilson(value, min(len(samples), len(samples) ** 2 / max(variance, 1.0)), confidence)
