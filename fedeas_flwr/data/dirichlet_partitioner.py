"""The paper's partition as a `Partitioner` of flwr-datasets, for use in any Flower app.

    from flwr_datasets import FederatedDataset

    from fedeas_flwr.data.dirichlet_partitioner import PaperDirichletPartitioner

    partitioner = PaperDirichletPartitioner(num_partitions=20, partition_by="label", alpha=0.1)
    data = FederatedDataset(dataset="cifar10", partitioners={"train": partitioner})

Needs the packages datasets and flwr-datasets: ``pip install "fedeas-flwr[datasets]"``.
"""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from fedeas_flwr.partition import Partition, dirichlet_partition


class PaperDirichletPartitioner(Partitioner):  # type: ignore[misc]  # the package may be missing where this is checked
    """Distribute samples class by class in Dirichlet proportions, as `dirichlet_partition` does, over K clients.

    ``partition_by`` is the column of the labels; labels that are not whole numbers from 0 are numbered in sorted order.
    ``alpha`` is the concentration of the symmetric Dirichlet distribution; smaller is more skewed. ``seed`` is that of
    NumPy's legacy generator. ``test_fraction`` is the fraction of its samples that a client sets aside
    (`load_test_partition`); 0.25, on the train and test split together, is the paper's protocol.
    """

    def __init__(
        self, num_partitions: int, partition_by: str, alpha: float, seed: int = 42, test_fraction: float = 0.0
    ) -> None:
        super().__init__()
        self._num_partitions, self._partition_by = num_partitions, partition_by
        self._alpha, self._seed, self._test_fraction = alpha, seed, test_fraction
        self._made: Partition | None = None

    def load_partition(self, partition_id: int) -> Dataset:
        """Return the samples that a client trains on."""
        return self.dataset.select(self._partition().train[partition_id])

    def load_test_partition(self, partition_id: int) -> Dataset:
        """Return the samples that a client sets aside for testing."""
        return self.dataset.select(self._partition().test[partition_id])

    @property
    def num_partitions(self) -> int:
        """Return the number of clients."""
        return self._num_partitions

    def _partition(self) -> Partition:
        if self._made is None:
            column = self._partition_by
            labels = np.asarray(self.dataset.select_columns(column).with_format("numpy")[:][column])
            if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
                labels = np.unique(labels, return_inverse=True)[1]
            self._made = dirichlet_partition(
                labels, self._num_partitions, self._alpha, self._seed, test_fraction=self._test_fraction
            )
        return self._made
