"""Images and labels, and which client holds which.

Other rooms use the datasets (`Dataset`, `dataset_info`, `open_dataset`, `short_name`), a client's share of one
(`FederatedData`, `federated_data`, `local_data`, `partitioned_labels`, `Images`, `Labels`), a node's folders (`Node`,
`read_node`, `run_folder`) and images on disk (`read_images`, `find_source`, `check_npz`, `OWN`).
"""
