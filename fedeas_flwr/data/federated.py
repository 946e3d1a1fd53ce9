"""The data of clients: a dataset partitioned over them, or a node's own images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from fedeas_flwr.common.files import cache_root
from fedeas_flwr.config import RunConfig
from fedeas_flwr.data import hf_dataset
from fedeas_flwr.data.datasets import Dataset, Images, Labels, dataset_info, open_dataset
from fedeas_flwr.data.node import Node
from fedeas_flwr.data.own_dataset import fingerprint
from fedeas_flwr.data.own_images import read_images
from fedeas_flwr.data.sources import DatasetInfo, find_source
from fedeas_flwr.partition import TEST_FRACTION, Partition, make_partition, stratified_split


@dataclass(frozen=True, eq=False)  # compared by identity
class FederatedData:
    """A dataset split over clients."""

    dataset: Dataset
    partition: Partition
    protocol: str

    @property
    def num_classes(self) -> int:
        """Return the number of classes C."""
        return len(self.dataset.classes)

    @cached_property
    def largest(self) -> int:
        """Return the number of training images of the client that has most."""
        return max(map(len, self.partition.train))

    def train(self, client: int) -> tuple[Images, Labels]:
        """Return the training images and labels of client k, copied into memory."""
        return self.images_at(self.partition.train[client])

    def test(self, client: int) -> tuple[Images, Labels]:
        """Return the test images and labels of client k; only protocol ``paper`` gives clients test images."""
        return self.images_at(self.partition.test[client])

    def train_labels(self, client: int) -> Labels:
        """Return the training labels of client k."""
        return self._labels()[self.partition.train[client]]

    def label_counts(self, client: int) -> Labels:
        """Return the label counts of client k, [1, C]."""
        return np.bincount(self.train_labels(client), minlength=self.num_classes)[None, :].astype(np.int64)

    def global_test(self) -> tuple[Images, Labels]:
        """Return the server's test set: the official one (``clean``) or all clients' test sets together (``paper``)."""
        if self.protocol == "clean":
            return np.asarray(self.dataset.x_test), np.asarray(self.dataset.y_test)
        return self.images_at(np.concatenate(self.partition.test))

    def test_sizes(self) -> list[int]:
        """Return how many images of each client the server's test set has, in its order; under ``clean``, nothing."""
        return [] if self.protocol == "clean" else [len(indices) for indices in self.partition.test]

    def counts(self) -> Labels:
        """Return the label counts of all clients, [K, C]; only a simulation knows them."""
        return self.partition.counts(self._labels(), self.num_classes)

    def _labels(self) -> Labels:
        return partitioned_labels(self.dataset, self.protocol)

    def images_at(self, indices: Labels) -> tuple[Images, Labels]:
        """Return the images at indices of the partition, copied into memory, and their labels."""
        # Indices below `first` are rows of the train set. Under `paper`, the others are rows of the test set.
        first = len(self.dataset.y_train)
        images = np.empty((len(indices), *self.dataset.x_train.shape[1:]), dtype=np.uint8)
        from_train = indices < first
        images[from_train] = self.dataset.x_train[indices[from_train]]
        images[~from_train] = self.dataset.x_test[indices[~from_train] - first]
        return images, self._labels()[indices]


def partitioned_labels(dataset: Dataset, protocol: str) -> Labels:
    """Return the labels of all images to be partitioned: the train set and, under ``paper``, the test set."""
    if protocol == "clean":
        return np.asarray(dataset.y_train)
    return np.concatenate([dataset.y_train, dataset.y_test])


def federated_data(config: RunConfig, clients: int) -> FederatedData:
    """Return the run's dataset, split over ``clients`` clients; it is cached until the dataset's files change."""
    return _federated_data(
        config.dataset,
        config.data_dir,
        find_source(config.dataset, config.data_dir).origin,
        config.protocol,
        clients,
        config.partition,
        config.partition_args,
        config.alpha,
        config.partition_seed,
    )


@lru_cache(maxsize=2)
def _federated_data(
    name: str,
    data_dir: str,
    origin: str,
    protocol: str,
    clients: int,
    partition: str,
    arguments: str,
    alpha: float,
    seed: int,
) -> FederatedData:
    """Return the split dataset; ``origin`` identifies the content of the dataset's files in the cache's key."""
    dataset = open_dataset(name, data_dir)
    labels, root = partitioned_labels(dataset, protocol), cache_root()
    made = make_partition(labels, protocol, clients, alpha, seed, root, partition=partition, arguments=arguments)
    return FederatedData(dataset, made, protocol)


def local_data(config: RunConfig, node: Node) -> FederatedData:
    """Return the run's dataset or the node's own images; the node trains on part `Node.part` of it."""
    if not node.data_path:
        return federated_data(config, node.partitions)
    info, version = dataset_info(config.dataset), fingerprint(node.data_path)
    return _own_data(info, node.data_path, version, config.protocol, config.partition_seed)


@lru_cache(maxsize=1)
def _own_data(info: DatasetInfo, path: str, version: str, protocol: str, seed: int) -> FederatedData:
    """Return a node's own images as the data of a single client; ``version`` is the fingerprint of their files."""
    height, width, channels = info.image_shape
    read = hf_dataset.read_set if hf_dataset.is_hf(path) else read_images
    found = read(path, classes=info.classes, size=(height, width), channels=channels)
    fraction, everything = TEST_FRACTION[protocol], np.arange(len(found.labels))
    train, test = stratified_split(found.labels, fraction, seed) if fraction else (everything, everything[:0])
    dataset = Dataset(
        info.name, info.classes, info.mean, info.std, found.images, found.labels, found.images[:0], found.labels[:0]
    )
    return FederatedData(dataset, Partition([train], [test]), protocol)
