"""Datasets: images and labels, and the part that each client holds.

The rule that partitions a dataset is in `fedeas_flwr/partition.py`.

Other packages use the datasets (`Dataset`, `dataset_info`, `open_dataset`, `short_name`, `Images`, `Labels`), a
client's part of one (`FederatedData`, `federated_data`, `local_data`, `partitioned_labels`), a node's folders (`Node`,
`read_node`, `run_folder`) and images on disk (`read_images`, `find_source`, `check_npz`, `OWN`).
"""
